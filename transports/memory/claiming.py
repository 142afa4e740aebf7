"""Claiming in the memory plane."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncdp.errors import ClaimLost, DataPlaneBadRequest
from asyncdp.meta import ClaimInfo, KVBatchMeta, RowHandle, lengths_of
from asyncdp.slots import ClaimTry
from asyncdp.transports.memory.base import PlaneBase
from asyncdp.transports.memory.claims import Claim, ReadyIndex

if TYPE_CHECKING:
    from asyncdp.transports.memory.partition import Partition

__all__ = ["Claiming"]

#: Waiting ids that ClaimNotReady names.
SHOWN = 16


class Claiming(PlaneBase):
    """Claims, gives back, lists."""

    def claim(
        self,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        most: int,
        least: int,
        claim_id: str,
        owner: str,
        lease_s: float | None,
    ) -> tuple[ClaimTry, bool]:
        """Claim the first ready samples, or say how far they are."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        for name in fields:
            if name not in part.fields:
                msg = f"required field {name!r} is neither declared in partition {part.id!r} nor was it ever written"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field=name)
        size = part.group_size
        if size is not None:
            if most < size:
                msg = f"batch_size {most} is below one group of {size}"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field="batch_size")
            least = min(least, most // size * size)
        self.expire(part)
        index = part.index(task, fields)
        rows = index.take(most, least)
        if not rows:
            return self._unready(part, task, fields, index), False
        now = self.clock.time()
        expires = None if lease_s is None else now + lease_s
        claim = Claim(claim_id, owner, task, tuple(fields), {row.id: row for row in rows}, now, expires)
        part.claims[claim_id] = claim
        for row in rows:
            row.claimed[task] = claim_id
            index_group = part.groups[row.group]
            part.touch(row, index_group)
        return self._batch(part, claim), True

    def claimed(self, partition_id: str, claim_id: str) -> ClaimTry | None:
        """Return the batch of a claim that was answered before, as far as it lives; None where there is none."""
        part = self.partitions.get(partition_id)
        claim = None if part is None else part.claims.get(claim_id)
        return None if part is None or claim is None else self._batch(part, claim)

    @staticmethod
    def _batch(part: Partition, claim: Claim) -> ClaimTry:
        rows = list(claim.rows.values())
        tags = [dict(row.tags) for row in rows]
        meta = KVBatchMeta(
            part.id,
            claim.task,
            [row.id for row in rows],
            list(claim.fields),
            lengths_of(tags),
            tags=tags,
            handles=[RowHandle(row.incarnation, claim.id) for row in rows],
        )
        return ClaimTry(meta, ready=len(rows))

    def _unready(self, part: Partition, task: str, fields: Sequence[str], index: ReadyIndex) -> ClaimTry:
        waiting = [
            row
            for row in part.rows.values()
            if task not in row.claimed and not index.holds(row, part.groups[row.group])
        ]
        waiting.sort(key=lambda row: row.created_at)
        oldest = self.clock.time() - waiting[0].created_at if waiting else None
        empty = KVBatchMeta(part.id, task, [], list(fields), tags=[], handles=[])
        ids = tuple(row.id for row in waiting[:SHOWN])
        return ClaimTry(empty, index.rows, oldest, ids, index.lacking(waiting))

    def release(
        self, partition_id: str, sample_ids: Sequence[str], claim_ids: Sequence[str | None], task: str
    ) -> tuple[None, bool]:
        """Make claimed samples claimable again; all of them, or none."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        self.expire(part)
        by_claim: dict[str, list[str]] = {}
        for sample_id, claim_id in zip(sample_ids, claim_ids, strict=True):
            claim = part.claims.get(claim_id or "")
            if claim is None or claim.task != task or sample_id not in claim.rows:
                msg = f"sample {sample_id!r} is not claimed by this client any more"
                raise ClaimLost(msg, partition_id=part.id, sample_ids=(sample_id,))
            by_claim.setdefault(claim.id, []).append(sample_id)
        for claim_id, ids in by_claim.items():
            self._unclaim(part, part.claims[claim_id], ids)
        self.changed()
        return None, True

    def release_owner(self, partition_id: str, owner: str) -> tuple[None, bool]:
        """Make everything that an owner claimed claimable again; remembered also where there was nothing."""
        part = self.partitions.get(partition_id)
        held = [] if part is None else [claim for claim in part.claims.values() if claim.owner == owner]
        if part is not None and held:
            for claim in held:
                self._unclaim(part, claim, list(claim.rows))
            self.changed()
        return None, True

    def abandon(self, partition_id: str, claim_id: str) -> None:
        """Give back a claim that nobody got; refuse it if it arrives later."""
        part = self.partitions.get(partition_id)
        claim = None if part is None else part.claims.get(claim_id)
        if part is not None and claim is not None:
            self._unclaim(part, claim, list(claim.rows))
            self.changed()
        self.refuse(claim_id)

    def list_claims(self, partition_id: str, task: str) -> list[ClaimInfo]:
        """List the claims of a task that live."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        self.expire(part)
        return [
            ClaimInfo(c.id, c.owner, c.task, tuple(c.rows), c.claimed_at, c.expires_at)
            for c in part.claims.values()
            if c.task == task
        ]

    def next_expiry(self, partition_id: str) -> float | None:
        """Unix time at which the next lease ends."""
        part = self.partitions.get(partition_id)
        ends = [] if part is None else [c.expires_at for c in part.claims.values() if c.expires_at is not None]
        return min(ends, default=None)

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Whether every sample present is claimed by every named task."""
        part = self.partition(partition_id)
        for task in tasks:
            self.check_task(part, task)
        self.expire(part)
        return all(task in row.claimed for row in part.rows.values() for task in tasks)
