"""The state of one partition of a directory, and the exception by which a directory refuses a request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .ready import ReadyIndex

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .rows import Claim, Group, Row

__all__ = ["Partition", "Refused", "Spec"]


class Refused(Exception):
    """Refusal of a request: the name of a class of ``asyncdp.errors``, a message, and the attributes of the error."""

    def __init__(self, kind: str, message: str, **info: Any) -> None:
        """Store the arguments; ``kind`` is a name, since asyncdp, and so the class, may not be installed here."""
        super().__init__(message)
        self.kind = kind
        self.message = message
        self.info = info


class Spec(Protocol):
    """Type of a field as fixed by a partition; the interface that the directory needs."""

    @property
    def kind(self) -> str:
        """``"tensor"``, ``"object"``, ``"enum"``, or ``""`` until the field is first written."""
        ...

    @property
    def enum(self) -> tuple[str, ...]:
        """Vocabulary of an enum field."""
        ...

    def describe(self) -> str:
        """Return the type as text."""
        ...

    def merge(self, new: Any, name: str, /) -> Any:
        """Return the spec of the field after a put of ``new``; refuse one that is not compatible with this spec."""
        ...


class Partition:
    """State of one partition, the address space of sample ids: declarations, samples, groups, claims."""

    def __init__(self, partition_id: str) -> None:
        """Start with nothing declared."""
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
        #: Cached statistics of the rows that are not ready in an index: time until which they are valid, creation time
        #: of the oldest row, ids of the oldest rows, and number of rows that lack each field.
        self.waits: dict[ReadyIndex, tuple[float, float | None, tuple[str, ...], dict[str, int]]] = {}

    def lives(self, sample_id: str, life: int | None) -> bool:
        """Whether a sample is present in this life, or in any life (None)."""
        row = self.rows.get(sample_id)
        return row is not None and life in (None, row.incarnation)

    def update_ready(self, row: Row, group: Group) -> None:
        """Update the ready indexes after a change of a sample."""
        for index in self.indexes.values():
            index.update(row, group)

    def leave(self, row: Row) -> None:
        """Remove a sample from its group, and the group if it is then empty."""
        group = self.groups[row.group]
        group.rows.pop(row.id, None)
        self.update_ready(row, group)
        if not group.rows:
            self.groups.pop(group.id, None)

    def index(self, task: str, fields: Sequence[str]) -> ReadyIndex:
        """Return the ready index of a task for a set of fields; it is built on first use."""
        key = (task, frozenset(fields))
        found = self.indexes.get(key)
        if found is None:
            found = self.indexes[key] = ReadyIndex(task, key[1], self.group_size)
            by_age = sorted(self.rows.values(), key=lambda row: (found.ready_since(row) or 0, row.incarnation))
            for row in by_age:
                found.update(row, self.groups[row.group])
        return found
