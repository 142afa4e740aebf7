"""Closes objects that belong to an event loop before the loop is closed.

A client may be used from one loop after another (one ``asyncio.run`` per step of a synchronous program). After a loop
is closed, its sockets cannot be closed properly any more: asyncio leaves them to the garbage collector.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

__all__ = ["abort", "at_loop_end", "end_at_once"]


def at_loop_end(work: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
    """Have the running loop await ``work()`` when it shuts down, or earlier, when the result is garbage collected.

    ``asyncio.run``, ``anyio.run`` and pytest plugins shut down asynchronous generators (``loop.shutdown_asyncgens``)
    before they close a loop, so ``work`` is called in the ``finally`` of one. ``await result.aclose()`` calls it at
    once. ``work`` must not refer to the object that holds the result. A loop that is closed without shutting down its
    generators never calls it.
    """
    generator = _until_the_end(work)
    first: Any = generator.__anext__()
    try:
        first.send(None)  # runs to the yield without a turn of the loop, and registers the generator with the loop
    except StopIteration:
        return generator
    raise AssertionError("the generator waited before its yield")


def end_at_once(end: AsyncGenerator[None, None]) -> None:
    """Run the ``work`` of :func:`at_loop_end` now, without a turn of the loop; ``work`` must not wait for anything.

    If the generator were only dropped, the loop would start a task for it at the next garbage collection.
    """
    closing: Any = end.aclose()
    try:
        closing.send(None)
    except StopIteration:
        return
    raise AssertionError("the work at the end of the loop waited")


async def _until_the_end(work: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
    try:
        yield
    finally:
        await work()


def abort(transport: Any) -> None:
    """Close an asyncio transport at once, even if its loop is closed, in which case asyncio itself would not."""
    try:
        transport.abort()
    except RuntimeError:  # its loop is closed
        inner = getattr(getattr(transport, "_ssl_protocol", None), "_transport", transport)
        sock = getattr(inner, "_sock", None)
        if sock is not None:
            sock.close()
            inner._sock = None  # noqa: SLF001 - else it warns when it is garbage collected
