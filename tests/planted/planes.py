"""Broken directories."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from asyncdp import DataPlaneNotReady, SampleNotFound
from asyncdp.calls.slots import Publish, Published
from asyncdp.meta import RowHandle
from asyncdp.rows.block import Ragged
from asyncdp.transports.directory.partition import Partition
from asyncdp.transports.memory.plane import Plane


class LeaseUnchecked(Plane):
    """A pop is not checked against who holds the claim by now."""

    @staticmethod
    def _check_claim(*args: Any) -> None:
        """Do not check."""


class LeasesForEver(Plane):
    """The lease of a claim never ends: what a dead client held is lost."""

    def expire(self, part: Partition) -> None:
        """Do not look."""


class TakesAnyRelease(Plane):
    """A release is not checked against who holds the claim by now."""

    def give_back(self, partition_id: str, task: str, sample_ids: Any, claim_ids: Any) -> Any:
        """Give back whatever holds these samples."""
        part = self.partition(partition_id)
        self.expire(part)
        rows = [part.rows[name] for name in sample_ids if name in part.rows]
        for row in rows:
            claim = part.claims.get(row.claimed.get(task, ""))
            if claim is not None:
                self._unclaim(part, claim, [row.id])
        return None, True


class SplitsGroups(Plane):
    """A group is claimed as soon as some of its samples are ready."""

    def take(self, *args: Any) -> Any:
        """Claim as if there were no groups."""
        part = self.partitions[args[0]]
        size, part.group_size = part.group_size, None
        try:
            return super().take(*args)
        finally:
            part.group_size = size


class ListsLess(Plane):
    """A listing leaves out the newest group."""

    def groups(self, partition_id: str) -> Any:
        """Leave one out."""
        return super().groups(partition_id)[:-1] or super().groups(partition_id)


class ForgetsOpIds(Plane):
    """A mutation that comes again is done again."""

    def once(self, op_id: str, not_after: float, act: Any) -> Any:
        """Just do it."""
        return act()[0]

    def resolve(self, op_id: str, age_s: float) -> str:
        """Promise what it does not keep."""
        return "refused"


class ForgetsEmptyClears(Plane):
    """A clear that found nothing is not remembered, and removes what was put since when it arrives once more."""

    def remove(self, *args: Any) -> Any:
        """Clear; an empty one changed nothing."""
        done, _ = super().remove(*args)
        return done, bool(done[0])


class IgnoresIncarnations(Plane):
    """A look-up does not ask which life of a sample is meant."""

    def locate(self, partition_id: str, sample_ids: Any, fields: Any, handles: Any) -> Any:
        """Find what is there."""
        return super().locate(partition_id, sample_ids, fields, None)


class ClaimsTwice(Plane):
    """Every third claim is forgotten, and its samples are given out again."""

    every = 3

    def take(self, *args: Any) -> Any:
        """Claim, and forget it at times."""
        got, changed = super().take(*args)
        part = self.partitions[args[0]]
        count = self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        for name in got[1] if count % self.every == 0 and got[0] == "batch" else ():
            row = part.rows[name]
            row.claimed.clear()
            part.update_ready(row, part.groups[row.group])
        return got, changed


class AdmitsLateMutations(Plane):
    """What was given up, and refused, is done all the same when it arrives."""

    def refuse(self, op_id: str) -> None:
        """Forget it."""


class WritesOtherLives(Plane):
    """A put that is bound to lives writes whatever lives under their ids."""

    def _written(self, part: Partition, ids: Any, bound: Any) -> Any:
        """Do not look at lives."""
        return super()._written(part, ids, bound and (bound[0], None, bound[2]))


class RevivesRows(Plane):
    """A put that is bound to lives creates the rows that are gone."""

    def _written(self, part: Partition, ids: Any, bound: Any) -> Any:
        """Write what is gone, and what lives in the life that is meant."""
        gone = [i not in part.rows for i in ids]
        if bound is None or bound[0] != "existing" or not any(gone):
            return super()._written(part, ids, bound)
        lives = bound[1] or (None,) * len(ids)
        return [at for at, i in enumerate(ids) if gone[at] or part.lives(i, lives[at])]


class SkipsHalf(Plane):
    """A put that leaves stale rows out writes one half of the others, and says that it wrote them all."""

    def publish(self, call: Any, owner: str) -> Any:
        """Tell of all that live."""
        part = self.partitions.get(call.partition_id)
        told: dict[int, RowHandle] = {}
        if call.skip_stale and part is not None:
            keep = super()._written(part, call.sample_ids, (call.only, call.lives, True))
            told = {at: RowHandle(part.rows[call.sample_ids[at]].incarnation) for at in keep}
        done, changed = super().publish(call, owner)
        handles = tuple(told.get(at, handle) for at, handle in enumerate(done.handles))
        return Published(handles, done.created), changed

    def _written(self, part: Partition, ids: Any, bound: Any) -> Any:
        """Write the first half."""
        keep = super()._written(part, ids, bound)
        return keep[: len(keep) // 2] if bound and bound[2] and len(keep) > 1 else keep


class RemovesOtherLives(Plane):
    """A removal that is bound to lives removes whatever lives under their ids."""

    def remove(self, partition_id: str, ids: Any, owner: str, claims: Any, lives: Any = None) -> Any:
        """Do not look at lives."""
        del lives
        return super().remove(partition_id, ids, owner, claims)


class ForgetsNested(Plane):
    """Takes ragged rows that are equally long for dense ones."""

    def publish(self, call: Any, owner: str) -> Any:
        """Publish as if nothing had been nested."""
        flat = {name: replace(spec, nested=False) for name, spec in call.specs.items()}
        for ref in call.refs:
            block = self.hosts[ref.host.id].slots[ref.slot].block
            for column in () if block is None else block.columns.values():
                if isinstance(column, Ragged):
                    column.nested = False
        return super().publish(replace(call, specs=flat), owner)


class KeepsWhatFits(Plane):
    """Over capacity, stores the rows that fit before it refuses."""

    def _check_room(self, new: int, promised: int = 0) -> None:
        """Do not check."""

    def publish(self, call: Any, owner: str) -> Any:
        """Publish tags of what fits, then refuse the rest."""
        new = [i for i in call.sample_ids if i not in self.partitions[call.partition_id].rows]
        room = self.capacity - self.samples
        if len(new) <= room:
            return super().publish(call, owner)
        super().publish(Publish(tuple(new[:room]), call.partition_id, (), None, {}), owner)
        raise DataPlaneNotReady("full", retry_after_s=0.001)


class ReplacesAll(Plane):
    """A put of some fields removes the others."""

    def _store(self, row: Any, cell: Any, names: Any, *sizes: Any) -> None:
        for name in list(row.cells):
            if name not in names:
                del row.cells[name]
        super()._store(row, cell, names, *sizes)


class OverwritesTags(Plane):
    """A put of tags removes the others."""

    def _tag(self, part: Any, row: Any, tags: Any) -> None:
        if tags:
            row.tags.clear()
        super()._tag(part, row, tags)


class ClaimableAgain(Plane):
    """A put makes a claimed sample claimable again."""

    def _store(self, row: Any, *what: Any) -> None:
        row.claimed.clear()
        super()._store(row, *what)


class NeverClaimableAgain(Plane):
    """Remembers claims of an id beyond its life."""

    def _row(self, part: Any, sample_id: str, *rest: Any) -> Any:
        row = super()._row(part, sample_id, *rest)
        seen = vars(self).setdefault("seen", {})
        row.claimed.update(seen.get(sample_id, {}))
        seen[sample_id] = row.claimed
        return row


class ClaimsUncommitted(Plane):
    """Claims what is not committed."""

    def _tag(self, part: Any, row: Any, tags: Any) -> None:
        super()._tag(part, row, tags)
        row.eligible = row.eligible or self.sequence
        part.update_ready(row, part.groups[row.group])


class LooksAway(Plane):
    """Takes a misspelt task or field for one that will come."""

    def take(self, partition_id: str, task: str, fields: Any, *args: Any) -> Any:
        """Claim for whoever asks."""
        part = self.partitions.setdefault(partition_id, Partition(partition_id))
        part.tasks.setdefault(task)
        for name in fields:
            part.fields.setdefault(name, next(iter(part.fields.values()), None))
        return super().take(partition_id, task, fields, *args)


class TakesTooFew(Plane):
    """Keeps the samples of a claim that it then calls not ready."""

    def take(self, *args: Any) -> Any:
        """Claim what there is, and say nothing of it."""
        partition_id, task, fields, most, _, claim_id, *rest = args
        answer = super().take(*args)
        if answer[0][0] == "unready":
            super().take(partition_id, task, fields, most, 1, claim_id + "'", *rest)
        return answer


class ClearsLoudly(Plane):
    """Raises where there is nothing to clear."""

    def remove(self, partition_id: str, ids: Any, *how: Any) -> Any:
        """Insist."""
        part = self.partitions.get(partition_id)
        for name in ids or ():
            if part is None or name not in part.rows:
                raise SampleNotFound(f"no {name!r}")
        return super().remove(partition_id, ids, *how)


class ClearsEverybodys(Plane):
    """Clears all there is where an owner asks for its own."""

    def remove(self, partition_id: str, ids: Any, *how: Any) -> Any:
        """Name all of them."""
        part = self.partitions.get(partition_id)
        every = list(part.rows) if ids is None and part is not None else ids
        return super().remove(partition_id, every, *how)


class ClearsNothing(Plane):
    """Says that it cleared."""

    def remove(self, *args: Any) -> Any:
        """Do nothing."""
        return (1, ()), True


class LookingConsumes(Plane):
    """Marks as claimed what it lists or counts."""

    def groups(self, partition_id: str) -> Any:
        """List, and mark."""
        listed = super().groups(partition_id)
        part = self.partitions[partition_id]
        for row in part.rows.values():
            for task in part.tasks:
                row.claimed.setdefault(task, "looked at")
            part.update_ready(row, part.groups[row.group])
        return listed


class CountsTheUnfinished(Plane):
    """Counts groups that are not complete."""

    def depth(self, partition_id: str, gone: Any) -> int:
        """Count all."""
        return len(self.groups(partition_id))


class RegisterResets(Plane):
    """Begins a partition anew."""

    def register(self, partition_id: str, *what: Any) -> None:
        """Drop it first."""
        self.remove_partition(partition_id)
        super().register(partition_id, *what)


class RegisterResetsCursors(Plane):
    """Forgets what was claimed."""

    def register(self, partition_id: str, *what: Any) -> None:
        """Forget claims."""
        super().register(partition_id, *what)
        part = self.partitions[partition_id]
        for row in part.rows.values():
            row.claimed.clear()
            part.update_ready(row, part.groups[row.group])


class LivesInChildren(Plane):
    """A forked child may use its copy."""

    def after_fork(self) -> None:
        """Nothing changes."""


class GivesClaimsAway(Plane):
    """Loses a claim that was given up."""

    def abandon(self, partition_id: str, claim_id: str) -> None:
        """Forget the claim, but not that its samples are claimed."""
        self.partitions[partition_id].claims.pop(claim_id, None)
        self.refuse(claim_id)
