"""The memory transport: a plane within one process that fulfils the whole contract, with slots, hosts and ports."""

from .transport import MemoryTransport

__all__ = ["MemoryTransport"]
