"""Detect leaked file descriptors: UCX's listener accepts any connection and never times out."""

from __future__ import annotations

import os
import resource
from typing import Final

__all__ = ["DescriptorWatch", "most_sessions"]

#: Descriptors per client session: a control stream and a UCX connection of at most three sockets (measured: 3 in all).
PER_SESSION: Final = 4
#: Descriptors reserved for other purposes than sessions: the directory, listeners, unauthenticated peers, open files.
_OWN: Final = 256
#: Tolerated descriptors beyond those of sessions: directory connections, unauthenticated peers within their timeout,
#: and what malformed connections left behind.
SPARE: Final = 128


class DescriptorWatch:
    """Compares the number of open descriptors of this process with the number that its sessions need.

    The comparison is only meaningful in a process that opens few other descriptors, such as a slot host's.
    """

    def __init__(self) -> None:
        """Take the number of descriptors that are open now as the baseline."""
        self._before = self._count()

    def look(self, sessions: int) -> bool:
        """Return whether more descriptors are open than this number of sessions and ``SPARE`` account for."""
        return self._count() > self._before + PER_SESSION * sessions + SPARE

    @staticmethod
    def _count() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - names are enough


def most_sessions() -> int:
    """Return how many sessions fit into the descriptor limit of this process; at least 16."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 1 << 20 if limit == resource.RLIM_INFINITY else max(16, (limit - _OWN) // PER_SESSION)
