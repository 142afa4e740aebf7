"""Decides which of the matching requests a fault hits."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

__all__ = ["Trigger"]


class Trigger:
    """Counts matching requests and decides which of them are hit.

    Args:
        times: Maximum number of hits; None: no limit.
        after: Number of matching requests that pass before the first hit.
        p: Probability that a request is hit; below 1 it needs ``rng``.
        at_s: Start in seconds; None: with the first hit.
        for_s: Duration in seconds from the start; None: until the end.
        rng: Random source.

    Attributes:
        matched: Number of matching requests so far, without those after the last hit.
        struck: Number of hits so far.
    """

    def __init__(
        self,
        times: int | None = None,
        after: int = 0,
        *,
        p: float = 1.0,
        at_s: float | None = None,
        for_s: float | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.times = times
        self.after = after
        self.p = p
        self.for_s = for_s
        self.rng = rng
        self.matched = 0
        self.struck = 0
        self._opened = at_s

    def strikes(self, now: float = 0.0) -> bool:
        """Count a matching request at time ``now`` in seconds, and return whether it is hit."""
        if self.times is not None and self.struck >= self.times:
            return False
        if self._opened is not None and now < self._opened:
            return False
        self.matched += 1
        if self.matched <= self.after:
            return False
        if self._opened is None:
            self._opened = now
        if self.for_s is not None and now >= self._opened + self.for_s:
            return False
        if self.p < 1.0 and (self.rng is None or self.rng.random() >= self.p):
            return False
        self.struck += 1
        return True
