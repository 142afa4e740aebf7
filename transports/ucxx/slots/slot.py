"""The state that a host keeps of one slot in use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from .header import Header, State, read_dead, write_dead

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    import numpy.typing as npt

    from ..payload.payload import Payload
    from .arena import Arena

__all__ = ["Grant", "ReadAttempt", "Slot", "live_at"]

#: Cells of a slot, and rows named one by one, that one step looks at (0.2 ms).
_CELLS_AT_ONCE: Final = 1 << 16
_NAMED_AT_ONCE: Final = 4096


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
        names: Hash of the names of the fields that it was reserved for; None where an earlier host reserved it.
        owner: The client that reserved it; "" once it is written.
        counted: State as which the store counts it. The word in the arena can be changed by lane writers.
    """

    number: int
    generation: int
    header: Header
    payload: Payload | None = None
    size: int | None = None
    readers: set[int] = field(default_factory=set)
    receiving: bool = False
    ready_since: float = 0.0
    names: int | None = None
    owner: str = ""
    counted: State = State.FREE

    def live(self, arena: Arena) -> npt.NDArray[np.uint8]:
        """Return the live bytes, one per row and field, shape ``(rows, cols)``: 1 for live, 0 for dead."""
        begin = live_at(arena, self.number, self.header.capacity)
        rows, cols = self.header.rows, self.header.cols
        return arena.slice(begin, rows * cols).reshape(rows, cols)

    def holds(self, arena: Arena, fields: Sequence[str], index: Sequence[int]) -> bool:
        """Return whether all these rows and fields are still live."""
        if not read_dead(arena, self.number):
            return True
        live, columns = self.live(arena), self._columns(fields)
        if isinstance(index, range):
            live = live[index.start : index.stop]
            whole = len(live) == len(index)
            return whole and bool((live if len(columns) == self.header.cols else live[:, columns]).all())
        rows = self._inside(index)
        return len(rows) == len(index) and bool(live[np.ix_(rows, columns)].all())

    def _columns(self, fields: Sequence[str]) -> npt.NDArray[np.int64]:
        """Return the numbers of those of these columns that the slot has; none where its payload was not read."""
        metas = () if self.payload is None else self.payload.layout.metas
        numbers = {meta.name: at for at, meta in enumerate(metas)}
        return np.asarray([numbers[name] for name in fields if name in numbers], np.int64)

    def _inside(self, index: Sequence[int]) -> npt.NDArray[np.int64]:
        """Return those of these row numbers that the slot has."""
        rows = np.asarray(index, np.int64)
        return rows[(rows >= 0) & (rows < self.header.rows)]

    def any_live(self, arena: Arena, rows: Collection[int]) -> bool:
        """Return whether any field of any of these rows is still live."""
        return bool(self.live(arena)[sorted(rows)].any())

    def kill(self, arena: Arena) -> None:
        """End the life of all rows."""
        if not self.all_dead(arena):
            live = self.live(arena)
            live[:] = 0
            write_dead(arena, self.number, live.size)

    def kill_in_steps(self, arena: Arena, index: Sequence[int], fields: Sequence[str] | None) -> Iterator[None]:
        """End the life of rows, or of some of their fields, in steps of bounded work; yield after each step.

        A caller that lets others run between two steps has to stop where the slot is not in use any more.
        """
        live = self.live(arena)
        columns = None if fields is None else self._columns(fields)
        first, stop, mask = 0, self.header.rows, None
        if isinstance(index, range) and index.step == 1:  # a client may name a very long range
            first, stop = max(first, index.start), min(stop, index.stop)
            if columns is None and stop - first == self.header.rows and live.size <= _CELLS_AT_ONCE:  # most often
                live[:] = 0
                write_dead(arena, self.number, live.size)
                yield
                return
        else:
            mask = np.zeros(stop, np.bool_)
            for begin in range(0, len(index), _NAMED_AT_ONCE):
                rows = self._inside(index[begin : begin + _NAMED_AT_ONCE])
                mask[rows] = True
                if len(index) > _NAMED_AT_ONCE:
                    yield
                else:
                    first, stop = (int(rows.min()), int(rows.max()) + 1) if len(rows) else (0, 0)
        step = max(1, _CELLS_AT_ONCE // max(1, self.header.cols))
        for begin in range(first, stop, step):
            end = min(begin + step, stop)
            part = live[begin:end]
            before = np.count_nonzero(part)
            rows = np.arange(end - begin) if mask is None else mask[begin:end].nonzero()[0]
            if columns is None:
                part[rows] = 0
            else:
                part[np.ix_(rows, columns)] = 0
            write_dead(arena, self.number, read_dead(arena, self.number) + int(before - np.count_nonzero(part)))
            yield

    def all_dead(self, arena: Arena) -> bool:
        """Return whether no cell of the slot is live."""
        return read_dead(arena, self.number) >= self.header.rows * self.header.cols


def live_at(arena: Arena, slot: int, capacity: int) -> int:
    """Return the offset in the segment of a slot's live bytes, which follow its payload."""
    return arena.payload_at(slot) + -(-capacity // 64) * 64
