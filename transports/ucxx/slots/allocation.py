"""Allocation of slots: for the rows of a put, by overwriting older rows, and as leases for puts to come."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from asyncdp.errors import DataPlaneNotReady

from .arena import PAGE
from .extents import size_class
from .header import Generations, Header, State, digest_of, lease, read_state, revoke, write_state
from .slot import Grant, Slot
from .slot_split import Split, cut, refuse_too_large
from .store import SlotStore, hash_of_names

if TYPE_CHECKING:
    from .arena import Arena
    from .writer_process import Process

__all__ = ["SlotAllocation"]


class SlotAllocation(SlotStore):
    """Takes slots from the free space of an arena, and gives leased ones back to it.

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
        self._generations = Generations()

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

    def _units(self, rows: int, cols: int, capacity: int) -> int:
        """Return the units of a slot: its payload, followed by one live byte per row and field."""
        return size_class(-(-(64 + -(-capacity // 64) * 64 + rows * cols) // self.arena.unit_bytes))

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

    def _take(self, names: int, header: Header, *, leased: bool = False) -> Slot | None:
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
        if leased:  # before the state, so that a host that is killed in between leaves no slot that nobody frees
            lease(arena, number, generation)
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

    def _full(self, units: int) -> DataPlaneNotReady:
        needed = units * self.arena.unit_bytes
        msg = f"the arena is full: {self.free_bytes} bytes are free, {needed} are needed"
        if self.doomed:
            held = sum(slot.header.units for slot in self.doomed) * self.arena.unit_bytes
            msg += f"; {held} are of rows that were removed and are still borrowed on the host's machine"
        return DataPlaneNotReady(msg, retry_after_s=0.05)

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
            not_after: Unix seconds, after which the put that uses a slot can no longer publish.
            writer: The process that may begin to use the slots.
            owner: Client in whose name they count as unwritten.
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
            slot = self._take(hash_of_names(fields), header, leased=True)
            if slot is None:
                break
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
