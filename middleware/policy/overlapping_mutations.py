"""Which mutations of this client touched the same ids while another one was under way."""

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
    """One mutation under way; ``ids`` None means its whole partition. ``touched``: another one began meanwhile."""

    partition_id: str
    ids: frozenset[str] | None
    touched: bool = False

    def overlaps(self, other: Watch) -> bool:
        """Whether both concern a common id."""
        if self.partition_id != other.partition_id:
            return False
        return self.ids is None or other.ids is None or not self.ids.isdisjoint(other.ids)


class OverlappingMutations:
    """The mutations under way, for backends that cannot tell a repeated one from a newer one. Sans-IO."""

    __slots__ = ("_watches",)

    def __init__(self) -> None:
        """Begin with none."""
        self._watches: set[Watch] = set()

    @contextmanager
    def watch(self, call: Call[Any]) -> Iterator[Watch]:
        """Note that a mutation begins: those under way on the same ids are touched by it, and it by them."""
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
