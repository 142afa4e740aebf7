"""Detects mutations of this client that overlap in time and concern the same ids."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdp.calls import Call

__all__ = ["OverlappingMutations", "Watch"]


@dataclass(slots=True, eq=False)
class Watch:
    """One mutation in flight; ``ids`` None means its whole partition, ``touched`` that another one overlaps with it."""

    partition_id: str
    ids: frozenset[str] | None
    touched: bool = False

    def overlaps(self, other: Watch) -> bool:
        """Return whether both mutations concern a common id."""
        if self.partition_id != other.partition_id:
            return False
        return self.ids is None or other.ids is None or not self.ids.isdisjoint(other.ids)


class OverlappingMutations:
    """The mutations in flight, for backends that cannot tell a repeated mutation from a newer one; without I/O."""

    __slots__ = ("_watches",)

    def __init__(self) -> None:
        """Start with none."""
        self._watches: set[Watch] = set()

    @contextmanager
    def watch(self, call: Call[Any]) -> Iterator[Watch]:
        """Register a mutation while it is in flight; it and those in flight on the same ids are marked ``touched``."""
        ids = getattr(call, "sample_ids", None)
        mine = Watch(getattr(call, "partition_id", ""), None if ids is None else frozenset(ids))
        for other in self._watches:
            if other.overlaps(mine):
                other.touched = True
                mine.touched = True
        self._watches.add(mine)
        try:
            yield mine
        finally:
            self._watches.discard(mine)
