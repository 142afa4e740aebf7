"""Promise 3a: puts and removals by a meta or a group apply only to the lives that it names."""

from __future__ import annotations

from .bound_puts import BoundPuts
from .bound_races import BoundRaces
from .bound_removals import BoundRemovals

__all__ = ["Bound"]


class Bound(BoundPuts, BoundRemovals, BoundRaces):
    """Promise 3a: puts and removals by a meta or a group apply only to the lives that it names."""
