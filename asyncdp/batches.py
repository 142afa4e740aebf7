"""Batches: an iterator that claims and reads batches, optionally ahead of the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

import anyio

from asyncdp.errors import ClaimNotReady, DataPlaneError, PartialReadError, SampleNotFound, StaleSlotError
from asyncdp.process.cancellation import finish
from asyncdp.rows.device_memory import staging_of

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from anyio.abc import TaskGroup
    from tensordict import TensorDict

    from asyncdp.client import Client
    from asyncdp.meta import KVBatchMeta

__all__ = ["Batches", "Idle", "Survivors"]

#: What becomes of a batch of which only some rows can be read.
Survivors = Literal["raise", "drop"]
#: What happens when too few samples are ready in time.
Idle = Literal["raise", "wait", "end"]
#: Seconds within which leaving the context releases claims that the caller did not get.
GIVE_BACK_S = 5.0


class Batches:
    """An iterator over claimed batches as ``(meta, data)``; made by ``client.batches(...)``.

    With ``prefetch`` above 0 it must be used as a context manager (``async with client.batches(..., prefetch=2) as
    batches``), which ends the task that claims and reads ahead. Leaving the context releases the claims of batches that
    the caller did not get; without prefetch there are none, since the claim of a batch whose read is cancelled is
    released at once. If a batch cannot be read, its error is raised with the claimed meta as ``error.batch``, which the
    caller has to evict or release; the iteration can be continued.

    Args:
        client: Client that claims and reads.
        partition_id: The partition, as for ``claim_meta``.
        task_name: The task that claims.
        required_fields: Fields that a sample must have to be claimed.
        batch_size: Largest number of samples per batch.
        min_batch_size: Smallest number of samples per batch; None: ``batch_size``.
        select_fields: Fields to read; None: the required fields.
        prefetch: Number of batches to claim and read ahead of the caller.
        device: Device to which the data of a batch is moved, to CUDA devices through pinned memory; None: it stays in
            host memory.
        borrow: As for ``get_data``, for each batch.
        survivors: If only some rows of a batch can be read, ``"raise"`` raises PartialReadError; ``"drop"`` returns the
            other rows, without groups (tag ``group_id``) of which a row is missing, and releases the claims of rows
            that are left out and still exist. A batch of which no row exists any more is passed over.
        idle: If too few samples are ready within ``timeout_s``, ``"raise"`` raises ClaimNotReady, ``"wait"`` waits
            again, ``"end"`` ends the iteration.
        timeout_s: Seconds to wait until enough samples are ready. A read may take at least the client's default.
    """

    def __init__(  # noqa: PLR0913 - the arguments of claim_meta, and how to iterate
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
        device: torch.device | None = None,
        borrow: bool = False,
        survivors: Survivors = "raise",
        idle: Idle = "raise",
    ) -> None:
        """Store the arguments; claims nothing yet."""
        self._client = client
        self._claim_args: tuple[Any, ...] = (partition_id, task_name, required_fields, batch_size)
        self._select = select_fields
        self._least = min_batch_size
        self._prefetch = prefetch
        self._timeout_s = timeout_s
        self._read_s = None if timeout_s is None else max(timeout_s, client.call_timeout_s)
        self._device = device
        self._borrow = borrow
        self._survivors = survivors
        self._idle = idle
        self._group: TaskGroup | None = None
        self._ready: deque[tuple[KVBatchMeta, TensorDict] | Exception] = deque()
        self._held: list[KVBatchMeta] = []
        self._changed = anyio.Event()
        self._ended = False

    async def _one(self) -> tuple[KVBatchMeta, TensorDict]:
        """Claim and read one batch.

        Raises:
            StopAsyncIteration: Too few samples were ready in time, and the iteration is to end then.
        """
        partition_id, task, fields, size = self._claim_args
        while True:
            try:
                meta = await self._client.claim_meta(
                    partition_id, task, fields, size, timeout_s=self._timeout_s, min_batch_size=self._least
                )
            except ClaimNotReady:
                if self._idle == "raise":
                    raise
                if self._idle == "end":
                    raise StopAsyncIteration from None
                continue
            self._held.append(meta)
            try:
                read = await self._read(meta)
            except Exception as err:
                err.batch = self._held[-1]  # type: ignore[attr-defined]
                raise
            if read is not None:
                return read
            self._held.pop()

    async def _read(self, meta: KVBatchMeta) -> tuple[KVBatchMeta, TensorDict] | None:
        """Read a claimed batch, or what is left of it; None if it is passed over."""
        wanted = meta
        while True:
            try:
                found = await self._client.get_data(wanted, self._select, borrow=self._borrow, timeout_s=self._read_s)
                return wanted, await self._moved(found)
            except PartialReadError as err:
                if self._survivors == "raise":
                    raise
                missing = {err.failed.sample_ids[at]: row for at, row in enumerate(err.errors.values())}
                kept = wanted.drop(_with_their_groups(wanted, missing))
                self._held[-1] = meta.subset(()) if kept is None else kept
                await self._release_left_out(wanted, kept, missing)
                if kept is not None and kept.sample_ids == err.ok.sample_ids:
                    return kept, await self._moved(err.rows)
            except (StaleSlotError, SampleNotFound):
                if self._survivors == "raise":
                    raise
                return None  # all rows are gone
            if kept is None:
                return None
            wanted = kept

    async def _moved(self, data: TensorDict) -> TensorDict:
        if self._device is None:
            return data
        if self._device.type == "cuda":
            return await staging_of(self._client.env).move(data, self._device)
        return data.to(self._device)

    async def _release_left_out(
        self, meta: KVBatchMeta, kept: KVBatchMeta | None, missing: dict[str, DataPlaneError]
    ) -> None:
        """Release the claims of rows that are left out of a batch but exist."""
        there = set() if kept is None else set(kept.sample_ids)
        gone = {one for one, err in missing.items() if isinstance(err, (StaleSlotError, SampleNotFound))}
        rest = meta.drop(there | gone)
        if rest is not None:
            await self._release(rest)

    async def _release(self, meta: KVBatchMeta) -> None:
        try:
            await self._client.release_claim(meta, timeout_s=GIVE_BACK_S)
        except DataPlaneError:  # list_claims shows claims that could not be released
            return

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
            except BaseException:  # cancelled: nobody else knows of the claim
                await finish(self._give_back, GIVE_BACK_S)
                raise
            self._hand_over(meta)
            return meta, data
        while not self._ready:
            if self._ended:
                raise StopAsyncIteration
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
            await finish(self._give_back, GIVE_BACK_S)

    async def _give_back(self) -> None:
        while self._held:
            if self._held[0].size:
                await self._release(self._held[0])
            del self._held[0]

    async def _ahead(self) -> None:
        """Keep up to ``prefetch`` results queued; an error is queued like a batch."""
        while True:
            while len(self._ready) >= self._prefetch:
                await self._wait()
            try:
                self._ready.append(await self._one())
            except Exception as err:  # noqa: BLE001 - raised to the caller when its turn comes
                self._ended = isinstance(err, StopAsyncIteration)
                if not self._ended:
                    self._ready.append(err)
            self._notify()
            if self._ended:
                return

    async def _wait(self) -> None:
        changed = self._changed
        await changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = anyio.Event()


def _with_their_groups(meta: KVBatchMeta, missing: Iterable[str]) -> set[str | int]:
    """Return the ids of missing rows and of all rows of their groups."""
    lost: set[str | int] = set(missing)
    tags = meta.tags or [{}] * meta.size
    groups = {row.get("group_id") for one, row in zip(meta.sample_ids, tags, strict=True) if one in lost} - {None}
    mates = (one for one, row in zip(meta.sample_ids, tags, strict=True) if row.get("group_id") in groups)
    return lost | set(mates)
