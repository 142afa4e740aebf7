"""Histogram: counts durations from 50 us to 60 s in buckets that can be added over clients and processes."""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BOUNDS_S", "Histogram"]

#: Upper bounds, in seconds, of the buckets that exporters show, beside the last one, which has no bound: 50 us is a hit
#: in shared memory, 60 s the default timeout of a call. Three bounds a decade.
BOUNDS_S: Final = (
    *(50e-6, 100e-6, 200e-6, 500e-6),
    *(1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 100e-3, 200e-3, 500e-3),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 60.0),
)
#: Each of these buckets is divided into so many of equal width, from which quantiles are computed.
PARTS: Final = 4
_FINE_S: Final = tuple(
    low + (high - low) * part / PARTS for low, high in pairwise((0.0, *BOUNDS_S)) for part in range(1, PARTS + 1)
)


class Histogram:
    """Counts durations. One thread adds, any thread may read.

    Attributes:
        count: Number of durations.
        total_s: Their sum, in seconds.
    """

    __slots__ = ("_counts", "count", "total_s")

    def __init__(self) -> None:
        """Start empty."""
        self._counts = [0] * (len(_FINE_S) + 1)
        self.count = 0
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        """Count one duration."""
        self._counts[bisect_left(_FINE_S, seconds)] += 1
        self.count += 1
        self.total_s += seconds

    def merge(self, other: Histogram) -> None:
        """Add the counts of another histogram."""
        for at, number in enumerate(other._counts):
            self._counts[at] += number
        self.count += other.count
        self.total_s += other.total_s

    def to_plain(self) -> dict[str, int]:
        """Return the counts of the buckets that are not empty, by their number, as plain values for JSON."""
        return {str(at): number for at, number in enumerate(self._counts) if number}

    def merge_plain(self, counts: Mapping[str, int]) -> None:
        """Add what :meth:`to_plain` returned; a number of no bucket is ignored. The sum of durations stays."""
        for at, number in counts.items():
            if at.isdecimal() and int(at) < len(self._counts):
                self._counts[int(at)] += int(number)
                self.count += int(number)

    def cumulative(self) -> list[tuple[float, int]]:
        """Return ``(upper bound in seconds, number of durations up to it)`` for each of ``BOUNDS_S``, then infinity."""
        out, seen = [], 0
        counts = self._counts
        for at, bound in enumerate(BOUNDS_S):
            seen += sum(counts[at * PARTS : (at + 1) * PARTS])
            out.append((bound, seen))
        return [*out, (float("inf"), seen + counts[-1])]

    def quantile(self, part: float) -> float:
        """Return the duration, in seconds, below which this part of all durations lies; 0 if there are none.

        Interpolated within a bucket whose width is at most a third of its upper bound; beyond 60 s: 60.
        """
        wanted = part * sum(self._counts)
        seen, low = 0, 0.0
        for bound, number in zip(_FINE_S, self._counts, strict=False):
            if number and seen + number >= wanted:
                return low + (bound - low) * (wanted - seen) / number
            seen += number
            low = bound
        return _FINE_S[-1] if wanted else 0.0
