import zlib
from collections import Counter
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule
from structlog.testing import capture_logs

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneNotReady,
    DataPlaneWriteError,
    StaleSlotError,
)
from asyncdp.transports.ucxx.slots.arena import WORDS, Arena
from asyncdp.transports.ucxx.slots.extents import Extents, size_class
from asyncdp.transports.ucxx.slots.header import (
    CHECK,
    GENERATIONS,
    Generations,
    Header,
    Outcome,
    State,
    write_outcome,
    write_state,
)
from asyncdp.transports.ucxx.slots.slot import ReadAttempt
from asyncdp.transports.ucxx.slots.table import SlotTable
from asyncdp.transports.ucxx.slots.writer_process import Process, this_process
from tests.ucxx import segments
from tests.ucxx.segments import put, rows, values

DEAD = Process(2**22 + 5, 1)
A = ("a",)


def begin(table: SlotTable, grant: Any, index: Any = range(1)) -> ReadAttempt:
    """Begin a read that has to be possible."""
    attempt = table.begin_read(grant.slot, grant.generation, A, index)
    assert isinstance(attempt, ReadAttempt), attempt
    return attempt


def all_free(table: SlotTable) -> bool:
    """No slot in use, all space in one stretch."""
    return not table.slots and table.extents.largest == table.arena.units and not table._by_op


def test_rows_come_back_from_a_slot(table: SlotTable) -> None:
    """Reserve, write, seal, read."""
    (grant,) = put(table, "op", rows(3, fill=2.5))
    attempt = begin(table, grant, range(3))
    payload = table.payload(attempt, A, range(3))
    assert not isinstance(payload, Exception)
    assert (values(payload) == 2.5).all()
    assert table.finish_read(attempt)
    assert table.counts()["ready"] == 1


def test_a_recycled_slot_is_stale_for_the_old_reference(table: SlotTable) -> None:
    """S1: the newer payload is never given to who holds the old reference."""
    (old,) = put(table, "old", rows(1))
    assert table.drop(old.slot, old.generation, [0])
    (new,) = put(table, "new", rows(1, fill=9.0))
    assert new.slot == old.slot
    assert new.generation != old.generation
    assert isinstance(table.begin_read(old.slot, old.generation, A, [0]), StaleSlotError)
    assert not table.drop(old.slot, old.generation, [0])
    assert table.find(new.slot, new.generation)


def test_a_slot_that_is_being_read_is_not_stale(table: SlotTable) -> None:
    """S2: a reader that stalls keeps nobody else out."""
    (grant,) = put(table, "op", rows(1))
    first, second = begin(table, grant), begin(table, grant)
    assert table.counts()["reading"] == 1
    assert table.finish_read(second)
    assert table.finish_read(first)
    assert table.counts()["reading"] == 0


def test_a_late_finish_changes_nothing_and_warns(table: SlotTable) -> None:
    """S3: finished twice, or after the slot was recycled."""
    (old,) = put(table, "old", rows(1))
    attempt = begin(table, old)
    assert table.finish_read(attempt)
    with capture_logs() as logs:
        assert not table.finish_read(attempt)
    assert [entry["log_level"] for entry in logs] == ["warning"]
    late = begin(table, old)
    table.slots[old.slot].readers.clear()
    table.drop(old.slot, old.generation, [0])
    (new,) = put(table, "new", rows(1))
    reader = begin(table, new)
    with capture_logs() as logs:
        assert not table.finish_read(late)
    assert logs
    assert table.counts() == {**table.counts(), "ready": 1, "reading": 1}
    assert table.finish_read(reader)


def test_a_slot_stuck_in_reading_does_not_block_writers(table: SlotTable) -> None:
    """S4: writers go on with other slots, and the doomed one is freed with its last reader."""
    (stuck,) = put(table, "stuck", rows(1))
    attempt = begin(table, stuck)
    assert table.drop(stuck.slot, stuck.generation, [0])
    for number in range(200):
        (grant,) = put(table, f"op{number}", rows(1))
        assert grant.slot != stuck.slot
        table.drop(grant.slot, grant.generation, [0])
    assert isinstance(table.begin_read(stuck.slot, stuck.generation, A, [0]), StaleSlotError)
    assert isinstance(table.payload(attempt, A, [0]), StaleSlotError)
    assert table.finish_read(attempt)
    assert all_free(table)


def test_generations_wrap(table: SlotTable) -> None:
    """S11: slot 0 at the last generation is a slot like any other."""
    write_state(table.arena, 0, State.FREE, GENERATIONS - 1)
    (grant,) = put(table, "op", rows(1, fill=3.0))
    assert grant.slot == 0
    assert 0 <= grant.generation < GENERATIONS - 1
    attempt = begin(table, grant)
    assert table.finish_read(attempt)
    table.drop(0, grant.generation, [0])
    assert all_free(table)


@pytest.mark.parametrize("generation", [0, 1, (1 << 32) - 1, 1 << 32, GENERATIONS - 1])
def test_any_generation_is_like_any_other(table: SlotTable, monkeypatch: pytest.MonkeyPatch, generation: int) -> None:
    """S11: also those that a release counted up from 0, which its arena may still hold."""
    monkeypatch.setattr(Generations, "after", lambda *_: generation)
    (grant,) = put(table, "op", rows(1, fill=3.0))
    assert grant.generation == generation
    header = Header.read(table.arena, grant.slot, generation)
    assert header is not None
    if generation < 1 << 32:
        before = zlib.crc32(header._packed() + generation.to_bytes(4, "little"))
        assert table.arena.words[grant.slot * WORDS + CHECK] == before
    assert table.finish_read(begin(table, grant))
    assert table.drop(grant.slot, generation, [0])
    assert all_free(table)


def test_the_last_slot_is_like_any_other(arena: Arena) -> None:
    """S11: its payload ends within the segment."""
    table = SlotTable(arena, max_slot_bytes=1 << 19)
    grants = [put(table, f"op{at}", rows(1, fill=float(at)))[0] for at in range(arena.units)]
    assert grants[-1].slot == arena.units - 1
    with pytest.raises(DataPlaneNotReady, match="full"):
        table.reserve("more", A, [32], 0, 1e9)
    for at, grant in enumerate(grants):
        attempt = begin(table, grant)
        payload = table.payload(attempt, A, [0])
        assert not isinstance(payload, Exception)
        assert (values(payload) == at).all()
        table.finish_read(attempt)
        table.drop(grant.slot, grant.generation, [0])
    assert all_free(table)


def test_a_reservation_is_all_or_nothing_and_asked_twice_the_same(arena: Arena) -> None:
    """A put that does not fit takes nothing; a repeated request gets the same slots."""
    table = SlotTable(arena, max_slot_bytes=1 << 17)
    before = table.free_bytes
    with pytest.raises(DataPlaneNotReady) as caught:
        table.reserve("big", A, [100_000] * 20, 0, 1e9)
    assert caught.value.retry_after_s
    assert table.free_bytes == before
    grants = table.reserve("op", A, [100_000] * 3, 5, 1e9)
    assert [(grant.first_row, grant.rows) for grant in grants] == [(5, 1), (6, 1), (7, 1)]
    assert table.reserve("op", A, [100_000] * 3, 5, 1e9) == grants
    assert table.reserve("op", A, [100_000], 8, 1e9) != grants


def test_a_row_larger_than_the_largest_slot_is_refused(table: SlotTable) -> None:
    """By name of the setting, and nothing is reserved."""
    with pytest.raises(DataPlaneBadRequest, match="max_slot_bytes"):
        table.reserve("op", A, [10, 1 << 20], 0, 1e9)
    assert all_free(table)


def test_rows_per_slot_limits_how_many_rows_share_one(arena: Arena) -> None:
    """Sizes, rows and first rows add up."""
    table = SlotTable(arena, max_slot_bytes=1 << 19, rows_per_slot=2)
    grants = put(table, "op", rows(5))
    assert [(grant.first_row, grant.rows) for grant in grants] == [(0, 2), (2, 2), (4, 1)]


def test_rows_die_one_by_one(table: SlotTable) -> None:
    """The slot lives until its last row is dead; a dead row, or a replaced field, is not read."""
    (grant,) = put(table, "op", rows(3))
    table.drop(grant.slot, grant.generation, [1])
    assert isinstance(table.begin_read(grant.slot, grant.generation, A, [0, 1]), StaleSlotError)
    attempt = begin(table, grant, [0, 2])
    table.drop(grant.slot, grant.generation, [2], A)
    assert isinstance(table.payload(attempt, A, [0, 2]), StaleSlotError)
    assert not isinstance(table.payload(attempt, A, [0]), Exception)
    table.finish_read(attempt)
    assert table.counts()["ready"] == 1
    table.drop(grant.slot, grant.generation, [0])
    assert all_free(table)


def test_an_abort_frees_what_was_reserved_and_refuses_the_rest(table: SlotTable) -> None:
    """Written or not; what of the put arrives later is refused; what is published stays."""
    (written,) = put(table, "op", rows(1))
    table.reserve("op", A, [32], 1, 1e9)
    assert table.abort("op", 1.0) == 0
    assert all_free(table)
    with pytest.raises(DataPlaneWriteError, match="given up"):
        table.reserve("op", A, [32], 0, 1e9)
    with pytest.raises(DataPlaneWriteError, match="given up"):
        table.writable(written.slot, written.generation, "op")
    table.forget(2.0)
    table.reserve("op", A, [32], 0, 1e9)
    (published,) = put(table, "other", rows(1))
    table.abort("other", 3.0, keep=[(published.slot, published.generation)])
    assert table.find(published.slot, published.generation)


def test_a_slot_is_never_taken_from_a_writer_that_may_still_write(table: SlotTable) -> None:
    """Not by an abort, not by time: only when the writer says so, or is dead."""
    (grant,) = table.reserve("op", A, [32], 0, 5.0, this_process())
    assert table.sweep(1e12) == 0
    assert table.abort("op", 6.0) == 1
    assert table.sweep(1e12) == 0
    assert table.counts()["given_up"] == 1
    write_outcome(table.arena, grant.slot, grant.generation, Outcome.STOPPED)
    table.sweep(0.0)
    assert all_free(table)
    table.reserve("dead", A, [32], 0, 1e18, DEAD)
    assert table.sweep(0.0) == 1
    table.reserve("idle", A, [32], 0, 1e18, this_process())
    assert table.abort("idle", 6.0, idle=True) == 0
    assert all_free(table)


def test_a_slot_that_the_host_receives_into_is_kept_until_the_receive_ends(table: SlotTable) -> None:
    """However late it is, and though its put was given up meanwhile."""
    (grant,) = table.reserve("op", A, [32], 0, 5.0)
    slot = table.writable(grant.slot, grant.generation, "op")
    slot.receiving = True
    with pytest.raises(DataPlaneNotReady):
        table.writable(grant.slot, grant.generation, "op")
    assert table.sweep(1e12) == 0
    assert table.abort("op", 6.0) == 1
    table.received(slot)
    assert all_free(table)
    table.reserve("late", A, [32], 0, 5.0)
    assert table.sweep(4.0) == 0
    assert table.sweep(6.0) == 1


def test_what_a_lane_writer_finished_is_ready(table: SlotTable) -> None:
    """Its word in the header is enough; a payload that is none costs the slot, with a warning."""
    (grant,) = table.reserve("op", A, [32], 0, 1e18, this_process())
    assert isinstance(table.begin_read(grant.slot, grant.generation, A, [0]), DataPlaneNotReady)
    segments.write(table, grant, rows(1))
    write_outcome(table.arena, grant.slot, grant.generation, Outcome.WRITTEN)
    table.finish_read(begin(table, grant))
    (bad,) = table.reserve("bad", A, [32], 0, 1e18, this_process())
    write_outcome(table.arena, bad.slot, bad.generation, Outcome.WRITTEN)
    with capture_logs() as logs:
        assert isinstance(table.begin_read(bad.slot, bad.generation, A, [0]), StaleSlotError)
    assert logs[0]["log_level"] == "warning"


def test_a_seal_without_a_payload_is_corrupt_and_twice_warns(table: SlotTable) -> None:
    """Nothing becomes READY by mistake."""
    (grant,) = table.reserve("op", A, [32], 0, 1e18)
    slot = table.writable(grant.slot, grant.generation, "op")
    with pytest.raises(CorruptPayload):
        table.seal(slot)
    segments.write(table, grant, rows(1))
    assert table.seal(slot)
    with capture_logs() as logs:
        assert not table.seal(slot)
    assert logs[0]["state"] == "READY"


def test_overwriting_takes_the_oldest_that_nobody_reads(arena: Arena) -> None:
    """Only where asked for; readers of what was overwritten get StaleSlotError."""
    table = SlotTable(arena, max_slot_bytes=1 << 19, overwrite_oldest=True)
    grants = [put(table, f"op{at}", rows(1))[0] for at in range(arena.units)]
    attempt = begin(table, grants[0])
    (new,) = put(table, "new", rows(1))
    assert new.slot == grants[1].slot
    assert isinstance(table.begin_read(grants[1].slot, grants[1].generation, A, [0]), StaleSlotError)
    assert table.finish_read(attempt)
    assert table.overwritten == 1


@pytest.mark.parametrize("units", [*range(1, 40), 100, 1000, 65537])
def test_size_classes_give_little_away(units: int) -> None:
    """Never smaller than asked, at most an eighth more, and a class of itself."""
    size = size_class(units)
    assert units <= size <= units * 1.125 + 1e-9
    assert size_class(size) == size


class Space(RuleBasedStateMachine):
    """Stretches that were taken never overlap, and all space comes back."""

    taken = Bundle("taken")

    @initialize()
    def begin(self) -> None:
        """64 free units."""
        self.extents = Extents(64)
        self.used: dict[int, int] = {}

    @rule(target=taken, units=st.integers(1, 20))
    def take(self, units: int) -> int:
        """Take some."""
        at = self.extents.take(units)
        if at is None:
            assert self.extents.largest < units
            return -1
        self.used[at] = units
        return at

    @rule(at=st.integers(0, 63), units=st.integers(1, 20))
    def take_at(self, at: int, units: int) -> None:
        """Take these."""
        free = all(not (at < b + n and b < at + units) for b, n in self.used.items()) and at + units <= 64
        assert self.extents.take_at(at, units) == free
        if free:
            self.used[at] = units

    @rule(at=consumes(taken))
    def give(self, at: int) -> None:
        """Give some back."""
        if at in self.used:
            self.extents.give(at, self.used.pop(at))

    @invariant()
    def adds_up(self) -> None:
        """Used and free make 64; no overlap; neighbours are joined."""
        if not hasattr(self, "extents"):
            return
        stretches = sorted([*self.used.items(), *self.extents._size.items()])
        at = 0
        for begin, units in stretches:
            assert begin == at
            at += units
        assert at == 64
        free = sorted(self.extents._size.items())
        assert all(b + n < c for (b, n), (c, _) in pairwise(free))
        assert self.extents.free_units == sum(n for _, n in free)


TestSpace = Space.TestCase


class Slots(RuleBasedStateMachine):
    """Any order of transitions: counts are true, no slot serves another's rows, all space comes back."""

    grants = Bundle("grants")
    attempts = Bundle("attempts")

    @initialize()
    def begin(self) -> None:
        """A small arena."""
        self.context = segments.arena(1 << 18)
        self.table = SlotTable(self.context.__enter__(), max_slot_bytes=1 << 16)
        self.count = 0

    @rule(target=grants, n=st.integers(1, 3), width=st.sampled_from([8, 5000]))
    def put(self, n: int, width: int) -> Any:
        """Put rows that carry their number."""
        self.count += 1
        try:
            return self.count, put(self.table, f"op{self.count}", rows(n, width, float(self.count)))[0]
        except DataPlaneNotReady:
            return None

    @rule(target=attempts, grant=grants)
    def read(self, grant: Any) -> Any:
        """Begin a read: what is there is what was put."""
        if grant is None:
            return None
        number, at = grant
        attempt = self.table.begin_read(at.slot, at.generation, A, range(at.rows))
        if isinstance(attempt, Exception):
            assert isinstance(attempt, StaleSlotError)
            return None
        payload = self.table.payload(attempt, A, range(at.rows))
        assert not isinstance(payload, Exception)
        assert (values(payload) == number).all()
        return attempt

    @rule(attempt=consumes(attempts))
    def finish(self, attempt: Any) -> None:
        """End it; the second time it warns."""
        if attempt is not None:
            self.table.finish_read(attempt)

    @rule(grant=grants, row=st.integers(0, 2))
    def drop(self, grant: Any, row: int) -> None:
        """Clear a row, maybe not for the first time."""
        if grant is not None:
            self.table.drop(grant[1].slot, grant[1].generation, [row])

    @rule(grant=grants)
    def abort(self, grant: Any) -> None:
        """Give a put up, maybe not for the first time."""
        if grant is not None:
            self.table.abort(f"op{grant[0]}", 0.0)

    @invariant()
    def adds_up(self) -> None:
        """Space in use is what the slots in use take."""
        if hasattr(self, "table"):
            used = sum(slot.header.units for slot in self.table.slots.values())
            assert used + self.table.extents.free_units == self.table.arena.units

    @invariant()
    def counts_are_those_of_the_slots(self) -> None:
        """The numbers that are kept are those that a walk over all slots finds."""
        if hasattr(self, "table"):
            slots = list(self.table.slots.values())
            found = Counter(self.table.state(slot).name.lower() for slot in slots)
            reading = sum(bool(slot.readers) for slot in slots)
            none = {"writing": 0, "ready": 0, "given_up": 0}
            assert self.table.states() == {**none, **found, "reading": reading}

    def teardown(self) -> None:
        """End all reads and rows: everything is free."""
        if not hasattr(self, "table"):
            return
        for slot in list(self.table.slots.values()):
            slot.readers.clear()
            self.table.drop(slot.number, slot.generation, range(slot.header.rows))
        assert all_free(self.table)
        self.context.__exit__(None, None, None)


TestSlots = Slots.TestCase
