"""Backoff: how long to wait before a retry.

Exponential backoff with *full* jitter: the wait is drawn uniformly between zero and a ceiling that doubles with each
attempt. Without jitter, clients that failed together would retry together, and again at each doubling. M. Brooker
compared ways to add jitter by simulation ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015): drawing from
the whole range took the fewest requests until every contender was through; keeping half of the wait fixed took more
requests and much longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


@dataclass(frozen=True)
class Backoff:
    """Computes the waits between attempts, in seconds.

    Raises ValueError if a time is not positive and finite, or cap_s is below base_s.
    """

    base_s: float = 0.05
    """Ceiling of the first wait: a few round trips on a busy network, and short compared to the deadline of a call."""
    cap_s: float = 2.0
    """Highest ceiling. The average wait is then one second: a backend that comes back is noticed soon, and one that
    does not gets one request a second from each call."""

    def __post_init__(self) -> None:
        for name, seconds in (("base_s", self.base_s), ("cap_s", self.cap_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be positive and finite, not {seconds!r}")
        if self.cap_s < self.base_s:
            raise ValueError(f"cap_s ({self.cap_s}) must not be below base_s ({self.base_s})")

    def ceiling_s(self, attempt: int) -> float:
        """Return the longest wait after `attempt` attempts: base_s, doubled with each further one, at most cap_s.

        Raises ValueError if attempt is below 1.
        """
        if attempt < 1:
            raise ValueError(f"attempt counts from 1, not {attempt}")
        try:
            return min(self.cap_s, math.ldexp(self.base_s, attempt - 1))
        except OverflowError:  # from about the 1030th attempt on
            return self.cap_s

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """Draw the wait after `attempt` failed attempts, between 0 and `ceiling_s(attempt)`."""
        return rng.uniform(0.0, self.ceiling_s(attempt))

    def not_ready_s(self, retry_after_s: float | None, attempt: int, rng: random.Random) -> float:
        """Return the wait after the backend asked to be retried later: at least retry_after_s, in seconds.

        The usual delay is added, since all refused clients got the same retry_after_s and should not retry at the same
        moment. It grows with each refusal, so a backend that keeps refusing is asked less and less often. If
        retry_after_s is None, NaN or not positive, the usual delay is returned alone.
        """
        asked_s = retry_after_s if retry_after_s is not None and retry_after_s > 0.0 else 0.0
        return asked_s + self.delay_s(attempt, rng)
