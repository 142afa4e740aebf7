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

from .allocation import SlotAllocation
from .header import State, digest_of
from .slot import Grant, ReadAttempt, Slot

if TYPE_CHECKING:
    from ..payload.payload import Payload
    from .slot_split import Split
    from .writer_process import Process

__all__ = ["OnFull", "SlotTable"]

#: What a put does where the arena is full: ``wait`` for space until its deadline, ``raise`` at once, or
#: ``overwrite_oldest``: free slots that are not being read, oldest first; later reads of them are StaleSlotError.
OnFull = Literal["wait", "raise", "overwrite_oldest"]
#: Most puts whose later requests are refused; beyond that the earliest refusal is forgotten. 20 MB.
_MOST_REFUSED: Final = 1 << 17


class SlotTable(SlotAllocation):
    """The slots of one arena, with all that clients request of them; arguments as of :class:`SlotAllocation`."""

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

    def _reserved(self, op: bytes, first_row: int, rows: int) -> Generator[None, None, list[Grant]]:
        """Return the grants of an earlier, identical request, empty where there was none; one slot per step."""
        share: list[Grant] = []
        for slot in list(self._by_op.get(op, ())):
            if self._current(slot) and first_row <= slot.header.first_row < first_row + rows:
                share.append(self._grant(slot))
            yield None
        return sorted(share, key=attrgetter("first_row"))

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
