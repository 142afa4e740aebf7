"""The default clock, and the event sink and retry budget of a client without layers."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AnyioClock", "NoSink", "Unlimited"]

#: By loop, Unix time at the time 0 of its clock.
_OFFSETS: WeakKeyDictionary[Any, float] = WeakKeyDictionary()


class AnyioClock:
    """The clock of the running event loop, so that under a loop with virtual time, wall time is virtual too.

    Wall time is read once from the system, when a loop is first used, and advances with the clock of that loop; all
    clocks of a loop agree. Each call reads the time often, so anyio is asked only once which loop of asyncio runs.
    """

    __slots__ = ("_loop", "_offset")

    def __init__(self) -> None:
        """Begin without a loop."""
        self._loop: Any = None
        self._offset = 0.0

    def now(self) -> float:
        """Return monotonic seconds, on the clock that cancel scopes use for deadlines."""
        loop = asyncio._get_running_loop()  # noqa: SLF001 - get_running_loop() without raising an error on trio
        return self._ask_anyio() if loop is None or loop is not self._loop else loop.time()

    def _ask_anyio(self) -> float:
        """Return the time of whatever loop anyio finds: a new one, or trio's."""
        now = anyio.current_time()
        loop = anyio.lowlevel.current_token().native_token
        if loop is not self._loop:
            self._offset = _OFFSETS.setdefault(loop, time.time() - now)
            self._loop = loop
        return now

    def time(self) -> float:
        """Return the Unix time in seconds."""
        now = self.now()
        return self._offset + now

    async def sleep(self, seconds: float) -> None:
        """Sleep for that many seconds."""
        await anyio.sleep(seconds)


class NoSink:
    """A sink that discards all events."""

    __slots__ = ()

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Discard the event."""


class Unlimited:
    """A retry budget without a limit."""

    __slots__ = ()

    def deposit(self, now: float) -> None:
        """Do nothing."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Return True."""
        del now, tokens
        return True
