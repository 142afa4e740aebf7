"""Clean-up work that has to come to its end although the task that does it is cancelled."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

__all__ = ["finish"]


async def finish(work: Callable[[], Awaitable[object]], timeout_s: float) -> bool:
    """Do clean-up work to its end although this task is cancelled, but for at most ``timeout_s`` seconds.

    A shielded scope of anyio holds back the cancels of other scopes, but not ``task.cancel()`` of asyncio. After such a
    cancel the work is begun anew, and the cancel goes on once it has ended; so work has to be repeatable.

    Returns:
        Whether the work ended in time.
    """
    cancelled: BaseException | None = None
    with anyio.move_on_after(timeout_s, shield=True) as scope:
        while True:
            try:
                await work()
            except anyio.get_cancelled_exc_class() as err:
                if scope.cancel_called:
                    raise
                cancelled = err
            else:
                break
    if cancelled is not None:
        raise cancelled
    return not scope.cancelled_caught
