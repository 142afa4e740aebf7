"""Sees when UCX's own thread spins: random bytes at its listener do that to it, for ever, at half a core (measured)."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path
from typing import Final

__all__ = ["SpinWatch"]

#: A thread that wants this much is spinning (measured: 0.5 to 1.0 then; 0.02 while 70 clients a second connect).
_SHARE: Final = 0.25
#: While UCX has work it must be more: what that thread does then over other networks is not known.
_BUSY_SHARE: Final = 0.45
#: It must have got this much of what it wanted: on a busy machine each wake waits its turn, which is no wish for more.
_LEAST: Final = 0.04


class SpinWatch:
    """Compares the processor time of threads that are not Python's between two looks.

    Time that a thread waited for a processor counts like time on one: a busy machine hides nothing.

    Only meaningful where nothing else runs threads of its own at work, as in a slot host's process.
    """

    def __init__(self) -> None:
        """Begin with what was spent so far."""
        self._spent = self._measure()
        self._hot = 0

    def look(self, since_s: float, *, idle: bool) -> bool:
        """Whether a thread was busy in two looks in a row, ``since_s`` seconds apart; ``idle``: UCX had no work."""
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
        """Seconds on a processor, and seconds of waiting for one, per foreign thread."""
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
        except FileNotFoundError:  # not each kernel counts what it waited
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"), 0.0
        return int(ran) / 1e9, int(waited) / 1e9
