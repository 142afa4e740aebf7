"""What a run of the example has shown so far: the roles write it, the views and the plot read it."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from asyncdp import Metrics, PortRotation, layers_of
from asyncdp.middleware.permit import Health

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdp import BaseClient
    from asyncdp.testing import FaultPlan

__all__ = ["Point", "Progress", "count_events", "ports_out"]


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
        clients: All clients of the plane, by role, for their counters.
        plan: The faults that are injected, if any.
    """

    began: float = field(default_factory=time.monotonic)
    steps: int = 0
    rewards: list[Point] = field(default_factory=list)
    evaluations: list[Point] = field(default_factory=list)
    staleness: list[Point] = field(default_factory=list)
    depths: list[Point] = field(default_factory=list)
    ages: Counter[int] = field(default_factory=Counter)
    clients: dict[str, BaseClient] = field(default_factory=dict)
    plan: FaultPlan | None = None

    @property
    def faults(self) -> Counter[str]:
        """Faults injected so far, by kind."""
        return Counter() if self.plan is None else self.plan.counts

    def elapsed_s(self) -> float:
        """Return the seconds since the run began."""
        return time.monotonic() - self.began

    def evaluated(self, reward: float) -> None:
        """Note a reward on the held-out prompts."""
        self.evaluations.append(Point(self.elapsed_s(), reward))

    def trained(self, rewards: Sequence[float], ages: Sequence[int]) -> None:
        """Note a training step on samples with these rewards and ages."""
        now = self.elapsed_s()
        self.steps += 1
        self.rewards.append(Point(now, sum(rewards) / len(rewards)))
        self.staleness.append(Point(now, sum(ages) / len(ages)))

    def looked(self, depth: int, ages: Iterable[int]) -> None:
        """Note what a look at the plane showed."""
        self.depths.append(Point(self.elapsed_s(), depth))
        self.ages = Counter(ages)


def count_events(clients: Iterable[BaseClient], event: str, label: str) -> Counter[str]:
    """Add up an event that the layers of all clients emitted, by one of its labels: ``"retry"`` by ``"reason"``."""
    total: Counter[str] = Counter()
    for client in clients:
        for layer in layers_of(client):
            if isinstance(layer, Metrics):
                for labels, count in layer.snapshot()["events_by"].get(event, {}).items():
                    by_name = dict(pair.split("=", 1) for pair in labels.split())
                    total[by_name.get(label, "?")] += count
    return total


def ports_out(clients: Iterable[BaseClient]) -> dict[tuple[str, int], int]:
    """Return all ports that were used, as (host, port), with the number of clients that leave each alone at present."""
    out: Counter[tuple[str, int]] = Counter()
    for client in clients:
        for layer in layers_of(client):
            if isinstance(layer, PortRotation):
                for port, seen in layer.ports(layer.env.clock.now()).items():
                    out[port] += seen.health is not Health.HEALTHY
    return dict(sorted(out.items()))
