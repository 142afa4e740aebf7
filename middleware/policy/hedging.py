"""Decides after which time without an answer a read is sent a second time.

The time is a quantile of how long recent reads of the same size took, so that nearly all reads are sent once, on a fast
network as on a slow one. This is the hedging of J. Dean and L. A. Barroso, "The Tail at Scale", CACM 56(2), 2013, who
wait for the 95th percentile.

Sans-IO: it is told how long reads took.
"""

from __future__ import annotations

import math
from collections import deque

#: So many recent reads of a size decide: enough for a 95th percentile, few enough to follow a change within seconds.
WINDOW = 128
#: Before so many reads of a size are known, the longest delay holds.
LEAST = 16
#: The quantile is computed anew after so many reads of a size.
EVERY = 8
#: Where nearly all reads take equally long, so many times their median is waited for: a read that is a little late is
#: answered before a second one would be, which costs a request and the connection of the first.
MEDIANS = 2.0
#: Sizes are the powers of two of the number of rows; so many sizes and sets of fields are remembered.
KINDS = 256

Kind = tuple[tuple[str, ...], int]


class HedgeDelay:
    """The delay of hedged reads: a quantile of recent durations, at least twice their median, at most ``most_s``.

    Args:
        most_s: The longest delay, in seconds, which holds while too few reads are known; positive and finite.
        quantile: Part of the reads that are answered within the delay, such as 0.95; 0: the delay is ``most_s``.

    Raises:
        ValueError: One of them is out of its range.
    """

    __slots__ = ("_kinds", "_most_s", "_quantile")

    def __init__(self, most_s: float, quantile: float) -> None:
        if not 0.0 <= quantile < 1.0:
            raise ValueError(f"hedge_quantile must be at least 0 and below 1, not {quantile!r}")
        self._most_s = most_s
        self._quantile = quantile
        self._kinds: dict[Kind, _Recent] = {}

    def delay_s(self, kind: Kind, outruns: int = 0) -> float:
        """Return the seconds to wait for an answer to a read of this kind.

        They double with each time in a row that the target was outrun: the connection to it was given up, and to open
        another one takes longer than a read.
        """
        recent = self._kinds.get(kind)
        delay_s = self._most_s if recent is None else recent.delay_s
        return min(math.ldexp(delay_s, min(outruns, 64)), self._most_s)

    def took(self, kind: Kind, seconds: float) -> None:
        """Learn how long a read took, until its first answer."""
        if not self._quantile:
            return
        recent = self._kinds.get(kind)
        if recent is None:
            if len(self._kinds) >= KINDS:
                self._kinds.clear()
            recent = self._kinds[kind] = _Recent()
        recent.add(seconds, self._quantile)


class _Recent:
    """The latest durations of reads of one kind."""

    __slots__ = ("count", "delay_s", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.delay_s = math.inf
        self.seconds: deque[float] = deque(maxlen=WINDOW)

    def add(self, seconds: float, quantile: float) -> None:
        self.seconds.append(seconds)
        self.count += 1
        if self.count >= LEAST and self.count % EVERY == 0:
            ordered = sorted(self.seconds)
            self.delay_s = max(ordered[int(quantile * len(ordered))], MEDIANS * ordered[len(ordered) // 2])
