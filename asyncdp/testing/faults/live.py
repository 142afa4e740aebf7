"""The state of a rule in use."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from .rule import Rule

__all__ = ["LiveRule"]


class LiveRule:
    """A rule with its random source and its counts of matching requests (``seen``) and of hits (``done``)."""

    __slots__ = ("done", "opened", "rng", "rule", "seen", "stage")

    def __init__(self, rule: Rule, rng: random.Random) -> None:
        self.rule = rule
        self.rng = rng
        self.seen = 0
        self.done = 0
        self.opened: float | None = rule.at_s
        self.stage = 0  # for crash_host: 0 up, 1 crashed, 2 restarted

    def strikes(self, now: float) -> bool:
        """Whether a matching request or slot is hit; ``now`` is in seconds since the first request under the plan."""
        rule = self.rule
        if rule.times is not None and self.done >= rule.times:
            return False
        if self.opened is not None and now < self.opened:
            return False
        self.seen += 1
        if self.seen <= rule.after:
            return False
        if self.opened is None:
            self.opened = now
        if rule.for_s is not None and now >= self.opened + rule.for_s:
            return False
        if rule.p < 1.0 and self.rng.random() >= rule.p:
            return False
        self.done += 1
        return True
