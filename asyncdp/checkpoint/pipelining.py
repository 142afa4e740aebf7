"""Runs two steps beside each other: one loads the next item while the other uses the one before."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import anyio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable

__all__ = ["one_ahead"]

T = TypeVar("T")
R = TypeVar("R")


async def one_ahead(items: Iterable[T], load: Callable[[T], Awaitable[R]], use: Callable[[R], Awaitable[None]]) -> None:
    """Load each item, in order, while the one before it is used: two of them are in memory. Raises the first error."""
    failed: list[Exception] = []
    send, receive = anyio.create_memory_object_stream[R](0)

    async def load_all() -> None:
        async with send:
            try:
                for item in items:
                    await send.send(await load(item))
            except Exception as err:  # noqa: BLE001 - raised below; a task group would wrap it
                failed.append(err)

    async with receive, anyio.create_task_group() as group:
        group.start_soon(load_all)
        try:
            async for loaded in receive:
                await use(loaded)
        except Exception as err:  # noqa: BLE001 - as above
            failed.insert(0, err)
            group.cancel_scope.cancel()
    if failed:
        raise failed[0]
