"""One address space of the memory plane: declarations, samples, groups, claims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from asyncdp.transports.memory.claims import Claim, Group, ReadyIndex, Row

if TYPE_CHECKING:
    from asyncdp.field_spec import FieldSpec

__all__ = ["Partition"]


class Partition:
    """One address space: declarations, samples, groups, claims."""

    def __init__(self, partition_id: str) -> None:
        """Begin with nothing declared."""
        self.id = partition_id
        self.fields: dict[str, FieldSpec] = {}
        self.declared: set[str] = set()
        self.tasks: dict[str, None] = {}
        self.num_samples = 0
        self.group_size: int | None = None
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, Group] = {}
        self.claims: dict[str, Claim] = {}
        self.lost: dict[tuple[str, str], float] = {}  # (claim id, sample id) -> when it expired or was released
        self.indexes: dict[tuple[str, frozenset[str]], ReadyIndex] = {}

    def touch(self, row: Row, group: Group) -> None:
        """Tell the ready indexes that something about a sample changed."""
        for index in self.indexes.values():
            index.update(row, group)

    def index(self, task: str, fields: Sequence[str]) -> ReadyIndex:
        """Return the ready index of a task, built on first use."""
        key = (task, frozenset(fields))
        index = self.indexes.get(key)
        if index is None:
            index = self.indexes[key] = ReadyIndex(task, key[1], self.group_size)
            ordered = [(index.ready_since(row), at, row) for at, row in enumerate(self.rows.values())]
            for _, _, row in sorted((since or 0, at, row) for since, at, row in ordered):
                index.update(row, self.groups[row.group])
        return index
