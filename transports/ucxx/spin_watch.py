"""Sees when UCX's own thread spins: random bytes at its listener do that to it, for ever, at half a core (measured)."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Final

__all__ = ["SpinWatch"]

#: A thread that does this much is spinning (measured: 0.5 to 1.0 then; 0.02 while 70 clients a second connect).
_SHARE: Final = 0.25
#: While UCX has work it must be more: what that thread does then over other networks is not known.
_BUSY_SHARE: Final = 0.45


class SpinWatch:
    """Compares the processor time of threads that are not Python's between two looks.

    Only meaningful where nothing else runs threads of its own at work, as in a slot host's process.
    """

    def __init__(self) -> None:
        """Begin with what was spent so far."""
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")
        self._spent = self._measure()
        self._hot = 0

    def look(self, since_s: float, *, idle: bool) -> bool:
        """Whether a thread was busy in two looks in a row, ``since_s`` seconds apart; ``idle``: UCX had no work."""
        spent, before = self._measure(), self._spent
        self._spent = spent
        used = max((spent[thread] - before.get(thread, 0.0) for thread in spent), default=0.0)
        self._hot = self._hot + 1 if used > (_SHARE if idle else _BUSY_SHARE) * since_s else 0
        return self._hot > 1

    def _measure(self) -> dict[str, float]:
        """Processor seconds per foreign thread."""
        ours = {str(thread.native_id) for thread in threading.enumerate()}
        spent = {}
        for task in Path("/proc/self/task").iterdir():
            if task.name not in ours:
                try:
                    fields = (task / "stat").read_text().rpartition(")")[2].split()
                except (FileNotFoundError, ProcessLookupError):
                    continue
                spent[task.name] = (int(fields[11]) + int(fields[12])) * self._tick_s
        return spent
