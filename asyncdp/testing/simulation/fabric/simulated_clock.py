"""Clock of a simulation: the time of the event loop, and a wall clock with the same start in every run."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

__all__ = ["SimulatedClock"]

#: Wall-clock time in unix seconds at which every simulated loop starts.
EPOCH_S = 1_700_000_000.0


class SimulatedClock:
    """A deterministic clock for stacks and planes; it must be created within the event loop that it is used in."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        """Take the time from asyncio's loop directly, because the clock is read many times in each call."""
        loop: object = anyio.lowlevel.current_token().native_token
        #: Returns the monotonic time in seconds.
        self.now: Callable[[], float] = getattr(loop, "time", anyio.current_time)

    def time(self) -> float:
        """Return the wall-clock time in unix seconds."""
        return EPOCH_S + self.now()

    async def sleep(self, seconds: float) -> None:
        """Sleep in simulated time."""
        await anyio.sleep(seconds)
