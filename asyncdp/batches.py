"""Batches: an iterator that claims and reads batches, optionally ahead of the caller."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Self

import anyio

if TYPE_CHECKING:
    from types import TracebackType

    from anyio.abc import TaskGroup
    from tensordict import TensorDict

    from asyncdp.client import Client
    from asyncdp.meta import KVBatchMeta

__all__ = ["Batches"]

#: Seconds within which leaving the context releases claims that the caller did not get.
GIVE_BACK_S = 5.0


class Batches:
    """An endless iterator over claimed batches as ``(meta, data)``; made by ``client.batches(...)``.

    With ``prefetch`` above 0 it must be used as a context manager (``async with client.batches(..., prefetch=2) as
    batches``), which ends the task that claims and reads ahead. Leaving the context releases the claims of batches that
    the caller did not get. If a batch cannot be read, its error is raised with the claimed meta as ``error.batch``,
    which the caller has to evict or release; the iteration can be continued.

    Args:
        client: Client that claims and reads.
        partition_id, task_name, required_fields, batch_size, min_batch_size: As for ``claim_meta``.
        select_fields: Fields to read; None: the required fields.
        prefetch: Number of batches to claim and read ahead of the caller.
        timeout_s: Seconds to wait for one batch, after which ClaimNotReady is raised.
    """

    def __init__(
        self,
        client: Client,
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
        """Store the arguments; claims nothing yet."""
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
        try:
            return meta, await self._client.get_data(meta, self._select, timeout_s=self._timeout_s)
        except Exception as err:
            err.batch = meta  # type: ignore[attr-defined]
            raise

    def _hand_over(self, meta: KVBatchMeta | None) -> None:
        """Stop holding a batch that the caller gets, with its data or its error: its claim is not released here."""
        self._held = [held for held in self._held if held is not meta]

    def __aiter__(self) -> Self:
        """Return the iterator itself."""
        return self

    async def __anext__(self) -> tuple[KVBatchMeta, TensorDict]:
        """Return the next batch."""
        if self._group is None:
            if self._prefetch:
                msg = "batches with prefetch have to be entered: async with client.batches(..., prefetch=n) as batches"
                raise RuntimeError(msg)
            try:
                meta, data = await self._one()
            except Exception as err:
                self._hand_over(getattr(err, "batch", None))
                raise
            self._hand_over(meta)
            return meta, data
        while not self._ready:
            await self._wait()
        got = self._ready.popleft()
        self._notify()
        if isinstance(got, Exception):
            self._hand_over(getattr(got, "batch", None))
            raise got
        self._hand_over(got[0])
        return got

    async def __aenter__(self) -> Self:
        """Start to claim and read ahead, if ``prefetch`` is above 0."""
        if self._prefetch:
            self._group = anyio.create_task_group()
            await self._group.__aenter__()
            self._group.start_soon(self._ahead)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End the prefetching task and release what the caller did not get, even if the caller is cancelled."""
        try:
            if self._group is not None:
                self._group.cancel_scope.cancel()
                await self._group.__aexit__(None, None, None)
        finally:
            self._group = None
            self._ready.clear()
            with anyio.move_on_after(GIVE_BACK_S, shield=True):
                await self._give_back()

    async def _give_back(self) -> None:
        held, self._held = self._held, []
        for meta in held:
            try:
                await self._client.release_claim(meta, timeout_s=GIVE_BACK_S)
            except Exception:  # noqa: BLE001, S112 - list_claims shows claims that could not be released
                continue

    async def _ahead(self) -> None:
        """Keep up to ``prefetch`` results queued; an error is queued like a batch."""
        while True:
            while len(self._ready) >= self._prefetch:
                await self._wait()
            try:
                self._ready.append(await self._one())
            except Exception as err:  # noqa: BLE001 - raised to the caller when its turn comes
                self._ready.append(err)
            self._notify()

    async def _wait(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()
