"""Holes in the slot hosts that no case of the catalogue names, each with the guard that closes it."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import torch

from asyncdp.errors import CorruptPayload, DataPlaneBadRequest, DataPlaneNotReady, DataPlaneUnavailable, StaleSlotError
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE, Block
from asyncdp.transports.ucxx.client import host_client as access_module
from asyncdp.transports.ucxx.client.host_client import HostClient, Route
from asyncdp.transports.ucxx.host.recovery import recover_slots
from asyncdp.transports.ucxx.payload.layout import bound
from asyncdp.transports.ucxx.slots.arena import Arena, arena_name
from asyncdp.transports.ucxx.slots.header import Outcome, read_dead, write_outcome
from asyncdp.transports.ucxx.slots.slot_split import cut
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.slots.writer_process import Process, this_machine
from asyncdp.transports.ucxx.wire.messages import Read, Reserve, Rows, SlotRows, WireError, unpack_body
from tests.ucxx import segments
from tests.ucxx.clients import get, value
from tests.ucxx.clients import put as to_host
from tests.ucxx.hosts import hosted, pool_of, put_over, ref_of
from tests.ucxx.segments import put, rows, write
from tests.ucxx.test_host import Known

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio
A = ("a",)
LOCAL = "127.0.0.1"


# -- epochs


async def test_a_plane_that_lost_its_data_gives_no_epoch_out_again(
    server: EmbeddedServer, connect: Callable[..., Directory]
) -> None:
    """S9: else slot 0 in generation 1 of the new life would be taken for that of the old one, and read as such."""
    first, other = connect(), connect(namespace="another")
    before = await first.next_epoch("host-0")
    for key in await first._link.command("KEYS", f"{first._settings.namespace}:*"):
        await first._link.command("DEL", key)
    assert await first.next_epoch("host-0") > before
    # Nor do two planes whose hosts have the same names: a client that maps the wrong arena sees that it is.
    assert await other.next_epoch("host-0") != before


# -- overwriting


def test_a_put_that_cannot_fit_overwrites_nothing(arena: Arena) -> None:
    """Neither where it is larger than the arena, nor where what is being written or read leaves too little."""
    table = SlotTable(arena, max_slot_bytes=1 << 19, overwrite_oldest=True)
    old = [put(table, f"op{at}", rows(1))[0] for at in range(8)]
    with pytest.raises(DataPlaneNotReady):
        table.reserve("large", A, [400_000] * 4, 0, 100.0)
    table.reserve("busy", A, [400_000], 0, 100.0)
    with pytest.raises(DataPlaneNotReady):
        table.reserve("two", A, [400_000, 400_000], 0, 100.0)
    with pytest.raises(DataPlaneNotReady):  # as many bytes would be free, but not in one piece
        table.reserve("one", A, [520_000], 0, 100.0)
    assert table.overwritten == 0
    assert all(table.find(grant.slot, grant.generation) for grant in old)
    table.reserve("fits", A, [440_000, 110_000], 0, 100.0)
    assert 0 < table.overwritten < 8


def test_what_a_lane_writer_has_finished_may_be_overwritten_at_once(arena: Arena) -> None:
    """Also before the host has taken note of it: a lane that is faster than the host's look still finds room."""
    table = SlotTable(arena, max_slot_bytes=1 << 19, overwrite_oldest=True)
    for at in range(arena.units):
        (grant,) = table.reserve(f"op{at}", A, [32], 0, 100.0, Process(os.getpid(), 1))
        write(table, grant, rows(1))
        write_outcome(arena, grant.slot, grant.generation, Outcome.WRITTEN)
    assert table.reserve("new", A, [32], 0, 100.0)
    assert table.overwritten == 1


# -- adoption


def test_rows_that_were_being_marked_dead_when_the_host_was_killed_stay_dead() -> None:
    """The count of dead rows is made anew: killed between marking and counting, a host would serve them again."""
    with segments.arena() as arena:
        table = SlotTable(arena, max_slot_bytes=1 << 19)
        (grant,) = put(table, "op", rows(3))
        slot = table.find(grant.slot, grant.generation)
        assert slot is not None
        slot.live(arena)[1] = 0  # and here it was killed
        assert read_dead(arena, grant.slot) == 0
        arena.close()
        again = Arena.recover(arena.name, "h")
        assert again is not None
        served = SlotTable(again, max_slot_bytes=1 << 19)
        assert recover_slots(served)["kept"] == 1
        assert isinstance(served.begin_read(grant.slot, grant.generation, A, range(3)), StaleSlotError)
        assert not isinstance(served.begin_read(grant.slot, grant.generation, A, [0, 2]), Exception)
        again.close()


def test_a_slot_whose_payload_is_torn_is_adopted_and_says_so() -> None:
    """A header of the slot that is right over a payload that is not: CorruptPayload for its readers, nobody else's."""
    with segments.arena() as arena:
        table = SlotTable(arena, max_slot_bytes=1 << 19)
        (torn,), (good,) = put(table, "torn", rows(1)), put(table, "good", rows(1))
        arena.slice(torn.at, 40)[34] ^= 1
        arena.close()
        again = Arena.recover(arena.name, "h")
        assert again is not None
        served = SlotTable(again, max_slot_bytes=1 << 19)
        assert recover_slots(served) == {"kept": 2, "freed": 0, "damaged": 0}
        assert isinstance(served.begin_read(torn.slot, torn.generation, A, [0]), CorruptPayload)
        assert not isinstance(served.begin_read(good.slot, good.generation, A, [0]), Exception)
        assert served.drop(torn.slot, torn.generation, range(1))
        assert served.find(torn.slot, torn.generation) is None
        again.close()


# -- the lane


async def test_there_is_no_lane_where_the_processor_reorders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The two looks of a lane reader hold what lies between them only where loads and stores keep their order."""
    async with hosted() as host:
        report = host.report()
        here, route = ref_of(report), Route(report.address, report.boot_id, report.arena)
        for machine, there in (("aarch64", False), ("x86_64", True)):
            monkeypatch.setattr(access_module.os, "uname", lambda machine=machine: SimpleNamespace(machine=machine))
            with pool_of() as pool:
                host_client = HostClient(pool, PICKLE, BufferPool())
                assert (host_client.lane_of(here, route) is not None) == there
                await host_client.close()


def mappings_of(name: str) -> int:
    """How often this process has a segment mapped."""
    return Path("/proc/self/maps").read_text().count(name)


async def test_the_memory_of_an_arena_that_was_given_up_is_let_go() -> None:
    """A client that outlives many lives of a host maps the arena of the latest only."""
    name, host_id = segments.fresh_name(), "h"
    machine = this_machine()
    with pool_of() as pool:
        host_client = HostClient(pool, PICKLE, BufferPool())
        for epoch in (1, 2, 3):
            Arena.discard(name)
            made = Arena.create(name, host_id, epoch=epoch, data_bytes=1 << 16)
            here = ref_of({"id": host_id, "epoch": epoch, "ports": ()})
            assert host_client.lane_of(here, Route(LOCAL, machine.boot_id, name)) is not None
            made.close()
            del made
        assert len(host_client._lanes) == 1
        # That of the third life alone: its maker's mapping is gone with `made`.
        assert mappings_of(name) == 1
        await host_client.close()
    Arena.discard(name)


async def test_a_writer_that_the_host_cannot_see_gets_no_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could not be proved dead later, or would be taken for dead while it copies: it sends to the host instead."""
    async with hosted() as host:
        here = ref_of(host.report())
        told = {}
        for name, process in (("unseen", Process(2**22 + 7, 1)), ("seen", None)):
            with monkeypatch.context() as patch, pool_of() as pool:
                if process is not None:
                    patch.setattr(
                        "asyncdp.transports.ucxx.client.connection.this_process", lambda process=process: process
                    )
                async with pool.use(LOCAL, here.ports[0]) as connection:
                    granted = await connection.reserve(here, name, A, [32], 0, ttl_s=5.0, wait_s=0.0, lane=True)
                told[name] = granted.lane
        assert told == {"unseen": False, "seen": True}


# -- the clock


async def test_a_step_of_the_machine_s_clock_takes_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What may still be published is told by the directory's clock, whatever happens to this machine's in between."""
    known = Known()
    async with hosted(known, beat_s=600.0) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                await put_over(connection, here, "op", rows(1))
            real = time.time
            monkeypatch.setattr(time, "time", lambda: real() + 86400.0)
            assert await host.reconcile() == 0
            assert host.service.facts()["ready"] == 1
            assert abs(host.clock() - known.now) < 60.0


# -- the wire


async def test_spans_that_are_no_number_are_no_request() -> None:
    """NaN is below and above nothing: a slot that it protects would be kept for ever."""
    fields = {"op_id": "op", "fields": A, "sizes": [1], "first_row": 0, "lane": False, "epoch": 1}
    for ttl_s, wait_s in ((float("nan"), 0.0), (1.0, float("nan")), (float("inf"), 0.0), (-1.0, 0.0)):
        with pytest.raises(WireError):
            unpack_body(msgspec.msgpack.encode(Reserve(**fields, ttl_s=ttl_s, wait_s=wait_s)))  # type: ignore[arg-type]


async def ask(connection: Any, refs: list[SlotRows], epoch: int) -> Rows:
    """Read, whatever the rows are."""
    rows_: Rows = await connection.request(connection._ask(Read([A], refs, 0, epoch), Rows))
    return rows_


async def test_rows_that_are_not_there_are_an_error_of_their_slot_alone() -> None:
    """Beyond the last row, none at all, or one a million times: the connection and the other slots are good."""
    async with hosted(max_reply_bytes=1 << 20, inline_bytes=1 << 22) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                (ref,) = await put_over(connection, here, "op", rows(3, width=1 << 16))
                (fine,) = await put_over(connection, here, "fine", rows(1))
                await connection.drop(here, [(ref.slot, ref.generation, [0], ())])
                good = SlotRows(fine.slot, fine.generation, 0, 0, 1)
                for index, code in (([1, 7], "StaleSlotError"), ([1] * 5000, "DataPlaneBadRequest"), ([], None)):
                    bad = SlotRows(ref.slot, ref.generation, 0, 0, 0, index)
                    reply = await ask(connection, [bad, good], here.epoch)
                    assert [(at, what) for at, what, *_ in reply.errors] == ([(0, code)] if code else [])
                    assert [at for part in reply.parts for at in part.refs][-1] == 1
                assert host.service.facts()["reading"] == 0


def test_a_request_has_fewer_messages_than_tags() -> None:
    """Tags of one request that reached into those of the next would let its messages be taken for theirs."""
    from asyncdp.transports.ucxx.wire import engine
    from asyncdp.transports.ucxx.wire import messages as wire

    slot = len(msgspec.msgpack.encode(SlotRows(0, 0, 0, 0, 0)))
    assert wire.BODY_BYTES / slot < engine._TAGS_PER_REQUEST


# -- the arena


def test_the_arena_of_another_user_is_an_error_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two users, one machine, the same names: said with what to change, not as a bare PermissionError."""

    def refused(name: str, flags: int) -> int:
        raise PermissionError(errno.EACCES, "Permission denied", name)

    monkeypatch.setattr("asyncdp.transports.ucxx.slots.arena._open", refused)
    name = arena_name("host-0")
    for work in (
        lambda: Arena.recover(name, "host-0"),
        lambda: Arena.discard(name),
        lambda: Arena.create(name, "host-0", epoch=1, data_bytes=1 << 16),
    ):
        with pytest.raises(
            DataPlaneUnavailable, match="that another user put there is for that user, or root, to remove"
        ):
            work()
    assert Arena.attach(name, "host-0", 1) is None


@pytest.mark.parametrize("over", [0, 1])
async def test_the_largest_payload_to_the_byte(over: int) -> None:
    """A row of just the largest size is stored and read; one byte more is refused, before anything is sent."""
    largest = 1 << 20
    width = largest - bound(A, [0]) + over
    block = Block.from_fields({"a": torch.arange(width).to(torch.uint8)[None]}, 1)
    async with hosted(max_slot_bytes=largest, inline_bytes=largest) as host:
        here = ref_of(host.report())
        with pool_of() as pool:
            if over:
                with pytest.raises(DataPlaneBadRequest, match="larger than the largest slot"):
                    await to_host(pool, here, "op", block)
            else:
                refs = await to_host(pool, here, "op", block)
                assert torch.equal(value(await get(pool, here, refs)), value(block))


@pytest.mark.parametrize("rows_per_slot", [None, 2])
def test_no_slot_is_larger_than_the_largest_and_none_is_empty(rows_per_slot: int | None) -> None:
    """However rows of about the largest size follow each other: each lies in one slot, once."""
    largest = 1 << 16
    edge = largest - bound(A, [0])
    for sizes in ([edge] * 3, [edge, 0, edge - 64, 8, edge], [edge // 2] * 5, [edge // 2 + 1] * 4, [0] * 9):
        shares = cut(A, sizes, largest, rows_per_slot)
        assert [row for first, stop, _ in shares for row in range(first, stop)] == list(range(len(sizes)))
        assert all(first < stop and capacity <= largest for first, stop, capacity in shares)
        assert all(capacity == bound(A, sizes[first:stop]) for first, stop, capacity in shares)


async def test_a_host_of_the_same_epoch_at_the_old_one_s_door_is_another_one() -> None:
    """S9: slots are numbered alike everywhere, and epochs may be alike too: who answers has to be who is meant."""
    async with hosted(Known()) as one, hosted(Known()) as two:
        assert one.arena.epoch == two.arena.epoch
        here, there = ref_of(one.report()), ref_of(two.report())
        with pool_of() as pool:
            host_client = HostClient(pool, PICKLE, BufferPool(), lane=False)
            async with pool.use(LOCAL, there.ports[0]) as connection:
                (ref,) = await put_over(connection, there, "op", rows(1))
            asked = type(here)(here.id, here.epoch, there.ports)
            for work in (
                lambda: host_client.read(asked, Route(LOCAL), [ref]),
                lambda: host_client.drop(asked, Route(LOCAL), [(ref.slot, ref.generation, [0], ())]),
                lambda: host_client.reserve(asked, Route(LOCAL), "other", A, [32], 0, ttl_s=1.0),
                lambda: host_client.abort(asked, Route(LOCAL), "op"),
            ):
                with pytest.raises(StaleSlotError, match="answers where slot host"):
                    await work()
            assert two.service.facts()["ready"] == 1
            await host_client.close()
