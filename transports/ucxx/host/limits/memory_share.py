"""A limit on the memory of all clients together: large requests wait undecoded, large replies before they are built."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Final

__all__ = ["MemoryShare"]

#: What takes no more than this many bytes is not counted and does not wait: all sessions together hold little of it,
#: for a short time.
SMALL_BYTES: Final = 1 << 20


class MemoryShare:
    """Bounds the bytes that are held at a time; waiters are served in order of arrival.

    Args:
        most: Maximum number of bytes. A single request for more is granted while nothing else is held.
    """

    def __init__(self, most: int) -> None:
        """Start with no bytes held."""
        self.most = most
        self.held = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def hold(self, nbytes: int) -> AsyncIterator[None]:
        """Wait until ``nbytes`` are available, and hold them for the duration of the context."""
        await self.acquire(nbytes)
        try:
            yield
        finally:
            self.release(nbytes)

    async def acquire(self, nbytes: int) -> None:
        """Wait until ``nbytes`` are available, and take them; they have to be given back by :meth:`release`."""
        if nbytes <= SMALL_BYTES:
            return
        if self._waiting or not self._fits(nbytes):
            await self._wait_for(nbytes)
        else:
            self.held += nbytes

    def release(self, nbytes: int) -> None:
        """Give back ``nbytes`` that were acquired."""
        if nbytes > SMALL_BYTES:
            self._give(nbytes)

    async def _wait_for(self, nbytes: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self._give(nbytes)
            else:
                with suppress(ValueError):  # the cancelled waiter was removed from the queue already
                    self._waiting.remove((nbytes, turn))
                self._wake()
            raise

    def _fits(self, nbytes: int) -> bool:
        return self.held + nbytes <= self.most or not self.held

    def _give(self, nbytes: int) -> None:
        self.held -= nbytes
        self._wake()

    def _wake(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self.held += nbytes
                turn.set_result(None)
