"""The directory gives the same answers as the memory plane, whatever is asked in whatever order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from asyncdp.calls.answers import claim_try, group_meta, refusal
from asyncdp.calls.slots import ClaimTry, HostRef, Located, Publish, Resolved, SlotRef, TryClaim
from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, PartitionInfo, RowHandle
from asyncdp.transports.directory.partition import Refused
from asyncdp.transports.transfer_queue.directory.units import UnitDirectory
from asyncdp.transports.transfer_queue.rows import spec_from_wire, spec_to_wire
from tests.ucxx.test_directory_model import PATTERN, Twins, play

if TYPE_CHECKING:
    from asyncdp.calls import RegisterPartition

R = TypeVar("R")


class OperationId(NamedTuple):
    """A mutation's name and how many seconds it has."""

    id: str
    left_s: float


class Published(NamedTuple):
    """What a put returned; ``dead`` is of the ucxx directory, here it is garbage of the directory's own."""

    handles: tuple[RowHandle | None, ...]
    created: tuple[bool, ...]
    dead: tuple[()] = ()

    @classmethod
    def of(cls, answer: tuple[list[int | None], list[bool]]) -> Published:
        """Read the directory's answer."""
        return cls(tuple(None if one is None else RowHandle(one) for one in answer[0]), tuple(answer[1]))


class Cleared(NamedTuple):
    """What a clear returned."""

    count: int
    freed: tuple[()] = ()


def served(act: Callable[[], R]) -> R:
    """Ask the directory; what it refuses with becomes the error that a client raises."""
    try:
        return act()
    except Refused as err:
        raise refusal(err.kind, err.message, **err.info) from None


class OnController:
    """The directory with the signatures of the ucxx directory's client, which the model is written for."""

    def __init__(self, capacity: int, units: list[str]) -> None:
        """Begin empty."""
        config = {"capacity": capacity, "group_pattern": PATTERN, "strict_schema": False, "auto_register": False}
        self.real = UnitDirectory(units, config)

    def until(self, op: OperationId) -> float:
        """Return an operation's deadline."""
        return self.real.monotonic() + op.left_s

    async def close(self) -> None:
        """End."""

    async def register(self, call: RegisterPartition) -> None:
        """register_partition."""
        args = (call.partition_id, call.fields, call.num_samples, call.consumer_tasks, call.grpo_group_size)
        served(lambda: self.real.register(*args, dict(call.enums)))

    async def publish(self, op: OperationId, call: Publish, owner: str) -> Published:
        """put_samples: what the transport asks for before and after it writes to the units."""
        p, ids, names = call.partition_id, call.sample_ids, list(call.specs)
        shares = []
        refused = None
        if names:
            try:
                placed = self.real.place(p, ids, names, op.id, 2, (), max(0.0, op.left_s), call.only)
            except Refused as err:
                refused = err  # what is asked for next is refused as well, and may have a reason that counts more
            else:
                if placed[0] == "done":
                    return Published.of(placed[1])
                shares = placed[1]
        wire = {name: spec_to_wire(spec) for name, spec in call.specs.items()}
        forms = {name: ("d", spec[1], spec[2]) for name, spec in wire.items()}
        bound = None if call.only is None else (call.only, call.lives, call.skip_stale)
        args = (p, ids, op.id, self.until(op), owner, call.tags, shares, forms, wire, call.nbytes, bound)
        try:
            done = Published.of(served(lambda: self.real.publish(*args)))
        finally:
            self.real.abort(op.id, settled=True)
        assert refused is None
        return done

    async def claim(
        self,
        op: OperationId,
        p: str,
        task: str,
        fields: list[str],
        most: int,
        least: int,
        owner: str,
        *,
        lease_s: float | None,
        explain: bool,
    ) -> ClaimTry:
        """claim_meta's look; this directory always explains."""
        del explain
        args = (p, task, fields, most, least, op.id, self.until(op), owner, lease_s)
        answer = served(lambda: self.real.claim(*args))
        return claim_try(TryClaim(p, task, tuple(fields), most, least), op.id, answer)

    async def release(self, op: OperationId, p: str, ids: Sequence[str], held: Sequence[str | None], task: str) -> None:
        """release_claim."""
        served(lambda: self.real.release(p, task, ids, held, op.id, self.until(op)))

    async def release_owner(self, op: OperationId, p: str, owner: str) -> None:
        """release_claims."""
        served(lambda: self.real.release_owner(p, owner, op.id, self.until(op)))

    async def abandon(self, p: str, claim_id: str) -> None:
        """Give back a claim that nobody got."""
        served(lambda: self.real.abandon(p, claim_id))

    async def clear(
        self, op: OperationId, p: str, ids: Sequence[str] | None, owner: str, held: Any, lives: Any
    ) -> Cleared:
        """clear_samples, pop."""
        return Cleared(served(lambda: self.real.clear(p, ids, op.id, self.until(op), owner, held, lives))[0])

    async def drop(self, op: OperationId, p: str) -> tuple[()]:
        """drop_partition."""
        served(lambda: self.real.drop(p, op.id, self.until(op)))
        return ()

    async def resolve(self, op_id: str, p: str) -> Resolved:
        """Resolve."""
        del p
        return Resolved(served(lambda: self.real.resolve(op_id, 0.0)))

    async def locate(
        self, p: str, ids: Sequence[str], fields: Sequence[str], handles: Sequence[RowHandle | None] | None
    ) -> Located:
        """Locate."""
        meant = None if handles is None else [None if one is None else one.incarnation for one in handles]
        groups, missing, found, specs, _, version = served(lambda: self.real.locate(p, ids, fields, meant))
        refs = tuple(
            SlotRef(HostRef(unit, 0, (1,)), layout, version, names, keys, rows)
            for unit, layout, names, keys, rows in groups
        )
        errors = {at: refusal(kind, text, **info) for at, (kind, text, info) in missing.items()}
        known = {name: spec_from_wire(spec) for name, spec in specs.items()}
        return Located(refs, errors, [None if one is None else RowHandle(one) for one in found], known)

    async def describe(self, p: str) -> PartitionInfo:
        """Describe."""
        return PartitionInfo(*served(lambda: self.real.describe(p)))

    async def depth(self, p: str) -> int:
        """Depth."""
        return served(lambda: self.real.depth(p, frozenset()))

    async def list_metadata(self, p: str) -> list[DataPlaneGroupMeta]:
        """list_metadata."""
        page, after = served(lambda: self.real.groups(p, 0))
        assert after is None
        found = [group_meta(p, one, frozenset()) for one in page]
        return sorted(found, key=lambda group: group.created_at)

    async def list_claims(self, p: str, task: str) -> list[ClaimInfo]:
        """list_claims."""
        return [ClaimInfo(*one) for one in served(lambda: self.real.list_claims(p, task))]

    async def consumed(self, p: str, tasks: Sequence[str]) -> bool:
        """check_consumption_status."""
        return served(lambda: self.real.consumed(p, tasks))

    async def list_partitions(self) -> list[PartitionInfo]:
        """list_partitions."""
        return [PartitionInfo(*one) for one in self.real.listing()]


class TwinsOnController(Twins):
    """Asks the memory plane and TransferQueue's directory the same, and compares."""

    def connect(self, url: str) -> OnController:
        """Begin with an empty directory."""
        del url
        self.op = OperationId
        return OnController(14, [host.id for host in self.hosts])

    def beat(self) -> None:
        """Storage units are there from the beginning."""

    def refs(self, found: Sequence[SlotRef]) -> set[Any]:
        """Return which field of which row is somewhere; where is each directory's own affair."""
        return {(name, row) for r in found for name in r.fields for row in r.rows}

    def hosts_agree(self) -> None:
        """Every cell that lives has a storage key of its own, and no garbage is among these."""
        real = self.directory.real
        living = [
            (cell.place.home, cell.index)
            for part in real.partitions.values()
            for row in part.rows.values()
            for cell in {id(cell): cell for cell in row.cells.values()}.values()
        ]
        dead = {
            (unit, key)
            for unit, ranges in real.garbage.items()
            for first, count, _ in ranges
            for key in range(first, first + count)
        }
        assert len(set(living)) == len(living)
        assert dead.isdisjoint(living)
        assert sum(real.load.values()) == len(living)
        assert real.samples == sum(len(part.rows) for part in real.partitions.values())
        assert not real.pending


@pytest.mark.slow
@settings(max_examples=60, suppress_health_check=list(HealthCheck), phases=[Phase.reuse, Phase.generate])
@given(data=st.data(), size=st.sampled_from([None, 2, 3]))
def test_the_directory_answers_as_the_memory_plane_does(data: st.DataObject, size: int | None) -> None:
    """Ids in order, incarnations, tags with their types, claims, errors with their texts: all the same."""
    play(TwinsOnController(""), data, size)
