"""Joining of small requests of many callers into one, since a request for one item costs as much as one for fifty."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Generic, TypeVar

__all__ = ["SMALL", "Joined"]

K = TypeVar("K")
Item = TypeVar("Item")
T = TypeVar("T")

#: Requests on the way above which further small ones wait for the next one together: with two, client and server work
#: at the same time.
_ON_THE_WAY: Final = 2
#: Most items of a request that is joined with others, and of a joined one: what is answered in a millisecond.
SMALL: Final = 32
_MOST: Final = 512
#: Seconds for which requests wait for those on the way, at the most: one that takes long, or hangs, holds up no other.
_PATIENCE_S: Final = 0.05
#: Most callers whose requests are joined: with more, so many calls go on at once that Python's garbage collector, which
#: counts the objects that come into being between two looks, runs ten times as often.
_CALLERS: Final = 32


class _Batch:
    """One joined request: the future of each caller, and the task that sends it."""

    __slots__ = ("callers", "task", "waiting")

    def __init__(self, callers: list[tuple[Sequence[Any], asyncio.Future[Any]]]) -> None:
        self.callers = callers
        self.waiting = len(callers)
        self.task: asyncio.Task[None] | None = None

    def left(self, _: object) -> None:
        """Count a caller that was answered or cancelled; a request that nobody waits for any more is cancelled."""
        self.waiting -= 1
        if not self.waiting and self.task is not None:
            self.task.cancel()


class Joined(Generic[K, Item, T]):
    """Sends requests that name items, several small ones of one key as one.

    A request that finds few others on the way is sent at once, in the caller's own task. Those that come while others
    are on the way are sent together, per key, as soon as one of those has ended, or 50 ms later. A caller that is
    cancelled takes nothing from the others; an error of the joined request is raised to each of them.

    Args:
        send: Sends the request of a key and items, and returns its answer.
    """

    def __init__(self, send: Callable[[K, Sequence[Item]], Awaitable[T]]) -> None:
        """Start without requests."""
        self._send = send
        self._loop: asyncio.AbstractEventLoop | None = None
        self._forget()

    def _forget(self) -> None:
        self._on_the_way = 0
        self._waiting: dict[K, list[tuple[Sequence[Item], asyncio.Future[tuple[T, int]]]]] = {}
        self._scheduled = False
        self._late: asyncio.TimerHandle | None = None
        self._batches: set[_Batch] = set()

    async def ask(self, key: K, items: Sequence[Item]) -> tuple[T, int]:
        """Return the answer of a request that includes these items, and where they begin in it."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # what another loop had on the way ended with it
            self._loop = loop
            self._forget()
        if len(items) > SMALL:
            return await self._send(key, items), 0
        if self._on_the_way < _ON_THE_WAY and not self._waiting:
            self._on_the_way += 1
            try:
                return await self._send(key, items), 0
            finally:
                self._ended(loop)
        future: asyncio.Future[tuple[T, int]] = loop.create_future()
        self._waiting.setdefault(key, []).append((items, future))
        self._schedule(loop)
        return await future

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        if loop is self._loop:
            self._on_the_way -= 1
            if self._waiting:
                self._schedule(loop)

    def _schedule(self, loop: asyncio.AbstractEventLoop) -> None:
        """Send what waits in the next turn, when all callers of this turn have come; later where others go before."""
        if self._scheduled:
            return
        if self._on_the_way < _ON_THE_WAY:
            self._scheduled = True
            loop.call_soon(self._join, loop)
        elif self._late is None:
            self._late = loop.call_later(_PATIENCE_S, self._join, loop, True)  # noqa: FBT003 - it takes no names

    def _join(self, loop: asyncio.AbstractEventLoop, late: bool = False) -> None:  # noqa: FBT001, FBT002
        if loop is not self._loop:
            return
        self._scheduled = False
        if self._late is not None:
            self._late.cancel()
            self._late = None
        most = self._on_the_way + len(self._waiting) if late else _ON_THE_WAY
        while self._waiting and self._on_the_way < most:
            key = next(iter(self._waiting))
            callers, total = self._waiting.pop(key), 0
            callers = [caller for caller in callers if not caller[1].done()]
            for at, (items, _) in enumerate(callers):
                total += len(items)
                if total > _MOST or at >= _CALLERS:
                    self._waiting[key] = callers[at:]  # behind other keys
                    callers = callers[:at]
                    break
            if not callers:
                continue
            batch = _Batch(callers)
            self._on_the_way += 1
            self._batches.add(batch)
            batch.task = loop.create_task(self._run(key, batch, loop))
            for _, future in callers:
                future.add_done_callback(batch.left)
        if self._waiting:
            self._schedule(loop)

    async def _run(self, key: K, batch: _Batch, loop: asyncio.AbstractEventLoop) -> None:
        try:
            answer = await self._send(key, [item for items, _ in batch.callers for item in items])
        except BaseException as err:
            batch.task = None
            for _, future in batch.callers:
                if not future.done():
                    future.set_exception(_copy(err)) if isinstance(err, Exception) else future.cancel()
            if not isinstance(err, Exception):
                raise
        else:
            batch.task, begin = None, 0
            for items, future in batch.callers:
                if not future.done():
                    future.set_result((answer, begin))
                begin += len(items)
        finally:
            self._batches.discard(batch)
            self._ended(loop)


def _copy(err: Exception) -> Exception:
    """Return a copy of an error, since each caller's layers add to theirs."""
    made = copy.copy(err)
    made.__cause__, made.__suppress_context__ = err.__cause__, err.__suppress_context__
    return made
