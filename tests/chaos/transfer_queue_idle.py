"""An event loop that has nothing to do, in a process of its own: what the machine alone does to a loop."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

__all__ = ["IdleLoop", "Ticks"]

#: Seconds between two ticks.
TICK_S = 0.005


def _waited_s() -> float:
    """Return for how long this thread has been ready to run without being given a processor."""
    try:
        with open("/proc/thread-self/schedstat") as told:  # noqa: PTH123 - it is read 200 times a second
            return int(told.read().split()[1]) / 1e9
    except (OSError, IndexError):  # another system, or one that does not count it
        return 0.0


class Ticks:
    """Measures the largest time between two ticks of an event loop.

    The pause between them is taken off, and the time in which other processes had the processors.
    """

    def __init__(self, loop: Any) -> None:
        """Begin to tick."""
        self._loop = loop
        self.begin()
        self._handle = loop.call_later(TICK_S, self._tick)

    def begin(self) -> None:
        """Forget what was measured."""
        self.gap_s = 0.0
        self._last = time.perf_counter() - _waited_s()

    def _tick(self) -> None:
        now = time.perf_counter() - _waited_s()
        self.gap_s = max(self.gap_s, now - self._last - TICK_S)
        self._last = now
        self._handle = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> float:
        """Stop, and return the largest gap."""
        self._handle.cancel()
        return self.gap_s


def _run(pipe: Any) -> None:
    import asyncio

    loop = asyncio.new_event_loop()
    ticks = Ticks(loop)

    def told() -> None:
        try:
            word = pipe.recv()
        except EOFError:
            loop.stop()
            return
        if word == "tell":
            pipe.send(ticks.gap_s)
        ticks.begin()

    loop.add_reader(pipe.fileno(), told)
    loop.run_forever()


class IdleLoop:
    """The process; ``begin`` and ``gap_s`` bracket what is to be compared with it."""

    def __init__(self) -> None:
        """Start it."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self.gap_s()  # it ticks now

    def begin(self) -> None:
        """Forget what was measured."""
        self._pipe.send("begin")

    def gap_s(self) -> float:
        """Return its largest gap since."""
        self._pipe.send("tell")
        gap: float = self._pipe.recv()
        return gap

    def close(self) -> None:
        """End it."""
        self._pipe.close()
        self._process.join(5)
