"""A scenario: what one seed makes of a plane, its clients, their stacks, the network and its troubles."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .fault_schedule import Trouble, draw_troubles
from .network import Conditions

__all__ = ["ClientPlan", "Scenario", "draw"]


@dataclass(frozen=True, slots=True)
class ClientPlan:
    """One client: its layers with their settings, its retry budget, the roles that its tasks play."""

    name: str
    layers: Mapping[str, Mapping[str, Any]]
    budget: Mapping[str, float]
    roles: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Scenario:
    """All that a run depends on.

    Attributes:
        seed: Of everything else as well, such as the order of tasks and the work that they do.
        hosts, memory: The plane.
        lease_s: How long claims last; None: until they are released.
        group_size: Samples of a group of the flow that is produced and consumed; None: no groups.
        conditions: The weather of the network.
        clients: Who works.
        troubles: What happens when.
        steps: How many things each task does.
        patience_s: What each call is allowed, in seconds: from, to.
        cancels: How likely a call is cancelled on its way.
    """

    seed: int
    hosts: int
    memory: Mapping[str, Any]
    lease_s: float | None
    group_size: int | None
    conditions: Conditions
    clients: tuple[ClientPlan, ...]
    troubles: tuple[Trouble, ...]
    steps: int = 60
    patience_s: tuple[float, float] = (0.5, 4.0)
    cancels: float = 0.1
    registers: int = 8
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def quiet_s(self) -> float:
        """Seconds after which nothing of the faults is left: quarantines, leases, reservations."""
        longest = max(
            (plan.layers.get("port_rotation", {}).get("quarantine_max_s", 0.0) for plan in self.clients), default=0.0
        )
        return 2.0 * longest + (self.lease_s or 0.0) + 60.0


def _layers(rng: random.Random) -> dict[str, dict[str, Any]]:
    """Draw a subset of the default layers, and their settings."""
    layers: dict[str, dict[str, Any]] = {}
    if rng.random() < 0.8:  # noqa: PLR2004 - how often it is there
        layers["batch_retry"] = {"max_rounds": rng.randint(1, 3), "round_backoff_base_s": rng.choice([0.01, 0.1])}
    layers["slot_mapping"] = {}
    layers["settle"] = {"close_timeout_s": 5.0}
    if rng.random() < 0.9:  # noqa: PLR2004
        layers["slot_retry"] = {"max_attempts": rng.randint(1, 4), "backoff_base_s": rng.choice([0.005, 0.05])}
    if rng.random() < 0.9:  # noqa: PLR2004
        base = rng.choice([0.5, 2.0])
        layers["port_rotation"] = {
            "quarantine_s": base,
            "quarantine_max_s": base * rng.choice([1, 4]),
            "quarantine_decay_s": 5.0,
            "first_contact_s": rng.choice([0.05, 1.0]),
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


#: What the tasks of a client may do; those that write registers are what most violations are found by.
ROLES = ("registers", "registers", "registers", "produces", "produces", "scores", "trains", "watches")


def draw(seed: int, *, steps: int = 60) -> Scenario:
    """Draw a scenario; the same seed, the same scenario."""
    rng = random.Random(f"scenario:{seed}")  # noqa: S311
    hosts, ports = rng.randint(1, 3), rng.randint(1, 4)
    names = [f"c{n}" for n in range(rng.randint(2, 4))]
    # Each role is played by somebody; the others are as it comes.
    casts: dict[str, list[str]] = {name: [] for name in names}
    for at, role in enumerate(("registers", "registers", "produces", "scores", "trains", "watches")):
        casts[names[at % len(names)]].append(role)
    for name in names:
        casts[name] += [rng.choice(ROLES) for _ in range(rng.randint(1, 2))]
    lease = rng.choice([None, None, 1.0])
    clients = tuple(
        ClientPlan(
            name,
            _layers(rng),
            rng.choice([{}, {"ratio": 0.2, "floor_per_s": 0.5, "window_s": 2.0}]),
            tuple(casts[name]),
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
        troubles=draw_troubles(rng, hosts, ports, names),
        steps=steps,
        cancels=rng.choice([0.0, 0.05, 0.15]),
        registers=rng.choice([3, 8]),
    )
