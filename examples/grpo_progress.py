"""What a run of the example has shown so far: the roles write it, the views and the plot read it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdp.examples.grpo_counts import Counts, counts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdp import Client
    from asyncdp.testing import FaultPlan

__all__ = ["Point", "Progress"]


class Point(NamedTuple):
    """A number at a time, in seconds since the run began."""

    at_s: float
    value: float


@dataclass
class Progress:
    """Numbers over time.

    Attributes:
        began: Monotonic seconds at the start.
        steps: Training steps so far, which is also the newest weight version.
        rewards: Mean reward of each trained batch.
        evaluations: Sampled reward on the held-out prompts.
        staleness: Mean age of each trained batch, in weight versions.
        depths: Complete groups in the plane.
        ages: How many groups in the plane are how many weight versions old, at the last look.
        clients: The clients of the plane in this process, by role, for their counters.
        told: What clients in other processes last said that they counted, by role.
        plan: The faults that are injected in this process, if any.
        killed: What was killed, and started anew.
        lasted_s: Seconds from start to end; None while the run goes on.
    """

    began: float = field(default_factory=time.monotonic)
    steps: int = 0
    rewards: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)
    staleness: list[Point] = field(default_factory=list)
    depths: list[Point] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    clients: dict[str, Client] = field(default_factory=dict)
    told: dict[str, Counts] = field(default_factory=dict)
    plan: FaultPlan | None = None
    killed: list[dict[str, Any]] = field(default_factory=list)
    lasted_s: float | None = None

    @property
    def faults(self) -> Counter[str]:
        """Faults injected so far, by kind."""
        counts: Counter[str] = Counter() if self.plan is None else self.plan.counts
        for told in self.told.values():
            counts.update(told.faults)
        return counts

    def counts(self) -> list[Counts]:
        """Return what each client has counted so far."""
        return [*(counts_of(client) for client in self.clients.values()), *self.told.values()]

    def ended(self) -> None:
        """Note the end: the last counts of the clients of this process, whose event loop is about to close."""
        self.lasted_s = self.elapsed_s()
        self.told.update((role, counts_of(client)) for role, client in self.clients.items())
        self.clients.clear()

    def elapsed_s(self) -> float:
        """Return the seconds since the run began; those that it lasted, once it has ended."""
        return time.monotonic() - self.began if self.lasted_s is None else self.lasted_s

    def evaluated(self, reward: float) -> None:
        """Note a reward on the held-out prompts."""
        self.evaluations.append(Point(self.elapsed_s(), reward))

    def trained(self, rewards: Sequence[float], ages: Sequence[int]) -> None:
        """Note a training step on samples with these rewards and ages."""
        now = self.elapsed_s()
        self.steps += 1
        self.rewards.append(Point(now, sum(rewards) / len(rewards)))
        self.staleness.append(Point(now, sum(ages) / len(ages)))

    def counted(self, role: str, counts: Counts) -> None:
        """Note what a client in another process has counted."""
        self.told[role] = counts

    def struck(self, what: str, **facts: Any) -> None:
        """Note that something was killed, or came back."""
        self.killed.append({"at_s": round(self.elapsed_s(), 2), "what": what, **facts})

    def looked(self, depth: int, ages: Iterable[int]) -> None:
        """Note what a look at the plane showed."""
        self.depths.append(Point(self.elapsed_s(), depth))
        self.ages = Counter(ages)
