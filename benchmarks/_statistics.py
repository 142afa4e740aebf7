"""What rounds of measurements say, and when they cannot be believed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Final

__all__ = ["FEWEST", "MOVED", "median_range", "moved", "wide"]

#: Fewer rounds give no range that holds with 95 %.
FEWEST: Final = 6
#: A range wider than so much of its median says little.
WIDE: Final = 0.5
#: A reference whose halves of the run differ by more has moved.
MOVED: Final = 1.25


def median_range(values: Sequence[float]) -> tuple[float, float]:
    """Where the median lies with 95 %: between two of the values themselves (the sign test's interval)."""
    ordered, n = sorted(values), len(values)
    tail, beyond = 1 / 2**n, 0
    while 2 * tail <= 0.05:
        beyond += 1
        tail += math.comb(n, beyond) / 2**n
    cut = max(0, beyond - 1)
    return ordered[cut], ordered[n - 1 - cut]


def moved(values: Sequence[float]) -> float:
    """Return by which factor the medians of both halves differ, 1.0 or more; 1.0 of fewer than six values."""
    if len(values) < FEWEST:
        return 1.0
    middle = len(values) // 2
    first, second = statistics.median(values[:middle]), statistics.median(values[middle:])
    low, high = sorted((first, second))
    return high / low if low > 0 else math.inf if high > 0 else 1.0


def wide(values: Sequence[float], width: float | None = None) -> str:
    """Return the range of a median that says little; nothing where it is narrow, or of too few values to tell.

    Args:
        values: One a round.
        width: Of a range that is still narrow; by default half of the median.
    """
    if len(values) < FEWEST:
        return ""
    low, high = median_range(values)
    width = WIDE * abs(statistics.median(values)) if width is None else width
    return f"{low:.3g} to {high:.3g}" if high - low > width else ""
