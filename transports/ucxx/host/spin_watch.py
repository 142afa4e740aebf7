"""Detect a spinning UCX thread: random bytes sent to its listener make it spin for ever, at half a core (measured)."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

__all__ = ["SpinWatch"]

#: Share of a core above which an idle UCX's thread is spinning (measured: 0.5 to 1.0 when it spins; 0.02 while 70
#: clients a second connect).
_SHARE: Final = 0.25
#: The same share while UCX has work; higher, since the thread's need over other networks is not known.
_BUSY_SHARE: Final = 0.45
#: Least share of a core that the thread must really have used: on a busy machine each wake-up waits for a core, which
#: alone is no sign of spinning.
_LEAST: Final = 0.04


class SpinWatch:
    """Measures the processor time that threads other than Python's used between two checks.

    Time that a thread waited for a processor counts like time on one, so spinning shows on a busy machine too.

    The result is only meaningful in a process without other busy native threads, such as a slot host's.
    """

    def __init__(self) -> None:
        """Take the processor time used so far as the baseline."""
        self._spent = self._measure()
        self._hot = 0

    def look(self, since_s: float, *, idle: bool) -> bool:
        """Return whether a thread was busy in two consecutive checks.

        Args:
            since_s: Seconds since the last check.
            idle: Whether UCX had no work in that time.
        """
        share = (_SHARE if idle else _BUSY_SHARE) * since_s
        spent, before = self._measure(), self._spent
        self._spent = spent
        hot = False
        for thread, (ran, waited) in spent.items():
            ran_before, waited_before = before.get(thread, (0.0, 0.0))
            got = ran - ran_before
            hot = hot or (got > _LEAST * since_s and got + waited - waited_before > share)
        self._hot = self._hot + 1 if hot else 0
        return self._hot > 1

    def _measure(self) -> dict[str, tuple[float, float]]:
        """Return seconds on a processor and seconds of waiting for one, by id of each thread that is not Python's."""
        ours = {str(thread.native_id) for thread in threading.enumerate()}
        spent = {}
        for task in Path("/proc/self/task").iterdir():
            if task.name not in ours:
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the thread has ended
                    spent[task.name] = self._of(task)
        return spent

    def _of(self, task: Path) -> tuple[float, float]:
        try:
            ran, waited, _ = (task / "schedstat").read_text().split()
        except FileNotFoundError:  # not every kernel counts the waiting time
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 0.0
        return int(ran) / 1e9, int(waited) / 1e9
