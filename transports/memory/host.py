"""A slot host in memory: slots with generations, read attempts, ports, epochs.

The states of a slot are FREE -> WRITING -> READY -> FREE. Reading is not a state: a slot has a set of read attempts,
each of which is finished exactly once. A slot whose rows were all removed while it is being read is freed when its last
reader ends. A transition from an unexpected state changes nothing and warns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from asyncdp.calls.slots import HostRef, SlotRef
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, DataPlaneUnavailable, DataPlaneWriteError, StaleSlotError
from asyncdp.log_line import log_line

if TYPE_CHECKING:
    from asyncdp.rows.block import Block
    from asyncdp.transports.directory.rows import Cell

__all__ = ["Host", "ReadAttempt", "Slot", "State", "Use"]

#: Generations wrap around at this value, as they do on transports that store them in a machine word.
GENERATIONS = 1 << 32


class State(Enum):
    """State of a slot."""

    FREE = "free"
    WRITING = "writing"
    READY = "ready"


@dataclass(slots=True, eq=False)
class Slot:
    """A slot and its content.

    Attributes:
        number, generation: Number of the slot on its host, and the count of its uses.
        state: Its state, see :class:`State`.
        op_id: Id of the put that reserved it.
        not_after: Time, by the plane's clock, at which an unpublished reservation may be reclaimed.
        first_row: Position of its first row in the put.
        size: Number of rows.
        block: Payload; None until it is written.
        live: Indexes of the rows that the directory still refers to.
        replaced: (row, field) pairs that a later put replaced.
        readers: Read attempts in progress.
        schemas: Cached schema hash by requested set of fields.
    """

    number: int
    generation: int = 0
    state: State = State.FREE
    op_id: str = ""
    not_after: float = 0.0
    first_row: int = 0
    size: int = 0
    block: Block | None = None
    live: set[int] = field(default_factory=set)
    replaced: set[tuple[int, str]] = field(default_factory=set)
    readers: set[int] = field(default_factory=set)
    schemas: dict[tuple[str, ...], int] = field(default_factory=dict)

    def holds(self, ref: SlotRef) -> bool:
        """Whether the directory still refers to all rows and fields of a ref."""
        if not self.live.issuperset(ref.index):
            return False
        return not self.replaced or not any((i, name) in self.replaced for i in ref.index for name in ref.fields)


@dataclass(slots=True, eq=False)
class Use:
    """One use of a slot, from its publish to the removal of its last row; the directory's cells have it as place."""

    host: Host
    epoch: int
    slot: Slot
    generation: int

    @property
    def home(self) -> tuple[str, int]:
        """Host and epoch that hold it."""
        return self.host.id, self.epoch

    @property
    def lasts(self) -> bool:
        """Whether the slot is still in this use and its host in the same epoch."""
        slot = self.slot
        return self.epoch == self.host.ref.epoch and slot.generation == self.generation and slot.state is State.READY


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """One read attempt on one slot."""

    slot: Slot
    generation: int
    number: int


class Host:
    """A simulated slot host: slots that are accessible through N interchangeable ports.

    Args:
        host_id: Id of the host.
        ports: Port numbers.
        slots: Number of slots; None: no limit.
        rows_per_slot: Maximum number of rows of a put in one slot; None: all rows share one.
    """

    def __init__(self, host_id: str, ports: tuple[int, ...], slots: int | None, rows_per_slot: int | None) -> None:
        """Start up and empty, in epoch 1."""
        self.id = host_id
        self.up = True
        self.limit = slots
        self.rows_per_slot = rows_per_slot
        self.slots: list[Slot] = []
        self.rows = 0
        self.free: deque[Slot] = deque()
        self.ref = HostRef(host_id, 1, ports)
        self.dead_ports: set[int] = set()
        self.reserved: dict[tuple[str, int], tuple[SlotRef, ...]] = {}
        self.refused: dict[str, float] = {}
        self._attempts = 0

    # -- connectivity

    def answer(self, port: int | None) -> None:
        """Raise the error that a client would see at this port, if any."""
        if not self.up:
            msg = "connection refused: the slot host is down"
            raise DataPlaneUnavailable(msg, host=self.id, port=port)
        if port is not None and (port in self.dead_ports or port not in self.ref.ports):
            msg = "connection refused: nobody listens at this port"
            raise DataPlaneUnavailable(msg, host=self.id, port=port)

    def crash(self) -> None:
        """Stop answering, as after a crash."""
        self.up = False

    def restart(self, *, adopt: bool) -> None:
        """Answer again: with the slots recovered (``adopt``), or empty and in a new epoch."""
        self.up = True
        if adopt:
            return
        self.ref = HostRef(self.id, self.ref.epoch + 1, self.ref.ports)
        self.slots = []
        self.rows = 0
        self.free.clear()
        self.reserved.clear()

    # -- writing

    def room(self, now: float) -> int | None:
        """Return how many rows still fit; None: no limit."""
        if self.limit is None:
            return None
        self.sweep(now)
        free = len(self.free) + self.limit - len(self.slots)
        return free * self.rows_per_slot if self.rows_per_slot else free and 1 << 62

    def reserve(
        self, op_id: str, fields: tuple[str, ...], rows: int, first_row: int, not_after: float, now: float
    ) -> tuple[SlotRef, ...]:
        """Reserve slots for rows; a repeated op_id returns the same slots."""
        self._refuse_given_up(op_id)
        known = self.reserved.get((op_id, first_row))
        if known is not None:
            return known
        self.sweep(now)
        per_slot = self.rows_per_slot or rows
        needed = -(-rows // per_slot)
        if self.limit is not None and needed > len(self.free) + self.limit - len(self.slots):
            msg = (
                f"host {self.id!r} has {len(self.free) + self.limit - len(self.slots)} free slots, {needed} are needed"
            )
            raise DataPlaneNotReady(msg, host=self.id, retry_after_s=0.05)
        refs = []
        for start in range(0, rows, per_slot):
            slot = self._take()
            size = min(per_slot, rows - start)
            slot.state, slot.op_id, slot.not_after = State.WRITING, op_id, not_after
            slot.first_row, slot.size = first_row + start, size
            positions = range(first_row + start, first_row + start + size)
            refs.append(SlotRef(self.ref, slot.number, slot.generation, fields, range(size), positions))
        self.reserved[op_id, first_row] = tuple(refs)
        return tuple(refs)

    def _take(self) -> Slot:
        if self.free:
            slot = self.free.popleft()
        else:
            slot = Slot(len(self.slots))
            self.slots.append(slot)
        slot.generation = (slot.generation + 1) % GENERATIONS
        return slot

    def _refuse_given_up(self, op_id: str) -> None:
        if op_id in self.refused:
            msg = "this write was given up and is refused"
            raise DataPlaneWriteError(msg, host=self.id)

    def write(self, op_id: str, refs: Sequence[SlotRef], block: Block) -> None:
        """Write reserved slots; the block holds the rows of all refs, in their order."""
        self._refuse_given_up(op_id)
        slots = [self.slot(ref) for ref in refs]
        for ref, slot in zip(refs, slots, strict=True):
            if slot is None or slot.state is not State.WRITING or slot.op_id != op_id:
                msg = f"slot {ref.slot} is not reserved for this write any more"
                raise DataPlaneWriteError(msg, host=self.id)
        first = 0
        for ref, slot in zip(refs, slots, strict=True):
            assert slot is not None  # noqa: S101 - checked above
            slot.block = block.take(range(first, first + len(ref.rows)))
            slot.schemas.clear()
            first += len(ref.rows)

    def slot(self, ref: SlotRef) -> Slot | None:
        """Return the slot of a ref, or None if the slot has been reused since."""
        if ref.host.epoch != self.ref.epoch or not 0 <= ref.slot < len(self.slots):
            return None
        slot = self.slots[ref.slot]
        return slot if slot.generation == ref.generation and slot.state is not State.FREE else None

    def commit(self, ref: SlotRef) -> Slot:
        """Make a written slot READY."""
        slot = self.slot(ref)
        if slot is None or slot.state is not State.WRITING or slot.block is None:
            msg = f"slot {ref.slot} of host {self.id!r} holds no finished write"
            raise DataPlaneWriteError(msg, host=self.id)
        slot.state = State.READY
        slot.live = set(range(slot.size))
        self.rows += slot.size
        self.reserved.pop((slot.op_id, slot.first_row), None)
        return slot

    def abort(self, op_id: str, now: float) -> None:
        """Free the slots that ``op_id`` reserved and did not publish; its later requests are refused."""
        self.refused[op_id] = now
        for key in [key for key in self.reserved if key[0] == op_id]:
            for ref in self.reserved.pop(key):
                slot = self.slot(ref)
                if slot is not None and slot.state is State.WRITING and slot.op_id == op_id:
                    self._free(slot)

    def sweep(self, now: float) -> None:
        """Reclaim reservations whose writer can neither write nor publish any more."""
        slots = ((op_id, self.slots[refs[0].slot]) for (op_id, _), refs in self.reserved.items())
        for op_id in dict.fromkeys(op_id for op_id, slot in slots if slot.not_after < now):
            self.abort(op_id, now)

    def forget(self, before: float) -> None:
        """Drop records of aborted op_ids that are older than this time."""
        for op_id in [op_id for op_id, since in self.refused.items() if since < before]:
            del self.refused[op_id]

    # -- reading

    def begin_read(self, ref: SlotRef) -> ReadAttempt | DataPlaneError:
        """Begin a read attempt, or return the error that prevents it. A slot may have many readers at once."""
        slot = self.slot(ref)
        if slot is None or slot.state is not State.READY:
            return StaleSlotError(f"slot {ref.slot} no longer holds the requested data", host=self.id)
        if not slot.holds(ref):
            return StaleSlotError(f"slot {ref.slot} does not hold these rows any more", host=self.id)
        self._attempts += 1
        slot.readers.add(self._attempts)
        return ReadAttempt(slot, ref.generation, self._attempts)

    def payload(self, attempt: ReadAttempt, ref: SlotRef) -> tuple[Block, int] | DataPlaneError:
        """Return a copy of the rows of a ref and the hash of their schema; the rows must still be live."""
        slot = attempt.slot
        if slot.generation != attempt.generation or slot.block is None or not slot.holds(ref):
            return StaleSlotError(f"slot {ref.slot} was cleared while it was read", host=self.id)
        block = slot.block.take(ref.index, ref.fields)
        schema = slot.schemas.get(ref.fields)
        if schema is None:
            schema = slot.schemas[ref.fields] = block.schema_hash()
        return block, schema

    def finish_read(self, attempt: ReadAttempt) -> bool:
        """End a read attempt; a second end, or one after the slot was recycled, changes nothing and warns."""
        slot = attempt.slot
        if slot.generation != attempt.generation or attempt.number not in slot.readers:
            log_line("warning", "late finish of a read changes nothing", host=self.id, slot=slot.number)
            return False
        slot.readers.discard(attempt.number)
        if slot.state is State.READY and not slot.live and not slot.readers:
            self._free(slot)
        return True

    # -- clearing

    def replace(self, cell: Cell, names: Sequence[str]) -> None:
        """Mark some fields of a row as replaced while its other fields stay in use."""
        if cell.place.lasts:
            cell.place.slot.replaced.update((cell.index, name) for name in names)

    def kill(self, cell: Cell) -> None:
        """Remove a row; its slot is freed after the last of its rows, or when the last reader ends."""
        if not cell.place.lasts:
            return
        slot = cell.place.slot
        if cell.index in slot.live:
            slot.live.discard(cell.index)
            self.rows -= 1
        if not slot.live and not slot.readers:
            self._free(slot)

    def _free(self, slot: Slot) -> None:
        slot.state, slot.block, slot.op_id = State.FREE, None, ""
        slot.live, slot.replaced, slot.readers = set(), set(), set()
        slot.schemas.clear()
        self.free.append(slot)

    def counts(self) -> dict[str, int]:
        """Return the number of slots by state, and the number being read."""
        out = {state.value: 0 for state in State}
        for slot in self.slots:
            out[slot.state.value] += 1
        out["reading"] = sum(bool(slot.readers) for slot in self.slots)
        return out


def least_loaded(hosts: Iterable[Host]) -> list[Host]:
    """Return the hosts that are up, those with the fewest rows first."""
    return sorted((h for h in hosts if h.up), key=lambda h: h.rows)
