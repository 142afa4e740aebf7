"""The header of one slot, in shared memory: what survives the host, and what a lane reader checks.

Sixteen words of 64 bits. Two of them change while the slot is used, each written by one process only: ``STATE`` by the
host, ``DONE`` by the writer. A word is stored in one machine instruction, and x86 keeps stores in order and loads in
order, so a reader that sees the same READY generation before and after its copy has copied that generation.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from typing import TYPE_CHECKING, Final

from .arena import WORDS
from .writer_process import Process

if TYPE_CHECKING:
    from .arena import Arena

__all__ = ["GENERATIONS", "Header", "Outcome", "State", "digest_of", "next_generation", "read_state"]

#: A generation is drawn at random below this, so that who was not told where a row lies cannot name it, to read or to
#: drop it. A reference to an earlier use of a slot is mistaken for one to this use once in so many times.
GENERATIONS: Final = 1 << 52

#: Positions of the words; FIXED begins the eight that belong to one generation, CHECK is their CRC-32.
STATE, DONE, DEAD, FIXED = range(4)
CHECK: Final = FIXED + 8
_FIXED: Final = struct.Struct("<IIIIQ16sdQQ")


class State(IntEnum):
    """What a slot is; 0, since a fresh segment is zeros."""

    FREE = 0
    WRITING = 1
    READY = 2
    #: Given up by its put while its writer may still be copying: freed when the writer is done or dead.
    GIVEN_UP = 3


class Outcome(IntEnum):
    """What the writer says in its word."""

    NONE = 0
    WRITTEN = 1
    STOPPED = 2


def digest_of(op_id: str) -> bytes:
    """Sixteen bytes that stand for an op_id, however long it is."""
    return blake2b(op_id.encode(), digest_size=16).digest()


def next_generation(before: int) -> int:
    """Draw the generation of a slot's next use."""
    return (before + 1 + secrets.randbelow(GENERATIONS - 1)) % GENERATIONS


def _check_of(data: bytes, generation: int) -> int:
    # Of four bytes where it fits them, as generations were counted up once.
    return zlib.crc32(data + generation.to_bytes(4 if generation < 1 << 32 else 8, "little"))


@dataclass(frozen=True, slots=True)
class Header:
    """What a slot was reserved for; fixed for one generation and checksummed with it.

    Attributes:
        units: Length of its stretch.
        rows, cols: Rows and fields.
        writer: Who copies into it, or None where the host itself receives it.
        op: Digest of the op_id.
        not_after: When a put that has not published can do so no more, by the directory's clock, unix seconds.
        first_row: Position, in its put, of the first row.
        capacity: Bytes for the payload.
    """

    units: int
    rows: int
    cols: int
    writer: Process | None
    op: bytes
    not_after: float
    first_row: int
    capacity: int

    def _packed(self) -> bytes:
        pid, start = self.writer or (0, 0)
        return _FIXED.pack(
            self.rows,
            self.units,
            pid,
            self.cols,
            start,
            self.op,
            self.not_after,
            self.first_row,
            self.capacity,
        )

    def write(self, arena: Arena, slot: int, generation: int) -> None:
        """Write all but the state."""
        data = self._packed()
        base = slot * WORDS
        words = arena.words
        words[base + DONE] = 0
        words[base + DEAD] = 0
        for at, word in enumerate(struct.unpack("<8Q", data), FIXED):
            words[base + at] = word
        words[base + CHECK] = _check_of(data, generation)

    @classmethod
    def read(cls, arena: Arena, slot: int, generation: int) -> Header | None:
        """Read it; None where its checksum does not match."""
        base = slot * WORDS
        data = arena.words[base + FIXED : base + CHECK].tobytes()
        if arena.words[base + CHECK] != _check_of(data, generation):
            return None
        rows, units, pid, cols, start, op, not_after, first_row, capacity = _FIXED.unpack(data)
        return cls(units, rows, cols, Process(pid, start) if pid else None, op, not_after, first_row, capacity)


def read_state(arena: Arena, slot: int) -> tuple[State, int]:
    """Return state and generation, read at once. A word that makes no sense is FREE."""
    word = arena.words[slot * WORDS + STATE]
    code = word & 0xFF
    return State(code) if code < len(State) else State.FREE, (word >> 8) % GENERATIONS


def write_state(arena: Arena, slot: int, state: State, generation: int) -> None:
    """Set state and generation at once."""
    arena.words[slot * WORDS + STATE] = generation << 8 | state


def read_outcome(arena: Arena, slot: int, generation: int) -> Outcome:
    """What the writer said about this generation."""
    word = arena.words[slot * WORDS + DONE]
    if word >> 2 != generation or not 0 < word & 3 <= Outcome.STOPPED:
        return Outcome.NONE
    return Outcome(word & 3)


def write_outcome(arena: Arena, slot: int, generation: int, outcome: Outcome) -> None:
    """Say, as the writer, what became of this generation."""
    arena.words[slot * WORDS + DONE] = generation << 2 | outcome


def read_dead(arena: Arena, slot: int) -> int:
    """How many row-field pairs of the slot are no content any more."""
    return int(arena.words[slot * WORDS + DEAD])


def write_dead(arena: Arena, slot: int, count: int) -> None:
    """Set that count; only the host does."""
    arena.words[slot * WORDS + DEAD] = count
