"""What is done about misuse of the UCX listener, in turn: a new worker, then a new process, then nothing."""

from __future__ import annotations

import enum
import math
from typing import Final

__all__ = ["AGAIN_S", "Remedies", "Remedy"]

#: A host that began anew does so again only after this many seconds: whoever sends garbage without end makes it spin,
#: but costs its clients no more than the seconds of one start in ten minutes.
AGAIN_S: Final = 600.0
#: Trouble that comes back within so many spans of the watch was not cured: it takes two of them to be seen.
_CURED_SPANS: Final = 6
_WORKERS: Final = 2


class Remedy(enum.Enum):
    """One of them."""

    NEW_WORKER = "UCX is started anew"
    NEW_PROCESS = "that did not help: the host begins anew"
    NOTHING = "that did not help, and nothing more is tried: start the host again"


class Remedies:
    """Says what to try next.

    A new worker mostly helps, and costs all connections. Where requests were under way UCX may keep the old one, with
    all that strangers left in it (measured); then only a new process helps. That costs a start, and no row where the
    arena is adopted.

    Args:
        span_s: Seconds between two looks of the watch.
        process_from: Time from which a new process may be had, by the same clock as ``now``; never unless told.
    """

    def __init__(self, span_s: float, process_from: float = math.inf) -> None:
        """Begin with nothing tried."""
        self._span_s = span_s
        self._process_from = process_from
        self._tried = 0
        self._at = -math.inf

    def next(self, now: float) -> Remedy:
        """Return what to try against trouble that was seen at ``now``, in seconds."""
        if now - self._at > _CURED_SPANS * self._span_s:
            self._tried = 0
        self._at = now
        if self._tried < _WORKERS:
            self._tried += 1
            return Remedy.NEW_WORKER
        return Remedy.NEW_PROCESS if now >= self._process_from else Remedy.NOTHING
