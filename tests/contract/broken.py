"""Memory transports that break one promise each, to prove that the suite would notice."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneNotReady, MemoryTransport, PartialReadError, SampleNotFound, SlotMapping
from asyncdp.calls.slots import Publish, Published
from asyncdp.rows.block import Block, Dense, Ragged
from asyncdp.transports.directory.partition import Partition
from asyncdp.transports.memory.host import Host
from asyncdp.transports.memory.plane import Plane

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from asyncdp.calls.slots import SlotRef


class Broken(MemoryTransport):
    """A transport whose plane and hosts are of other classes."""

    plane_class: type[Plane] = Plane
    host_class: type[Host] = Host

    def __init__(self, config: Mapping[str, Any] | None = None, *, bootstrap: bool = True) -> None:
        """Start a plane and break it."""
        super().__init__(config, bootstrap=bootstrap)
        if self._owned is not None:
            self._owned.__class__ = self.plane_class
            for host in self._owned.hosts.values():
                host.__class__ = self.host_class


def plane(kind: type[Plane]) -> type[Broken]:
    """Make a transport with planes of this class."""
    return type(kind.__name__, (Broken,), {"plane_class": kind})


def host(kind: type[Host]) -> type[Broken]:
    """Make a transport with hosts of this class."""
    return type(kind.__name__, (Broken,), {"host_class": kind})


# --- 1: rows come back unchanged


def _rewriting(change: Callable[[Any], Any]) -> type[Host]:
    class Rewriting(Host):
        """Changes columns when they are written."""

        def write(self, op_id: str, refs: Sequence[SlotRef], block: Block) -> None:
            """Write something else."""
            columns = {name: change(column) for name, column in block.columns.items()}
            super().write(op_id, refs, Block(block.n, columns, block.specs, block.codec))

    return Rewriting


def _cast(column: Any) -> Any:
    is_small = isinstance(column, Dense) and column.values.dtype == torch.bfloat16
    return Dense(column.values.float()) if is_small else column


def _squeeze(column: Any) -> Any:
    is_wide = isinstance(column, Dense) and column.values.ndim == 2 and column.values.shape[1] == 1
    return Dense(column.values[:, 0]) if is_wide else column


def _reverse(column: Any) -> Any:
    return column.take(range(len(column))[::-1]) if len(column) > 1 else column


Casts = host(_rewriting(_cast))
Squeezes = host(_rewriting(_squeeze))
Reverses = host(_rewriting(_reverse))


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


class SharesMemory(Host):
    """Hands out the stored tensor itself."""

    def payload(self, attempt: Any, ref: SlotRef) -> Any:
        """Return the block as it lies."""
        got = super().payload(attempt, ref)
        stored = attempt.slot.block
        if isinstance(got, tuple) and len(ref.index) == stored.n:
            return Block(stored.n, {name: stored.columns[name] for name in ref.fields}, stored.specs), got[1]
        return got


# --- 2: never fewer rows or columns


class ShortReads(SlotMapping):
    """Returns the rows that came as if they were all; a transport that is read as a whole."""

    def __init__(self, config: Any, *, bootstrap: bool = True) -> None:
        super().__init__(MemoryTransport(config, bootstrap=bootstrap))
        self.plane = self.inner.plane  # type: ignore[attr-defined]

    def get_capabilities(self) -> Any:
        """Be read as a whole."""
        return replace(super().get_capabilities(), slot_addressable=False)

    async def get(self, call: Any, ctx: Any) -> Any:
        """Read."""
        try:
            return await super().get(call, ctx)
        except PartialReadError as err:
            return err.rows if err.ok.size else TensorDict({}, batch_size=[0])


# --- 3: a put is whole or absent


class HalfVisible(Broken):
    """Publishes one half of the rows, then the other; needs slots of one row."""

    async def _publish(self, call: Any, ctx: Any) -> Any:
        half = len(call.sample_ids) // 2
        handles: tuple[Any, ...] = ()
        for first, stop in ((0, half), (half, len(call.sample_ids))):
            refs = tuple(replace(ref, rows=[ref.rows[0] - first]) for ref in call.refs if first <= ref.rows[0] < stop)
            tags = None if call.tags is None else call.tags[first:stop]
            if stop > first:
                sizes = {name: each[first:stop] for name, each in call.nbytes.items()}
                part = replace(call, sample_ids=call.sample_ids[first:stop], refs=refs, tags=tags, nbytes=sizes)
                handles += self.plane.publish(part, self._owner)[0].handles
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
        return Published(handles)


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


class ForgetsOpIds(Plane):
    """Does again what it is asked again."""

    def once(self, op_id: str, not_after: float, act: Any) -> Any:
        """Just do it."""
        return act()[0]

    def resolve(self, op_id: str, age_s: float) -> str:
        """Promise what it does not keep."""
        return "refused"


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


# --- 4: each task gets each sample once


class ClaimsTwice(Plane):
    """Forgets what it gave out."""

    def take(self, *args: Any) -> Any:
        """Claim, and forget."""
        got, changed = super().take(*args)
        part = self.partitions[args[0]]
        for name in got[1] if got[0] == "batch" else ():
            row = part.rows[name]
            row.claimed.clear()
            part.touch(row, part.groups[row.group])
        return got, changed


class ClaimsBeforeTags(Broken):
    """Publishes fields first, tags later."""

    async def _publish(self, call: Any, ctx: Any) -> Any:
        handles = await super()._publish(replace(call, tags=None), ctx)
        for _ in range(20):
            await anyio.lowlevel.checkpoint()
        self.plane.publish(Publish(call.sample_ids, call.partition_id, (), call.tags, {}), self._owner)
        return handles


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


class SplitsGroups(Plane):
    """Claims parts of groups."""

    def take(self, partition_id: str, *args: Any) -> Any:
        """Claim as if there were no groups."""
        part = self.partitions[partition_id]
        size, part.group_size = part.group_size, None
        try:
            return super().take(partition_id, *args)
        finally:
            part.group_size = size


class ClaimsUncommitted(Plane):
    """Claims what is not committed."""

    def _tag(self, part: Any, row: Any, tags: Any) -> None:
        super()._tag(part, row, tags)
        row.eligible = row.eligible or self.sequence
        part.touch(row, part.groups[row.group])


class LooksAway(Plane):
    """Takes a misspelt task or field for one that will come."""

    def take(self, partition_id: str, task: str, fields: Any, *args: Any) -> Any:
        """Claim for whoever asks."""
        part = self.partitions.setdefault(partition_id, Partition(partition_id))
        part.tasks.setdefault(task)
        for name in fields:
            part.fields.setdefault(name, next(iter(part.fields.values()), None))
        return super().take(partition_id, task, fields, *args)


# --- 5: ClaimNotReady with nothing claimed


class TakesTooFew(Plane):
    """Keeps the samples of a claim that it then calls not ready."""

    def take(self, *args: Any) -> Any:
        """Claim what there is, and say nothing of it."""
        partition_id, task, fields, most, _, claim_id, *rest = args
        answer = super().take(*args)
        if answer[0][0] == "unready":
            super().take(partition_id, task, fields, most, 1, claim_id + "'", *rest)
        return answer


class ForgetsLeases(Plane):
    """Lets anybody release and pop what was claimed again by another."""

    @staticmethod
    def _check_claim(*args: Any) -> None:
        """Do not check."""


# --- 6: what outlived its data is stale


class IgnoresIncarnations(Plane):
    """Reads whatever lives under an id."""

    def locate(self, partition_id: str, ids: Any, fields: Any, handles: Any) -> Any:
        """Do not look at handles."""
        return super().locate(partition_id, ids, fields, None)


class IgnoresGenerations(Host):
    """Serves whatever lies in a slot."""

    def begin_read(self, ref: SlotRef) -> Any:
        """Do not look at the generation."""
        return super().begin_read(replace(ref, generation=self.slots[ref.slot].generation))

    def kill(self, cell: Any) -> None:
        """Free the slot, but keep what lies in it."""
        slot = cell.slot
        kept = slot.block, slot.state, set(slot.live)
        super().kill(cell)
        if slot.block is None:
            slot.block, slot.state, slot.live = kept


# --- 7: removing what is not there


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


# --- 8: looking consumes nothing


class LookingConsumes(Plane):
    """Marks as claimed what it lists or counts."""

    def groups(self, partition_id: str) -> Any:
        """List, and mark."""
        listed = super().groups(partition_id)
        part = self.partitions[partition_id]
        for row in part.rows.values():
            for task in part.tasks:
                row.claimed.setdefault(task, "looked at")
            part.touch(row, part.groups[row.group])
        return listed


class CountsTheUnfinished(Plane):
    """Counts groups that are not complete."""

    def depth(self, partition_id: str, gone: Any) -> int:
        """Count all."""
        return len(self.groups(partition_id))


# --- 9: registering again


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
            part.touch(row, part.groups[row.group])


# --- 10b: a process may fork


class LivesInChildren(Plane):
    """A forked child may use its copy."""

    def after_fork(self) -> None:
        """Nothing changes."""


# --- 11: nothing is left behind


class LeavesReaders(Broken):
    """A cancelled read never ends its attempt."""

    async def _read(self, call: Any, ctx: Any) -> Any:
        try:
            return await super()._read(call, ctx)
        except anyio.get_cancelled_exc_class():
            for ref in call.refs:
                self.plane.hosts[ref.host.id].slots[ref.slot].readers.add(-1)
            raise


class LeavesSlots(Host):
    """Frees nothing that was reserved in vain."""

    def abort(self, op_id: str, now: float) -> None:
        """Do nothing."""


class GivesClaimsAway(Plane):
    """Loses a claim that was given up."""

    def abandon(self, partition_id: str, claim_id: str) -> None:
        """Forget the claim, but not that its samples are claimed."""
        self.partitions[partition_id].claims.pop(claim_id, None)
        self.refuse(claim_id)
