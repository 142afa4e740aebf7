"""Which stretches of an arena are free: best fit over size classes, neighbours joined at once. No I/O."""

from __future__ import annotations

from bisect import bisect_left, insort

__all__ = ["Extents", "size_class"]


def size_class(units: int) -> int:
    """Round up to a size class: exact up to 8 units, then eight classes per doubling, so at most 1/8 is given away.

    Payloads of about one size then fit exactly into what their like left behind, as in jemalloc's classes.
    """
    step = 1 << max(0, (units - 1).bit_length() - 4)
    return -(-units // step) * step


class Extents:
    """Free stretches of ``units`` units.

    Args:
        units: How many there are; all begin free.
    """

    def __init__(self, units: int) -> None:
        """Begin with one free stretch."""
        self.free_units = 0
        self._size: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._by_size: dict[int, dict[int, None]] = {}
        self._sizes: list[int] = []
        self._add(0, units)

    def copy(self) -> Extents:
        """Return one that gives out the same stretches from here on."""
        twin = Extents(0)
        twin.free_units = self.free_units
        twin._size, twin._ends = dict(self._size), dict(self._ends)
        twin._by_size = {units: dict(starts) for units, starts in self._by_size.items()}
        twin._sizes = list(self._sizes)
        return twin

    @property
    def largest(self) -> int:
        """Units of the largest free stretch."""
        return self._sizes[-1] if self._sizes else 0

    def take(self, units: int) -> int | None:
        """Take the smallest stretch that fits; returns where it begins, or None where none does."""
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
        """Take this very stretch; False, and nothing changed, where it is not free throughout."""
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
        """Give a stretch back and join it with its free neighbours."""
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
