import asyncio
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import HostRef, ReadSlots, SlotRef
from asyncdp.errors import CorruptPayload, DataPlaneNotReady, DataPlaneReadError, DataPlaneWriteError, StaleSlotError
from asyncdp.process.buffer_pool import KEPT_BYTES, BufferPool
from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.client import lane as lane_module
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.payload import payload as payload_module
from asyncdp.transports.ucxx.slots.header import Outcome, State, read_outcome, read_state
from asyncdp.transports.ucxx.slots.slot import Grant
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.slots.writer_process import Process, this_process
from tests.ucxx.segments import put, rows

ROOT = Path(__file__).parents[2]
HOST = HostRef("h", 7, (1,))


@pytest.fixture
def arena_bytes() -> int:
    """Size of the arena."""
    return 4 << 20


def ref(grant: Grant, index: Any = None, fields: tuple[str, ...] = ("a",), first: int = 0) -> SlotRef:
    """A reference to rows of a slot, which become rows ``first ..`` of the request."""
    index = range(grant.rows) if index is None else index
    return SlotRef(HOST, grant.slot, grant.generation, fields, index, range(first, first + len(index)))


def filled(part: Any) -> list[float]:
    """First value of each row of a part."""
    out: list[float] = part.block.columns["a"].values[:, 0].tolist()
    return out


@pytest.mark.anyio
async def test_rows_of_many_slots_come_in_one_copy(table: SlotTable, lane: Lane) -> None:
    """In the order asked, as the host's own answer would be, verified."""
    grants = [put(table, f"op{at}", rows(2, fill=float(at)))[0] for at in range(5)]
    refs = [ref(grants[at], [1], first=place) for place, at in enumerate((3, 0, 4))]
    result = await lane.read(refs)
    assert not verify(result, ReadSlots(HOST, tuple(refs))).errors
    (part,) = result.parts
    assert part.refs == (0, 1, 2)
    assert filled(part) == [3.0, 0.0, 4.0]


@pytest.mark.anyio
async def test_what_is_read_is_the_reader_s_own(table: SlotTable, lane: Lane) -> None:
    """R10: changed in place, and kept after the slot was recycled."""
    (grant,) = put(table, "op", rows(2, 4096))
    first = (await lane.read([ref(grant)])).parts[0]
    first.block.columns["a"].values[:] = 9.0  # type: ignore[attr-defined]
    assert filled((await lane.read([ref(grant)])).parts[0]) == [1.0, 1.0]
    table.drop(grant.slot, grant.generation, range(2))
    put(table, "new", rows(2, 4096, 5.0))
    assert filled(first) == [9.0, 9.0]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [CorruptPayload, DataPlaneReadError])
async def test_a_payload_that_cannot_be_built_does_not_fail_the_others(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch, kind: type[DataPlaneReadError]
) -> None:
    """Its refs have the error, those that are stale theirs, and the others of the read have their rows."""
    build = lane_module.block_of

    def fails_once(payload: Any, codec: Any) -> Any:
        if payload.layout.metas[0].name == "bad":
            raise kind("of a dtype that nobody knows", field="bad")
        return build(payload, codec)

    monkeypatch.setattr(lane_module, "block_of", fails_once)
    bad = Block.from_fields({"bad": torch.zeros(1, 4)}, 1)
    grants = [put(table, f"op{at}", bad if at in (1, 2) else rows(1))[0] for at in range(4)]
    table.drop(grants[2].slot, grants[2].generation, [0])
    refs = [ref(grant, fields=("bad",) if at in (1, 2) else ("a",)) for at, grant in enumerate(grants)]
    result = verify(await lane.read(refs), ReadSlots(HOST, tuple(refs)))
    assert sorted(at for part in result.parts for at in part.refs) == [0, 3]
    assert {at: type(err) for at, err in result.errors.items()} == {1: kind, 2: StaleSlotError}
    assert (result.errors[1].host, result.errors[1].field) == ("h", "bad")


@pytest.mark.anyio
async def test_a_recycled_slot_a_dead_row_and_another_epoch_are_stale(table: SlotTable, lane: Lane) -> None:
    """Each is the error of its ref alone; the others come."""
    (gone,) = put(table, "gone", rows(1))
    (half,) = put(table, "half", rows(2))
    (good,) = put(table, "good", rows(1, fill=4.0))
    table.drop(gone.slot, gone.generation, [0])
    table.drop(half.slot, half.generation, [1])
    old = SlotRef(HostRef("h", 6, ()), good.slot, good.generation, ("a",), [0], [0])
    refs = [ref(gone), ref(half), ref(half, [0]), ref(good), old, SlotRef(HOST, 1 << 40, 1, ("a",), [0], [0])]
    result = await lane.read(refs)
    assert {at: type(err) for at, err in result.errors.items()} == dict.fromkeys((0, 1, 4, 5), StaleSlotError)
    (part,) = result.parts
    assert part.refs == (2, 3)
    assert filled(part) == [1.0, 4.0]


@pytest.mark.anyio
async def test_a_slot_that_changes_during_the_copy_is_stale(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recycled, or its row cleared, between the checks: no torn byte is given out; the other slots' rows come."""
    grants = [put(table, f"op{at}", rows(2, 64, float(at)))[0] for at in range(3)]

    async def meanwhile(copies: Iterator[int]) -> None:
        list(copies)
        table.drop(grants[0].slot, grants[0].generation, range(2))
        put(table, "new", rows(2, 64, 7.0))
        table.drop(grants[2].slot, grants[2].generation, [0])

    monkeypatch.setattr(lane_module, "copy_cooperatively", meanwhile)
    refs = [ref(grant, first=2 * at) for at, grant in enumerate(grants)]
    result = await lane.read(refs)
    assert {at: type(err) for at, err in result.errors.items()} == dict.fromkeys((0, 2), StaleSlotError)
    assert not set(verify(result, ReadSlots(HOST, tuple(refs))).errors) - {0, 2}
    assert filled(result.parts[0]) == [1.0, 1.0]


@pytest.mark.anyio
async def test_an_arena_that_was_given_up_serves_nothing(table: SlotTable, lane: Lane) -> None:
    """A host that starts without adoption: old references are stale at once."""
    (grant,) = put(table, "op", rows(1))
    assert lane.usable
    table.arena.unlink()
    assert not lane.usable
    assert isinstance((await lane.read([ref(grant)])).errors[0], StaleSlotError)


@pytest.mark.anyio
async def test_a_written_slot_is_read_before_its_host_noticed(table: SlotTable, lane: Lane) -> None:
    """Reserve, copy, say so in the header: no round trip; unfinished it is not ready, given up it is stale."""
    grants = table.reserve("op", ("a",), [256] * 3, 0, 1e18, this_process())
    refs = [ref(grant) for grant in grants]
    assert isinstance((await lane.read(refs)).errors[0], DataPlaneNotReady)
    await lane.write(refs, rows(3, 64, 6.0))
    assert filled((await lane.read(refs)).parts[0]) == [6.0] * 3
    table.abort("op", 0.0)
    assert isinstance((await lane.read(refs)).errors[0], StaleSlotError)


@pytest.mark.anyio
async def test_a_put_over_several_slots(table: SlotTable, lane: Lane) -> None:
    """Each slot gets its rows, ragged ones and objects too."""
    table.rows_per_slot = 2
    ragged = torch.nested.nested_tensor([torch.arange(k).float() for k in (1, 4, 0, 2, 3)], layout=torch.jagged)
    block = Block.from_fields({"a": torch.arange(5.0), "r": ragged, "o": ["u", "v", "w", "x", "y"]}, 5)
    grants = table.reserve("op", tuple(block.columns), block.row_nbytes().tolist(), 0, 1e18, this_process())
    assert [grant.rows for grant in grants] == [2, 2, 1]
    refs = [ref(grant, fields=("o", "r", "a"), first=grant.first_row) for grant in grants]
    await lane.write(refs, block)
    result = verify(await lane.read(refs), ReadSlots(HOST, tuple(refs)))
    assert not result.errors
    td = result.parts[0].block.to_tensordict()
    assert td["o"] == ["u", "v", "w", "x", "y"]
    assert td["a"].tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    assert [row.tolist() for row in td["r"].unbind()] == [[0.0], [0.0, 1.0, 2.0, 3.0], [], [0.0, 1.0], [0.0, 1.0, 2.0]]


@pytest.mark.anyio
async def test_a_write_that_is_cancelled_can_be_tried_again_or_given_up(
    table: SlotTable, lane: Lane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copy stops between two pieces; the slot stays reserved until its put is given up, or the write succeeds."""
    monkeypatch.setattr(payload_module, "PIECE_BYTES", 4096)
    (grant,) = table.reserve("op", ("a",), [1 << 20], 0, 1e18, this_process())
    task = asyncio.ensure_future(lane.write([ref(grant)], rows(1, 1 << 18)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert read_outcome(table.arena, grant.slot, grant.generation) is Outcome.NONE
    for _ in range(2):  # tried again after it was done, it does nothing
        await lane.write([ref(grant)], rows(1, 1 << 18, 8.0))
    assert filled((await lane.read([ref(grant)])).parts[0]) == [8.0]
    (other,) = table.reserve("other", ("a",), [1 << 20], 0, 1e18, this_process())
    task = asyncio.ensure_future(lane.write([ref(other)], rows(1, 1 << 18)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert table.abort("other", 0.0) == 1
    with pytest.raises(DataPlaneWriteError, match="given up"):
        await task
    assert read_outcome(table.arena, other.slot, other.generation) is Outcome.STOPPED
    table.sweep(0.0)
    assert table.find(other.slot, other.generation) is None


@pytest.mark.anyio
async def test_a_write_into_what_is_not_reserved_is_refused(table: SlotTable, lane: Lane) -> None:
    """Another generation, too many rows or bytes, a slot that is READY: nothing is changed."""
    (ready,) = put(table, "ready", rows(1))
    (mine,) = table.reserve("op", ("a",), [32], 0, 1e18, this_process())
    before = table.arena.data.copy()
    wrong = SlotRef(HOST, mine.slot, mine.generation + 1, ("a",), [0], [0])
    await lane.write([ref(ready)], rows(1, fill=5.0))  # as if its answer had been lost: nothing to do
    assert np.array_equal(before, table.arena.data)
    for target, block in ((ref(ready, [0, 1]), rows(1)), (wrong, rows(1))):
        with pytest.raises(DataPlaneWriteError):
            await lane.write([target], block)
        assert np.array_equal(before, table.arena.data)
    for target, block in ((ref(mine, [0, 1]), rows(2)), (ref(mine), rows(2)), (ref(mine), rows(1, 1 << 18))):
        with pytest.raises(DataPlaneWriteError):
            await lane.write([target], block)
    assert read_state(table.arena, ready.slot) == (State.READY, ready.generation)


@pytest.mark.anyio
async def test_damage_in_a_slot_is_corrupt_not_stale(table: SlotTable, lane: Lane) -> None:
    """The payload's head does not match its checksum, or there is no such field or row."""
    (grant,) = put(table, "op", rows(1))
    (other,) = put(table, "other", rows(1))
    table.arena.data[grant.at + 40] ^= 1
    result = await lane.read([ref(grant), ref(other, fields=("b",)), ref(other, [1])])
    assert {type(err) for err in result.errors.values()} == {CorruptPayload}
    assert not result.parts


WRITER = """
import asyncio, sys
from asyncdp.rows.block import PICKLE
from asyncdp.calls.slots import HostRef, SlotRef
from asyncdp.transports.ucxx.payload import payload
from asyncdp.transports.ucxx.slots.arena import Arena
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.slots.writer_process import this_process
from tests.ucxx import segments
payload.PIECE_BYTES = 4096
lane = Lane(Arena.attach(sys.argv[1], "h", 7), BufferPool(), PICKLE)
print(*this_process(), flush=True)
slot, generation = map(int, input().split())
pieces = lane._copy_in
def slowly(ref, block):
    for number, size in enumerate(pieces(ref, block)):
        if number == 3:
            print("half", flush=True)
            input()
        yield size
lane._copy_in = slowly
ref = SlotRef(HostRef("h", 7, ()), slot, generation, ("a",), [0], [0])
try:
    asyncio.run(lane.write([ref], segments.rows(1, 1 << 16, 13.0)))
except Exception as err:
    print(type(err).__name__, flush=True)
"""


class Writer:
    """A lane writer in a process of its own, which stops in the middle of its copy."""

    def __init__(self, table: SlotTable) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, table.arena.name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        pid, start = self.hear().split()
        (self.grant,) = table.reserve("paused", ("a",), [4 << 16], 0, 5.0, Process(int(pid), int(start)))
        self.say(f"{self.grant.slot} {self.grant.generation}")
        assert self.hear() == "half"

    def say(self, text: str) -> None:
        """Send a line."""
        assert self.process.stdin
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def hear(self) -> str:
        """Receive a line."""
        assert self.process.stdout
        return self.process.stdout.readline().strip()


def put_all_around(table: SlotTable) -> list[Grant]:
    """Fill the whole rest of the arena."""
    grants = []
    try:
        while True:
            grants += put(table, f"other{len(grants)}", rows(1, 4000, float(len(grants))))
    except DataPlaneNotReady:
        return grants


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_lane_writer_that_is_paused_in_mid_write_spoils_nothing(table: SlotTable, lane: Lane) -> None:
    """S16: stopped, its put given up, all the rest written anew, resumed: no wrong byte, and the space returns."""
    writer = Writer(table)
    try:
        writer.process.send_signal(signal.SIGSTOP)
        assert table.abort("paused", 0.0) == 1
        assert table.sweep(1e12) == 0
        grants = put_all_around(table)
        assert len(grants) > 100
        writer.process.send_signal(signal.SIGCONT)
        writer.say("on")
        assert writer.hear() == "DataPlaneWriteError"
        writer.process.wait(120)
        result = await lane.read([ref(grant, first=at) for at, grant in enumerate(grants)])
        assert not result.errors
        values: Any = result.parts[0].block.columns["a"].values  # type: ignore[attr-defined]
        assert (values == torch.arange(len(grants)).float()[:, None]).all()
        table.sweep(0.0)
        assert table.find(writer.grant.slot, writer.grant.generation) is None
    finally:
        writer.process.kill()
        writer.process.communicate()


@pytest.mark.slow
def test_the_space_of_a_lane_writer_that_was_killed_comes_back(table: SlotTable) -> None:
    """P12: proved dead by pid and start time."""
    writer = Writer(table)
    assert table.sweep(1e12) == 0
    writer.process.kill()
    writer.process.wait(120)
    assert table.sweep(0.0) == 1
    assert not table.slots
    writer.process.communicate()


def test_no_torn_row_is_ever_accepted(table: SlotTable, lane: Lane) -> None:
    """A host that recycles slots as fast as it can, a reader beside it: right bytes or StaleSlotError."""
    current: dict[int, tuple[Grant, float]] = {}
    stop = threading.Event()

    def churn() -> None:
        count = 0
        while not stop.is_set():
            for key in range(4):
                count += 1
                old = current.get(key)
                if old is not None:
                    table.drop(old[0].slot, old[0].generation, [0])
                current[key] = (put(table, f"op{count}", rows(1, 1 << 14, float(count)))[0], float(count))

    thread = threading.Thread(target=churn)
    thread.start()
    good = stale = 0
    try:
        began = time.monotonic()
        while time.monotonic() - began < (60.0 if not (good and stale) else 1.0):
            held = list(current.values())
            result = asyncio.run(lane.read([ref(grant, first=at) for at, (grant, _) in enumerate(held)]))
            stale += sum(isinstance(err, StaleSlotError) for err in result.errors.values())
            assert all(isinstance(err, (StaleSlotError, DataPlaneNotReady)) for err in result.errors.values())
            for part in result.parts:
                values: Any = part.block.columns["a"].values  # type: ignore[attr-defined]
                for place, at in enumerate(part.refs):
                    assert (values[place] == held[at][1]).all()
                    good += 1
    finally:
        stop.set()
        thread.join()
    assert good
    assert stale


def test_result_memory_is_used_again_once_every_tensor_is_gone() -> None:
    """A view of a view still holds it; nothing is lent twice."""
    pool = BufferPool(least_bytes=4096)
    first = pool.empty(200_000)
    tensor = torch.from_numpy(first[100:200].view(np.int32)[3:]).view(-1)
    address = first.ctypes.data
    del first
    second = pool.empty(200_000)
    assert second.ctypes.data != address
    del tensor
    third = pool.empty(190_000)
    assert third.ctypes.data == address
    assert (pool.hits, pool.misses) == (1, 2)
    assert pool.empty(100).base is None


def test_a_gibibyte_that_came_in_two_replies_is_kept() -> None:
    """A reply is a gibibyte at most; no page of these is touched."""
    pool = BufferPool(keep_bytes=2 << 30)
    for _ in range(2):
        lent = [pool.empty(960 << 20), pool.empty((64 << 20) + 4096)]
        del lent
    assert (pool.hits, pool.misses) == (2, 2)
    assert 0 < KEPT_BYTES <= 2 << 30


def test_result_memory_is_not_kept_without_bound() -> None:
    """What is beyond keep_bytes goes back to the system."""
    pool = BufferPool(keep_bytes=1 << 20, least_bytes=4096)
    lent = [pool.empty(512 << 10) for _ in range(6)]
    del lent
    pool.empty(4096)
    assert sum(map(len, pool._free)) <= 1 << 20
