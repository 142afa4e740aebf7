"""Opens planes in this process, and sees what calls leave behind in them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.testing.contract import by_config

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdp.testing.contract import Opener

__all__ = ["memory"]


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
