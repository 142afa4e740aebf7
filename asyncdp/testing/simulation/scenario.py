"""Scenarios: the plane, the clients with their stacks, the network and the faults that a seed determines."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .fabric.fault_schedule import ScheduledFault, draw_faults
from .fabric.network import Conditions

__all__ = ["ClientPlan", "Scenario", "draw"]


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """Plan of one client: settings of its layers, its retry budget, and the roles of its tasks."""

    name: str
    layers: Mapping[str, Mapping[str, Any]]
    budget: Mapping[str, float]
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Everything that determines a run.

    Attributes:
        seed: Seed of all further random choices, such as the order of tasks and their steps.
        hosts, memory: Number of hosts, and the ``memory`` settings of the plane.
        lease_s: Duration of claims in seconds; None: claims last until they are released.
        group_size: Number of samples per group of the flow; None: no groups.
        conditions: Latency and fault probabilities of the network.
        clients: Plans of the clients.
        faults: The scheduled faults.
        steps: Number of steps of each task.
        patience_s: Minimum and maximum timeout of a call in seconds.
        cancels: Probability that a call is cancelled.
    """

    seed: int
    hosts: int
    memory: Mapping[str, Any]
    lease_s: float | None
    group_size: int | None
    conditions: Conditions
    clients: tuple[ClientPlan, ...]
    faults: tuple[ScheduledFault, ...]
    steps: int = 60
    patience_s: tuple[float, float] = (0.5, 4.0)
    cancels: float = 0.1
    registers: int = 8
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quiet_s(self) -> float:
        """Seconds after which no effect of the faults is left, such as quarantines, leases and reservations."""
        longest = max(
            (plan.layers.get("port_rotation", {}).get("quarantine_max_s", 0.0) for plan in self.clients), default=0.0
        )
        return 2.0 * longest + (self.lease_s or 0.0) + 60.0


#: Settings of hedged reads: none, with a fixed delay, with the delay that most reads take.
HEDGES: tuple[dict[str, float], ...] = ({}, {}, {"hedge_after_s": 0.005}, {"hedge_after_s": 0.2, "hedge_quantile": 0.9})


def _layers(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Draw a subset of the default layers and their settings."""
    layers: dict[str, dict[str, Any]] = {}
    if rng.random() < 0.8:  # noqa: PLR2004 - how often it is there
        layers["batch_retry"] = {"max_rounds": rng.randint(1, 3), "round_backoff_base_s": rng.choice([0.01, 0.1])}
    layers["slot_mapping"] = {}
    layers["reconcile"] = {"close_timeout_s": 5.0}
    if rng.random() < 0.9:  # noqa: PLR2004
        layers["slot_retry"] = {"max_attempts": rng.randint(1, 4), "backoff_base_s": rng.choice([0.005, 0.05])}
    if rng.random() < 0.9:  # noqa: PLR2004
        base = rng.choice([0.5, 2.0])
        layers["port_rotation"] = {
            "quarantine_s": base,
            "quarantine_max_s": base * rng.choice([1, 4]),
            "quarantine_decay_s": 5.0,
            "first_contact_s": rng.choice([0.05, 1.0]),
            **rng.choice(HEDGES),
        }
    layers["attempt_timeout"] = {"attempt_timeout_s": rng.choice([0.1, 0.3, 1.0])}
    layers["typed_errors"] = {}
    return layers


def _conditions(rng: random.Random) -> Conditions:
    if rng.random() < 0.15:  # noqa: PLR2004 - sometimes all is well but for what hosts and clients do
        return Conditions(latency_s=rng.choice([0.0005, 0.005]))
    scale = rng.choice([0.2, 1.0, 1.0, 2.0])
    return Conditions(
        latency_s=rng.choice([0.0005, 0.002, 0.01]),
        spread=rng.choice([0.3, 0.8, 1.5]),
        lose_request=0.01 * scale,
        lose_reply=0.02 * scale,
        noticed=rng.choice([0.3, 0.8]),
        duplicate=0.02 * scale,
        arrives_late=rng.choice([0.2, 0.8]),
        garble=rng.choice([0.0, 0.01 * scale]),
    )


#: Roles that tasks are drawn from; registers are more frequent, since they find most violations.
ROLES = ("registers", "registers", "registers", "produces", "produces", "scores", "trains", "watches")


def draw(seed: int, *, steps: int = 60) -> Scenario:
    """Draw the scenario of a seed; the result is deterministic."""
    rng = random.Random(f"scenario:{seed}")  # noqa: S311
    hosts, ports = rng.randint(1, 3), rng.randint(1, 4)
    names = [f"c{n}" for n in range(rng.randint(2, 4))]
    # Every role is assigned at least once; further roles are drawn.
    roles: dict[str, list[str]] = {name: [] for name in names}
    for at, role in enumerate(("registers", "registers", "produces", "scores", "trains", "watches")):
        roles[names[at % len(names)]].append(role)
    for name in names:
        roles[name] += [rng.choice(ROLES) for _ in range(rng.randint(1, 2))]
    lease = rng.choice([None, None, 1.0])
    clients = tuple(
        ClientPlan(
            name,
            _layers(rng),
            rng.choice([{}, {"ratio": 0.2, "floor_per_s": 0.5, "window_s": 2.0}]),
            tuple(roles[name]),
        )
        for name in names
    )
    return Scenario(
        seed=seed,
        hosts=hosts,
        memory={
            "ports_per_host": ports,
            "rows_per_slot": rng.choice([None, 1, 1, 2]),
            "slots_per_host": rng.choice([None, None, 96]),
            "checksum": rng.random() < 0.3,  # noqa: PLR2004
        },
        lease_s=lease,
        group_size=rng.choice([None, 2, 3]),
        conditions=_conditions(rng),
        clients=clients,
        faults=draw_faults(rng, hosts, ports, names),
        steps=steps,
        cancels=rng.choice([0.0, 0.05, 0.15]),
        registers=rng.choice([3, 8]),
    )
