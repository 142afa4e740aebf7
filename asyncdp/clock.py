"""The default clock, and the event sink and retry budget of a client without layers."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AnyioClock", "NoSink", "Unlimited"]


class AnyioClock:
    """The clock of the running event loop, so that under a loop with virtual time, wall time is virtual too.

    Wall time is read once from the system, when a loop is first used, and advances with the clock of that loop.
    """

    __slots__ = ("_loop", "_offset")

    def __init__(self) -> None:
        """Begin without a loop."""
        self._loop: object = None
        self._offset = 0.0

    #: Returns monotonic seconds. It is anyio's function itself, not a wrapper, since each call reads it several times.
    now = staticmethod(anyio.current_time)

    def time(self) -> float:
        """Return the Unix time in seconds."""
        loop = anyio.lowlevel.current_token().native_token
        now = anyio.current_time()
        if loop is not self._loop:
            self._loop = loop
            self._offset = time.time() - now
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
