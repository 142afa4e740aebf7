"""The header of one slot, in shared memory: it survives the host's process, and lane readers check it.

A header is sixteen words of 64 bits. ``STATE``, ``DEAD`` and ``LEASE`` are written by the host only, ``DONE`` and
``BEGUN`` by the writer only. A word is stored in one machine instruction, and x86 keeps stores in order and loads in
order, so a reader that sees the same READY generation before and after its copy has copied that generation.

A leased slot is begun by its writer, or revoked by its host: each stores its own word, and then loads that of the other
one. x86 may load before an earlier store is seen, so there is a fence between the two; then one of them at least sees
the other. A writer that is paused before its store may store when the slot has another writer: ``BEGUN`` is a word of
its own, so that it overwrites no outcome, and a lease whose word is not as the host has left it is not taken back.
"""

from __future__ import annotations

import os
import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum
from hashlib import blake2b
from threading import Lock
from typing import TYPE_CHECKING, Final

from .arena import WORDS
from .writer_process import Process

if TYPE_CHECKING:
    from .arena import Arena

__all__ = [
    "GENERATIONS",
    "Generations",
    "Header",
    "Outcome",
    "State",
    "begin",
    "digest_of",
    "is_leased",
    "lease",
    "read_state",
    "revoke",
]

#: Generations are drawn at random below this number, so that a client that was not given a reference to a row cannot
#: guess one, to read or drop it. A reference to an earlier use of a slot is mistaken for one to the current use once in
#: this many times.
GENERATIONS: Final = 1 << 52

#: Positions of the words. FIXED is the first of eight words that are fixed for one generation; CHECK is their CRC-32.
STATE, DONE, DEAD, FIXED = range(4)
CHECK: Final = FIXED + 8
LEASE, BEGUN = CHECK + 1, CHECK + 2
_FIXED: Final = struct.Struct("<IIIIQ16sdQQ")


class State(IntEnum):
    """State of a slot. FREE is 0, because a new segment contains zeros."""

    FREE = 0
    WRITING = 1
    READY = 2
    #: Aborted by its put while its writer may still be copying; freed when the writer has finished or is dead.
    GIVEN_UP = 3


#: The states by their codes, as read_state runs several times for each slot and ``State(code)`` is slower than this.
_STATES: Final = tuple(State)


class Outcome(IntEnum):
    """Outcome of a write, as the writer records it in the word ``DONE``."""

    NONE = 0
    WRITTEN = 1
    STOPPED = 2


#: Code of the word ``BEGUN`` once the writer of a leased slot begins, unless it was too late: then it is STOPPED.
_BEGUN: Final = 3
#: Codes of the word ``LEASE``.
_LEASED, _REVOKED = 1, 2


def digest_of(op_id: str) -> bytes:
    """Return a digest of sixteen bytes that identifies an op_id of any length."""
    return blake2b(op_id.encode(), digest_size=16).digest()


class Generations:
    """Draws generations from the system's random numbers, many at a time, as each call of the system takes 0.5 us."""

    def __init__(self) -> None:
        """Start without numbers."""
        self._drawn: list[int] = []

    def after(self, before: int) -> int:
        """Draw the generation of the next use of a slot, whose last one was ``before``: any other number."""
        if not self._drawn:
            numbers = struct.unpack("<512Q", os.urandom(4096))
            self._drawn = [number % (GENERATIONS - 1) for number in numbers]
        return (before + 1 + self._drawn.pop()) % GENERATIONS


def _check_of(data: bytes, generation: int) -> int:
    # Generations below 2**32 are hashed as four bytes, for compatibility with arenas whose generations were counted up.
    return zlib.crc32(data + generation.to_bytes(4 if generation < 1 << 32 else 8, "little"))


@dataclass(frozen=True, slots=True)
class Header:
    """Describes what a slot was reserved for; fixed for one generation and checksummed with it.

    Attributes:
        units: Length of its extent, in units.
        rows, cols: Number of rows and of fields.
        writer: Process that copies into it over the lane; None: the host receives the payload.
        op: Digest of the put's op_id.
        not_after: Unix seconds, by the directory's clock, after which the put can no longer publish.
        first_row: Position of the slot's first row in its put.
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
        """Write all words but the state; ``DONE``, ``DEAD``, ``LEASE`` and ``BEGUN`` become 0."""
        data = self._packed()
        base = slot * WORDS
        words = arena.words
        words[base + DONE] = 0
        words[base + DEAD] = 0
        words[base + LEASE] = 0
        words[base + BEGUN] = 0
        for at, word in enumerate(struct.unpack("<8Q", data), FIXED):
            words[base + at] = word
        words[base + CHECK] = _check_of(data, generation)

    @classmethod
    def read(cls, arena: Arena, slot: int, generation: int) -> Header | None:
        """Read the header of a slot; return None where its checksum does not match."""
        base = slot * WORDS
        data = arena.words[base + FIXED : base + CHECK].tobytes()
        if arena.words[base + CHECK] != _check_of(data, generation):
            return None
        rows, units, pid, cols, start, op, not_after, first_row, capacity = _FIXED.unpack(data)
        return cls(units, rows, cols, Process(pid, start) if pid else None, op, not_after, first_row, capacity)


def read_state(arena: Arena, slot: int) -> tuple[State, int]:
    """Return state and generation, read atomically. An invalid state is returned as FREE."""
    word = arena.words[slot * WORDS + STATE]
    code = word & 0xFF
    return _STATES[code] if code < len(_STATES) else State.FREE, (word >> 8) % GENERATIONS


def write_state(arena: Arena, slot: int, state: State, generation: int) -> None:
    """Set state and generation atomically."""
    arena.words[slot * WORDS + STATE] = generation << 8 | state


def read_outcome(arena: Arena, slot: int, generation: int) -> Outcome:
    """Return what the writer recorded for this generation; NONE where it recorded nothing."""
    for at in (DONE, BEGUN):
        word = arena.words[slot * WORDS + at]
        if word >> 2 == generation and 0 < word & 3 <= Outcome.STOPPED:
            return Outcome(word & 3)
    return Outcome.NONE


def write_outcome(arena: Arena, slot: int, generation: int, outcome: Outcome) -> None:
    """Record, as the writer, how the write of this generation ended."""
    arena.words[slot * WORDS + DONE] = generation << 2 | outcome


def _fence() -> None:
    """Have all earlier stores of this thread seen before any later load: taking a lock is a locked instruction."""
    lock = Lock()
    lock.acquire()
    lock.release()


def lease(arena: Arena, slot: int, generation: int) -> None:
    """Mark a slot as leased, as its host, before the client is told of it."""
    arena.words[slot * WORDS + LEASE] = generation << 2 | _LEASED


def is_leased(arena: Arena, slot: int, generation: int) -> bool:
    """Return whether a slot is leased and, as far as is seen, its writer has not begun."""
    base = slot * WORDS
    return bool(arena.words[base + LEASE] == generation << 2 | _LEASED and not arena.words[base + BEGUN])


def revoke(arena: Arena, slot: int, generation: int) -> bool:
    """End a lease, as its host; return whether the writer has not begun, so that it never will.

    Again, it returns the same; of a slot that was not leased False.
    """
    base = slot * WORDS
    if arena.words[base + LEASE] >> 2 != generation:
        return False
    arena.words[base + LEASE] = generation << 2 | _REVOKED
    _fence()
    return not arena.words[base + BEGUN]


def begin(arena: Arena, slot: int, generation: int) -> bool:
    """Begin to use a leased slot, as its writer; return whether it may, since the lease was not revoked before."""
    base = slot * WORDS
    if arena.words[base + LEASE] != generation << 2 | _LEASED:
        return False
    arena.words[base + BEGUN] = generation << 2 | _BEGUN
    _fence()
    if arena.words[base + LEASE] == generation << 2 | _LEASED:
        return True
    arena.words[base + BEGUN] = generation << 2 | Outcome.STOPPED  # the host sees that, and frees the slot
    return False


def read_dead(arena: Arena, slot: int) -> int:
    """Return how many cells (pairs of row and field) of the slot are dead."""
    return int(arena.words[slot * WORDS + DEAD])


def write_dead(arena: Arena, slot: int, count: int) -> None:
    """Set the number of dead cells of the slot; only the host calls this."""
    arena.words[slot * WORDS + DEAD] = count
