"""Turns of the event loop: long work is done in slices, and only one slice of all long work runs per turn of the loop.

So a short request waits for one slice and for other short requests, however many long ones there are, and however long
each of them is.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from time import perf_counter
from typing import Final

__all__ = ["TimeSlices", "Work"]

#: Seconds that a piece of work may take before others have their turn.
SLICE_S: Final = 0.001


class TimeSlices:
    """A queue of the long work of one event loop, served in the order of asking."""

    def __init__(self) -> None:
        """Start with nothing waiting."""
        self._waiting: deque[asyncio.Future[None]] = deque()

    def begin(self, gone: Callable[[], bool] = lambda: False) -> Work:
        """Return the first slice of a piece of work, which begins now; it ends where ``gone`` becomes true."""
        return Work(self, gone)

    async def next(self) -> None:
        """Wait for a turn of the event loop in which no other long work runs."""
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        if len(self._waiting) == 1:
            loop.call_soon(self._give, loop)
        await turn

    def _give(self, loop: asyncio.AbstractEventLoop) -> None:
        while self._waiting:
            turn = self._waiting[0]
            if not turn.done():
                turn.set_result(None)
                loop.call_soon(self._give, loop)
                return
            self._waiting.popleft()


class Work:
    """Work that asks after each step whether its slice is over: ``if work.over: await work.next()``.

    Args:
        turns: Queue that it waits in.
        gone: Whether the client that it is for is gone.
    """

    __slots__ = ("_gone", "_turns", "_until")

    def __init__(self, turns: TimeSlices, gone: Callable[[], bool]) -> None:
        """Begin the first slice."""
        self._turns = turns
        self._gone = gone
        self._until = perf_counter() + SLICE_S

    @property
    def over(self) -> bool:
        """Whether the slice has taken its time."""
        return perf_counter() >= self._until

    async def next(self) -> None:
        """Let others have their turn, then begin the next slice.

        Raises:
            ConnectionResetError: The client is gone.
        """
        await self._turns.next()
        self.check()
        self._until = perf_counter() + SLICE_S

    def check(self) -> None:
        """Raise ConnectionResetError if the client is gone."""
        if self._gone():
            raise ConnectionResetError("the client is gone")
