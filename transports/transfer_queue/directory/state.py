"""What the directory knows of one partition, and how it refuses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from asyncdp.transports.memory.claims import Claim, Group, ReadyIndex, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Cell", "Partition", "Pending", "Refused", "Share"]

Tags = dict[str, Any]


class Refused(Exception):
    """An answer that is an error: the name of a class of :mod:`asyncdp.errors`, a message, and its attributes."""

    def __init__(self, kind: str, message: str, **info: Any) -> None:
        """Keep all three; ``kind`` is a name, since the classes are not known here."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.info = info


@dataclass(slots=True, eq=False)
class Share:
    """The rows of one put that went to one storage unit, and how they are laid out there."""

    unit: str
    layout: int


@dataclass(slots=True, eq=False)
class Cell:
    """Where the fields that one put gave to one row lie: under ``key`` in the unit of ``share``."""

    share: Share
    key: int


@dataclass(slots=True, eq=False)
class Pending:
    """Storage keys that were given out to a put which has not been published yet.

    Attributes:
        ranges: (unit, first key, count).
        new: Samples that the put will add, as far as known.
        until: When it is given up, by the directory's monotonic clock.
    """

    ranges: list[tuple[str, int, int]] = field(default_factory=list)
    new: int = 0
    until: float = 0.0


class Partition:
    """One address space: declarations, samples, groups, claims."""

    def __init__(self, partition_id: str) -> None:
        """Begin with nothing declared."""
        self.id = partition_id
        self.fields: dict[str, tuple[Any, ...]] = {}
        self.declared: set[str] = set()
        self.tasks: dict[str, None] = {}
        self.num_samples = 0
        self.group_size: int | None = None
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, Group] = {}
        self.claims: dict[str, Claim] = {}
        self.lost: dict[tuple[str, str], float] = {}  # (claim id, sample id) -> when it expired or was released
        self.indexes: dict[tuple[str, frozenset[str]], ReadyIndex] = {}
        #: Which rows waited for an index: until when that counts, since when the oldest of them waits, the first ids,
        #: and how many of them lack which field.
        self.waits: dict[ReadyIndex, tuple[float, float | None, tuple[str, ...], dict[str, int]]] = {}

    def lives(self, sample_id: str, life: int | None) -> bool:
        """Whether a sample is there, in the life that is meant, or (None) in any."""
        row = self.rows.get(sample_id)
        return row is not None and life in (None, row.incarnation)

    def touch(self, row: Row, group: Group) -> None:
        """Tell the ready indexes that something about a sample changed."""
        for index in self.indexes.values():
            index.update(row, group)

    def leave(self, row: Row) -> None:
        """Take a sample out of its group."""
        group = self.groups[row.group]
        group.rows.pop(row.id, None)
        self.touch(row, group)
        if not group.rows:
            self.groups.pop(group.id, None)

    def index(self, task: str, fields: Sequence[str]) -> ReadyIndex:
        """Return the ready index of a task for a set of fields, built when it is first asked for."""
        key = (task, frozenset(fields))
        found = self.indexes.get(key)
        if found is None:
            found = self.indexes[key] = ReadyIndex(task, key[1], self.group_size)
            by_age = sorted(self.rows.values(), key=lambda row: (found.ready_since(row) or 0, row.incarnation))
            for row in by_age:
                found.update(row, self.groups[row.group])
        return found

    def nbytes(self) -> int:
        """Payload bytes of all samples."""
        return sum(sum(row.nbytes.values()) for row in self.rows.values())
