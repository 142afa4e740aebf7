"""What the layers of a client have counted, as plain values: they travel from the process of a role to the driver."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, NamedTuple

from asyncdp import Metrics, PortRotation
from asyncdp.middleware.policy.permit import Health
from asyncdp.service import layers_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from asyncdp import Client
    from asyncdp.testing import FaultPlan

__all__ = ["Counts", "count_events", "counts_of", "ports_out"]


class Counts(NamedTuple):
    """The counts of one client.

    Attributes:
        events: How often its layers did something, by event and labels (``"reason=timeout"``).
        ports: The ports that it used, and whether it leaves each alone at present.
        faults: Faults injected below its layers, by kind, where its process has a plan of its own.
    """

    events: Mapping[str, Mapping[str, int]]
    ports: Mapping[tuple[str, int], bool]
    faults: Mapping[str, int]


def counts_of(client: Client, plan: FaultPlan | None = None) -> Counts:
    """Return the counts of a client so far; needs its event loop, for the time."""
    events: Mapping[str, Mapping[str, int]] = {}
    ports: dict[tuple[str, int], bool] = {}
    for layer in layers_of(client):
        if isinstance(layer, Metrics):
            events = layer.snapshot()["events_by"]
        elif isinstance(layer, PortRotation):
            seen = layer.ports(layer.env.clock.now())
            ports = {port: facts.health is not Health.HEALTHY for port, facts in seen.items()}
    return Counts(events, ports, {} if plan is None else dict(plan.counts))


def count_events(counts: Iterable[Counts], event: str, label: str) -> Counter[str]:
    """Add up an event over all clients, by one of its labels: ``"retry"`` by ``"reason"``."""
    total: Counter[str] = Counter()
    for one in counts:
        for labels, count in one.events.get(event, {}).items():
            by_name = dict(pair.split("=", 1) for pair in labels.split())
            total[by_name.get(label, "?")] += count
    return total


def ports_out(counts: Collection[Counts]) -> dict[tuple[str, int], int]:
    """Return all ports that were used, as (host, port), with the number of clients that leave each alone at present."""
    out: Counter[tuple[str, int]] = Counter()
    for one in counts:
        for port, left_alone in one.ports.items():
            out[port] += left_alone
    return dict(sorted(out.items()))
