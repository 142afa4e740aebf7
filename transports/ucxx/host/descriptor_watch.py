"""Sees when strangers hold descriptors of this process: UCX's listener lets anybody connect and never gives up."""

from __future__ import annotations

import os
import resource
from typing import Final

__all__ = ["DescriptorWatch", "most_sessions"]

#: A client's session has a control stream and a UCX connection of at most three sockets (measured: 3 in all).
PER_SESSION: Final = 4
#: Kept from sessions: the directory, listeners, strangers at either door, files that are read.
_OWN: Final = 256
#: Beside those: connections to the directory, strangers that have not yet had their time, what garbage left behind.
SPARE: Final = 128


class DescriptorWatch:
    """Compares the open descriptors of this process with what its sessions need.

    Only meaningful where nothing else opens many of its own, as in a slot host's process.
    """

    def __init__(self) -> None:
        """Begin with what is open now."""
        self._before = self._count()

    def look(self, sessions: int) -> bool:
        """Whether more are open than so many sessions account for."""
        return self._count() > self._before + PER_SESSION * sessions + SPARE

    @staticmethod
    def _count() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough


def most_sessions() -> int:
    """How many sessions this process has descriptors for, by its limit; at least a few."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else max(16, (limit - _OWN) // PER_SESSION)
