"""Writes the rollouts of one group: all of them are trained on, or none is left behind."""

from __future__ import annotations

import uuid
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

from asyncdp.errors import DataPlaneBadRequest, DataPlaneError
from asyncdp.process.cancellation import finish
from asyncdp.settings import verb_arguments as check

from .reservations import WRITER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

    from tensordict import TensorDict

    from asyncdp.meta import KVBatchMeta
    from asyncdp.protocol import DataPlaneClient

    from .ledger import CapacityLedger
    from .reservations import Reservation

__all__ = ["GroupWriter"]

#: Seconds that the rollback of a group may take.
ROLLBACK_S = 10.0


class GroupWriter:
    """Writes one group in several puts, each of new rows, and commits it at the end.

    For example::

        async with GroupWriter(client, "rollouts", "g7", size=8, weight_version=3) as group:
            await group.put(["g7_g0", "g7_g1"], fields)
            await group.fail("g7_g2", "the environment crashed")

    Until then no row can be claimed, since rows are put with ``committed=False``. If the block raises or is cancelled,
    the rows that this writer has created are removed, in the lives that it created, and its error goes up; if the
    removal fails too, that error is ``error.rollback_error`` and is noted in the traceback. What is left then is not
    committed, so no claim returns it, and a RecoveryLoop evicts it. Once the group is committed nothing is removed, and
    the block does not fail if its reservation cannot be removed: the next listing of a CapacityLedger does that.

    A group of another size than ``size`` is not committed: a put of too many rows is refused before it is sent, and a
    block that ends with too few is an error, after which nothing is left. Failed rows stand for rows that are missing:
    with them the group is committed, to be counted, though it is not complete. So is a block that wrote failures only.
    One that wrote nothing gives its place back.

    Args:
        client: A client of the plane; its backend must be able to bind mutations to lives (``bound_mutations``).
        partition_id: The partition.
        group_id: The group.
        size: Number of rows of the complete group, without failed ones; at least 1.
        weight_version: Version of the weights that the rollouts were made with.
        reservation: The group's place, released or committed with the group; None: it has none.
        ledger: The ledger of the reservation if it is in this process, which then need not list to know.

    Attributes:
        meta: The rows written so far, failed ones aside; None before the first put.
        failed: Number of rows that were written as failed.

    Raises:
        DataPlaneBadRequest: An argument has the wrong type or is out of range; at the end of the block, too few rows
            were written.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        partition_id: str,
        group_id: str,
        *,
        size: int,
        weight_version: int,
        reservation: Reservation | None = None,
        ledger: CapacityLedger | None = None,
    ) -> None:
        """Write nothing yet."""
        self.meta: KVBatchMeta | None = None
        self.failed = 0
        self._client = client
        self._partition_id = check.name(partition_id, "partition_id")
        self._group_id = check.name(group_id, "group_id")
        self._size = check.count(size, "size")
        self._reservation = reservation
        self._ledger = ledger
        self._token = uuid.uuid4().hex
        tags = {
            "group_id": group_id,
            "weight_version": weight_version,
            "expected_num_keys": size,
            "committed": False,
            WRITER: self._token,
        }
        (self._tags,) = check.tag_rows([tags], 1)
        self._created: list[KVBatchMeta] = []
        self._unsure: list[str] = []
        self._committed = False
        self._said_failed: set[str] = set()
        self._open: bool | None = None  # None before the block, False after it

    async def put(
        self,
        sample_ids: Sequence[str],
        fields: TensorDict | Mapping[str, Any],
        tags: Sequence[Mapping[str, Any]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Put new rows of the group; ``tags`` are added to those of the group.

        Raises:
            DataPlaneBadRequest: A row of one of the ids lives already, the group would have more than ``size`` rows, or
                the writer is not in its block; nothing was written.
        """
        ids = check.ids(sample_ids)
        given = check.tag_rows([{}] * len(ids) if tags is None else tags, len(ids))
        there = {*(self.meta.sample_ids if self.meta is not None else ()), *self._unsure} - self._said_failed
        if (rows := len(there.union(ids))) > self._size:
            raise self._bad(f"has {self._size} rows, and with this put it would have {rows}", "sample_ids")
        meta = await self._put(ids, fields, [{**row, **self._tags} for row in given], timeout_s)
        self.meta = meta if self.meta is None else self.meta.concat(meta)
        return meta

    async def fail(
        self, sample_id: str, reason: str, *, tags: Mapping[str, Any] | None = None, timeout_s: float | None = None
    ) -> None:
        """Put a row that says that a rollout failed: no claim returns it, and it does not complete the group.

        It counts as a row where the partition's ``grpo_group_size`` bounds the rows of a group.
        """
        (given,) = check.tag_rows([tags or {}], 1)
        row = {**given, **self._tags, "status": "failed", "failure": reason}
        self._said_failed.add(check.name(sample_id, "sample_id"))
        await self._put([sample_id], None, [row], timeout_s)
        self.failed += 1

    async def _put(
        self,
        sample_ids: Sequence[str],
        fields: TensorDict | Mapping[str, Any] | None,
        tags: list[dict[str, Any]],
        timeout_s: float | None,
    ) -> KVBatchMeta:
        if not self._open:
            where = "was not entered: use it as async with" if self._open is None else "has ended"
            raise self._bad(f"is not written to: the block of its writer {where}", "group_id")
        self._unsure.extend(sample_ids)
        try:
            meta = await self._client.put_samples(
                sample_ids, self._partition_id, fields, tags, only="new", timeout_s=timeout_s
            )
        except DataPlaneError as err:
            if not err.ambiguous:
                self._unsure = [one for one in self._unsure if one not in set(sample_ids)]
            raise
        self._unsure = [one for one in self._unsure if one not in set(sample_ids)]
        self._created.append(meta)
        return meta

    async def __aenter__(self) -> Self:
        """Return the writer.

        Raises:
            DataPlaneBadRequest: It was entered before: each writer writes one group once.
        """
        if self._open is not None:
            raise self._bad("is not written to again: its writer was entered before", "group_id")
        self._open = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Commit the group, or remove what was created of it."""
        self._open = False
        if err is None:
            try:
                await self._commit()
            except BaseException as failed:
                if not self._committed:
                    await self._roll_back(failed)
                raise
        else:
            await self._roll_back(err)

    async def _commit(self) -> None:
        """Commit all rows in one put: other clients see the whole group or nothing of it."""
        if not self._created and not self._unsure:
            if self._reservation is not None:
                await self._release(self._reservation)
            return
        fit = 0 if self.meta is None else self.meta.size
        if fit + self.failed < self._size and (fit or not self.failed):
            failed = f" and {self.failed} failed ones" if self.failed else ""
            raise self._bad(f"has {self._size} rows, and {fit}{failed} were put: nothing is committed", "size")
        rows = self._created[0].concat(self._created[1:])
        await self._client.put_samples(rows, self._partition_id, tags=[{"committed": True}] * rows.size)
        self._committed = True
        if self._reservation is not None:
            with suppress(DataPlaneError):  # the group is there all the same: the next listing ends its reservation
                if self._ledger is not None:
                    await self._ledger.commit(self._reservation)
                else:
                    await self._client.clear_samples(self._reservation.meta, self._partition_id)

    def _bad(self, what: str, field: str) -> DataPlaneBadRequest:
        msg = f"group {self._group_id!r} {what}"
        return DataPlaneBadRequest(msg, op="put_samples", partition_id=self._partition_id, field=field)

    async def _release(self, reservation: Reservation) -> None:
        if self._ledger is not None:
            await self._ledger.release(reservation)
        else:
            await self._client.clear_samples(reservation.meta, self._partition_id)

    async def _roll_back(self, error: BaseException) -> None:
        """Remove what was created; what goes wrong with that is attached to ``error``."""
        problem: Exception | None = None

        async def roll_back() -> None:
            nonlocal problem
            try:
                await self._remove_created()
                if self._reservation is not None:
                    await self._release(self._reservation)
            except Exception as err:  # noqa: BLE001 - it goes up with the error that it follows
                problem = err

        if not await finish(roll_back, ROLLBACK_S):
            problem = TimeoutError(f"the rollback took longer than {ROLLBACK_S:g} s")
        if problem is not None:
            error.rollback_error = problem  # type: ignore[attr-defined]
            error.add_note(f"The rollback of the group failed too: {type(problem).__name__}: {problem}")

    async def _remove_created(self) -> None:
        created = list(self._created)
        if self._unsure:
            created += await self._found(self._unsure)
        if created:
            await self._client.clear_samples(created[0].concat(created[1:]), self._partition_id)

    async def _found(self, sample_ids: Sequence[str]) -> list[KVBatchMeta]:
        """Find the rows that puts without an answer have created; a put to the same ids settles what became of them.

        That put changes nothing, since rows of others may live under these ids by now.
        """
        nothing: list[dict[str, Any]] = [{}] * len(sample_ids)
        await self._client.put_samples(sample_ids, self._partition_id, tags=nothing, only="existing", stale="skip")
        found = []
        for group in await self._client.list_metadata(self._partition_id):
            ours = [key for key, row in zip(group.keys, group.tags, strict=True) if row.get(WRITER) == self._token]
            there = [key for key in ours if key in set(sample_ids)]
            if there:
                found.append(group.meta(there))
        return found
