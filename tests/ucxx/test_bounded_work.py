"""What one request, one connection and all clients may cost a slot host: bounded before it is done. No UCX here."""

import asyncio
import struct
import sys
import threading
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from asyncdp.calls.slots import SlotRef
from asyncdp.errors import CorruptPayload, DataPlaneBadRequest, DataPlaneError, DataPlaneNotReady
from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.client import connection as connections
from asyncdp.transports.ucxx.host import host as hosts
from asyncdp.transports.ucxx.host.limits import time_slices
from asyncdp.transports.ucxx.host.limits.memory_share import SMALL_BYTES, MemoryShare
from asyncdp.transports.ucxx.payload import layout as layouts
from asyncdp.transports.ucxx.payload.blocks import block_of, packed
from asyncdp.transports.ucxx.payload.layout import bound
from asyncdp.transports.ucxx.payload.payload import Payload
from asyncdp.transports.ucxx.slots.slot_split import cut
from asyncdp.transports.ucxx.wire import control as controls
from asyncdp.transports.ucxx.wire.control import Control
from asyncdp.transports.ucxx.wire.failures import describe
from asyncdp.transports.ucxx.wire.messages import (
    MOST_FIELDS,
    MOST_REFS,
    MOST_ROWS,
    MOST_SLOTS,
    REPLIES,
    REQUESTS,
    Abort,
    Ask,
    Done,
    Drop,
    Failed,
    Granted,
    HostFacts,
    PartHead,
    Read,
    Reserve,
    Rows,
    SlotRows,
    WireError,
    Write,
    check_length,
    pack_frame,
    unpack_body,
)
from tests.ucxx.hosts import hosted, pool_of, put_over, ref_of
from tests.ucxx.segments import put, rows, write

pytestmark = pytest.mark.anyio
LOCAL = "127.0.0.1"


class LoopRuns:
    """How often the event loop ran."""

    count = 0

    async def run(self) -> None:
        """Count until cancelled."""
        while True:
            self.count += 1
            await asyncio.sleep(0)


@pytest.fixture
async def loop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[LoopRuns]:
    """How often the event loop has run; long work of a host lets it run after each of its steps."""
    monkeypatch.setattr(time_slices, "SLICE_S", 0.0)
    counted = LoopRuns()
    beside = asyncio.ensure_future(counted.run())
    yield counted
    beside.cancel()


@pytest.mark.parametrize(
    "message",
    [
        Read([("a",)], [SlotRows(0, 0, 0, 0, 1)] * (MOST_REFS + 1), 0, 0),
        Drop([()], [SlotRows(0, 0, 0, 0, 1)] * (MOST_REFS + 1), 0),
        Reserve("op", ("a",) * (MOST_FIELDS + 1), [1], 0, 1.0, 0.0, False, 0),  # noqa: FBT003 - a message
        Write("op", [(0, 0, 0)] * (MOST_SLOTS + 1), 0),
        Read([("a" * 4097,)], [], 0, 0),
        Read([("a",)], [SlotRows(0, 0, 0, 0, 0, [0] * (3 << 20))], 0, 0),
    ],
    ids=["refs of a read", "refs of a drop", "fields", "slots of a write", "a name", "rows one by one"],
)
async def test_requests_that_would_cost_too_much_are_not_even_decoded(message: Any) -> None:
    """A4: 2.7 million refs, 240,000 fields: refused by the lengths that they announce."""
    with pytest.raises(WireError):
        unpack_body(pack_frame(message)[12:])


async def test_a_read_of_as_many_refs_as_may_be_does_not_hold_up_the_loop(loop: LoopRuns) -> None:
    """A4: other sessions have their turn meanwhile: the loop ran again and again while all refs were looked at."""
    async with hosted(arena_bytes=64 << 20) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                (ref,) = await put_over(connection, here, "op", rows(1))
            request = Read([("a",)], [SlotRows(ref.slot, ref.generation, 0, 0, 1)] * MOST_REFS, 1, here.epoch)
            before = loop.count
            with await host.service.read(request) as (reply, _):
                assert reply.parts
            assert loop.count - before >= MOST_REFS
            before = loop.count
            assert await host.service.drop(Drop([()], request.refs, here.epoch)) >= 1
            assert loop.count - before >= MOST_REFS


async def test_a_reserve_of_many_slots_takes_turns_and_is_whole_or_absent(loop: LoopRuns) -> None:
    """A4: slot by slot, with turns; given up meanwhile, or without space for all, nothing stays reserved."""
    async with hosted(arena_bytes=64 << 20, unit_bytes=4096, rows_per_slot=1) as host:
        service, epoch = host.service, host.arena.epoch
        free = service.table.free_bytes

        def asks(op_id: str, count: int) -> Reserve:
            return Reserve(op_id, ("a",), [8] * count, 0, 60.0, 0.0, False, epoch)  # noqa: FBT003 - a message

        before = loop.count
        assert len(await service.reserve(asks("many", 4000), None)) == 4000
        assert loop.count - before >= 4000
        with pytest.raises(DataPlaneNotReady):
            await service.reserve(asks("too many", 20_000), None)
        giving = asyncio.ensure_future(service.reserve(asks("given up", 4000), None))
        while not service._reserving:  # noqa: ASYNC110 - a thread splits the rows before
            await asyncio.sleep(0.001)
        with pytest.raises(DataPlaneNotReady):
            await service.reserve(asks("given up", 4000), None)
        service.table.abort("given up", 0.0)
        with pytest.raises(DataPlaneError):
            await giving
        cut_off = asyncio.ensure_future(service.reserve(asks("cut off", 4000), None))
        while not service._reserving:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.001)
        cut_off.cancel()
        await asyncio.gather(cut_off, return_exceptions=True)
        service.table.abort("many", 0.0)
        assert service.table.free_bytes == free


class _NotWalked(dict[int, Any]):
    """Slots that no request may look at one after the other."""

    def _walk(self) -> Any:
        raise AssertionError("a request walks all slots")

    __iter__ = keys = values = items = _walk


async def test_no_request_walks_all_slots_nor_those_of_a_put_in_one_go(loop: LoopRuns) -> None:
    """A4: facts are counted as slots change; a put of many slots is reserved again and aborted with turns."""
    async with hosted(arena_bytes=16 << 20, unit_bytes=4096, rows_per_slot=1) as host:
        service, table = host.service, host.service.table
        every = Reserve("many", ("a",), [8] * 3000, 0, 60.0, 0.0, False, host.arena.epoch)  # noqa: FBT003 - a message
        one = msgspec.structs.replace(every, sizes=[8], first_row=7)
        granted = await service.reserve(every, None)
        table.slots = _NotWalked(table.slots)
        assert service.facts()["writing"] == host.report().slots["writing"] == 3000
        before = loop.count
        assert await service.reserve(one, None) == [granted[7]]
        assert loop.count - before >= 3000
        before = loop.count
        assert await service.reserve(every, None) == granted
        assert loop.count - before >= 3000
        before = loop.count
        assert await service.abort(Abort("many", idle=True), None) == 0
        assert loop.count - before >= 3 * 3000
        assert service.facts()["writing"] == 0
        table.slots = dict.copy(table.slots)


async def test_the_oldest_rows_are_looked_for_with_turns(loop: LoopRuns) -> None:
    """A4: a put that overwrites thousands of slots looks at them one by one; one that is read meanwhile is kept."""
    keys: Any = {"arena_bytes": 4 << 20, "unit_bytes": 4096, "on_full": "overwrite_oldest"}
    async with hosted(**keys) as host:
        table = host.service.table
        old = [put(table, f"old{number}", rows(1))[0] for number in range(1024)]
        assert table.free_bytes == 0
        wide = Reserve("wide", ("a",), [1 << 20], 0, 60.0, 0.0, False, host.arena.epoch)  # noqa: FBT003 - a message
        before = loop.count
        reserving = asyncio.ensure_future(host.service.reserve(wide, None))
        await asyncio.sleep(0)
        attempt = table.begin_read(old[0].slot, old[0].generation, ("a",), [0])
        await asyncio.gather(reserving, return_exceptions=True)
        assert loop.count - before >= (1 << 20) // 4096
        assert table.find(old[0].slot, old[0].generation) is not None
        assert table.cleared(attempt, ("a",), [0]) is None  # type: ignore[arg-type]
        assert table.finish_read(attempt)  # type: ignore[arg-type]


async def test_a_put_of_more_cells_than_may_be_is_refused_at_once() -> None:
    """A4: rows x fields are bounded before anything is reckoned with them."""
    async with hosted() as host:
        many = tuple(map(str, range(MOST_FIELDS)))
        request = Reserve("op", many, [1] * 5000, 0, 60.0, 0.0, False, host.arena.epoch)  # noqa: FBT003 - a message
        with pytest.raises(DataPlaneBadRequest, match="too large"):
            await host.service.reserve(request, None)
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                for fields, rows_ in ((("a",), MOST_ROWS + 1), ((*many, "more"), 1)):
                    with pytest.raises(DataPlaneBadRequest, match="in parts"):
                        await connection.reserve(here, "op", fields, [1] * rows_, 0, ttl_s=9, wait_s=0, lane=False)
                assert (await connection.ask())["writing"] == 0


async def test_what_is_more_than_one_request_may_name_goes_in_several(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client cuts its requests: reads, writes and drops of any number of slots, each row once and in its place."""
    for name in ("MOST_REFS", "MOST_SLOTS"):
        monkeypatch.setattr(connections, name, 7)
    async with hosted(unit_bytes=4096, rows_per_slot=1) as host:
        here = ref_of(host.report())
        block = Block.from_fields({"a": torch.arange(40.0).reshape(40, 1)}, 40)
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                refs = await put_over(connection, here, "op", block)
                assert len(refs) == 40
                asked = [*refs[::-1], SlotRef(here, refs[0].slot, 10**6, ("a",), range(1), range(1))]
                result = await connection.read(here, asked)
                got = {
                    at: float(part.block.columns["a"].values[row, 0])  # type: ignore[attr-defined]
                    for part in result.parts
                    for row, at in enumerate(part.refs)
                }
                assert got == {at: float(39 - at) for at in range(40)}
                assert list(result.errors) == [40]
                cells = [(ref.slot, ref.generation, [0], ("a",) if ref.slot % 2 else ()) for ref in refs]
                assert await connection.drop(here, cells) == 40
        assert host.service.table.counts()["ready"] == 0


@pytest.mark.parametrize(("sent", "extra"), [(64, 0), (1024, 0), (2048, 0), (None, 64)])
async def test_a_payload_that_describes_other_bytes_than_were_written_is_refused(sent: int | None, extra: int) -> None:
    """A1: what a client did not write itself is not in its rows: space is reused, and others have written there."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                theirs = await put_over(connection, here, "theirs", rows(1, 512, fill=7.0))
                await connection.drop(here, [(ref.slot, ref.generation, [0], ()) for ref in theirs])
                granted = await connection.reserve(here, "op", ("a",), [2048], 0, ttl_s=60, wait_s=0, lane=False)
                slot, generation, _, _ = granted.grants[0]
                whole = packed(rows(1, 512)).tobytes()
                data = whole[:sent] + b"\0" * extra
                for inline, told in ((data, "Failed"), (whole, "Written")):
                    message = Write("op", [(slot, generation, len(inline))], here.epoch, None, inline)
                    await connection._control.send(message)
                    assert type(await connection._control.receive()).__name__ == told


async def test_a_write_of_nothing_is_not_reported_as_written() -> None:
    """A1: no slots, no answer that all of them were written."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                for inline in (None, b""):
                    await connection._control.send(Write("op", [], here.epoch, None, inline))
                    told = await connection._control.receive()
                    assert isinstance(told, Failed)
                    assert told.code == "DataPlaneBadRequest"


async def test_a_field_that_is_named_again_is_refused() -> None:
    """A5: a read of a field 256 times is no reply of 256 times its rows; nor is one reserved or dropped so."""
    async with hosted(inline_bytes=0) as host:
        here = ref_of(host.report())
        slot, generation = await _mebibyte(host, here)
        refs = [SlotRows(slot, generation, 0, 0, 1)]
        with pytest.raises(DataPlaneBadRequest, match="twice"):
            await host.service.read(Read([("a",) * 256], refs, 1, here.epoch))
        with pytest.raises(DataPlaneBadRequest, match="twice"):
            await host.service.drop(Drop([("a", "a")], refs, here.epoch))
        request = Reserve("op2", ("a", "b", "a"), [1], 0, 9.0, 0.0, False, here.epoch)  # noqa: FBT003 - a message
        with pytest.raises(DataPlaneBadRequest, match="twice"):
            await host.service.reserve(request, None)
        assert host.service.memory.held == 0


async def _ragged(host: Any, lengths: list[int], fields: int = 1) -> SlotRows:
    """A slot of ragged rows of these lengths in bytes, in each of the fields f0, f1, ..."""
    values = [torch.full((length,), 1, dtype=torch.uint8) for length in lengths]
    nested = torch.nested.nested_tensor(values, layout=torch.jagged)
    block = Block.from_fields({f"f{at}": nested for at in range(fields)}, len(lengths))
    (grant,) = put(host.service.table, "ragged", block)
    return SlotRows(grant.slot, grant.generation, 0, 0, len(lengths))


async def test_a_reply_counts_the_rows_that_it_has_not_the_average(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: of many short rows the one long row, again and again: no reply beyond what may be repeated."""
    from asyncdp.transports.ucxx.host.limits import reply_room

    monkeypatch.setattr(reply_room, "REPEATED_BYTES", 4 << 20)
    async with hosted(inline_bytes=0) as host:
        epoch = host.arena.epoch
        ref = await _ragged(host, [1 << 20, *[0] * 999])
        again = SlotRows(ref.slot, ref.generation, 0, 0, 0, [0] * 999)
        with await host.service.read(Read([("f0",)], [again], 1, epoch)) as (reply, payloads):
            assert not payloads
            assert [code for _, code, _, _ in reply.errors] == ["DataPlaneBadRequest"]
        few = SlotRows(ref.slot, ref.generation, 0, 0, 0, [0, 5, 0])
        with await host.service.read(Read([("f0",)], [few] * 9, 1, epoch)) as (reply, payloads):
            assert 2 << 20 <= sum(map(len, payloads)) <= 7 << 20
            assert {code for _, code, _, _ in reply.errors} == {"DataPlaneNotReady"}
        whole = [SlotRows(ref.slot, ref.generation, 0, 0, 1000), SlotRows(ref.slot, ref.generation, 0, 0, 0, [0, 7])]
        with await host.service.read(Read([("f0",)], whole, 1, epoch)) as (reply, payloads):
            assert not reply.errors


async def test_no_reply_takes_more_than_all_replies_may() -> None:
    """A5: held_bytes bounds a reply also while no other is held; what does not fit is asked for again."""
    async with hosted(inline_bytes=0, held_bytes=3 << 20) as host:
        here = ref_of(host.report())
        refs = []
        for op in ("b", "c", "d", "e"):
            (grant,) = put(host.service.table, op, rows(1, 1 << 18))
            refs.append(SlotRows(grant.slot, grant.generation, 0, 0, 1))
        with await host.service.read(Read([("a",)], refs, 1, here.epoch)) as (reply, payloads):
            assert 1 << 20 < sum(map(len, payloads)) <= 3 << 20
            assert {code for _, code, _, _ in reply.errors} == {"DataPlaneNotReady"}


async def test_rows_named_one_by_one_times_fields_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: more cells than the slot has, beyond some: refused, before anything of that size is made."""
    from asyncdp.transports.ucxx.host import reads

    monkeypatch.setattr(reads, "MOST_CELLS", 1000)
    async with hosted(inline_bytes=0) as host:
        ref = await _ragged(host, [1] * 10, fields=20)
        names = tuple(f"f{at}" for at in range(20))
        for times, told in ((5, []), (6, ["DataPlaneBadRequest"])):
            again = SlotRows(ref.slot, ref.generation, 0, 0, 0, [*range(10)] * times)
            with await host.service.read(Read([names], [again], 1, host.arena.epoch)) as (reply, _):
                assert [code for _, code, _, _ in reply.errors] == told


async def test_a_drop_of_many_cells_takes_turns(loop: LoopRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: rows named again and again, and wide slots: in steps of bounded work; the right cells die, once each."""
    from asyncdp.transports.ucxx.slots import slot as slots

    monkeypatch.setattr(slots, "_CELLS_AT_ONCE", 100)
    monkeypatch.setattr(slots, "_NAMED_AT_ONCE", 50)
    async with hosted() as host:
        ref, epoch = await _ragged(host, [1] * 40, fields=20), host.arena.epoch
        held = host.service.table.find(ref.slot, ref.generation)
        assert held is not None
        picked = SlotRows(ref.slot, ref.generation, 0, 0, 0, [3, 39, 1 << 39] * 200)
        before = loop.count
        assert await host.service.drop(Drop([("f1", "f7", "none")], [picked], epoch)) == 1
        assert loop.count - before >= 600 // 50 + 40 // 5
        live = held.live(host.arena)
        assert live.sum() == 800 - 4
        assert not live[[3, 3, 39, 39], [1, 7, 1, 7]].any()
        few = SlotRows(ref.slot, ref.generation, 0, 0, 0, [38, 2])
        assert (
            await host.service.drop(Drop([()], [few, SlotRows(ref.slot, ref.generation, 0, 30, 1 << 39)], epoch)) == 2
        )
        assert live.sum() == 800 - 2 - 11 * 20
        both = [SlotRows(ref.slot, ref.generation, 0, 0, 40)] * 2
        drops = [asyncio.ensure_future(host.service.drop(Drop([()], both, epoch))) for _ in range(3)]
        assert sum(await asyncio.gather(*drops)) >= 1
        assert host.service.table.counts()["ready"] == 0
        assert host.service.table.free_bytes == host.arena.units * host.arena.unit_bytes


class _Counted(str):
    """A name that counts how often it is looked at."""

    __slots__ = ()
    looks = 0

    def encode(self, *args: Any) -> bytes:
        """Count."""
        _Counted.looks += 1
        return super().encode(*args)


async def test_names_are_not_looked_at_again_for_each_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: a split of many rows of many fields takes their sum of time, not their product; each row is in one slot."""
    monkeypatch.setattr(_Counted, "looks", 0)
    names, sizes = [_Counted(at) for at in range(500)], [at % 700 for at in range(600)]
    shares = cut(names, sizes, 200_000, None)
    assert _Counted.looks <= 5 * len(names)
    assert [share.first for share in shares[1:]] == [share.stop for share in shares[:-1]]
    assert (shares[0].first, shares[-1].stop) == (0, 600)
    assert all(bound(names, sizes[first:stop]) <= capacity <= 200_000 for first, stop, capacity in shares)
    with pytest.raises(DataPlaneBadRequest, match="a row of 200000 bytes"):
        cut(names, [*sizes, 200_000], 200_000, None)


async def test_a_put_without_space_is_not_split_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4: while it waits for space nothing is reckoned by row; once there is space, it is served."""
    async with hosted(arena_bytes=1 << 20, max_slot_bytes=1 << 20, unit_bytes=4096, rows_per_slot=1) as host:
        service, epoch, split = host.service, host.arena.epoch, 0
        units = service.table._units

        def counted(*args: Any) -> int:
            nonlocal split
            split += 1
            return units(*args)

        monkeypatch.setattr(service.table, "_units", counted)
        first = Reserve("first", ("a",), [4000] * 50, 0, 60.0, 0.0, False, epoch)  # noqa: FBT003 - a message
        assert len(await service.reserve(first, None)) == 50
        assert split == 50
        second = Reserve("second", ("a",), [9000] * 80, 0, 60.0, 60.0, False, epoch)  # noqa: FBT003 - a message
        waiting = asyncio.ensure_future(service.reserve(second, None))
        for _ in range(20):
            await asyncio.sleep(0)
            service.space_came_back()
        for _ in range(20):
            await asyncio.sleep(0)
        assert split == 50
        service.table.abort("first", 0.0)
        assert len(await waiting) == 80
        assert split == 50 + 80


async def test_what_a_host_keeps_of_the_lengths_of_rows_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: beside the arena, whatever it holds; what was forgotten is read anew."""
    from asyncdp.transports.ucxx.slots import store

    monkeypatch.setattr(store, "MOST_LAYOUT_BYTES", 100_000, raising=False)
    async with hosted(inline_bytes=0) as host:
        table = host.service.table

        def kept() -> int:
            looked = [slot.payload.layout for slot in table.slots.values() if slot.payload is not None]
            return sum(steps.nbytes for layout in looked for steps in layout.offsets if steps is not None)

        refs = []
        for number in range(20):
            values = [torch.full((1 + 2 * (row > 0),), number, dtype=torch.uint8) for row in range(2000)]
            nested = torch.nested.nested_tensor(values, layout=torch.jagged)
            (grant,) = put(table, f"op{number}", Block.from_fields({"a": nested}, 2000))
            refs.append(SlotRows(grant.slot, grant.generation, 0, 1999, 1))
            assert kept() <= 100_000
        with await host.service.read(Read([("a",)], refs, 1, host.arena.epoch)) as (reply, payloads):
            assert not reply.errors
            column: Any = block_of(Payload.read(payloads[0])).columns["a"]
            assert column.values.tolist() == [number for number in range(20) for _ in range(3)]
        assert kept() <= 100_000
        whole = [SlotRows(ref.slot, ref.generation, 0, 0, 2000) for ref in refs]
        assert await host.service.drop(Drop([()], whole, host.arena.epoch)) == 20
        assert table.layout_bytes == 0


async def _mebibyte(host: Any, here: Any) -> tuple[int, int]:
    """Slot and generation of a row of 1 MiB, which came without UCX."""
    with pool_of() as pool:
        async with pool.use(LOCAL, here.ports[0]) as connection:
            granted = await connection.reserve(here, "op", ("a",), [1 << 20], 0, ttl_s=9, wait_s=0, lane=False)
    slot, generation, _, _ = granted.grants[0]
    table = host.service.table
    held = table.find(slot, generation)
    assert held is not None
    write(table, table._grant(held), rows(1, 1 << 18))
    assert table.seal(held)
    return slot, generation


async def test_rows_named_again_and_again_take_no_memory_beyond_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: a request of some bytes makes no reply of a gigabyte: the first repeats come, the rest has to ask again."""
    from asyncdp.transports.ucxx.host.limits import reply_room

    monkeypatch.setattr(reply_room, "REPEATED_BYTES", 4 << 20)
    async with hosted(inline_bytes=0) as host:
        here = ref_of(host.report())
        slot, generation = await _mebibyte(host, here)
        request = Read([("a",)], [SlotRows(slot, generation, 0, 0, 1)] * 1000, 1, here.epoch)
        with await host.service.read(request) as (reply, payloads):
            assert sum(map(len, payloads)) <= 6 << 20
            assert sum(len(part.refs) for part in reply.parts) >= 2
            assert len(reply.errors) + sum(len(part.refs) for part in reply.parts) == 1000
            assert host.service.memory.held > 0
            assert {code for _, code, _, _ in reply.errors} == {"DataPlaneNotReady"}
        assert host.service.memory.held == 0
        alone = Read([("a",)], [SlotRows(slot, generation, 0, 0, 0, [0] * 1000)], 1, here.epoch)
        with await host.service.read(alone) as (reply, payloads):
            assert not payloads
            assert {code for _, code, _, _ in reply.errors} == {"DataPlaneBadRequest"}


async def test_a_reply_that_is_gathered_while_it_is_sent_keeps_its_slots_and_a_share_of_the_arena() -> None:
    """A5, R: a slot that is being sent is used for no other row; what is too much of the arena is copied first."""
    options: dict[str, Any] = {"arena_bytes": 64 << 20, "max_slot_bytes": 32 << 20, "rows_per_slot": 1}
    async with hosted(inline_bytes=0, **options) as host:
        here, table = ref_of(host.report()), host.service.table
        refs = []
        for number in range(3):
            (grant,) = put(table, f"op{number}", rows(1, 4 << 20, float(number)))
            refs.append(SlotRows(grant.slot, grant.generation, 0, 0, 1))
        one, two = Read([("a",)], refs[:1], 1, here.epoch), Read([("a",)], refs[1:], 1, here.epoch)
        streamed = await host.service.read(one, stream=True)
        assert not streamed.payloads
        copied = await host.service.read(two, stream=True)
        assert not copied.gathers
        copied.release()
        assert await host.service.drop(Drop([()], refs[:1], here.epoch)) == 1
        assert table.counts()["reading"] == 1
        messages = [piece for piece in streamed.messages(host.service.buffers) if piece is not None]
        payload = Payload.read(np.concatenate(messages))
        assert float(block_of(payload).columns["a"].values[0, -1]) == 0.0  # type: ignore[attr-defined]
        streamed.release()
        assert table.counts()["reading"] == 0
        assert table.find(refs[0].slot, refs[0].generation) is None
        assert host.service.memory.held == 0
        again = await host.service.read(Read([("a",)], refs[1:2], 1, here.epoch), stream=True)
        assert again.gathers
        again.release()


async def test_without_ucx_no_reply_is_built_that_cannot_be_sent() -> None:
    """A5: without UCX what fits into the frame comes, the rest is asked for again, what never fits is a typed error."""
    async with hosted(inline_bytes=4096, unit_bytes=4096, rows_per_slot=1) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                refs = []
                for number in range(4):
                    refs += await put_over(connection, here, f"op{number}", rows(1, 500))
                built: list[int] = []
                empty = host.service.buffers.empty
                host.service.buffers.empty = lambda size: (built.append(size), empty(size))[1]  # type: ignore[method-assign]
                result = await connection.read(here, refs)
                assert sum(len(part.refs) for part in result.parts) >= 1
                assert all(isinstance(err, DataPlaneNotReady) for err in result.errors.values())
                assert sum(built) <= 4096
        request = Read([("a",)], [SlotRows(refs[0].slot, refs[0].generation, 0, 0, 0, [0] * 9)], 0, here.epoch)
        with await host.service.read(request, in_frame=True) as (reply, _):
            assert [code for _, code, _, _ in reply.errors] in (["DataPlaneUnavailable"], ["DataPlaneBadRequest"])
        assert isinstance(reply, Rows)


async def test_memory_for_replies_is_shared_in_the_order_of_asking() -> None:
    """A5: small ones never wait; who is cancelled while it waits holds up nobody; one that is too large goes alone."""
    share, order = MemoryShare(10 << 20), []

    async def use(name: str, nbytes: int, until: asyncio.Event) -> None:
        async with share.hold(nbytes):
            order.append(name)
            await until.wait()

    first, rest = asyncio.Event(), asyncio.Event()
    tasks = [asyncio.ensure_future(use("first", 8 << 20, first))]
    await asyncio.sleep(0)
    for name, nbytes in (("huge", 99 << 20), ("second", 5 << 20), ("third", 5 << 20)):
        tasks.append(asyncio.ensure_future(use(name, nbytes, rest)))
    tasks.append(asyncio.ensure_future(use("small", SMALL_BYTES, rest)))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert order == ["first", "small"]
    tasks[1].cancel()
    await asyncio.sleep(0)
    first.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert order == ["first", "small", "second", "third"]
    rest.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert share.held == 0
    async with share.hold(99 << 20):
        assert share.held == 99 << 20


async def test_memory_that_was_held_for_replies_goes_when_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: a host gives back what nobody used for some seconds, at its next look; what is used again is kept."""
    monkeypatch.setattr(hosts, "_IDLE_S", 0.0)
    async with hosted() as host:
        buffers = host.service.buffers
        buffers.empty(8 << 20)
        again = buffers.empty(8 << 20)
        assert buffers.hits == 1
        del again
        await host._sweep()
        buffers.empty(8 << 20)
        assert buffers.hits == 1


async def test_fresh_pages_of_a_large_reply_are_allocated_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: the system clears each page at the first write to it, 64 MiB in up to 0.1 s: a thread does that."""
    async with hosted(arena_bytes=64 << 20) as host:
        here, by = ref_of(host.report()), set()
        slot, generation = await _mebibyte(host, here)
        take = host.service.buffers.take

        class Noticed(np.ndarray):
            def fill(self, value: float) -> None:
                by.add(threading.current_thread() is threading.main_thread())
                super().fill(value)

        def taking(nbytes: int) -> tuple[Any, bool]:
            memory, fresh = take(nbytes)
            return memory.view(Noticed), fresh

        monkeypatch.setattr(host.service.buffers, "take", taking)
        request = Read([("a",)], [SlotRows(slot, generation, 0, 0, 1)] * 8, 1, here.epoch)
        with await host.service.read(request):
            assert by == {False}


async def test_of_all_long_work_one_slice_runs_in_a_turn_of_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A4, A6: slices come round in the order of asking, one for each turn, and who is cancelled holds up nobody."""
    monkeypatch.setattr(time_slices, "SLICE_S", 0.0)
    queue, ran, turn = time_slices.TimeSlices(), [], 0

    async def long(name: str) -> None:
        work = queue.begin()
        for _ in range(3):
            assert work.over
            await work.next()
            ran.append((turn, name))

    tasks = [asyncio.ensure_future(long(name)) for name in "abcd"]
    for turn in range(40):
        await asyncio.sleep(0)
        if turn == 3:
            tasks[1].cancel()
    assert [name for _, name in ran if name != "b"] == list("acdacdacd")
    assert len({at for at, _ in ran}) == len(ran)
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_body_that_is_too_long_for_its_kind_is_refused_by_its_first_bytes() -> None:
    """A4: before it has come, so it takes no memory; nor is the kind hidden by another encoding of the same number."""
    million = pack_frame(Read([("a",)], [SlotRows(0, 0, 0, 0, 1)] * 300_000, 0, 0))
    body = million[12:]
    assert body[0] & 0xF0 == 0x90
    assert body[1] == 7
    with pytest.raises(WireError, match="longer"):
        unpack_body(b"\xdc\0" + bytes([body[0] & 15]) + body[1:])
    with pytest.raises(WireError, match="longer"):
        unpack_body(body[:1] + b"\xcc\x07" + body[2:])
    control, closed = Control(), []
    control.open_up()
    control.on_lost = lambda: closed.append(control)
    control.data_received(million[:1000])
    assert closed
    assert isinstance(control.why, WireError)


@pytest.mark.parametrize(
    "message",
    [Rows([PartHead([0], [0], 0, 0, 0)], []), Granted([(0, 0, 0, 0)], lane=False), HostFacts({}), Failed("a", "b")],
    ids=lambda message: type(message).__name__,
)
async def test_a_host_decodes_no_message_that_only_hosts_send(message: Any) -> None:
    """A4: a reply that comes as a request ends the connection, by its first bytes where it is long."""
    with pytest.raises(WireError):
        unpack_body(pack_frame(message)[12:], REQUESTS)
    assert unpack_body(pack_frame(message)[12:], REPLIES) == message
    with pytest.raises(WireError, match="longer"):
        check_length(pack_frame(message)[12:14], 2000, REQUESTS)
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                connection._control._transport.write(pack_frame(message))
                with pytest.raises(ConnectionResetError):
                    await connection._control.receive()


@pytest.mark.parametrize(
    "message",
    [
        Rows([PartHead([], [], 0, 0, 0)] * (MOST_REFS + 1), []),
        Rows([PartHead([0] * (MOST_REFS + 1), [], 0, 0, 0)], []),
        Rows([], [(0, "", "", None)] * (MOST_REFS + 1)),
        Granted([(0, 0, 0, 0)] * (MOST_ROWS + 1), lane=False),
        Read([("a",)], [], 0, 0),
    ],
    ids=["parts", "refs of a part", "errors", "grants", "a request"],
)
async def test_a_client_decodes_no_more_of_a_reply_than_a_request_may_ask_for(message: Any) -> None:
    """A4: refused by the lengths that it announces."""
    with pytest.raises(WireError):
        unpack_body(pack_frame(message)[12:], REPLIES)


def _described(schema: bytes) -> bytes:
    """A payload of one row of columns without bytes, of this schema."""
    body = schema + bytes(-(32 + len(schema)) % 64)
    return struct.pack("<4sBBHIQQI", b"ADPP", 1, 0, 0, len(schema), 1, 32 + len(body), zlib.crc32(body)) + body


@pytest.mark.parametrize("columns", [1, 60_000])
async def test_a_schema_of_other_columns_than_reserved_is_not_decoded(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A4: 60,000 columns where one was reserved: refused by their number, and nothing of them is kept."""
    schema = msgspec.msgpack.encode([(f"{at:x}", 0, "uint8", (0,)) for at in range(columns)])
    assert len(schema) < layouts.MAX_HEAD_BYTES
    data = np.frombuffer(_described(schema), np.uint8)
    before = layouts._metas.nbytes
    if columns == 1:
        assert layouts.read_layout(data, 1, columns=1, exact=True).nbytes == len(data)
        return
    monkeypatch.setattr(msgspec.msgpack, "decode", None)
    for expected in (1, None):
        with pytest.raises(CorruptPayload, match="columns"):
            layouts.read_layout(data, 1, columns=expected)
    assert layouts._metas.nbytes == before


async def test_what_is_kept_of_schemas_is_bounded_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: however many payloads came, of however many columns each."""
    monkeypatch.setattr(layouts, "_CACHED_BYTES", 1 << 20)
    for number in range(40):
        names = [f"{number}-{at}" for at in range(300)]
        schema = msgspec.msgpack.encode([(name, 0, "uint8", (0,)) for name in names])
        layout = layouts.read_layout(np.frombuffer(_described(schema), np.uint8))
        layouts.schema_of(layout.metas)
    for cache in (layouts._metas, layouts._dense, layouts.schema_of):
        assert 0 < cache.nbytes <= 1 << 20


@pytest.mark.parametrize(
    "head", [b"\x91", b"\x91\x94\xa1a\x00\xa5uint8", b"\x91\x97\xa1a\x00\xa5uint8\x91\x01\x00\xc2"]
)
async def test_a_schema_that_is_nested_is_a_corrupt_payload(head: bytes) -> None:
    """A4: 200,000 levels deep: a typed error, not the interpreter's."""
    data = np.frombuffer(_described(head + b"\x91" * 200_000 + b"\x00"), np.uint8)
    with pytest.raises(CorruptPayload):
        layouts.read_layout(data, 1)


async def test_requests_that_never_become_whole_take_no_more_than_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5: of long requests that come in part, the one that began first is closed; one that becomes whole is served."""
    monkeypatch.setattr(hosts, "_INCOMING_BYTES", 8 << 20)
    async with hosted() as host:
        here = ref_of(host.report())
        whole = pack_frame(Reserve("op", ("a",), [1] * MOST_ROWS, 0, 9.0, 0.0, False, here.epoch + 1))  # noqa: FBT003 - a message
        part = pack_frame(Write("op", [], here.epoch, None, b"\0" * (4 << 20)))[: 3 << 20]

        async def kept(nbytes: int, sessions: int) -> None:
            def so() -> bool:
                kept_bytes = sum(session.control.kept_bytes for session in host._sessions.values())
                return (kept_bytes, len(host._sessions)) == (nbytes, sessions)

            async with asyncio.timeout(20):
                while not so():  # noqa: ASYNC110 - what is looked at has no event
                    await asyncio.sleep(0.01)

        with pool_of(per_port=9) as pool:
            async with AsyncExitStack() as held:
                made = [await held.enter_async_context(pool.use(LOCAL, here.ports[0])) for _ in range(5)]
                for count, one in enumerate(made[:4], 1):
                    one._control._transport.write(part)
                    await kept(min(2, count) * len(part), min(5, 7 - count))
                made[4]._control._transport.write(whole)
                assert isinstance(await made[4]._control.receive(), Failed)
                for one in made:
                    one.spend()


async def test_of_requests_sent_on_without_waiting_none_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A5, A6: each is decoded once, in order, when it is taken; all that was not taken counts as kept."""
    decoded = 0

    def counted(*body: Any) -> Any:
        nonlocal decoded
        decoded += 1
        return unpack_body(*body)

    class Transport:
        paused = False

        def pause_reading(self) -> None:
            self.paused = True

        def resume_reading(self) -> None:
            self.paused = False

        def abort(self) -> None:
            """End nothing."""

    monkeypatch.setattr(controls, "unpack_body", counted)
    control, transport = Control(), Transport()
    control.open_up()
    control._transport = transport
    frames = [pack_frame(Abort(f"{number}", idle=True)) for number in range(50)]
    control.data_received(b"".join(frames))
    for number in range(50):
        assert decoded == number
        assert control.kept_bytes == sum(map(len, frames[number:]))
        assert transport.paused == control.pipelines == (number < 49)
        assert await control.expect(Abort) == Abort(f"{number}", idle=True)
    control.data_received(pack_frame(Abort("late", idle=True)) + b"garbage, more of it than a head has")
    assert await control.expect(Abort) == Abort("late", idle=True)
    with pytest.raises(ConnectionResetError):
        await control.receive()


async def test_large_requests_wait_undecoded_and_those_that_free_space_do_not_wait_for_puts() -> None:
    """A5: of large puts that wait for space as many are decoded as may be; a large drop is served meanwhile."""
    async with hosted(held_bytes=2 << 20, rows_per_slot=None) as host:
        here, service = ref_of(host.report()), host.service
        full = [*put(service.table, "old", rows(1, 1 << 19)), *put(service.table, "older", rows(1, 1 << 19))]

        def asks(op_id: str) -> Reserve:
            return Reserve(op_id, ("a",), [100] * 50_000, 0, 60.0, 60.0, False, here.epoch)  # noqa: FBT003 - a message

        async def kept(nbytes: int) -> None:
            """Wait until so many bytes wait undecoded, while one request is decoded."""
            async with asyncio.timeout(60):
                while True:
                    there = sum(session.control.kept_bytes for session in host._sessions.values())
                    if there == nbytes and service.reserving.held:
                        return
                    await asyncio.sleep(0.01)

        with pool_of(per_port=9) as pool:
            async with AsyncExitStack() as held:
                first, second, third, other = [
                    (await held.enter_async_context(pool.use(LOCAL, here.ports[0])))._control for _ in range(4)
                ]
                frame = pack_frame(asks("first"))
                for count, one in enumerate((first, second, third)):
                    await one.send(asks(("first", "secnd", "third")[count]))
                    await kept(count * len(frame))
                third.reset()
                named = [SlotRows(grant.slot, grant.generation, 0, 0, 0, [0] * 50_000) for grant in full]
                await other.send(Drop([()], named, here.epoch))
                assert await other.receive() == Done(2)
                assert isinstance(await first.receive(), Granted)
                await kept(len(frame))
                await first.send(Abort("first", idle=True))
                assert await first.receive() == Done(0)
                assert isinstance(await second.receive(), Granted)
                async with asyncio.timeout(60):
                    while service.reserving.held:  # noqa: ASYNC110 - what is looked at has no event
                        await asyncio.sleep(0.01)
                assert service.facts()["reserved"] == 2 + service.table.states()["writing"]  # nothing for who is gone
                for one in (first, second, other):
                    one.end()
        assert service.reserving.held == service.requests.held == 0


async def test_of_wide_rows_a_reply_names_no_more_fields_than_may_be() -> None:
    """A4: refs of thousands of fields each: the first ones come, the rest has to ask again."""
    async with hosted(arena_bytes=8 << 20, inline_bytes=4 << 20) as host:
        here = ref_of(host.report())
        names = tuple(f"f{number}" for number in range(2000))
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                wide = Block.from_fields(dict.fromkeys(names, torch.zeros(1, 1)), 1)
                (ref,) = await put_over(connection, here, "op", wide)
        request = Read([names], [SlotRows(ref.slot, ref.generation, 0, 0, 1)] * 500, 1, here.epoch)
        with await host.service.read(request) as (reply, _):
            assert 1 <= sum(len(part.refs) for part in reply.parts) <= (1 << 16) // 2000
            assert {code for _, code, _, _ in reply.errors} == {"DataPlaneNotReady"}


async def test_of_those_who_do_not_wait_for_replies_one_is_served_in_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A6: whatever all of them have sent on, others have their turn of the loop after each single request of theirs."""
    async with hosted() as host:
        here, turn = ref_of(host.report()), 0
        served: list[int] = []
        facts = host.service.facts
        monkeypatch.setattr(host.service, "facts", lambda: (served.append(turn), facts())[1])

        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        counting = asyncio.ensure_future(count())
        with pool_of(per_port=20) as crowd:
            async with AsyncExitStack() as held:
                made = [await held.enter_async_context(crowd.use(LOCAL, here.ports[0])) for _ in range(10)]
                for one in made:
                    one._control._transport.write(pack_frame(Ask()) * 40)
                async with asyncio.timeout(30):
                    while len(served) < 400:  # noqa: ASYNC110 - what is looked at has no event
                        await asyncio.sleep(0)
                for one in made:
                    one.spend()
        counting.cancel()
        assert len(set(served)) >= 400 - 3 * 10  # the last ones of each are not sent on any more


async def test_who_does_not_wait_for_replies_waits_its_turn() -> None:
    """A6: sixty connections that send on without reading: a new client is let in and served meanwhile."""
    async with hosted() as host:
        here = ref_of(host.report())
        with pool_of(per_port=80) as crowd, pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                (ref,) = await put_over(connection, here, "op", rows(1))
            frame = pack_frame(Read([("a",)], [SlotRows(ref.slot, ref.generation, 0, 0, 1)] * 500, 0, here.epoch))
            held = AsyncExitStack()
            made = [await held.enter_async_context(crowd.use(LOCAL, here.ports[0])) for _ in range(20)]
            for one in made:
                one._control._transport.write(frame * 200)
            for _ in range(5):
                with pool_of() as fresh:
                    async with asyncio.timeout(60), fresh.use(LOCAL, here.ports[0]) as late:
                        assert not (await late.read(here, [ref])).errors
            served = host.service.served["reads"]
            assert served < 20 * 200 * 500
            for one in made:
                one.spend()
            await held.aclose()


async def test_an_error_that_many_refs_share_names_a_long_field_briefly() -> None:
    """A field of 4,096 characters that no slot has, asked for 400 times: it took 11 MB of each connection."""
    async with hosted(inline_bytes=0) as host:
        (grant,) = put(host.service.table, "op", rows(1))
        refs = [SlotRows(grant.slot, grant.generation, 0, 0, 1)] * 400
        with await host.service.read(Read([("\U000e0001" * 4096,)], refs, 1, host.arena.epoch)) as (reply, _):
            assert [code for _, code, _, _ in reply.errors] == ["CorruptPayload"] * 400
            assert len(pack_frame(reply)) < 400 * 200


def test_the_text_of_an_error_is_cut_where_it_is_told() -> None:
    """Whatever it names."""
    assert len(describe(DataPlaneBadRequest("x" * 100_000))[1]) <= 1000


async def test_names_of_fields_are_not_kept_with_the_slots_that_they_were_reserved_for() -> None:
    """14 reservations of 4,000 long names took 900 MB beside an arena of 256 MiB."""
    async with hosted() as host:
        names = tuple(f"{at} and so on" for at in range(100))
        before = sys.getrefcount(names[50])
        for at in range(3):
            host.service.table.reserve(f"op{at}", names, [1], 0, 1e12)
        assert sys.getrefcount(names[50]) <= before + 1  # that of a cache of bounded size


async def test_a_payload_of_other_fields_than_were_reserved_is_refused() -> None:
    """Else its readers would hold the host's ports to be ill."""
    async with hosted() as host:
        table = host.service.table
        (grant,) = table.reserve("op", ["b"], [32], 0, 1e12)
        write(table, grant, rows(1))
        slot = table.find(grant.slot, grant.generation)
        assert slot is not None
        with pytest.raises(CorruptPayload, match="other fields than its slot was reserved for") as caught:
            table.seal(slot)
        assert not caught.value.blames_port


async def test_nothing_is_computed_for_a_reply_that_waits_for_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """60 replies that waited took 15 MB each for the lengths of their rows."""
    from asyncdp.transports.ucxx.host import reads

    made: list[int] = []
    monkeypatch.setattr(reads, "gathers", lambda picks, do=reads.gathers: made.append(len(picks)) or do(picks))
    async with hosted(inline_bytes=0, held_bytes=3 << 20) as host:
        (grant,) = put(host.service.table, "op", rows(1, 1 << 19))
        request = Read([("a",)], [SlotRows(grant.slot, grant.generation, 0, 0, 1)], 1, host.arena.epoch)

        async def read() -> int:
            with await host.service.read(request) as (_, payloads):
                return sum(map(len, payloads))

        async with host.service.memory.hold(2 << 20):
            reading = asyncio.ensure_future(read())
            await asyncio.sleep(0.05)
            assert not made
        assert await reading > 2 << 20
        assert made == [1]
        assert host.service.memory.held == 0


async def test_a_reply_that_is_larger_than_estimated_is_counted() -> None:
    """One long row of a slot of short ones: the average says little, the reply is 2 MiB."""
    async with hosted(inline_bytes=0) as host:
        ref = await _ragged(host, [1] * 99 + [2 << 20], fields=1)
        request = Read([("f0",)], [SlotRows(ref.slot, ref.generation, 0, 99, 1)], 1, host.arena.epoch)
        with await host.service.read(request) as (_, payloads):
            assert host.service.memory.held >= sum(map(len, payloads)) > 2 << 20
        assert host.service.memory.held == 0


async def test_a_read_ends_where_its_client_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a client that went away after a long request cost 17 s of the host."""
    monkeypatch.setattr(time_slices, "SLICE_S", 0.0)
    async with hosted(inline_bytes=0) as host:
        (grant,) = put(host.service.table, "op", rows(1))
        refs = [SlotRows(grant.slot, grant.generation, 0, 0, 1)] * 1000
        begun = host.service.table.begin_read
        attempts: list[Any] = []
        monkeypatch.setattr(host.service.table, "begin_read", lambda *args: attempts.append(args) or begun(*args))
        with pytest.raises(ConnectionResetError, match="gone"):
            await host.service.read(Read([("a",)], refs, 1, host.arena.epoch), gone=lambda: len(attempts) > 9)
        assert len(attempts) == 10
        assert host.service.table.counts()["reading"] == 0
