"""The slots of one host: FREE -> WRITING -> READY -> FREE.

Reading is not a state but a set of read attempts, each finished exactly once; a slot whose rows all died while it is
read is freed when its last reader finishes. One that a process on this machine borrows (see ``borrows.py``) is doomed:
READY without live rows, until a look finds that nobody borrows it. A transition from an unexpected state changes
nothing and logs a warning. A WRITING slot is freed only when its writer can no longer write: a lane writer has recorded
its end or its process is dead; for a remote writer, the host's own receive has ended. A slot is never freed because
time passed or a connection broke, since a write may be slow; an aborted one is only marked as GIVEN_UP.

Only the host's thread calls this code; lane readers see its changes of the arena at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

import structlog

from asyncdp.errors import CorruptPayload

from ..payload.payload import Payload
from .extents import Extents
from .header import (
    Outcome,
    State,
    digest_of,
    is_leased,
    read_outcome,
    read_state,
    write_state,
)
from .slot import Grant, Slot

if TYPE_CHECKING:
    from .arena import Arena

__all__ = ["SlotStore", "hash_of_names"]

#: Most bytes of the layouts that slots keep; those of rows that differ in length grow with the number of rows.
MOST_LAYOUT_BYTES: Final = 64 << 20


def hash_of_names(names: Iterable[str]) -> int:
    """Return a hash of the names of fields, in any order; kept in place of them, since they may be long."""
    return hash(frozenset(names))


class SlotStore:
    """The slots in use, and the transitions between their states.

    Args:
        arena: Arena that holds the slots.
        on_free: Called whenever space was freed.
    """

    def __init__(self, arena: Arena, on_free: Callable[[], None]) -> None:
        """Start with all slots FREE."""
        self.arena = arena
        self.extents = Extents(arena.units)
        self.slots: dict[int, Slot] = {}
        self.overwritten = 0
        self._on_free = on_free
        #: Slots of each put, in the order of their reservation.
        self._by_op: dict[bytes, dict[Slot, None]] = {}
        self._states: Counter[State] = Counter()
        self._read: set[Slot] = set()
        self._attempts = 0
        #: Puts whose later requests are refused, by the digest of their op_id, with the time of the refusal.
        self._refused: dict[bytes, float] = {}
        #: Slots that would be free if nobody borrowed them.
        self.doomed: dict[Slot, None] = {}
        #: Slots that were leased ahead, as far as is known not in use yet; with who got the lease, and when.
        self.leased: dict[Slot, tuple[object, float]] = {}
        #: Units of the slots that each client has reserved and not written yet.
        self.unwritten: dict[str, int] = {}
        #: Estimated bytes of the layouts that slots keep.
        self.layout_bytes = 0
        self._kept: dict[Slot, None] = {}
        self._layouts: dict[int, int] = {}
        self._log = structlog.get_logger("asyncdp.ucxx")

    # -- transitions

    def seal(self, slot: Slot, now: float = 0.0) -> bool:
        """Make a WRITING slot READY after checking its payload; return whether it is READY now.

        Raises:
            CorruptPayload: The slot does not hold a payload of the reserved rows and fields.
        """
        if not self._current(slot) or self.state(slot) is not State.WRITING:
            return self._warn("seal", slot)
        self.look(slot)
        self._change(slot, State.READY)
        slot.ready_since = now
        self._discharge(slot)
        return True

    def look(self, slot: Slot) -> Payload:
        """Return a slot's payload with its layout, which is read once and kept.

        Raises:
            CorruptPayload: The slot does not hold a payload of the reserved rows and fields.
        """
        payload = slot.payload
        if payload is None:
            # Beyond what was received lies what others had written there before.
            size = slot.header.capacity if slot.size is None else slot.size
            data = self.arena.slice(self.arena.payload_at(slot.number), size)
            rows, columns = slot.header.rows, slot.header.cols
            payload = Payload.read(data, rows, columns=columns, exact=slot.size is not None)
            if slot.names not in (None, hash_of_names(meta.name for meta in payload.layout.metas)):
                raise CorruptPayload("the payload has other fields than its slot was reserved for", blames_port=False)
            self._keep(slot, payload)
        return payload

    def _keep(self, slot: Slot, payload: Payload) -> None:
        """Keep a slot's payload with its layout; where all layouts take too much memory, read the oldest ones anew."""
        slot.payload = payload
        self._kept[slot] = None
        users = self._layouts.get(id(payload.layout), 0)
        self._layouts[id(payload.layout)] = users + 1  # slots with equal dense columns share one
        self.layout_bytes += 0 if users else payload.layout.kept_bytes
        while self.layout_bytes > MOST_LAYOUT_BYTES:
            self.unlook(next(iter(self._kept)))

    def unlook(self, slot: Slot) -> None:
        """Forget the payload of a slot; it is read anew where it is needed."""
        payload, slot.payload = slot.payload, None
        if payload is None:
            return
        del self._kept[slot]
        users = self._layouts.pop(id(payload.layout)) - 1
        if users:
            self._layouts[id(payload.layout)] = users
        else:
            self.layout_bytes -= payload.layout.kept_bytes

    def apply_outcome(self, slot: Slot, now: float = 0.0) -> State:
        """Apply the outcome that a lane writer recorded in the header, if any; return the state after it."""
        state = self.state(slot)
        if state not in (State.WRITING, State.GIVEN_UP):
            return state
        outcome = read_outcome(self.arena, slot.number, slot.generation)
        if outcome is Outcome.NONE:
            return state
        if state is State.WRITING and outcome is Outcome.WRITTEN:
            try:
                self.seal(slot, now)
            except CorruptPayload as err:
                self._log.warning("a lane writer left no payload", slot=slot.number, why=str(err))
            else:
                return State.READY
        self._free(slot)
        return State.FREE

    def restore(self, slot: Slot) -> bool:
        """Add a slot of a previous incarnation of the host; return False where its extent is in use already."""
        if not self.extents.take_at(slot.number, slot.header.units):
            return False
        self._add(slot)
        return True

    def _add(self, slot: Slot) -> None:
        self.slots[slot.number] = slot
        self._by_op.setdefault(slot.header.op, {})[slot] = None
        self._count(slot, self.state(slot))

    def _count(self, slot: Slot, state: State) -> None:
        self._states[slot.counted] -= 1
        self._states[state] += 1
        slot.counted = state

    def _change(self, slot: Slot, state: State) -> None:
        """Set the state of a slot in use."""
        self.leased.pop(slot, None)
        write_state(self.arena, slot.number, state, slot.generation)
        self._count(slot, state)

    def _charge(self, slot: Slot, owner: str) -> None:
        if owner:
            slot.owner = owner
            self.unwritten[owner] = self.unwritten.get(owner, 0) + slot.header.units

    def _discharge(self, slot: Slot) -> None:
        if slot.owner:
            left = self.unwritten.pop(slot.owner) - slot.header.units
            if left:
                self.unwritten[slot.owner] = left
            slot.owner = ""

    def _free(self, slot: Slot) -> bool:
        """Free a slot, or doom it as long as somebody borrows it; return whether it is free."""
        if not self._current(slot):
            return self._warn("free", slot)
        # The rows die before the look, so that nobody borrows them after it.
        slot.kill(self.arena)
        if self.arena.is_borrowed(slot.number, slot.header.units):
            self._doom(slot)
            return False
        # The state is written first, so that a lane reader in the middle of a copy sees it before the space is reused.
        self._change(slot, State.FREE)
        self._read.discard(slot)
        del self.slots[slot.number]
        self.unlook(slot)
        self.doomed.pop(slot, None)
        self._leave_put(slot)
        self.extents.give(slot.number, slot.header.units)
        self._on_free()
        return True

    def _doom(self, slot: Slot) -> None:
        self.doomed[slot] = None
        self._leave_put(slot)
        self._change(slot, State.READY)

    def _leave_put(self, slot: Slot) -> None:
        """Forget which put, and which client, reserved a slot."""
        self._discharge(slot)
        of_op = self._by_op.get(slot.header.op, {})
        of_op.pop(slot, None)
        if not of_op:
            self._by_op.pop(slot.header.op, None)

    def _current(self, slot: Slot) -> bool:
        return self.slots.get(slot.number) is slot

    def _warn(self, what: str, slot: Slot) -> bool:
        state, generation = read_state(self.arena, slot.number)
        self._log.warning(
            f"{what} of a slot in an unexpected state changes nothing",
            slot=slot.number,
            generation=slot.generation,
            state=state.name,
            current=generation,
        )
        return False

    def _writer_gone(self, slot: Slot) -> bool:
        writer = slot.header.writer
        return not slot.receiving if writer is None else not writer.is_alive()

    # -- queries

    def find(self, number: int, generation: int) -> Slot | None:
        """Return the slot if it is in use with exactly this generation, else None."""
        slot = self.slots.get(number)
        return slot if slot is not None and slot.generation == generation else None

    def state(self, slot: Slot) -> State:
        """Return the state of a slot in use."""
        return read_state(self.arena, slot.number)[0]

    @property
    def free_bytes(self) -> int:
        """Free space of the arena, in bytes."""
        return self.extents.free_units * self.arena.unit_bytes

    def of_op(self, op_id: str) -> list[Slot]:
        """Return the slots that a put reserved, in the order of their reservation."""
        return list(self._by_op.get(digest_of(op_id), ()))

    def counts(self) -> dict[str, int]:
        """Return the numbers of slots by state and of those being read, the free bytes, and the overwritten slots."""
        return {"doomed": 0, **self.states(), "free_bytes": self.free_bytes, "overwritten": self.overwritten}

    def states(self) -> dict[str, int]:
        """Return the numbers of slots by state and of those being read; each heartbeat carries them.

        ``doomed`` ones, where there are any, have no rows, and somebody borrowed them when they were looked at last.
        ``leased`` ones, where there are any, are for puts to come, and not counted as being written.
        """
        out = {state.name.lower(): self._states[state] for state in State if state is not State.FREE}
        out["reading"] = len(self._read)
        idle = sum(is_leased(self.arena, slot.number, slot.generation) for slot in self.leased)
        if idle:
            out |= {"leased": idle, "writing": out["writing"] - idle}
        return {**out, "doomed": len(self.doomed)} if self.doomed else out

    def _grant(self, slot: Slot) -> Grant:
        header = slot.header
        at = self.arena.payload_at(slot.number)
        return Grant(slot.number, slot.generation, header.rows, header.first_row, at, header.capacity)
