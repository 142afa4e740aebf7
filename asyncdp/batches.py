"""Batches: claim and read in a loop, optionally ahead of the caller."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Self

import anyio

from asyncdp.errors import ClaimNotReady

if TYPE_CHECKING:
    from types import TracebackType

    from anyio.abc import TaskGroup
    from tensordict import TensorDict

    from asyncdp.client import BaseClient
    from asyncdp.meta import KVBatchMeta

__all__ = ["Batches"]


class Batches:
    """An endless iterator over ``(meta, data)`` of claimed batches; made by ``client.batches(...)``.

    With ``prefetch`` above 0 it has to be entered (``async with client.batches(..., prefetch=2) as batches``): the
    tasks that claim and read ahead must end somewhere. Leaving it gives back the claims that the caller did not get.
    A batch that cannot be read raises its error; the iterator can go on after it.

    Args:
        client: Where to claim and read.
        partition_id, task_name, required_fields, batch_size, min_batch_size: As for ``claim_meta``.
        select_fields: What to read; default: the required fields.
        prefetch: How many batches to claim and read ahead of the caller.
        timeout_s: How long to wait for one batch, in seconds; then ClaimNotReady is raised.
    """

    def __init__(
        self,
        client: BaseClient,
        partition_id: str,
        task_name: str,
        required_fields: tuple[str, ...],
        batch_size: int,
        *,
        select_fields: tuple[str, ...] | None,
        min_batch_size: int | None,
        prefetch: int,
        timeout_s: float | None,
    ) -> None:
        """Keep the arguments; nothing is claimed yet."""
        self._client = client
        self._claim_args: tuple[Any, ...] = (partition_id, task_name, required_fields, batch_size)
        self._select = select_fields
        self._least = min_batch_size
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._group: TaskGroup | None = None
        self._ready: deque[tuple[KVBatchMeta, TensorDict] | Exception] = deque()
        self._held: list[KVBatchMeta] = []
        self._changed = anyio.Event()

    async def _one(self) -> tuple[KVBatchMeta, TensorDict]:
        partition_id, task, fields, size = self._claim_args
        meta = await self._client.claim_meta(
            partition_id, task, fields, size, timeout_s=self._timeout_s, min_batch_size=self._least
        )
        self._held.append(meta)
        data = await self._client.get_data(meta, self._select, timeout_s=self._timeout_s)
        return meta, data

    def __aiter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> tuple[KVBatchMeta, TensorDict]:
        """Return the next batch."""
        if self._group is None:
            if self._prefetch:
                msg = "batches with prefetch have to be entered: async with client.batches(..., prefetch=n) as batches"
                raise RuntimeError(msg)
            meta, data = await self._one()
            self._held.clear()
            return meta, data
        while not self._ready:
            await self._wait()
        got = self._ready.popleft()
        self._notify()
        if isinstance(got, Exception):
            raise got
        self._held = [meta for meta in self._held if meta is not got[0]]
        return got

    async def __aenter__(self) -> Self:
        """Begin to claim ahead."""
        if self._prefetch:
            self._group = anyio.create_task_group()
            await self._group.__aenter__()
            self._group.start_soon(self._ahead)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the tasks and give back what the caller did not get."""
        if self._group is None:
            return
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)
        self._group = None
        self._ready.clear()
        with anyio.move_on_after(5.0, shield=True):
            for meta in self._held:
                try:
                    await self._client.release_claim(meta, timeout_s=5.0)
                except Exception:  # noqa: BLE001, S112 - list_claims shows what could not be given back
                    continue

    async def _ahead(self) -> None:
        """Keep up to ``prefetch`` results waiting; an error waits in line like a batch."""
        while True:
            while len(self._ready) >= self._prefetch:
                await self._wait()
            try:
                self._ready.append(await self._one())
            except ClaimNotReady as err:
                self._ready.append(err)
            except Exception as err:  # noqa: BLE001 - handed to the caller in its turn
                self._ready.append(err)
            self._notify()

    async def _wait(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
