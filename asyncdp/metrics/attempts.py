"""AttemptTimes: durations of attempts by request and outcome."""

from __future__ import annotations

from .histogram import Histogram
from .observer import AttemptEnded, Observer

__all__ = ["AttemptTimes"]


class AttemptTimes(Observer):
    """Counts durations of attempts.

    Attributes:
        by: Histogram by (request, outcome): ``("ReadSlots", "ok")``.
    """

    def __init__(self) -> None:
        """Start empty."""
        self.by: dict[tuple[str, str], Histogram] = {}

    def attempt_ended(self, attempt: AttemptEnded) -> None:
        """Count it."""
        key = attempt.request, attempt.outcome
        histogram = self.by.get(key)
        if histogram is None:
            histogram = self.by[key] = Histogram()
        histogram.add(attempt.seconds)
