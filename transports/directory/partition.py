"""One address space of a directory, and how a directory refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .ready import ReadyIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rows import Claim, Group, Row

__all__ = ["Partition", "Refused", "Spec"]


class Refused(Exception):
    """An answer that is an error: the name of a class of ``asyncdp.errors``, a message, and its attributes."""

    def __init__(self, kind: str, message: str, **info: Any) -> None:
        """Keep all three; ``kind`` is a name, since the classes are not known here."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.info = info


class Spec(Protocol):
    """What a partition fixed about a field: all that a directory asks of it."""

    @property
    def kind(self) -> str:
        """``"tensor"``, ``"object"``, ``"enum"``, or ``""`` while nothing was written."""
        ...

    @property
    def enum(self) -> tuple[str, ...]:
        """Vocabulary of an enum field."""
        ...

    def describe(self) -> str:
        """Text of the type."""
        ...

    def merge(self, new: Any, name: str, /) -> Any:
        """Return the spec after a put of ``new``; refuse one that does not go together with this."""
        ...


class Partition:
    """One address space: declarations, samples, groups, claims."""

    def __init__(self, partition_id: str) -> None:
        """Begin with nothing declared."""
        self.id = partition_id
        self.fields: dict[str, Any] = {}  # name -> Spec
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
