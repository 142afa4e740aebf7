"""Ends what belongs to an event loop before the loop is closed.

A client may be used from one loop after another (one ``asyncio.run`` per step of a synchronous program), and sockets of
a closed loop cannot be closed in order any more: asyncio leaves them to the collector.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

__all__ = ["abort", "at_loop_end", "end_at_once"]


def at_loop_end(work: Callable[[], Awaitable[None]]) -> AsyncGenerator[None, None]:
    """Have the running loop await ``work()`` when it shuts down; or sooner, when nobody refers to the result any more.

    ``asyncio.run``, ``anyio.run`` and pytest plugins shut down asynchronous generators (``loop.shutdown_asyncgens``)
    before they close a loop: so ``work`` is the end of one. ``await result.aclose()`` does it now. ``work`` must not
    refer to what holds the result. A loop that is closed without that never calls it.
    """
    generator = _until_the_end(work)
    first: Any = generator.__anext__()
    try:
        first.send(None)  # to its yield, without a turn of the loop, which takes note of it
    except StopIteration:
        return generator
    raise AssertionError("the generator waited before its yield")


def end_at_once(end: AsyncGenerator[None, None]) -> None:
    """Do now, without a turn of the loop, the ``work`` of :func:`at_loop_end`, which must not wait for anything.

    One that is only dropped makes the loop start a task for it, whenever the collector comes by.
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
    """Close an asyncio transport at once; one whose loop is closed as well, which asyncio leaves to the collector."""
    try:
        transport.abort()
    except RuntimeError:  # its loop is closed
        inner = getattr(getattr(transport, "_ssl_protocol", None), "_transport", transport)
        sock = getattr(inner, "_sock", None)
        if sock is not None:
            sock.close()
            inner._sock = None  # noqa: SLF001 - else it complains of itself when it is collected
