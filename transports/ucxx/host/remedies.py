"""Escalation against misuse of the UCX listener: a new UCX worker, then a new process, then nothing."""

from __future__ import annotations

import enum
import math
from typing import Final

__all__ = ["AGAIN_S", "Remedies", "Remedy"]

#: Seconds before a host that restarted may restart again. A peer that sends garbage all the time can make UCX spin, but
#: it causes no more than one restart, which takes seconds, in ten minutes.
AGAIN_S: Final = 600.0
#: Misuse seen again within this many intervals of the watch counts as not remedied; detection takes two of them.
_CURED_SPANS: Final = 6
_WORKERS: Final = 2


class Remedy(enum.Enum):
    """An action against misuse of the UCX listener."""

    NEW_WORKER = "UCX is started anew"
    NEW_PROCESS = "that did not help: the host begins anew"
    NOTHING = "that did not help, and nothing more is tried: start the host again"


class Remedies:
    """Chooses the next action against misuse of the UCX listener.

    A new worker mostly helps, and closes all connections. Where requests were running UCX may keep the old worker, with
    the leaked connections in it (measured); then only a new process helps. That takes a restart, and loses no row where
    the arena is adopted.

    Args:
        span_s: Seconds between two checks of the watch.
        process_from: Time from which a new process may be started, by the clock of ``now``; infinity: never.
    """

    def __init__(self, span_s: float, process_from: float = math.inf) -> None:
        """Start with no action taken."""
        self._span_s = span_s
        self._process_from = process_from
        self._tried = 0
        self._at = -math.inf

    def next(self, now: float) -> Remedy:
        """Return the action against misuse that was detected at ``now``, in seconds of a monotonic clock."""
        if now - self._at > _CURED_SPANS * self._span_s:
            self._tried = 0
        self._at = now
        if self._tried < _WORKERS:
            self._tried += 1
            return Remedy.NEW_WORKER
        return Remedy.NEW_PROCESS if now >= self._process_from else Remedy.NOTHING
