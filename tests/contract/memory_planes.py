"""Opens planes in this process, and sees what calls leave behind in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp import MemoryTransport
from asyncdp.testing.contract import by_config
from asyncdp.transports.memory.host import Host
from asyncdp.transports.memory.plane import Plane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from asyncdp.testing.contract import Opener

__all__ = ["memory", "with_hosts", "with_planes"]


def memory(kind: Callable[..., Any], **settings: Any) -> Opener:
    """Open planes in this process; ``kind`` is the transport's class, ``settings`` the mapping ``memory``."""
    return by_config(kind, leftovers=_leftovers, memory=settings)


def _leftovers(transport: Any) -> Callable[[], dict[str, int]]:
    plane = transport.plane  # looked at after its end as well

    def left() -> dict[str, int]:
        found: dict[str, int] = {}
        for host in plane.hosts.values():
            found.update({f"{host.id} {state}": count for state, count in host.counts().items() if count})
        return {name: count for name, count in found.items() if name.endswith((" writing", " reading"))}

    return left


class _Replaced(MemoryTransport):
    """A transport whose plane and hosts are of other classes."""

    plane_class: type[Plane] = Plane
    host_class: type[Host] = Host

    def __init__(self, config: Mapping[str, Any] | None = None, *, bootstrap: bool = True) -> None:
        """Start a plane and break it."""
        super().__init__(config, bootstrap=bootstrap)
        if self._owned is not None:
            self._owned.__class__ = self.plane_class
            for host in self._owned.hosts.values():
                host.__class__ = self.host_class


def with_planes(kind: type[Plane]) -> type[MemoryTransport]:
    """Make a transport with planes of this class."""
    return type(kind.__name__, (_Replaced,), {"plane_class": kind})


def with_hosts(kind: type[Host]) -> type[MemoryTransport]:
    """Make a transport with hosts of this class."""
    return type(kind.__name__, (_Replaced,), {"host_class": kind})
