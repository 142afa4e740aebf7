"""An event loop that has nothing to do, in a process of its own: what the machine alone does to a loop."""

from __future__ import annotations

import multiprocessing
import time
from typing import Any

__all__ = ["IdleLoop", "Ticks"]

#: Seconds between two ticks.
TICK_S = 0.005


class Ticks:
    """Measures the largest time between two ticks of an event loop, the pause between them taken off."""

    def __init__(self, loop: Any) -> None:
        """Begin to tick."""
        self._loop = loop
        self.begin()
        self._handle = loop.call_later(TICK_S, self._tick)

    def begin(self) -> None:
        """Forget what was measured."""
        self.gap_s = 0.0
        self._last = time.perf_counter()

    def _tick(self) -> None:
        now = time.perf_counter()
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
