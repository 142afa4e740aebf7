"""The ways in which a call can be cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import anyio

if TYPE_CHECKING:
    from .checkpoints import Checkpoints

__all__ = ["ASYNCIO_ONLY", "WAYS"]

#: A function that runs a call and returns whether it was cancelled; False for a call that completed.
Way = Callable[["Checkpoints", Callable[[], Awaitable[Any]]], Awaitable[bool]]
#: Timeout in seconds for asyncio.wait_for. The unusual value identifies its timer among others; it never elapses.
ODD_S = 86_399.123


async def by_scope(points: Checkpoints, call: Callable[[], Awaitable[Any]]) -> bool:
    """Cancel an anyio cancel scope around the call."""
    with anyio.CancelScope() as scope:
        points.cancel = scope.cancel
        await points.run(call)
    return scope.cancelled_caught


async def by_task(points: Checkpoints, call: Callable[[], Awaitable[Any]]) -> bool:
    """Cancel the task that makes the call by task.cancel()."""
    task = asyncio.create_task(points.run(call))
    points.cancel = task.cancel
    await asyncio.wait([task])
    if task.cancelled():
        return True
    task.result()
    return False


async def by_wait_for(points: Checkpoints, call: Callable[[], Awaitable[Any]]) -> bool:
    """Make the timeout of asyncio.wait_for elapse at the checkpoint."""
    with _timer() as timer:
        points.cancel = timer.expire
        try:
            # asyncdp itself must not use wait_for, but its users do, and its races differ between Python versions.
            await asyncio.wait_for(points.run(call), ODD_S)  # noqa: TID251
        except TimeoutError as err:
            if type(err) is not TimeoutError or not timer.expired:
                raise  # this is the TimeoutError of the call itself
            return True
    return False


class _Timer:
    """The timer that wait_for started."""

    def __init__(self) -> None:
        self.set: list[Callable[[], object]] = []
        self.expired = False

    def expire(self) -> None:
        """Make the timer elapse now."""
        self.expired = True
        for run in self.set:
            run()


@contextmanager
def _timer() -> Iterator[_Timer]:
    """Capture the timer of wait_for, by wrapping ``call_at`` of the loop."""
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
#: Ways that trio does not support.
ASYNCIO_ONLY = frozenset({"native", "wait_for"})
