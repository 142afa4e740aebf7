"""How long to wait before asking again.

Exponential with *full* jitter: the wait is drawn evenly between nothing and a ceiling that doubles with each attempt.
Clients that failed together would otherwise come back together, and again at each doubling. M. Brooker compared ways to
add jitter by simulation ("Exponential Backoff And Jitter", AWS Architecture Blog, 2015): drawing from the whole range
took the fewest requests until every contender was through; keeping half of the wait fixed took more requests and much
longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random


@dataclass(frozen=True)
class Backoff:
    """Waits between attempts, in seconds.

    ValueError where a time is not positive and finite, or cap_s is below base_s.
    """

    base_s: float = 0.05
    """Ceiling before the second attempt: a few round trips on a busy network, little against any call's deadline."""
    cap_s: float = 2.0
    """Highest ceiling. On average one second is waited there: a backend that comes back is noticed soon, and one that
    does not is asked once a second by each call."""

    def __post_init__(self) -> None:
        for name, seconds in (("base_s", self.base_s), ("cap_s", self.cap_s)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{name} must be positive and finite, not {seconds!r}")
        if self.cap_s < self.base_s:
            raise ValueError(f"cap_s ({self.cap_s}) must not be below base_s ({self.base_s})")

    def ceiling_s(self, attempt: int) -> float:
        """Longest wait after `attempt` attempts: base_s, doubled with each further one, at most cap_s.

        ValueError if attempt is below 1.
        """
        if attempt < 1:
            raise ValueError(f"attempt counts from 1, not {attempt}")
        try:
            return min(self.cap_s, math.ldexp(self.base_s, attempt - 1))
        except OverflowError:  # the 1030th attempt or so, of a call with no deadline worth the name
            return self.cap_s

    def delay_s(self, attempt: int, rng: random.Random) -> float:
        """How long to wait after `attempt` attempts have failed: between 0 and `ceiling_s(attempt)`."""
        return rng.uniform(0.0, self.ceiling_s(attempt))

    def not_ready_s(self, retry_after_s: float | None, attempt: int, rng: random.Random) -> float:
        """How long to wait when the backend asked for patience: never less than retry_after_s, in seconds.

        The usual delay comes on top: all who were refused were told the same, and must not come back in the same
        moment. It is small at first and grows with each refusal, so a backend that keeps saying "soon" is asked less
        and less often. A backend that does not say how long (None, or a number that is none) gets the usual delay
        alone.
        """
        asked_s = retry_after_s if retry_after_s is not None and retry_after_s > 0.0 else 0.0
        return asked_s + self.delay_s(attempt, rng)
