"""Claims: the part of the directory that gives each sample to each task once."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .core import Core
from .rows import Claim

if TYPE_CHECKING:
    from .partition import Partition
    from .ready import ReadyIndex

__all__ = ["Claims"]

#: Maximum number of waiting sample ids that ClaimNotReady lists.
SHOWN = 16
#: In partitions with up to this many rows, the waiting ids are searched on every request; that takes about 1 ms.
FULL_SCAN_ROWS = 5000
#: In larger partitions a search is repeated only after this multiple of its own duration, so that searches take at most
#: 5 % of the directory's time.
SCAN_PAUSE_FACTOR = 20.0


class Claims(Core):
    """The directory's operations on claims: claiming, releasing, listing, leases."""

    # -- leases

    def expire(self, part: Partition) -> None:
        """Release the claims whose lease has expired."""
        now = self.time()
        late = [c for c in part.claims.values() if c.expires_at is not None and c.expires_at <= now]
        for claim in late:
            self._unclaim(part, claim, list(claim.rows))

    def next_expiry(self, partition_id: str) -> float | None:
        """Return the unix time at which the next lease expires; None if no claim has a lease."""
        part = self.partitions.get(partition_id)
        ends = [] if part is None else [c.expires_at for c in part.claims.values() if c.expires_at is not None]
        return min(ends, default=None)

    def _unclaim(self, part: Partition, claim: Claim, ids: Sequence[str]) -> None:
        now = self.monotonic()
        for sample_id in ids:
            row = claim.rows.pop(sample_id)
            part.lost[claim.id, sample_id] = now
            if row.claimed.get(claim.task) == claim.id:
                del row.claimed[claim.task]
            part.update_ready(row, part.groups[row.group])
        if not claim.rows:
            part.claims.pop(claim.id, None)
            self.refuse(claim.id)

    def _check_claim(self, part: Partition, sample_id: str, held: tuple[str, ...] | None, life: int | None) -> None:
        """Refuse the removal of a sample that the caller's claims do not hold any more."""
        if held is None:
            return
        row = part.rows[sample_id] if part.lives(sample_id, life) else None
        if row is not None and any(claim_id in row.claimed.values() for claim_id in held):
            return
        if row is None and not any((claim_id, sample_id) in part.lost for claim_id in held):
            return  # removed already, under this claim or by an evict
        raise self._lost(part, sample_id)

    def _lost(self, part: Partition, sample_id: str) -> Exception:
        text = f"sample {sample_id!r} is not claimed by this client any more"
        return self.error("ClaimLost", text, partition_id=part.id, sample_ids=(sample_id,))

    # -- claiming

    def claim(
        self,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        most: int,
        least: int,
        claim_id: str,
        not_after: float,
        owner: str,
        lease_s: float | None,
    ) -> tuple[Any, ...]:
        """Claim the first ready samples, or describe why there are too few; a repeated claim id returns the same batch.

        Returns:
            ``("batch", ids, tags, incarnations)`` or ``("unready", ready, oldest wait in s, waiting ids, lacking)``;
            lacking is {field: number of waiting samples that lack it}.
        """
        known = self.partitions.get(partition_id)
        before = None if known is None else known.claims.get(claim_id)
        if before is not None:
            return _batch(before)
        args = (partition_id, task, fields, most, least, claim_id, owner, lease_s)
        return self.once(claim_id, not_after, lambda: self.take(*args))

    def take(
        self,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        most: int,
        least: int,
        claim_id: str,
        owner: str,
        lease_s: float | None,
    ) -> tuple[tuple[Any, ...], bool]:
        """Claim without checking the claim id; return the answer of :meth:`claim` and whether something was claimed."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        for name in fields:
            if name not in part.fields:
                text = f"required field {name!r} is neither declared in partition {part.id!r} nor was it ever written"
                raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field=name)
        size = part.group_size
        if size is not None:
            if most < size:
                text = f"batch_size {most} is below one group of {size}"
                raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field="batch_size")
            least = min(least, most // size * size)
        self.expire(part)
        index = part.index(task, fields)
        rows = index.take(most, least)
        if not rows:
            return self._unready(part, task, index), False
        now = self.time()
        expires = None if lease_s is None else now + lease_s
        claim = Claim(claim_id, owner, task, tuple(fields), {row.id: row for row in rows}, now, expires)
        part.claims[claim_id] = claim
        for row in rows:
            row.claimed[task] = claim_id
            part.update_ready(row, part.groups[row.group])
        return _batch(claim), True

    def _unready(self, part: Partition, task: str, index: ReadyIndex) -> tuple[Any, ...]:
        """Return how many rows are ready, and which rows have waited longest.

        This scans every row, and a waiting claim asks many times a second: so in large partitions the result of a scan
        is reused for a while, see ``SCAN_PAUSE_FACTOR``.
        """
        began = self.monotonic()
        until, since, ids, lacking = part.waits.get(index, (began, None, (), {}))
        if until <= began:
            waiting = [
                row
                for row in part.rows.values()
                if task not in row.claimed and not index.holds(row, part.groups[row.group])
            ]
            first = heapq.nsmallest(SHOWN, waiting, key=lambda row: row.created_at)
            since, ids = first[0].created_at if first else None, tuple(row.id for row in first)
            lacking = index.lacking(waiting)
            if len(part.rows) > FULL_SCAN_ROWS:
                ended = self.monotonic()
                part.waits[index] = (ended + SCAN_PAUSE_FACTOR * (ended - began), since, ids, lacking)
        return ("unready", index.rows, None if since is None else self.time() - since, ids, lacking)

    # -- giving back

    def release(
        self,
        partition_id: str,
        task: str,
        sample_ids: Sequence[str],
        claim_ids: Sequence[str | None],
        op_id: str,
        not_after: float,
    ) -> None:
        """Make claimed samples claimable again, all of them or none."""
        self.once(op_id, not_after, lambda: self.give_back(partition_id, task, sample_ids, claim_ids))

    def give_back(
        self, partition_id: str, task: str, sample_ids: Sequence[str], claim_ids: Sequence[str | None]
    ) -> tuple[None, bool]:
        """Release samples without checking an op_id; returns what :meth:`once` expects."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        self.expire(part)
        by_claim: dict[str, dict[str, None]] = {}
        for sample_id, claim_id in zip(sample_ids, claim_ids, strict=True):
            claim = part.claims.get(claim_id or "")
            if claim is None or claim.task != task or sample_id not in claim.rows:
                raise self._lost(part, sample_id)
            by_claim.setdefault(claim.id, {})[sample_id] = None
        for claim_id, ids in by_claim.items():
            self._unclaim(part, part.claims[claim_id], list(ids))
        self.changed()
        return None, True

    def release_owner(self, partition_id: str, owner: str, op_id: str, not_after: float) -> None:
        """Release all claims of an owner; the outcome is recorded even if there was no claim."""

        def act() -> tuple[None, bool]:
            part = self.partitions.get(partition_id)
            held = [] if part is None else [claim for claim in part.claims.values() if claim.owner == owner]
            if part is not None and held:
                for claim in held:
                    self._unclaim(part, claim, list(claim.rows))
                self.changed()
            return None, True

        self.once(op_id, not_after, act)

    def abandon(self, partition_id: str, claim_id: str) -> None:
        """Release a claim whose answer no client received; refuse it if it arrives later."""
        part = self.partitions.get(partition_id)
        claim = None if part is None else part.claims.get(claim_id)
        if part is not None and claim is not None:
            self._unclaim(part, claim, list(claim.rows))
            self.changed()
        self.refuse(claim_id)

    # -- queries

    def list_claims(self, partition_id: str, task: str) -> list[tuple[Any, ...]]:
        """List the active claims of a task, each as the values of ``asyncdp.ClaimInfo`` in their order."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        self.expire(part)
        return [
            (c.id, c.owner, c.task, tuple(c.rows), c.claimed_at, c.expires_at)
            for c in part.claims.values()
            if c.task == task
        ]

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Whether every present sample is claimed by every one of these tasks."""
        part = self.partition(partition_id)
        for task in tasks:
            self.check_task(part, task)
        self.expire(part)
        return all(task in row.claimed for row in part.rows.values() for task in tasks)


def _batch(claim: Claim) -> tuple[Any, ...]:
    rows = list(claim.rows.values())
    return ("batch", [r.id for r in rows], [dict(r.tags) for r in rows], [r.incarnation for r in rows])
