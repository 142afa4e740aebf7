"""The allocator of an arena's free extents: best fit over size classes, adjacent extents merged at once. No I/O."""

from __future__ import annotations

from bisect import bisect_left, insort

from asyncdp.process.buffer_pool import size_class

__all__ = ["Extents", "size_class"]


class Extents:
    """The free extents (contiguous runs of units) of an arena.

    Args:
        units: Number of units of the arena; all are free at the start.
    """

    def __init__(self, units: int) -> None:
        """Start with one free extent of all units."""
        self.free_units = 0
        self._size: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._add(0, units)

    def copy(self) -> Extents:
        """Return a copy that allocates the same extents as this one would from here on."""
        twin = Extents(0)
        twin.free_units = self.free_units
        twin._size, twin._ends = dict(self._size), dict(self._ends)
        twin._by_size = {units: dict(starts) for units, starts in self._by_size.items()}
        twin._sizes = list(self._sizes)
        return twin

    @property
    def largest(self) -> int:
        """Units of the largest free extent; 0 where there is none."""
        return self._sizes[-1] if self._sizes else 0

    def take(self, units: int) -> int | None:
        """Allocate ``units`` from the smallest free extent that fits; return the first unit, or None."""
        at = bisect_left(self._sizes, units)
        if at == len(self._sizes):
            return None
        size = self._sizes[at]
        begin = next(iter(self._by_size[size]))
        self._remove(begin)
        if size > units:
            self._add(begin + units, size - units)
        return begin

    def take_at(self, begin: int, units: int) -> bool:
        """Allocate exactly this extent; return False, without a change, where it is not entirely free."""
        for start, size in self._size.items():
            if start <= begin and begin + units <= start + size:
                self._remove(start)
                if start < begin:
                    self._add(start, begin - start)
                if begin + units < start + size:
                    self._add(begin + units, start + size - begin - units)
                return True
        return False

    def give(self, begin: int, units: int) -> None:
        """Free an extent and merge it with its free neighbours."""
        before = self._ends.get(begin)
        if before is not None:
            units += self._remove(before)
            begin = before
        if begin + units in self._size:
            units += self._remove(begin + units)
        self._add(begin, units)

    def _add(self, begin: int, units: int) -> None:
        if units <= 0:
            return
        self._size[begin], self._ends[begin + units] = units, begin
        starts = self._by_size.get(units)
        if starts is None:
            starts = self._by_size[units] = {}
            insort(self._sizes, units)
        starts[begin] = None
        self.free_units += units

    def _remove(self, begin: int) -> int:
        units = self._size.pop(begin)
        del self._ends[begin + units]
        starts = self._by_size[units]
        del starts[begin]
        if not starts:
            del self._by_size[units]
            self._sizes.remove(units)
        self.free_units -= units
        return units
