"""Broken directories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.calls.slots import Published
from asyncdp.meta import RowHandle
from asyncdp.transports.memory.plane import Plane

if TYPE_CHECKING:
    from asyncdp.transports.directory.partition import Partition


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

    def take(self, *args: Any) -> Any:
        """Claim, and forget it at times."""
        got, changed = super().take(*args)
        part = self.partitions[args[0]]
        count = self.__dict__["count"] = self.__dict__.get("count", 0) + 1
        for name in got[1] if count % 3 == 0 and got[0] == "batch" else ():
            row = part.rows[name]
            row.claimed.clear()
            part.touch(row, part.groups[row.group])
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
