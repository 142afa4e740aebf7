"""Every planted bug: what it replaces, which check finds it, and the scenarios in which it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from asyncdp import AttemptTimeout, BatchRetry, MemoryTransport, PortRotation, Reconcile, SlotRetry
from asyncdp.compose.composition import SlotMapping
from asyncdp.middleware.policy.budget import RetryBudget
from asyncdp.testing.simulation import Conditions, Scenario, ScheduledFault
from asyncdp.transports.memory.host import Host
from asyncdp.transports.memory.plane import Plane
from tests.planted import hosts, outages, planes, ports, puts, retries

Variant = Callable[[Scenario], Scenario]

#: All layers, as they are by default but for time limits that fit a simulation.
ALL_LAYERS: dict[str, dict[str, Any]] = {
    "batch_retry": {},
    "slot_mapping": {},
    "reconcile": {},
    "slot_retry": {"backoff_base_s": 0.02},
    "port_rotation": {"quarantine_s": 0.3, "quarantine_max_s": 0.6, "first_contact_s": 0.01},
    "attempt_timeout": {"attempt_timeout_s": 0.2},
    "typed_errors": {},
}
#: Tight enough to be spent.
TIGHT = {"ratio": 0.1, "floor_per_s": 0.5, "window_s": 2.0}


def drawn(scenario: Scenario) -> Scenario:
    """Leave it as it was drawn."""
    return scenario


def _cast(scenario: Scenario, *roles: str, budget: dict[str, float] | None = None) -> Scenario:
    """Let every client have all layers and play these roles."""
    clients = tuple(replace(c, layers=ALL_LAYERS, budget=budget or {}, roles=roles) for c in scenario.clients)
    return replace(scenario, clients=clients, memory={**scenario.memory, "slots_per_host": None})


def lossy(scenario: Scenario) -> Scenario:
    """Many requests and replies are lost, or late, on the way to two registers."""
    conditions = Conditions(0.01, 1.0, lose_request=0.05, lose_reply=0.2, noticed=0.9, duplicate=0.1, arrives_late=0.9)
    few = replace(scenario, conditions=conditions, registers=2, cancels=0.25, patience_s=(2.0, 4.0), faults=())
    return _cast(few, "registers", "registers", "registers", budget={"floor_per_s": 100.0})


def crowded(scenario: Scenario) -> Scenario:
    """Many tasks read and write the same few registers; slots are slow and soon used again."""
    conditions = Conditions(0.005, 1.5)
    few = replace(scenario, conditions=conditions, registers=3, cancels=0.0, hosts=1, faults=())
    return replace(_cast(few, *["registers"] * 4), memory={"ports_per_host": 2, "rows_per_slot": 1})


def poor(scenario: Scenario) -> Scenario:
    """Everything fails, and nobody can afford it."""
    conditions = Conditions(0.002, 0.5, lose_request=0.3, noticed=1.0)
    return _cast(replace(scenario, conditions=conditions, faults=()), *["registers"] * 3, budget=TIGHT)


def frugal(scenario: Scenario) -> Scenario:
    """Half of all requests are lost, and a call may try each port once."""
    layers = {**ALL_LAYERS, "batch_retry": {"max_rounds": 1}, "slot_retry": {"max_attempts": 1}}
    chosen = poor(replace(scenario, conditions=Conditions(0.002, 0.5, lose_request=0.5, noticed=1.0)))
    return replace(chosen, clients=tuple(replace(c, layers=layers, budget={}) for c in chosen.clients))


def reading(scenario: Scenario) -> Scenario:
    """Many registers that many read at once, and few of which change meanwhile."""
    chosen = replace(scenario, conditions=Conditions(0.02, 0.5), registers=16, cancels=0.0, hosts=1, faults=())
    return replace(_cast(chosen, *["registers"] * 5), memory={"ports_per_host": 2, "rows_per_slot": 1})


def broken_ports(scenario: Scenario) -> Scenario:
    """On each host one port after the other is silent for a while."""
    faults = [
        ScheduledFault(0.3 + 0.5 * port, 0.8, "port", f"host-{host}", host * 3 + port, "silent")
        for host in range(scenario.hosts)
        for port in (1, 2, 3)
    ]
    chosen = replace(scenario, faults=tuple(faults), cancels=0.3, conditions=Conditions(0.01, 0.8))
    return replace(_cast(chosen, *["registers"] * 3), memory={"ports_per_host": 3, "rows_per_slot": 1})


def leased(scenario: Scenario) -> Scenario:
    """Claims last for a moment only, and trainers are slow."""
    chosen = replace(scenario, lease_s=0.15, faults=(), conditions=Conditions(0.02, 0.8))
    return _cast(chosen, "produces", "scores", "trains", "trains")


def bereft(scenario: Scenario) -> Scenario:
    """As leased, and one who holds claims is killed."""
    chosen = leased(scenario)
    return replace(chosen, faults=(ScheduledFault(0.8, 0.0, "kill", chosen.clients[0].name),))


def flowing(scenario: Scenario) -> Scenario:
    """Samples flow, replies are lost, and everybody looks."""
    conditions = Conditions(0.005, 0.8, lose_reply=0.1, noticed=0.7, arrives_late=0.8)
    chosen = replace(scenario, conditions=conditions, group_size=3, cancels=0.15, faults=())
    roles = ("produces", "scores", "trains", "watches")
    return replace(_cast(chosen, *roles), memory={"ports_per_host": 2, "rows_per_slot": 1})


def emptied(scenario: Scenario) -> Scenario:
    """Hosts come back empty, again and again."""
    faults = [ScheduledFault(0.3 * at, 0.05, "empty", f"host-{at % scenario.hosts}") for at in range(1, 9)]
    chosen = replace(scenario, faults=tuple(faults), conditions=Conditions(0.005), registers=24)
    return replace(_cast(chosen, *["registers"] * 3), memory={"ports_per_host": 1, "rows_per_slot": 1})


def away(scenario: Scenario) -> Scenario:
    """Hosts die, and come back when no call has the patience for it any more."""
    faults = [ScheduledFault(0.4, 3.0, "crash", f"host-{host}") for host in range(scenario.hosts)]
    layers = {**ALL_LAYERS, "slot_retry": {"backoff_base_s": 0.02, "outage_patience_s": 0.5}}
    chosen = replace(scenario, faults=tuple(faults), conditions=Conditions(0.01), patience_s=(3.0, 4.0))
    chosen = replace(_cast(chosen, *["registers"] * 4), cancels=0.0, memory={"ports_per_host": 1, "rows_per_slot": 1})
    return replace(chosen, clients=tuple(replace(client, layers=layers) for client in chosen.clients))


def forgetful(scenario: Scenario) -> Scenario:
    """Replies are lost, and whoever waits for one notices at once."""
    conditions = Conditions(0.001, 0.5, lose_reply=0.25, noticed=1.0)
    chosen = replace(scenario, conditions=conditions, registers=12, cancels=0.0, patience_s=(4.0, 5.0), faults=())
    return _cast(chosen, *["registers"] * 4, budget={"floor_per_s": 100.0})


def impatient(scenario: Scenario) -> Scenario:
    """Most calls are cancelled on their way, and all that is on its way arrives, late."""
    chosen = replace(scenario, conditions=Conditions(0.01, 1.0, arrives_late=1.0), registers=2, cancels=0.5, faults=())
    return _cast(chosen, *["registers"] * 3)


class Planted(NamedTuple):
    """One bug: the class that is replaced, by what, the check that finds it, a variant of a scenario that shows it."""

    guard: type[Any]
    bug: type[Any]
    check: str
    variant: Variant = drawn


PLANTED = [
    Planted(PortRotation, ports.LeaksProbes, "ports", broken_ports),
    Planted(PortRotation, ports.TwoProbes, "probe", broken_ports),
    Planted(PortRotation, ports.NeverHeals, "ports", broken_ports),
    Planted(PortRotation, ports.Starves, "ports", broken_ports),
    Planted(SlotRetry, retries.DenyList, "budget", poor),
    Planted(SlotRetry, retries.ClaimsWithoutToken, "claim", flowing),
    Planted(SlotRetry, retries.ClearsWithoutOpId, "register", forgetful),
    Planted(RetryBudget, retries.NeverSpends, "budget", poor),
    Planted(SlotRetry, retries.AsksStaleAgain, "stale-once", crowded),
    Planted(SlotRetry, retries.NeverGivesUp, "ceiling", frugal),
    Planted(SlotRetry, outages.AsksAlone, "outage", away),
    Planted(SlotRetry, outages.WaitsForEver, "outage", away),
    Planted(BatchRetry, retries.MixesLives, "whole", crowded),
    Planted(BatchRetry, retries.ShortRead, "outcome", crowded),
    Planted(SlotMapping, puts.RollbackRemovesAll, "register", poor),
    Planted(SlotMapping, puts.CompletionOrder, "register", crowded),
    Planted(Reconcile, puts.Careless, "register", impatient),
    Planted(Reconcile, puts.Heedless, "claim", flowing),
    Planted(AttemptTimeout, puts.ConvertsResults, "register", lossy),
    Planted(AttemptTimeout, puts.Endless, "time", broken_ports),
    Planted(MemoryTransport, puts.HalfVisible, "whole", flowing),
    Planted(MemoryTransport, puts.TagsLater, "claim", flowing),
    Planted(Host, hosts.NoGeneration, "register", crowded),
    Planted(Host, hosts.NoEpoch, "register", emptied),
    Planted(Host, hosts.BusyIsStale, "stale", reading),
    Planted(Host, hosts.ReclaimsByTime, "register", crowded),
    Planted(Plane, planes.LeaseUnchecked, "claim", leased),
    Planted(Plane, planes.LeasesForEver, "liveness", bereft),
    Planted(Plane, planes.TakesAnyRelease, "claim", bereft),
    Planted(Plane, planes.SplitsGroups, "claim", flowing),
    Planted(Plane, planes.ListsLess, "register", crowded),
    Planted(Plane, planes.ForgetsOpIds, "register", lossy),
    Planted(Plane, planes.ForgetsEmptyClears, "register", lossy),
    Planted(Plane, planes.IgnoresIncarnations, "stale", crowded),
    Planted(Plane, planes.ClaimsTwice, "claim", flowing),
    Planted(Plane, planes.AdmitsLateMutations, "claim", flowing),
    Planted(Plane, planes.WritesOtherLives, "life", crowded),
    Planted(Plane, planes.RevivesRows, "life", crowded),
    Planted(Plane, planes.SkipsHalf, "register", crowded),
    Planted(Plane, planes.RemovesOtherLives, "register", crowded),
    Planted(MemoryTransport, puts.DecidesAnew, "register", forgetful),
]
