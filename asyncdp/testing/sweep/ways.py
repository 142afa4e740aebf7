"""The ways in which users cancel."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from .checkpoints import Checkpoints

__all__ = ["ASYNCIO_ONLY", "WAYS"]

#: Runs a call; whether it was cancelled. A call that ended before, or all the same, was not.
Way = Callable[["Checkpoints", Callable[[], Awaitable[Any]]], Awaitable[bool]]
#: Seconds given to asyncio.wait_for; odd, so that its timer is known again among others. It never comes.
ODD_S = 86_399.123


async def by_scope(points: Checkpoints, call: Callable[[], Awaitable[Any]]) -> bool:
    """Cancel the scope of anyio around the call."""
    with anyio.CancelScope() as scope:
        points.cancel = scope.cancel
        await points.run(call)
    return scope.cancelled_caught


async def by_task(points: Checkpoints, call: Callable[[], Awaitable[Any]]) -> bool:
    """Cancel the task that makes the call, as asyncio does."""
    task = asyncio.create_task(points.run(call))
    points.cancel = task.cancel
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


async def by_wait_for(points: Checkpoints, call: Callable[[], Awaitable[Any]]) -> bool:
    """Let the time of asyncio.wait_for run out at the checkpoint."""
    with _timer() as timer:
        points.cancel = timer.expire
        try:
            # Banned in asyncdp; its users use it, and it has cancelled and raced in its own way in each Python.
            await asyncio.wait_for(points.run(call), ODD_S)  # noqa: TID251
        except TimeoutError as err:
            if type(err) is not TimeoutError or not timer.expired:
                raise  # the call's own
            return True
    return False


class _Timer:
    """The timer that wait_for sets."""

    def __init__(self) -> None:
        self.set: list[Callable[[], object]] = []
        self.expired = False

    def expire(self) -> None:
        """Do now what its end would do."""
        self.expired = True
        for run in self.set:
            run()


@contextmanager
def _timer() -> Iterator[_Timer]:
    """Catch the timer: every loop sets timers by call_at."""
    loop: Any = asyncio.get_running_loop()
    timer = _Timer()
    call_at = loop.call_at

    def catch(when: float, callback: Callable[..., object], *args: Any, **more: Any) -> Any:
        handle = call_at(when, callback, *args, **more)
        if abs(when - loop.time() - ODD_S) < 1.0 and not timer.set:

            def run() -> None:
                if not handle.cancelled():
                    handle.cancel()
                    loop.call_soon(callback, *args, **more)

            timer.set.append(run)
        return handle

    loop.call_at = catch
    try:
        yield timer
    finally:
        del loop.call_at


WAYS: Mapping[str, Way] = {"scope": by_scope, "native": by_task, "wait_for": by_wait_for}
#: Those that trio has not.
ASYNCIO_ONLY = frozenset({"native", "wait_for"})
