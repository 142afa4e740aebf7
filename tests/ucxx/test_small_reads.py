"""Reads of one slot on the lane: by the short way what the general one returns, and nothing of a slot that changed."""

from typing import Any

import pytest
import torch

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import HostRef, ReadSlots, SlotRef
from asyncdp.errors import StaleSlotError
from asyncdp.rows.block import Block, Dense
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.client.small_reads import SmallReads
from asyncdp.transports.ucxx.slots.slot import Grant
from asyncdp.transports.ucxx.slots.table import SlotTable
from tests.ucxx.segments import put

pytestmark = pytest.mark.anyio
HOST = HostRef("h", 7, (1,))


@pytest.fixture
def arena_bytes() -> int:
    """Size of the arena."""
    return 4 << 20


def rows(n: int, fill: float = 0.0) -> Block:
    """Rows of two fields of one shape, and a ragged one."""
    at = torch.arange(n * 6.0).view(n, 2, 3) + fill
    ragged = [torch.full((row % 3 + 1,), row) for row in range(n)]
    return Block.from_fields({"a": at, "b": torch.arange(n, dtype=torch.int16), "c": ragged}, n)


def ref(grant: Grant, index: Any, fields: tuple[str, ...] = ("a", "b")) -> SlotRef:
    """A reference to rows of a slot."""
    return SlotRef(HOST, grant.slot, grant.generation, fields, index, range(len(index)))


def small(lane: Lane) -> SmallReads:
    """The short way of a lane."""
    return lane._small


@pytest.mark.parametrize("index", [range(5), [2], [1, 2, 3]])
@pytest.mark.parametrize("fields", [("a",), ("b", "a")])
async def test_the_short_way_returns_what_the_general_one_does(
    table: SlotTable, lane: Lane, index: Any, fields: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same rows, sizes and schema, the second time by the remembered head; both are verified."""
    grants = [put(table, f"op{at}", rows(5, at))[0] for at in range(2)]
    for grant in grants:
        one = ref(grant, index, fields)
        quick = small(lane).read(one)
        assert quick is not None
        with monkeypatch.context() as patch:
            patch.setattr(SmallReads, "read", lambda *_: None)
            general = await lane.read((one,))
        (part,), (wanted,) = quick.parts, general.parts
        assert not verify(quick, ReadSlots(HOST, (one,))).errors
        assert (part.refs, part.nbytes, part.schema) == (wanted.refs, wanted.nbytes, wanted.schema)
        for name in fields:
            mine, theirs = part.block.columns[name], wanted.block.columns[name]
            assert isinstance(mine, Dense)
            assert isinstance(theirs, Dense)
            assert mine.values.dtype == theirs.values.dtype
            assert torch.equal(mine.values, theirs.values)
    assert len(small(lane)._known) == 1


async def test_what_is_not_usual_is_left_to_the_general_way(table: SlotTable, lane: Lane) -> None:
    """Ragged fields, fields and rows that are not there, rows in another order, and other generations."""
    (grant,) = put(table, "op", rows(5))
    for one in (
        ref(grant, range(2), ("a", "c")),
        ref(grant, range(2), ("none",)),
        ref(grant, range(4, 7)),
        ref(grant, [3, 1]),
        SlotRef(HOST, grant.slot, grant.generation + 1, ("a",), range(1), range(1)),
    ):
        assert small(lane).read(one) is None


async def test_rows_that_died_are_not_read(table: SlotTable, lane: Lane) -> None:
    """Neither by the short way, which looks no further, nor by the general one; rows beside them are."""
    (grant,) = put(table, "op", rows(5))
    for _ in table.drop_in_steps(grant.slot, grant.generation, [2], None):
        pass
    assert small(lane).read(ref(grant, [2])) is None
    assert isinstance((await lane.read((ref(grant, [2]),))).errors[0], StaleSlotError)
    assert not (await lane.read((ref(grant, [1]),))).errors


@pytest.mark.parametrize("reuse", [True, False])
async def test_a_slot_that_changes_during_the_copy_is_not_read(
    table: SlotTable, lane: Lane, *, reuse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after a row was dropped, and not after others were put into it: its header is looked at after the copy."""
    (grant,) = put(table, "op", rows(5))
    looks = 0
    whole = SmallReads._whole

    def changed(self: SmallReads, one: SlotRef) -> bool:
        nonlocal looks
        looks += 1
        if looks == 2:
            index = range(5) if reuse else [0]
            for _ in table.drop_in_steps(grant.slot, grant.generation, index, None):
                pass
            if reuse:
                (other,) = put(table, "other", rows(5, 100.0))
                assert other.slot == grant.slot
        return whole(self, one)

    monkeypatch.setattr(SmallReads, "_whole", changed)
    result = await lane.read((ref(grant, range(5)),))
    assert looks == 2
    assert not result.parts
    assert isinstance(result.errors[0], StaleSlotError)


async def test_what_is_remembered_is_bounded(table: SlotTable, lane: Lane) -> None:
    """Payloads of ever new shapes do not add up."""
    for at in range(300):
        (grant,) = put(table, f"op{at}", Block.from_fields({"a": torch.zeros(1, at + 1)}, 1))
        assert small(lane).read(ref(grant, [0], ("a",))) is not None
        for _ in table.drop_in_steps(grant.slot, grant.generation, [0], None):
            pass
    assert len(small(lane)._known) <= 256
