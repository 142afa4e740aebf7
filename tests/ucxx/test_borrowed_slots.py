"""Borrowed rows of slots: never another sample's bytes, whatever becomes of the slot; and the space comes back."""

import gc
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from asyncdp import borrowed
from asyncdp.calls.answers import verify
from asyncdp.calls.slots import HostRef, ReadSlots, SlotRef
from asyncdp.errors import DataPlaneNotReady, StaleSlotError
from asyncdp.process import private_mapping
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.process.private_mapping import mapping_at
from asyncdp.rows.block import PICKLE, Block
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.host.recovery import recover_slots
from asyncdp.transports.ucxx.slots import borrows
from asyncdp.transports.ucxx.slots.arena import Arena
from asyncdp.transports.ucxx.slots.header import Outcome, write_outcome
from asyncdp.transports.ucxx.slots.slot import Grant
from asyncdp.transports.ucxx.slots.table import SlotTable
from tests.ucxx import segments
from tests.ucxx.segments import put, rows, write

ROOT = Path(__file__).parents[2]
HOST = HostRef("h", 7, (1,))
pytestmark = pytest.mark.anyio


@pytest.fixture
def lane(table: SlotTable) -> Lane:
    """Give the client's side of it."""
    return lane_of(table)


def lane_of(table: SlotTable, **options: Any) -> Lane:
    """Attach to an arena."""
    attached = Arena.attach(table.arena.name, "h", 7)
    assert attached is not None
    return Lane(attached, BufferPool(), PICKLE, **options)


def ref(grant: Grant, index: Any = None, fields: tuple[str, ...] = ("a",), first: int = 0) -> SlotRef:
    """A reference to rows of a slot, which become rows ``first ..`` of the request."""
    index = range(grant.rows) if index is None else index
    return SlotRef(HOST, grant.slot, grant.generation, fields, index, range(first, first + len(index)))


async def read(lane: Lane, *refs: SlotRef) -> list[Block]:
    """Borrow; the parts' blocks, verified."""
    result = verify(await lane.read(refs, borrow=True), ReadSlots(HOST, tuple(refs)))
    assert not result.errors
    return [part.block for part in result.parts]


async def values_of(lane: Lane, *refs: SlotRef) -> torch.Tensor:
    """Borrow; field ``a``."""
    (block,) = await read(lane, *refs)
    return tensor(block)


def tensor(block: Block, name: str = "a") -> torch.Tensor:
    """The values of a field."""
    found: torch.Tensor = block.columns[name].values  # type: ignore[attr-defined]
    return found


def in_place(values: torch.Tensor) -> bool:
    """Whether a tensor is on a mapping of a slot, not a copy."""
    return mapping_at(values.untyped_storage().data_ptr()) is not None


def clear(table: SlotTable, grant: Grant) -> None:
    """End the life of all rows of a slot."""
    assert table.drop(grant.slot, grant.generation, range(grant.rows))


def put_all_around(table: SlotTable, fill: float = 9.0) -> list[Grant]:
    """Fill all that is free."""
    grants: list[Grant] = []
    with pytest.raises(DataPlaneNotReady, match="are still borrowed" if table.doomed else "are needed$"):
        add_until_full(table, fill, grants)
    return grants


def add_until_full(table: SlotTable, fill: float, grants: list[Grant]) -> None:
    """Put and put, until it is refused."""
    while True:
        grants += put(table, f"other{fill}-{len(grants)}", rows(1, 2000, fill))


def all_free(table: SlotTable) -> bool:
    """Whether no unit is in use, after a look."""
    gc.collect()
    table.sweep(0.0)
    return table.extents.largest == table.arena.units


async def test_rows_stay_as_they_were_read(table: SlotTable, lane: Lane) -> None:
    """R13: cleared, and all space put anew: the tensor is as it was; its space is used, and free afterwards."""
    (grant,) = put(table, "op", rows(2, 4000))
    values = await values_of(lane, ref(grant))
    assert in_place(values)
    clear(table, grant)
    grants = put_all_around(table)
    assert (values == 1.0).all()
    assert table.states()["doomed"] == 1
    with pytest.raises(StaleSlotError):
        raise (await lane.read([ref(grant)], borrow=True)).errors[0]
    for other in grants:
        clear(table, other)
    assert not all_free(table)
    del values
    assert all_free(table)
    assert table.counts()["doomed"] == 0


async def test_without_the_look_before_a_slot_is_freed_it_would_be_another_sample(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of the test above, taken out: the tensor changes under its reader."""
    monkeypatch.setattr(Arena, "is_borrowed", lambda *_: False)
    (grant,) = put(table, "op", rows(2, 4000))
    values = await values_of(lane, ref(grant))
    clear(table, grant)
    put_all_around(table)
    assert (values == 9.0).any()


async def test_what_a_reader_writes_stays_with_it(table: SlotTable, lane: Lane) -> None:
    """R13: neither the arena nor another reader's tensor changes."""
    (grant,) = put(table, "op", rows(2, 4000))
    mine, other = await values_of(lane, ref(grant)), await values_of(lane, ref(grant))
    mine += 5.0
    assert (other == 1.0).all()
    assert (await values_of(lane, ref(grant)) == 1.0).all()


async def test_a_slice_keeps_the_slot_and_the_last_one_frees_it(table: SlotTable, lane: Lane) -> None:
    """Two readers, one of which kept a view of a view."""
    (grant,) = put(table, "op", rows(3, 4000))
    values, again = await values_of(lane, ref(grant)), await values_of(lane, ref(grant))
    part = values[1:].view(-1)[4000:]
    clear(table, grant)
    del values, again
    put_all_around(table)
    assert (part == 1.0).all()
    assert not table.sweep(0.0)
    del part
    assert table.sweep(0.0) == 1


async def test_leaving_the_context_gives_rows_back(table: SlotTable, lane: Lane) -> None:
    """What is still referred to then holds zeros, not what is put there next."""
    (grant,) = put(table, "op", rows(2, 4000))
    plain = torch.ones(2)
    with borrowed(TensorDict({"a": await values_of(lane, ref(grant)), "b": plain}, [2])) as data:
        part = data["a"][1]
        clear(table, grant)
        assert not table.sweep(0.0)
    put_all_around(table)
    assert not part.any()
    assert (data["b"] == 1.0).all()
    part += 1.0
    assert table.counts()["doomed"] == 1
    assert table.sweep(0.0) == 1
    del part, data


async def test_what_lies_in_one_slot_is_borrowed_whatever_its_kind(table: SlotTable, lane: Lane) -> None:
    """Some rows of it, ragged ones, objects beside them, fields of several slots: each as a copy has them."""
    nested = torch.nested.nested_tensor([torch.arange(n * 1.0) for n in (3, 0, 5, 2)], layout=torch.jagged)
    fields = {"a": torch.arange(16.0).view(4, 4).bfloat16(), "r": nested, "o": ["w", "x", "y", "z"]}
    (grant,) = put(table, "op", Block.from_fields(fields, 4))
    (more,) = put(table, "more", Block.from_fields({"m": torch.arange(4)}, 4))
    refs = [ref(grant, range(1, 4), ("o", "r", "a")), ref(more, [1, 2, 3], ("m",))]
    copied = {name: column for part in (await lane.read(refs)).parts for name, column in part.block.columns.items()}
    blocks = await read(lane, *refs)
    found = {name: column for block in blocks for name, column in block.columns.items()}
    assert found["o"].items == copied["o"].items  # type: ignore[attr-defined]
    assert found["r"].offsets.tolist() == copied["r"].offsets.tolist() == [0, 0, 5, 7]  # type: ignore[attr-defined]
    for name in ("a", "r", "m"):
        values = found[name].values  # type: ignore[attr-defined]
        assert in_place(values)
        assert torch.equal(values, copied[name].values)  # type: ignore[attr-defined]


async def test_what_does_not_lie_together_is_copied(table: SlotTable, lane: Lane) -> None:
    """Rows of several slots, rows with others between them, only objects: as without borrow."""
    first, second = put(table, "one", rows(2, 400))[0], put(table, "two", rows(2, 400, 2.0))[0]
    values = await values_of(lane, ref(first), ref(second, first=2))
    assert values[:, 0].tolist() == [1.0, 1.0, 2.0, 2.0]
    assert not in_place(values)
    assert not in_place(await values_of(lane, ref(first, [1, 0])))
    (words,) = put(table, "words", Block.from_fields({"o": ["x", "y"]}, 2))
    await read(lane, ref(words, fields=("o",)))
    for grant in (first, second, words):
        clear(table, grant)
    assert table.extents.largest == table.arena.units


async def test_beyond_its_share_of_the_arena_a_lane_copies(table: SlotTable) -> None:
    """And borrows again once enough was given back; other lanes have shares of their own."""
    (grant,) = put(table, "op", rows(1, 8000))
    units = table.slots[grant.slot].header.units
    lane = lane_of(table, borrow_share=2.5 * units / table.arena.units)
    held = [await values_of(lane, ref(grant)) for _ in range(3)]
    assert [in_place(values) for values in held] == [True, True, False]
    assert in_place(await values_of(lane_of(table), ref(grant)))
    assert not in_place(await values_of(lane_of(table, borrow_share=0.0), ref(grant)))
    del held[0]
    assert in_place(await values_of(lane, ref(grant)))


async def test_a_slot_that_is_reused_before_it_is_held_is_stale(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cleared between the first look at it and the lock: nothing of it is given out, and nothing stays locked."""
    (grant,) = put(table, "op", rows(2, 4000))
    borrow = lane.arena.borrow

    def late(*args: Any) -> Any:
        clear(table, grant)
        put_all_around(table)
        return borrow(*args)

    monkeypatch.setattr(lane.arena, "borrow", late)
    result = await lane.read([ref(grant)], borrow=True)
    assert isinstance(result.errors[0], StaleSlotError)
    assert not result.parts
    assert not any(table.arena.is_borrowed(slot.number, slot.header.units) for slot in table.slots.values())


async def test_a_slot_that_its_host_has_not_noticed_yet_can_be_borrowed(table: SlotTable, lane: Lane) -> None:
    """A lane writer's, of which then the host takes note, and which it clears."""
    from asyncdp.transports.ucxx.slots.writer_process import this_process

    (grant,) = table.reserve("op", ("a",), [16000], 0, 100.0, this_process())
    write(table, grant, rows(1, 4000))
    write_outcome(table.arena, grant.slot, grant.generation, Outcome.WRITTEN)
    values = await values_of(lane, ref(grant))
    assert in_place(values)
    clear(table, grant)
    put_all_around(table)
    assert (values == 1.0).all()


async def test_overwriting_leaves_borrowed_slots_alone() -> None:
    """The oldest that nobody borrows go."""
    with segments.arena(unit_bytes=4096) as made:
        table = SlotTable(made, max_slot_bytes=1 << 19, overwrite_oldest=True)
        grants = [put(table, f"op{at}", rows(1, 30000, float(at)))[0] for at in range(8)]
        held = await values_of(lane_of(table), ref(grants[0]))
        for at in range(20):
            put(table, f"new{at}", rows(1, 30000, 50.0))
        assert (held == 0.0).all()
        assert table.find(grants[0].slot, grants[0].generation) is not None
        assert table.find(grants[1].slot, grants[1].generation) is None


async def test_a_slot_that_is_borrowed_while_it_is_overwritten_is_no_space(
    lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader came between both looks: the put does not get it, and its own put, sent again, finds it gone."""
    with segments.arena(unit_bytes=4096) as made:
        table = SlotTable(made, max_slot_bytes=1 << 19, overwrite_oldest=True)
        (grant,) = put(table, "op", rows(1, 100000))
        held = await values_of(lane_of(table), ref(grant))
        monkeypatch.setattr(table, "_may_be_overwritten", lambda slot: slot.generation == grant.generation)
        monkeypatch.setattr(table, "_slots_to_overwrite", whole(table))
        with pytest.raises(DataPlaneNotReady):
            table.reserve("new", ("a",), [500000] * 2, 0, 100.0)
        assert (held == 1.0).all()
        assert table.counts()["doomed"] == 1
        assert not table.is_written(grant.slot, grant.generation, "op")


def whole(table: SlotTable) -> Any:
    """All slots of a table, as those to overwrite."""

    def slots(_: Any) -> Any:
        yield None
        return list(table.slots.values())

    return slots


async def test_nobody_borrows_a_slot_after_the_look_at_it(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows die before the host looks who has it: who comes after the look finds them dead."""
    (grant,) = put(table, "op", rows(1, 4000))
    look, came = Arena.is_borrowed, []

    def late(arena: Arena, *slot: int) -> bool:
        found = look(arena, *slot)
        reading = lane.read([ref(grant)], borrow=True)
        with pytest.raises(StopIteration) as ended:
            reading.send(None)
        came.append(ended.value.value.errors[0])
        return found

    monkeypatch.setattr(Arena, "is_borrowed", late)
    assert table.abort("op", 0.0) == 0
    assert [type(err) for err in came] == [StaleSlotError]


async def test_an_abandoned_put_dooms_what_is_borrowed(table: SlotTable, lane: Lane) -> None:
    """The put may be made again under its op_id; it gets another slot."""
    (grant,) = put(table, "op", rows(1, 4000))
    values = await values_of(lane, ref(grant))
    assert table.abort("op", 0.0) == 1
    assert not table.of_op("op")
    assert not table.is_written(grant.slot, grant.generation, "op")
    put_all_around(table)
    assert (values == 1.0).all()


@pytest.mark.parametrize("when", ["cleared before", "cleared after"])
async def test_a_host_that_is_started_again_leaves_borrowed_slots_alone(
    table: SlotTable, lane: Lane, when: str
) -> None:
    """It adopts an arena of which it knows nothing but what lies in it."""
    (grant,) = put(table, "op", rows(2, 4000))
    values = await values_of(lane, ref(grant))
    if when == "cleared before":
        clear(table, grant)
    after = SlotTable(table.arena, max_slot_bytes=1 << 19)
    recover_slots(after)
    if when == "cleared after":
        clear(after, grant)
    assert after.counts()["doomed"] == 1
    grants = put_all_around(after)
    assert (values == 1.0).all()
    for other in grants:
        clear(after, other)
    del values
    assert all_free(after)


async def test_an_arena_that_is_removed_stays_for_its_readers(table: SlotTable, lane: Lane) -> None:
    """Another one of its name has other memory, and the lane to the old one borrows nothing of it."""
    (grant,) = put(table, "op", rows(2, 4000))
    values = await values_of(lane, ref(grant))
    name = table.arena.name
    table.arena.unlink()
    made = Arena.create(name, "h", epoch=7, data_bytes=segments.MIB)
    try:
        put_all_around(SlotTable(made, max_slot_bytes=1 << 19))
        assert (values == 1.0).all()
        assert lane.arena.borrow(grant.slot, 1, 100, lambda: None) is None
        assert isinstance((await lane.read([ref(grant)], borrow=True)).errors[0], StaleSlotError)
    finally:
        made.unlink()


def test_a_lock_to_the_end_of_the_file_is_found_as_such(table: SlotTable) -> None:
    """Another program may lock all of an arena: the system reports its length as 0."""
    fd = os.open(f"/dev/shm/{table.arena.name}", os.O_RDONLY)
    other = os.open(f"/dev/shm/{table.arena.name}", os.O_RDONLY)
    try:
        borrows.lock(other, 4096, 0)
        first, size = borrows.locked_range(fd, 0, 1 << 20) or (0, 0)
        assert (first, first + size) == (4096, sys.maxsize)
        assert borrows.locked_range(fd, 0, 4096) is None
    finally:
        os.close(fd)
        os.close(other)


async def test_an_arena_that_is_removed_keeps_the_memory_of_borrowed_slots_only(table: SlotTable, lane: Lane) -> None:
    """Whatever order they were borrowed in: a small tensor does not keep a whole arena."""
    grants = [put(table, f"op{at}", rows(1, 16000, float(at)))[0] for at in range(6)]
    held = [await values_of(lane, ref(grants[at])) for at in (4, 1)]
    fd = os.open(f"/dev/shm/{table.arena.name}", os.O_RDONLY)
    try:
        before = os.fstat(fd).st_blocks * 512
        table.arena.unlink()
        assert before - os.fstat(fd).st_blocks * 512 >= before - 4 * 64 * 1024 - 64 * 1024
    finally:
        os.close(fd)
    assert [values[0, 0].item() for values in held] == [4.0, 1.0]
    assert all((values == values[0, 0]).all() for values in held)


async def test_a_process_has_only_so_many_mappings(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system allows no more of all kinds together: beyond that rows are copied, and borrowed again later."""
    (grant,) = put(table, "op", rows(1, 4000))
    gc.collect()
    monkeypatch.setattr(private_mapping, "_MOST", len(private_mapping._LIVE) + 2)
    held = [await values_of(lane, ref(grant)) for _ in range(3)]
    assert [in_place(values) for values in held] == [True, True, False]
    del held[0]
    assert in_place(await values_of(lane, ref(grant)))


async def test_a_borrow_that_two_threads_end_is_given_back_once(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The system is called without the interpreter's lock."""
    (grant,) = put(table, "op", rows(1, 4000))
    values = await values_of(lane, ref(grant))
    mapping = mapping_at(values.data_ptr())
    assert mapping is not None
    made, real = [], private_mapping._map

    def late(*args: Any) -> int:
        if not made:
            made.append(1)
            mapping.end()  # another thread's
        return real(*args)

    monkeypatch.setattr(private_mapping, "_map", late)
    mapping.end()
    assert list(lane._given_back) == [table.slots[grant.slot].header.units]


async def test_what_is_made_of_a_borrowed_tensor(table: SlotTable, lane: Lane) -> None:
    """Pickled it is a copy, which holds nothing; an array on it holds the slot; it cannot be made larger."""
    (grant,) = put(table, "op", rows(2, 4000))
    values = await values_of(lane, ref(grant))
    copied = pickle.loads(pickle.dumps(values))
    with pytest.raises(RuntimeError, match="resiz"):
        values.untyped_storage().resize_(1 << 20)
    clear(table, grant)
    assert not table.sweep(0.0)
    array = values.numpy()
    del values
    gc.collect()
    assert not table.sweep(0.0)
    assert (array == 1.0).all()
    del array
    assert table.sweep(0.0) == 1
    assert (copied == 1.0).all()


async def test_a_shared_tensor_gives_its_slot_back(table: SlotTable, lane: Lane) -> None:
    """As when it is sent by torch.multiprocessing: its values are the same, elsewhere."""
    (grant,) = put(table, "op", rows(2, 4000))
    values = await values_of(lane, ref(grant))
    values.share_memory_()
    assert not in_place(values)
    clear(table, grant)
    put_all_around(table)
    assert (values == 1.0).all()
    assert table.counts()["doomed"] == 0


async def test_nothing_is_borrowed_from_a_host_that_does_not_know_of_it(table: SlotTable, lane: Lane) -> None:
    """An earlier release would reuse the slot."""
    table.arena._lends[0] = 0
    (grant,) = put(table, "op", rows(2, 4000))
    assert not in_place(await values_of(lane, ref(grant)))


@contextmanager
def borrower(table: SlotTable) -> Iterator[Any]:
    """Start the program that borrows; yields a function that has it do a step, and its process."""
    command = [sys.executable, "-m", "tests.ucxx.borrowing", table.arena.name]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:

        def do(step: str) -> str:
            assert process.stdin
            assert process.stdout
            process.stdin.write(step + "\n")
            process.stdin.flush()
            return process.stdout.readline().strip()

        try:
            yield do, process
        finally:
            process.kill()


def test_the_space_of_a_reader_that_was_killed_comes_back(table: SlotTable) -> None:
    """SIGKILL: neither it nor the host does anything for it."""
    (grant,) = put(table, "op", rows(1, 4000))
    with borrower(table) as (do, process):
        assert do(f"borrow {grant.slot} {grant.generation}") == "borrow 1.0"
        clear(table, grant)
        assert not all_free(table)
        process.kill()
        process.wait()
        assert all_free(table)


def test_a_forked_child_gives_back_nothing_of_its_parent(table: SlotTable) -> None:
    """What the child writes, and that it drops its tensor and ends, changes nothing for the parent."""
    (grant,) = put(table, "op", rows(1, 4000))
    with borrower(table) as (do, _):
        do(f"borrow {grant.slot} {grant.generation}")
        assert do("fork") == "fork 1.0"  # the child's answer
        clear(table, grant)
        put_all_around(table)
        assert do("write") == "write 99.0"
        assert do("drop") == "drop None"
        assert table.counts()["doomed"] == 1
        assert not table.sweep(0.0)
        assert do("end") == "fork 1.0"  # the parent's
        assert not table.sweep(0.0)
        assert do("drop") == "drop None"
        assert table.sweep(0.0) == 1


def test_a_forked_child_keeps_what_its_parent_lost(table: SlotTable) -> None:
    """The parent is killed: its child still has the tensor, and the slot is free when the child has ended too."""
    (grant,) = put(table, "op", rows(1, 4000))
    with borrower(table) as (do, process):
        do(f"borrow {grant.slot} {grant.generation}")
        do("fork")
        clear(table, grant)
        process.kill()
        process.wait()
        assert not all_free(table)
        put_all_around(table)
        assert do("look") == "look 1.0"
        do("end")
    for slot in list(table.slots.values()):
        table.drop(slot.number, slot.generation, range(slot.header.rows))
    assert all_free(table)
