"""The embedded plane: the whole contract in one process, with slots, hosts, ports and epochs."""

from .transport import MemoryTransport

__all__ = ["MemoryTransport"]
