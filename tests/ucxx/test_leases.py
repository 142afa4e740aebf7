"""Slots that a host leases ahead: used without a request, and never lost, whoever ends when."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import anyio
import pytest
import torch

from asyncdp.calls.slots import HostRef, Publish, SlotRef, WriteSlots
from asyncdp.errors import DataPlaneNotReady
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE
from asyncdp.transports.ucxx.client import leases as leases_module
from asyncdp.transports.ucxx.client.directory_entry import HostEntry
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.client.leases import STEADY, Leases
from asyncdp.transports.ucxx.host import service as service_module
from asyncdp.transports.ucxx.host.recovery import recover_slots
from asyncdp.transports.ucxx.slots.header import Outcome, State, begin, revoke, write_outcome
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.slots.writer_process import Process, this_process
from asyncdp.transports.ucxx.wire.messages import LEASE_S, Reserve
from tests.ucxx import segments
from tests.ucxx.hosts import hosted
from tests.ucxx.seen_plane import IDS, Seen, seen_plane, states_of
from tests.ucxx.segments import put, rows

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer
    from asyncdp.transports.ucxx.slots.arena import Arena
    from asyncdp.transports.ucxx.slots.slot import Grant

pytestmark = pytest.mark.anyio
A = ("a",)
GONE = Process(2**22 + 5, 1)


def leased(table: SlotTable, count: int = 1, **options: Any) -> list[Grant]:
    """Lease slots for one row of 100 bytes each."""
    whole = {"writer": this_process(), "most_units": table.arena.units, "holder": "me", **options}
    return table.lease([f"op+{at}" for at in range(count)], A, [100], 100.0, **whole)


def units(grants: list[Grant], table: SlotTable) -> int:
    """Return the units of slots that are in use."""
    return sum(table.slots[grant.slot].header.units for grant in grants)


# -- the table


def test_a_lease_that_is_not_in_use_is_taken_back(table: SlotTable) -> None:
    """One that is in use stays until its writer is done; its space counts as used all the while."""
    idle, used = leased(table, 2)
    assert table.states()["leased"] == 2
    assert table.free_bytes == (table.arena.units - units([idle, used], table)) * table.arena.unit_bytes
    assert begin(table.arena, used.slot, used.generation)
    assert table.states() == {"writing": 1, "ready": 0, "given_up": 0, "reading": 0, "leased": 1}
    assert table.revoke() == 1
    assert not begin(table.arena, idle.slot, idle.generation)
    assert table.revoke() == 0
    segments.write(table, used, rows(1))
    write_outcome(table.arena, used.slot, used.generation, Outcome.WRITTEN)
    table.sweep(0.0)
    assert table.state(table.slots[used.slot]) is State.READY


def test_only_those_of_one_holder_or_of_before_a_time(table: SlotTable) -> None:
    """A session that ends takes its own leases along."""
    leased(table, 1, holder="a", now=1.0)
    leased(table, 1, holder="b", now=2.0)
    assert table.revoke(holder="c") == 0
    assert table.revoke(holder="a") == 1
    assert table.revoke(before=2.0) == 0
    assert table.revoke(before=2.1) == 1


class _Words:
    """The words of an arena, of which the other side acts after so many accesses of this one."""

    def __init__(self, arena: Arena, number: int, act: Callable[[], None]) -> None:
        self._words, self._left, self._act = arena.words, number, act

    def _count(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._act()

    def __getitem__(self, at: int) -> int:
        word = self._words[at]
        self._count()
        return word

    def __setitem__(self, at: int, word: int) -> None:
        self._words[at] = word
        self._count()


class _Killed:
    """The words of an arena whose host is killed before so many more stores."""

    class Now(BaseException):
        """It is killed now."""

    def __init__(self, words: Any, left: int) -> None:
        self._words, self._left = words, left

    def __getitem__(self, at: int) -> int:
        word: int = self._words[at]
        return word

    def __setitem__(self, at: int, word: int) -> None:
        self._left -= 1
        if not self._left:
            raise self.Now
        self._words[at] = word


@pytest.mark.parametrize("after", range(1, 4))
@pytest.mark.parametrize("first", ["host", "writer"])
def test_a_lease_is_begun_or_taken_back_and_never_both(table: SlotTable, first: str, after: int) -> None:
    """Whenever the other side acts: one at least sees the other, and the slot is free in the end."""
    (grant,) = leased(table)
    place = grant.slot, grant.generation
    begun, freed = [], []

    def act() -> None:
        """Do what the other side does."""
        if first == "host":
            begun.append(begin(table.arena, *place))
        else:
            freed.append(table.revoke())

    between: Any = SimpleNamespace(words=_Words(table.arena, after, act))
    if first == "host":
        if revoke(between, *place):
            freed.append(1)
            table.revoke()
    else:
        begun.append(begin(between, *place))
    assert not (any(begun) and any(freed))
    if any(begun):
        assert table.find(*place)
        write_outcome(table.arena, *place, Outcome.STOPPED)
    table.sweep(0.0)
    table.revoke()
    assert not table.slots
    assert not table.leased


@pytest.mark.parametrize("after", range(1, 5))
@pytest.mark.parametrize("other", ["put", "lease"])
def test_a_writer_that_is_paused_while_it_begins_harms_nobody(table: SlotTable, other: str, after: int) -> None:
    """Its lease was taken back, and the slot is another writer's by now: what that one said of it stays."""
    (grant,) = leased(table)
    given: list[Grant] = []

    def act() -> None:
        """Give the slot to another writer, which uses it, if it is free."""
        if table.revoke():
            told: Any = {"writer": this_process()}
            given.extend(leased(table) if other == "lease" else table.reserve("other", A, [100], 0, 100.0, **told))
            if other == "lease":
                assert begin(table.arena, given[0].slot, given[0].generation)
            segments.write(table, given[0], rows(1))
            if other == "put":
                write_outcome(table.arena, given[0].slot, given[0].generation, Outcome.WRITTEN)

    paused: Any = SimpleNamespace(words=_Words(table.arena, after, act))
    begun = begin(paused, grant.slot, grant.generation)
    assert not (begun and given)
    for slot in given:
        assert slot.slot == grant.slot
        assert table.revoke() == 0
        if other == "lease":
            write_outcome(table.arena, slot.slot, slot.generation, Outcome.WRITTEN)
        table.sweep(0.0)
        assert table.state(table.slots[slot.slot]) is State.READY


def test_leases_make_room_for_who_needs_it(table: SlotTable) -> None:
    """They take an eighth of the arena at most, leave a quarter free, and a put that needs their space gets it."""
    grants = leased(table, 16)
    assert 0 < units(grants, table) <= table.arena.units // 8
    assert not leased(table, 16)
    row, count = 50_000, 0
    while table.leased:  # they go when the space is needed, and no earlier
        before = table.free_bytes
        table.reserve(f"op{count}", A, [row], 0, 100.0)
        count += 1
    assert before < row
    with pytest.raises(DataPlaneNotReady):
        table.reserve("too large", A, [row] * 4, 0, 100.0)
    assert not leased(table, 1)


async def test_many_rows_get_no_leases() -> None:
    """Their slots take long to set up, and nobody may ever use them."""
    async with hosted() as host:
        for rows_, ahead in ((4096, 2), (4097, 0)):
            request = Reserve("op", A, [1] * rows_, 0, 9.0, 0.0, lane=True, epoch=host.arena.epoch, ahead=2)
            granted = host.service.lease(request, ["op+0", "op+1"], this_process(), "me", None)
            assert len(granted) == ahead
        assert host.service.table.revoke(owner="other") == 0
        assert host.service.table.revoke(owner="me") == 2


def test_the_owner_has_no_more_than_its_share(table: SlotTable) -> None:
    """Leases count as reserved and not written."""
    grants = leased(table, 16, owner="me", most_units=3)
    assert units(grants, table) <= 3
    assert table.unwritten == {"me": units(grants, table)}
    table.revoke()
    assert not table.unwritten


@pytest.mark.parametrize("was", ["begun", "idle"])
def test_leases_of_a_killed_client_are_free_again(table: SlotTable, was: str) -> None:
    """Whether it had begun to use them or not."""
    (grant,) = leased(table, writer=GONE)
    if was == "begun":
        assert begin(table.arena, grant.slot, grant.generation)
        assert not table.revoke()
    table.sweep(0.0)
    assert not table.slots
    assert not table.leased


def test_a_lease_is_aborted_by_its_own_id(table: SlotTable) -> None:
    """Later requests of it are refused; it is not counted as leased any more."""
    (grant,) = leased(table)
    begin(table.arena, grant.slot, grant.generation)
    assert table.abort("op+0", 0.0) == 1  # its writer may still copy
    assert table.states() == {"writing": 0, "ready": 0, "given_up": 1, "reading": 0}
    write_outcome(table.arena, grant.slot, grant.generation, Outcome.STOPPED)
    table.sweep(0.0)
    assert not table.slots


def test_a_host_that_was_started_again_keeps_what_is_in_use(arena: Arena, table: SlotTable) -> None:
    """Leases that were not begun are free: their clients lost the connection that they came over."""
    _, used = leased(table, 2)
    begin(arena, used.slot, used.generation)
    anew = SlotTable(arena, max_slot_bytes=1 << 19)
    assert recover_slots(anew) == {"kept": 1, "freed": 1, "damaged": 0}
    assert list(anew.slots) == [used.slot]
    assert put(anew, "op", rows(1))


def test_a_host_that_is_killed_while_it_leases_or_takes_back_leaves_no_slot_in_use(arena: Arena) -> None:
    """At whichever store: a client that lives on has begun none of these slots, and will begin none."""
    real = arena.words
    for count in itertools.count(1):
        table = SlotTable(arena, max_slot_bytes=1 << 19)
        arena.words = _Killed(real, count)
        try:
            leased(table, 2)
            table.revoke()
        except _Killed.Now:
            arena.words = real
            anew = SlotTable(arena, max_slot_bytes=1 << 19)
            recover_slots(anew)
            assert not anew.slots, count
        else:
            break
        finally:
            arena.words = real


# -- the client


class _Open:
    """A connection that is open until it is told otherwise."""

    ended = False


def _given(table: SlotTable, count: int = 1, ttl_s: float = 30.0) -> tuple[Leases, Lane, HostRef, Any]:
    """Return a client's leases, the lane to their host, and the connection that they came over."""
    lane, host, connection = Lane(table.arena, BufferPool(), PICKLE), HostRef("h", 7, (1,)), _Open()
    made = Leases()
    told: Any = {"op_id": "op", "connection": connection, "sent_at": leases_module.time.monotonic(), "ttl_s": ttl_s}
    made.add(host, A, 1, [(grant.slot, grant.generation) for grant in leased(table, count)], **told)
    return made, lane, host, connection


def test_a_put_gets_a_lease_of_its_kind_only(table: SlotTable) -> None:
    """Not one of another epoch, field, number of rows, or that is too small; the same put gets the same one again."""
    made, lane, host, _ = _given(table)
    assert made.take(lane, HostRef("h", 6, (1,)), "one", A, [100], 0, 9.0) is None
    assert made.take(lane, host, "one", ("b",), [100], 0, 9.0) is None
    assert made.take(lane, host, "one", A, [50, 50], 0, 9.0) is None
    assert made.take(lane, host, "one", A, [1 << 18], 0, 9.0) is None
    taken = made.take(lane, host, "one", A, [100], 3, 9.0)
    assert taken is not None
    assert list(taken[0].rows) == [3]
    assert made.take(lane, host, "one", A, [100], 3, 9.0) == taken
    assert made.take(lane, host, "two", A, [100], 0, 9.0) is None
    assert made.ids(host, "one") == ["op+0"]
    made.done("one")
    assert not made.ids(host, "one")


def test_a_lease_ends_with_its_connection_and_with_time(table: SlotTable, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one begun by a put that may publish later than its slot is kept, or by a forked child."""
    made, lane, host, connection = _given(table)
    connection.ended = True
    assert made.take(lane, host, "one", A, [100], 0, 9.0) is None
    made, lane, host, _ = _given(table)
    assert made.take(lane, host, "one", A, [100], 0, 50.0) is None
    made, lane, host, _ = _given(table)
    began = leases_module.time.monotonic()
    monkeypatch.setattr(leases_module.time, "monotonic", lambda: began + LEASE_S + 0.1)
    assert made.take(lane, host, "one", A, [100], 0, 9.0) is None
    monkeypatch.undo()
    made, lane, host, _ = _given(table)
    lane._pid += 1
    assert made.take(lane, host, "one", A, [100], 0, 9.0) is None
    assert table.revoke() == 4  # none of them was begun


# -- whole puts


@pytest.fixture
async def seen(server: EmbeddedServer, namespace: str, connect: Callable[..., Directory]) -> AsyncIterator[Seen]:
    """Give a plane whose client puts rows of one kind again and again, and has leases."""
    # However slow the machine is, no lease is late.
    with mock.patch.object(leases_module, "LEASE_S", 1000.0), mock.patch.object(service_module, "LEASE_S", 1000.0):
        async with seen_plane(server, namespace, connect, call_timeout_s=60.0) as made:
            for _ in range(STEADY):
                await made.put()
            assert made.states()["leased"] > 0
            yield made


def _refs(seen: Seen) -> Any:
    """Return the leases of the first client."""
    return seen.transport._resolver.leases


async def test_a_steady_put_asks_nothing_but_the_directory(seen: Seen) -> None:
    """The host is not asked for slots, and what is read back is what was put."""
    reserved = seen.host.service.served["reserved"]
    seen.asked.clear()
    for value in range(4):
        await seen.put(value)
        assert (await seen.client.get_samples(IDS, "p", ["x"]))["x"].unique().tolist() == [value]
    assert seen.host.service.served["reserved"] == reserved
    assert seen.asked["publish"] == 4
    assert not seen.asked["place"]
    assert not _refs(seen)._used


async def test_puts_with_unlike_timeouts_share_leases(seen: Seen) -> None:
    """What a put with a short timeout leases ahead serves the next one with a long timeout too."""
    reserved = seen.host.service.served["reserved"]
    for at in range(52):
        await seen.put(timeout_s=(60.0, 3600.0)[at % 2])
    assert seen.host.service.served["reserved"] - reserved == 3


async def test_leases_end_with_the_client(seen: Seen) -> None:
    """Closing the client frees the leased slots that no put has begun to use, before their leases expire."""
    await seen.client.close()
    with anyio.fail_after(30):
        while seen.states() != {"ready": 1}:  # noqa: ASYNC110 - nobody tells
            await anyio.sleep(0.01)


@pytest.mark.parametrize("step", [WriteSlots, Publish])
async def test_a_cancelled_put_frees_its_leased_slot(seen: Seen, step: type) -> None:
    """Before the next put of the client, as a reserved one."""
    execute = seen.transport.execute
    before = dict(seen.states())

    async def stuck(call: Any, ctx: Any) -> Any:
        if isinstance(call, step):
            scope.cancel()
            await anyio.sleep_forever()
        return await execute(call, ctx)

    with anyio.CancelScope() as scope, mock.patch.object(seen.transport, "execute", stuck):
        await seen.put(7.0)
    during = seen.states()
    assert during.get("writing", 0) + during["ready"] == before["ready"] + 1
    assert during["leased"] == before["leased"] - 1
    await seen.put(8.0)
    after = seen.states()
    assert after == {"ready": before["ready"], "leased": after["leased"]}
    assert not _refs(seen)._used


@pytest.mark.parametrize("leases", [True, False])
async def test_a_cancelled_put_frees_its_slot_on_a_host_that_has_left(
    seen: Seen, connect: Callable[..., Directory], namespace: str, *, leases: bool
) -> None:
    """The host, which cannot be told, finds it in shared memory when it is back, though the client lives on."""
    if not leases:
        seen.host.service.table.revoke()
        _refs(seen).clear()
    execute, find = seen.transport.execute, seen.transport._resolver.find
    before = seen.states()["ready"]

    async def stuck(call: Any, ctx: Any) -> Any:
        if isinstance(call, WriteSlots):
            scope.cancel()
            await anyio.sleep_forever()
        return await execute(call, ctx)

    async def found(host: HostRef) -> Any:
        return None if host.id == seen.host.report().id else await find(host)

    with anyio.CancelScope() as scope, mock.patch.object(seen.transport, "execute", stuck):
        await seen.put(7.0)
    assert seen.states()["writing"] == 1
    async with hosted(HostEntry(connect()), plane=namespace) as spare:
        await seen.transport._directory.hosts()
        with mock.patch.object(seen.transport._resolver, "find", found):
            await seen.client.put_samples(["c"], "p", {"x": torch.ones(1, 3)})
        assert states_of(spare) == {"ready": 1}
        assert not seen.states().get("writing")
        assert seen.states()["ready"] == before


async def test_a_host_that_is_gone_is_not_written_to(
    seen: Seen, connect: Callable[..., Directory], namespace: str
) -> None:
    """Though its arena is still mapped, and the directory still lists it: the put goes to another host."""
    async with hosted(HostEntry(connect()), plane=namespace) as spare:
        await seen.transport._directory.hosts()
        for index in range(len(seen.host.report().ports)):
            seen.host.fail_port(index)
        await anyio.sleep(0.01)  # host and client share this loop, which closes the sockets
        await seen.put(5.0)
        assert states_of(spare) == {"ready": 1}
        assert (await seen.client.get_samples(IDS, "p", ["x"]))["x"].unique().tolist() == [5.0]


async def test_a_put_that_needs_the_space_of_leases_gets_it(seen: Seen) -> None:
    """Of another client, on a full host: no lease makes a put fail."""
    table = seen.host.service.table
    async with seen.other() as other:
        size = table.free_bytes // 4 // 2 - 4096
        for name in ("c", "d"):
            await other.put_samples([name], "p", {"x": torch.zeros(1, size // 4)})
    assert seen.states()["ready"] >= 3


def test_refs_of_a_lease_say_that_no_port_took_part() -> None:
    """Else a port that nobody used would count as healthy."""
    ref = SlotRef(HostRef("h", 1, ()), 0, 1, A, range(1), range(1))
    assert leases_module.Leased((ref,)).through_port is False
