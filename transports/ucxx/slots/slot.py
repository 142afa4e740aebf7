"""The state that a host keeps of one slot in use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .header import Header, read_dead, write_dead

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    import numpy as np
    import numpy.typing as npt

    from ..payload.payload import Payload
    from .arena import Arena

__all__ = ["Grant", "ReadAttempt", "Slot", "live_at"]


@dataclass(frozen=True, slots=True)
class Grant:
    """A reserved slot, as reported to its writer.

    Attributes:
        slot, generation: Number and generation of the slot.
        rows, first_row: Number of rows of the put that it takes, and position of the first one in the put.
        at: Offset of the payload in the segment, in bytes.
        capacity: Bytes for the payload.
    """

    slot: int
    generation: int
    rows: int
    first_row: int
    at: int
    capacity: int


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """One read of one slot by one reader; it has to be finished exactly once."""

    slot: int
    generation: int
    number: int


@dataclass(slots=True, eq=False)
class Slot:
    """A slot that is not FREE.

    Attributes:
        number, generation, header: Number and generation of the slot, and what it was reserved for.
        payload: The payload with its layout; None until it was read.
        size: Bytes of the payload that the host itself received; None: a lane writer copied it, or an earlier host.
        readers: Numbers of the read attempts that have not finished.
        receiving: Whether the host itself is receiving into the slot.
        ready_since: When the slot became READY, in seconds of the host's clock.
        fields: Column numbers by field name.
        owner: The client that reserved it; "" once it is written.
    """

    number: int
    generation: int
    header: Header
    payload: Payload | None = None
    size: int | None = None
    readers: set[int] = field(default_factory=set)
    receiving: bool = False
    ready_since: float = 0.0
    fields: dict[str, int] = field(default_factory=dict)
    owner: str = ""

    def live(self, arena: Arena) -> npt.NDArray[np.uint8]:
        """Return the live bytes, one per row and field, shape ``(rows, cols)``: 1 for live, 0 for dead."""
        begin = live_at(arena, self.number, self.header.capacity)
        rows, cols = self.header.rows, self.header.cols
        return arena.slice(begin, rows * cols).reshape(rows, cols)

    def holds(self, arena: Arena, fields: Sequence[str], index: Sequence[int]) -> bool:
        """Return whether all these rows and fields are still live."""
        if not read_dead(arena, self.number):
            return True
        if isinstance(index, range):
            live = self.live(arena)[index.start : index.stop]
        else:
            live = self.live(arena)[[row for row in index if 0 <= row < self.header.rows]]
        if len(live) != len(index):
            return False
        return bool(live[:, [self.fields[name] for name in fields if name in self.fields]].all())

    def any_live(self, arena: Arena, rows: Collection[int]) -> bool:
        """Return whether any field of any of these rows is still live."""
        return bool(self.live(arena)[sorted(rows)].any())

    def kill(self, arena: Arena, index: Sequence[int], fields: Sequence[str] | None) -> bool:
        """End the life of rows, or of some of their fields; return whether all of the slot is dead now."""
        live = self.live(arena)
        if isinstance(index, range) and index.step == 1:  # a client may name a very long range
            index = range(max(0, index.start), min(index.stop, self.header.rows))
            which: slice | list[int] = slice(index.start, max(index.start, index.stop))
        else:
            which = [row for row in index if 0 <= row < self.header.rows]
        if fields is None:
            live[which] = 0
        else:
            for at in {self.fields[name] for name in fields if name in self.fields}:
                live[which, at] = 0
        dead = live.size - int(live.sum())
        write_dead(arena, self.number, dead)
        return dead == live.size


def live_at(arena: Arena, slot: int, capacity: int) -> int:
    """Return the offset in the segment of a slot's live bytes, which follow its payload."""
    return arena.payload_at(slot) + -(-capacity // 64) * 64
