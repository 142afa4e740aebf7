"""Time in a simulation: the loop's own, and a wall clock that begins at the same moment in every run."""

from __future__ import annotations

from collections.abc import Callable

import anyio
import anyio.lowlevel

__all__ = ["SimulatedClock"]

#: Unix seconds at which every simulated loop begins.
EPOCH_S = 1_700_000_000.0


class SimulatedClock:
    """A clock for stacks and planes whose readings are the same in each run; made within a loop, for that loop."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        """Ask asyncio's loop directly: it is asked many times on the way of each call."""
        loop: object = anyio.lowlevel.current_token().native_token
        #: Seconds, monotonic.
        self.now: Callable[[], float] = getattr(loop, "time", anyio.current_time)

    def time(self) -> float:
        """Unix seconds."""
        return EPOCH_S + self.now()

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await anyio.sleep(seconds)
