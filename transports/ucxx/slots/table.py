"""The operations of a host on its slots that clients request: reserve, write, abort, read, clear."""

from __future__ import annotations

from collections.abc import Callable, Container, Generator, Iterator, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import TYPE_CHECKING, Final, Literal

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneWriteError,
    StaleSlotError,
)

from .arena import PAGE
from .extents import size_class
from .header import (
    Generations,
    Header,
    State,
    digest_of,
    lease,
    read_state,
    revoke,
    write_state,
)
from .slot import Grant, ReadAttempt, Slot
from .slot_split import Split, cut, refuse_too_large
from .store import SlotStore, hash_of_names

if TYPE_CHECKING:
    from ..payload.payload import Payload
    from .arena import Arena
    from .writer_process import Process

__all__ = ["OnFull", "SlotTable"]

#: What a put does where the arena is full: ``wait`` for space until its deadline, ``raise`` at once, or
#: ``overwrite_oldest``: free slots that are not being read, oldest first; later reads of them are StaleSlotError.
OnFull = Literal["wait", "raise", "overwrite_oldest"]
#: Most puts whose later requests are refused; beyond that the earliest refusal is forgotten. 20 MB.
_MOST_REFUSED: Final = 1 << 17


class SlotTable(SlotStore):
    """The table of the slots of one arena.

    Args:
        arena: Arena that holds the slots: a new one, or an adopted one (then call :func:`recover_slots` first).
        max_slot_bytes: Largest payload in bytes: puts are split into slots of this size; a larger row is refused.
        rows_per_slot: Most rows of one put that share a slot; None: as many as fit.
        overwrite_oldest: Whether old rows are overwritten by newer ones when the arena is full.
        on_free: Called whenever space was freed.
    """

    def __init__(
        self,
        arena: Arena,
        *,
        max_slot_bytes: int,
        rows_per_slot: int | None = None,
        overwrite_oldest: bool = False,
        on_free: Callable[[], None] = lambda: None,
    ) -> None:
        """Start with all slots FREE."""
        super().__init__(arena, on_free)
        # A row larger than the whole arena will never fit, so it is an error and no reason to wait for space.
        self.max_slot_bytes = min(max_slot_bytes, arena.units * arena.unit_bytes - PAGE)
        self.rows_per_slot = rows_per_slot
        self.overwrite_oldest = overwrite_oldest
        self._refused: dict[bytes, float] = {}
        self._attempts = 0
        self._generations = Generations()

    # -- writing

    def reserve(
        self,
        op_id: str,
        fields: Sequence[str],
        sizes: Sequence[int],
        first_row: int,
        not_after: float,
        writer: Process | None = None,
    ) -> list[Grant]:
        """Reserve slots for rows of a put, all or none; the same op_id and first row get the same slots again.

        Args:
            op_id: Id of the put.
            fields: Field names, in the order of the payload's columns.
            sizes: Data bytes of each row.
            first_row: Position in the put of the first of these rows.
            not_after: Unix seconds, by the directory's clock, after which the put can no longer publish.
            writer: Process that will copy into the slots over the lane; None: the host receives the payloads.

        Raises:
            DataPlaneNotReady: There is no space; nothing was reserved.
            DataPlaneBadRequest: A row is larger than the largest slot.
            DataPlaneWriteError: The put was aborted.
        """
        steps = self.reserve_in_steps(op_id, fields, sizes, first_row, not_after, writer)
        return next(grants for grants in steps if grants is not None)

    def reserve_in_steps(
        self,
        op_id: str,
        fields: Sequence[str],
        sizes: Sequence[int],
        first_row: int,
        not_after: float,
        writer: Process | None = None,
        *,
        split: Split | None = None,
        admit: Callable[[int], None] = lambda _: None,
        owner: str = "",
    ) -> Generator[list[Grant] | None, None, None]:
        """Reserve like :meth:`reserve`, one slot per step: yield None after each slot, and the grants at the end.

        A generator that is closed early frees its slots. ``split`` is the split of the rows into slots, where it was
        computed already, or known to be in vain for want of space. ``admit`` is called with the total number of units
        before any is allocated, and raises where this client, ``owner``, may not have them; they count in
        ``unwritten`` of it.
        """
        op = digest_of(op_id)
        again = yield from self._reserved(op, first_row, len(sizes))
        self._refuse_given_up(op)
        if again:
            yield again
            return
        taken: list[Slot] = []
        grants: list[Grant] = []
        try:
            for slot in self._take_all(op, fields, sizes, first_row, not_after, writer, split, admit):
                if slot is not None:
                    taken.append(slot)
                    self._charge(slot, owner)
                    grants.append(self._grant(slot))
                yield None
                self._refuse_given_up(op)
        except BaseException:
            for other in taken:
                if self._current(other):
                    self._free(other)
            raise
        yield grants

    def _take_all(
        self,
        op: bytes,
        fields: Sequence[str],
        sizes: Sequence[int],
        first_row: int,
        not_after: float,
        writer: Process | None,
        split: Split | None,
        admit: Callable[[int], None],
    ) -> Iterator[Slot | None]:
        """Take the slots of a put: yield each, and None after each other step."""
        shares, units, total = self.split(fields, sizes) if split is None else split
        if total > self.extents.free_units:
            self.revoke()
        if not shares or (total > self.extents.free_units and not self.overwrite_oldest):
            raise self._full(total)
        admit(total)
        names = hash_of_names(fields)
        oldest: Iterator[Slot] | None = None
        for at, (start, stop, capacity) in enumerate(shares):
            header = Header(units[at], stop - start, len(fields), writer, op, not_after, first_row + start, capacity)
            slot = self._take(names, header)
            if slot is None and self.revoke():
                slot = self._take(names, header)
            if slot is None and oldest is None:
                oldest = iter((yield from self._slots_to_overwrite(units[at:])) if self.overwrite_oldest else ())
                slot = self._take(names, header)  # some space may have come back meanwhile
            while slot is None and oldest is not None and self._overwrite(oldest):
                slot = self._take(names, header)
            if slot is None:
                raise self._full(total)
            yield slot

    def lease(
        self,
        op_ids: Sequence[str],
        fields: Sequence[str],
        sizes: Sequence[int],
        not_after: float,
        writer: Process,
        *,
        owner: str = "",
        holder: object = None,
        now: float = 0.0,
        most_units: int = 0,
    ) -> list[Grant]:
        """Reserve slots for puts to come, of as many rows and of the same fields and about the same size, one for each.

        A leased slot is reserved like any other, in the name of its writer, until :meth:`revoke` takes it back, which
        it does where its writer has not begun to use it. There are fewer leases where slots have to share with others:
        all leases take at most an eighth of the arena, and leave a quarter of it free.

        Args:
            op_ids: Ids by which the reservations can be aborted; one slot for each, at the most.
            fields: Names of the fields.
            sizes: Data bytes of each row; rows that take several slots get no lease.
            not_after: As in :meth:`reserve`.
            writer: The process that may begin to use the slots.
            owner: As in :meth:`reserve_in_steps`.
            holder: Who gets the leases, for :meth:`revoke`.
            now: When, in seconds of the host's clock, for :meth:`revoke`.
            most_units: Most units of unwritten slots of this owner.
        """
        (share, *more), _, _ = self.split(fields, sizes)
        # Rows that differ in length do not add up to the same size again.
        units = self._units(len(sizes), len(fields), share.capacity + share.capacity // 16)
        capacity = (units * self.arena.unit_bytes - 64 - len(sizes) * len(fields)) // 64 * 64
        taken = sum(slot.header.units for slot in self.leased)
        room = min(
            self.arena.units // 8 - taken,
            self.extents.free_units - self.arena.units // 4,
            most_units - self.unwritten.get(owner, 0),
        )
        grants: list[Grant] = []
        for op_id in () if more else op_ids[: max(0, room // units)]:
            header = Header(units, len(sizes), len(fields), writer, digest_of(op_id), not_after, 0, capacity)
            slot = self._take(hash_of_names(fields), header)
            if slot is None:
                break
            lease(self.arena, slot.number, slot.generation)
            self.leased[slot] = holder, now
            self._charge(slot, owner)
            grants.append(self._grant(slot))
        return grants

    def revoke(self, *, holder: object = None, owner: str | None = None, before: float = float("inf")) -> int:
        """Free leased slots that their writers have not begun to use; return how many.

        Args:
            holder: Who got the leases; None: anybody.
            owner: Client that they were reserved for; None: any.
            before: Only leases that were given before this time.
        """
        freed = 0
        for slot, (by, at) in list(self.leased.items()):
            if at < before and holder in (None, by) and owner in (None, slot.owner):
                del self.leased[slot]
                freed += revoke(self.arena, slot.number, slot.generation) and self._free(slot)
        return freed

    def split(self, fields: Sequence[str], sizes: Sequence[int]) -> Split:
        """Split the rows of a put into slots; for any thread.

        Raises:
            DataPlaneBadRequest: A row is larger than the largest slot.
        """
        shares = cut(fields, sizes, self.max_slot_bytes, self.rows_per_slot)
        units = [self._units(stop - start, len(fields), capacity) for start, stop, capacity in shares]
        return Split(shares, units, sum(units))

    def least_units(self, fields: Sequence[str], sizes: Sequence[int]) -> int:
        """Return a lower bound of the units that rows take, without splitting them.

        Raises:
            DataPlaneBadRequest: A row is larger than the largest slot.
        """
        refuse_too_large(fields, sizes, self.max_slot_bytes)
        return -(-sum(sizes) // self.arena.unit_bytes)

    def _full(self, units: int) -> DataPlaneNotReady:
        needed = units * self.arena.unit_bytes
        msg = f"the arena is full: {self.free_bytes} bytes are free, {needed} are needed"
        if self.doomed:
            held = sum(slot.header.units for slot in self.doomed) * self.arena.unit_bytes
            msg += f"; {held} are of rows that were removed and are still borrowed on the host's machine"
        return DataPlaneNotReady(msg, retry_after_s=0.05)

    def _reserved(self, op: bytes, first_row: int, rows: int) -> Generator[None, None, list[Grant]]:
        """Return the grants of an earlier, identical request, empty where there was none; one slot per step."""
        share: list[Grant] = []
        for slot in list(self._by_op.get(op, ())):
            if self._current(slot) and first_row <= slot.header.first_row < first_row + rows:
                share.append(self._grant(slot))
            yield None
        return sorted(share, key=attrgetter("first_row"))

    def _units(self, rows: int, cols: int, capacity: int) -> int:
        """Return the units of a slot: its payload, followed by one live byte per row and field."""
        return size_class(-(-(64 + -(-capacity // 64) * 64 + rows * cols) // self.arena.unit_bytes))

    def _take(self, names: int, header: Header) -> Slot | None:
        arena = self.arena
        number = self.extents.take(header.units)
        if number is None:
            return None
        generation = self._generations.after(read_state(arena, number)[1])
        slot = Slot(number, generation, header, names=names)
        header.write(arena, number, generation)
        slot.live(arena)[:] = 1
        # Old content of this memory must not be taken for the payload of this generation.
        arena.slice(arena.payload_at(number), 32)[:] = 0
        write_state(arena, number, State.WRITING, generation)
        self._add(slot)
        return slot

    def _slots_to_overwrite(self, sizes: Sequence[int]) -> Generator[None, None, list[Slot]]:
        """Return the slots to overwrite, oldest first, to get extents of these sizes; empty where even all do not do.

        The search works on a copy of the free extents, so a put that cannot fit overwrites nothing. One slot per step.
        """
        trial, chosen = self.extents.copy(), []
        left = iter(list(self.slots.values()))
        for units in sizes:
            while trial.take(units) is None:
                slot = next(left, None)
                if slot is None:
                    return []
                if self._may_be_overwritten(slot):
                    trial.give(slot.number, slot.header.units)
                    chosen.append(slot)
                yield None
        return chosen

    def _may_be_overwritten(self, slot: Slot) -> bool:
        if not self._current(slot) or slot.readers or self.apply_outcome(slot) is not State.READY:
            return False
        return not self.arena.is_borrowed(slot.number, slot.header.units)

    def _overwrite(self, oldest: Iterator[Slot]) -> bool:
        """Free the next slot that may still be overwritten, and count it; return False where there is none."""
        slot = next(filter(self._may_be_overwritten, oldest), None)
        if slot is None:
            return False
        self.overwritten += 1
        return self._free(slot)

    def _refuse_given_up(self, op: bytes) -> None:
        if op in self._refused:
            raise DataPlaneWriteError("this write was given up and is refused")

    def writable(self, number: int, generation: int, op_id: str) -> Slot:
        """Return a slot that the host may receive into for this put.

        Raises:
            DataPlaneNotReady: An earlier attempt of the same write has not ended yet.
            DataPlaneWriteError: The slot is not, or no longer, reserved for this put.
        """
        op = digest_of(op_id)
        self._refuse_given_up(op)
        slot = self.find(number, generation)
        if slot is None or slot.header.op != op or self.state(slot) is not State.WRITING:
            raise DataPlaneWriteError(f"slot {number} is not reserved for this write any more")
        if slot.receiving:
            raise DataPlaneNotReady(f"slot {number} is still being received into", retry_after_s=0.02)
        return slot

    def is_written(self, number: int, generation: int, op_id: str) -> bool:
        """Return whether an earlier attempt of this write has made the slot READY."""
        op = digest_of(op_id)
        slot = self.find(number, generation)
        return (
            slot is not None
            and slot.header.op == op
            and op not in self._refused
            and slot not in self.doomed
            and self.apply_outcome(slot) is State.READY
        )

    def refuse(self, op_id: str, now: float) -> None:
        """Refuse all later requests of a put; ``now`` is the time of the refusal, for :meth:`forget`."""
        op = digest_of(op_id)
        self._refused.pop(op, None)
        self._refused[op] = now
        if len(self._refused) > _MOST_REFUSED:
            del self._refused[next(iter(self._refused))]

    def abort(self, op_id: str, now: float, *, idle: bool = False, keep: Container[tuple[int, int]] = ()) -> int:
        """Free the slots that a put reserved, and refuse later requests of it.

        Args:
            op_id: Id of the put.
            now: Time of the refusal, for :meth:`forget`.
            idle: Whether the writer itself has reported that it copies no row of the put.
            keep: (slot, generation) of slots that are published, according to the directory.

        Returns:
            The number of slots that stay occupied for now, because they are still being written or read.
        """
        return sum(self.abort_in_steps(op_id, now, idle=idle, keep=keep))

    def abort_in_steps(
        self, op_id: str, now: float, *, idle: bool = False, keep: Container[tuple[int, int]] = ()
    ) -> Iterator[bool]:
        """Abort like :meth:`abort`, one slot per step: yield whether it stays occupied."""
        self.refuse(op_id, now)
        for slot in self.of_op(op_id):
            if not self._current(slot) or (slot.number, slot.generation) in keep:
                yield False
                continue
            state = self.apply_outcome(slot)
            if state in (State.WRITING, State.GIVEN_UP) and (slot.receiving or not (idle or self._writer_gone(slot))):
                self._change(slot, State.GIVEN_UP)
                yield True
            elif state is State.READY and slot.readers:
                self.drop(slot.number, slot.generation, range(slot.header.rows))
                yield True
            elif state is not State.FREE:
                yield not self._free(slot)

    def received(self, slot: Slot) -> None:
        """Mark that the host's own receive into a slot has ended, successfully or not; free an aborted slot."""
        slot.receiving = False
        if self._current(slot) and self.state(slot) is State.GIVEN_UP:
            self._free(slot)

    def sweep(self, now: float) -> int:
        """Free slots whose writer is dead, or (where the host receives) whose put expired; return how many.

        Doomed slots that nobody borrows any more are freed too.
        """
        return sum(self.sweep_in_steps(now))

    def sweep_in_steps(self, now: float) -> Iterator[bool]:
        """Sweep like :meth:`sweep`, one slot per step: yield whether it was freed."""
        for slot in list(self.doomed):
            yield self._current(slot) and not slot.readers and self._free(slot)
        for slot in list(self.slots.values()):
            if not self._current(slot) or self.state(slot) not in (State.WRITING, State.GIVEN_UP):
                yield False
                continue
            state = self.apply_outcome(slot, now)
            late = slot.header.writer is not None or state is State.GIVEN_UP or slot.header.not_after < now
            gone = state in (State.WRITING, State.GIVEN_UP) and late and self._writer_gone(slot)
            yield gone and self._free(slot)

    def forget(self, before: float) -> None:
        """Forget refusals from before this time."""
        while self._refused and next(iter(self._refused.values())) < before:
            del self._refused[next(iter(self._refused))]

    # -- reading

    def begin_read(
        self, number: int, generation: int, fields: Sequence[str], index: Sequence[int]
    ) -> ReadAttempt | DataPlaneError:
        """Begin a read attempt, or return the error that prevents it. A slot may have many readers at a time."""
        slot = self.find(number, generation)
        state = State.FREE if slot is None else self.apply_outcome(slot)
        if slot is None or state in (State.FREE, State.GIVEN_UP):
            return StaleSlotError(f"slot {number} no longer holds the requested data")
        if state is State.WRITING:
            return DataPlaneNotReady(f"slot {number} is still being written", retry_after_s=0.01)
        try:
            self.look(slot)
        except CorruptPayload as err:
            return err
        if not slot.holds(self.arena, fields, index):
            return StaleSlotError(f"slot {number} does not hold these rows any more")
        self._attempts += 1
        slot.readers.add(self._attempts)
        self._read.add(slot)
        return ReadAttempt(number, generation, self._attempts)

    def payload(self, attempt: ReadAttempt, fields: Sequence[str], index: Sequence[int]) -> Payload | DataPlaneError:
        """Return the payload that an attempt reads if the rows are live."""
        slot = self.find(attempt.slot, attempt.generation)
        if slot is None:
            return StaleSlotError(f"slot {attempt.slot} was cleared while it was read")
        try:
            payload = self.look(slot)
        except CorruptPayload as err:
            return err
        if not slot.holds(self.arena, fields, index):
            return StaleSlotError(f"slot {attempt.slot} was cleared while it was read")
        return payload

    def cleared(self, attempt: ReadAttempt, fields: Sequence[str], index: Sequence[int]) -> StaleSlotError | None:
        """Return the error of an attempt of which rows died during the copy; None where all are live."""
        payload = self.payload(attempt, fields, index)
        return payload if isinstance(payload, StaleSlotError) else None

    def finish_read(self, attempt: ReadAttempt) -> bool:
        """End a read attempt; a second time, or after the slot was reused, change nothing and log a warning."""
        slot = self.find(attempt.slot, attempt.generation)
        if slot is None or attempt.number not in slot.readers:
            self._log.warning("late finish of a read changes nothing", slot=attempt.slot, generation=attempt.generation)
            return False
        slot.readers.discard(attempt.number)
        if not slot.readers:
            self._read.discard(slot)
        if not slot.readers and self.state(slot) is State.READY and not slot.live(self.arena).any():
            self._free(slot)
        return True

    # -- clearing

    def drop(self, number: int, generation: int, index: Sequence[int], fields: Sequence[str] | None = None) -> bool:
        """End the life of rows, or of some of their fields; a slot without live rows is freed after its last reader.

        Returns whether the slot was READY with this generation; a repeated call, or one after the slot was reused,
        changes nothing.
        """
        return any([*self.drop_in_steps(number, generation, index, fields)])

    def drop_in_steps(
        self, number: int, generation: int, index: Sequence[int], fields: Sequence[str] | None = None
    ) -> Iterator[bool]:
        """Drop like :meth:`drop`, in steps of bounded work: yield True at the end where the slot was found."""
        slot = self.find(number, generation)
        if slot is None or self.apply_outcome(slot) is not State.READY:
            return
        self._look_safely(slot)
        for _ in slot.kill_in_steps(self.arena, index, fields):
            yield False
            if not self._current(slot):  # another request ended the life of the last rows meanwhile
                yield True
                return
        if slot.all_dead(self.arena) and not slot.readers:
            self._free(slot)
        yield True

    def _look_safely(self, slot: Slot) -> None:
        with suppress(CorruptPayload):
            self.look(slot)
