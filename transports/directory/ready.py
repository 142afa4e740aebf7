"""Index of the samples that a task may claim, in the order in which they became ready."""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

from .rows import Group, Row

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["ReadyIndex"]


class ReadyIndex:
    """The units (samples, or whole groups) that a task may claim for a set of required fields, first ready first.

    Args:
        task: Name of the task.
        fields: Fields that a sample must have.
        group_size: Number of rows of a whole group; None: each sample is a unit.
    """

    def __init__(self, task: str, fields: frozenset[str], group_size: int | None) -> None:
        """Start empty; the partition reports its rows by :meth:`update`."""
        self.task = task
        self.fields = fields
        self.group_size = group_size
        self._ready: dict[Any, int] = {}
        self._size: dict[Any, int] = {}
        self._heap: list[tuple[int, int, int, Any]] = []
        self._pushed = 0
        self.rows = 0

    def holds(self, row: Row, group: Group) -> bool:
        """Whether the sample is claimable now; in a partition with groups, together with its whole group."""
        return (row if self.group_size is None else group) in self._ready and not row.failed

    def lacking(self, rows: Iterable[Row]) -> dict[str, int]:
        """Return how many of these rows lack each required field; fields that all rows have are left out."""
        counts = dict.fromkeys(sorted(self.fields), 0)
        for row in rows:
            for name in self.fields:
                if name not in row.produced:
                    counts[name] += 1
        return {name: count for name, count in counts.items() if count}

    def ready_since(self, row: Row) -> int | None:
        """Return the sequence number at which the sample became ready; None if it is not ready or is claimed."""
        if row.eligible is None or self.task in row.claimed:
            return None
        latest = row.eligible
        for name in self.fields:
            seq = row.produced.get(name)
            if seq is None:
                return None
            latest = max(latest, seq)
        return latest

    def update(self, row: Row, group: Group) -> None:
        """Update the index after a change or the removal of the sample."""
        if self.group_size is None:
            alive = group.rows.get(row.id) is row
            self._set(row, self.ready_since(row) if alive else None, 1)
            return
        expected = group.expected or self.group_size
        since: int | None = None
        members = group.fit if len(group.rows) >= expected else []
        if len(members) >= expected:
            each = [self.ready_since(member) for member in members]
            if None not in each:
                since = max(seq for seq in each if seq is not None)
        self._set(group, since, len(members))

    def _set(self, unit: Row | Group, since: int | None, size: int) -> None:
        if unit in self._ready:
            self.rows -= self._size[unit]
        if since is None:
            self._ready.pop(unit, None)
            self._size.pop(unit, None)
            return
        self.rows += size
        self._size[unit] = size
        if self._ready.get(unit) != since:
            self._ready[unit] = since
            # Units that became ready at the same time are ordered by age, even if some were claimed and released since.
            self._pushed += 1  # a tie-breaker for the heap, since units cannot be compared
            heapq.heappush(self._heap, (since, unit.order, self._pushed, unit))

    def take(self, most: int, least: int) -> list[Row]:
        """Return ``least`` to ``most`` of the first ready rows, in whole units, or none. The rows stay ready."""
        taken: list[tuple[int, int, int, Any]] = []
        seen: set[Row | Group] = set()
        count = 0
        full = False
        while self._heap:
            since, _, _, unit = self._heap[0]
            if self._ready.get(unit) != since or unit in seen:
                heapq.heappop(self._heap)
                continue
            if count + self._size[unit] > most:
                full = True
                break
            taken.append(heapq.heappop(self._heap))
            seen.add(unit)
            count += self._size[unit]
            if count == most:
                full = True
                break
        for entry in taken:
            heapq.heappush(self._heap, entry)
        if not count or (count < least and not full):
            return []
        rows: list[Row] = []
        for _, _, _, unit in taken:
            rows.extend([unit] if isinstance(unit, Row) else sorted(unit.fit, key=lambda row: row.order))
        return rows
