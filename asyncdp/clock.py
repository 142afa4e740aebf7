"""What a client without a stack uses for time, events and budget."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["AnyioClock", "NoSink", "Unlimited"]


class AnyioClock:
    """The event loop's own clock, so that a virtual loop brings virtual time, wall time included.

    Wall time starts from the real one when a loop is first seen, and runs with that loop's clock.
    """

    __slots__ = ("_loop", "_offset")

    def __init__(self) -> None:
        """Begin, tied to no loop."""
        self._loop: object = None
        self._offset = 0.0

    #: Seconds, monotonic. The function itself: it is called several times on the way of each call.
    now = staticmethod(anyio.current_time)

    def time(self) -> float:
        """Unix seconds."""
        loop = anyio.lowlevel.current_token().native_token
        now = anyio.current_time()
        if loop is not self._loop:
            self._loop = loop
            self._offset = time.time() - now
        return self._offset + now

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        await anyio.sleep(seconds)


class NoSink:
    """Takes events and forgets them."""

    __slots__ = ()

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Forget the event."""


class Unlimited:
    """A budget that never runs out."""

    __slots__ = ()

    def deposit(self, now: float) -> None:
        """Count nothing."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Allow everything."""
        del now, tokens
        return True
