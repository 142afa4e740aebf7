"""One slot in use, as its host knows it."""

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
    """A reserved slot, as its writer is told.

    Attributes:
        slot, generation: Which one.
        rows, first_row: How many rows of the put go there, and which is the first.
        at: Where in the segment the payload goes, in bytes.
        capacity: Bytes for it.
    """

    slot: int
    generation: int
    rows: int
    first_row: int
    at: int
    capacity: int


@dataclass(frozen=True, slots=True)
class ReadAttempt:
    """One reader of one slot; finished exactly once."""

    slot: int
    generation: int
    number: int


@dataclass(slots=True, eq=False)
class Slot:
    """What a host remembers of a slot that is not FREE.

    Attributes:
        number, generation, header: Which one, and what it was reserved for.
        payload: Where its rows lie, once they were looked at.
        readers: Read attempts under way.
        receiving: Whether the host itself is receiving into it.
        ready_since: When it became READY, by the host's clock.
        fields: Column numbers by field name, once the payload was looked at.
    """

    number: int
    generation: int
    header: Header
    payload: Payload | None = None
    readers: set[int] = field(default_factory=set)
    receiving: bool = False
    ready_since: float = 0.0
    fields: dict[str, int] = field(default_factory=dict)

    def live(self, arena: Arena) -> npt.NDArray[np.uint8]:
        """One byte per row and field, shape ``(rows, cols)``: 1 where it is somebody's content."""
        begin = live_at(arena, self.number, self.header.capacity)
        rows, cols = self.header.rows, self.header.cols
        return arena.slice(begin, rows * cols).reshape(rows, cols)

    def holds(self, arena: Arena, fields: Sequence[str], index: Sequence[int]) -> bool:
        """Whether all these rows and fields are still somebody's content."""
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
        """Whether any of these rows is still marked as somebody's content."""
        return bool(self.live(arena)[sorted(rows)].any())

    def kill(self, arena: Arena, index: Sequence[int], fields: Sequence[str] | None) -> bool:
        """End the life of rows, or of some of their fields. Whether nothing lives in the slot any more."""
        live = self.live(arena)
        if isinstance(index, range) and index.step == 1:  # as long as the wire says, which may be very long
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
    """Where the live bytes of a slot begin: behind its payload."""
    return arena.payload_at(slot) + -(-capacity // 64) * 64
