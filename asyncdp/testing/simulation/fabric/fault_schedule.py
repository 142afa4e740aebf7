"""Schedule of the faults of a simulation: what fails, when, and for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from .link import DIRECTORY
from .network import PortState

if TYPE_CHECKING:
    from .fabric import Fabric

__all__ = ["KINDS", "ScheduledFault", "draw_faults", "run_fault"]


@dataclass(frozen=True, slots=True)
class ScheduledFault:
    """One scheduled fault.

    Attributes:
        at_s, for_s: Start and duration in seconds.
        kind: One of :data:`KINDS`.
        target: Id of a host, name of a client, or the directory.
        port: Port number, for faults of one port.
        how: For ``port`` and ``outage``, the state of the port; for ``cut``, the unreachable host; for ``slow``, the
            factor of the latency.
    """

    at_s: float
    for_s: float
    kind: str
    target: str
    port: int | None = None
    how: str = ""


#: Kinds of faults and their weights.
KINDS = {"port": 5, "slow": 3, "crash": 3, "empty": 1, "outage": 2, "cut": 2, "pause": 3, "kill": 1}
#: Seconds within which faults start.
UNTIL_S = 6.0


def draw_faults(rng: random.Random, hosts: int, ports: int, clients: Sequence[str]) -> tuple[ScheduledFault, ...]:
    """Draw a schedule, ordered by time; at most one client is killed, and never the only one."""
    drawn: list[ScheduledFault] = []
    for kind in rng.choices(list(KINDS), list(KINDS.values()), k=rng.randint(0, 7)):
        at_s, for_s = rng.uniform(0.05, UNTIL_S), rng.uniform(0.2, 3.0)
        number = rng.randrange(hosts)
        host, client = f"host-{number}", rng.choice(clients)
        port = number * ports + rng.randint(1, ports)
        state = rng.choice(list(PortState)).value
        if kind == "port":
            drawn.append(ScheduledFault(at_s, for_s, kind, host, port, state))
        elif kind == "slow":
            drawn.append(ScheduledFault(at_s, for_s, kind, host, port, str(rng.choice([10.0, 100.0, 1000.0]))))
        elif kind in ("crash", "empty"):
            drawn.append(ScheduledFault(at_s, for_s, kind, host))
        elif kind == "outage":
            state = rng.choice([PortState.REFUSES, PortState.SILENT, PortState.MUTE, PortState.RESETS]).value
            drawn.append(ScheduledFault(at_s, min(for_s, 1.5), kind, DIRECTORY, None, state))
        elif kind == "cut":
            drawn.append(ScheduledFault(at_s, for_s, kind, client, None, rng.choice([host, DIRECTORY])))
        elif kind == "pause" or (len(clients) > 1 and not any(t.kind == "kill" for t in drawn)):
            drawn.append(ScheduledFault(at_s, for_s, kind, client))
    return tuple(sorted(drawn, key=lambda fault: fault.at_s))


async def run_fault(fabric: Fabric, fault: ScheduledFault, kill: anyio.CancelScope | None = None) -> None:
    """Start a fault at its time and end it after its duration; ``kill`` is the cancel scope of a client to kill."""
    await anyio.sleep(fault.at_s)
    network = fabric.network
    network.faults[fault.kind] += 1
    port = (fault.target, fault.port)
    if fault.kind in ("port", "outage"):
        network.ports[port] = PortState(fault.how)
        await anyio.sleep(fault.for_s)
        network.ports.pop(port, None)
    elif fault.kind == "slow":
        network.slow[port] = float(fault.how)
        await anyio.sleep(fault.for_s)
        network.slow.pop(port, None)
    elif fault.kind == "cut":
        network.cut.add((fault.target, fault.how))
        await anyio.sleep(fault.for_s)
        network.cut.discard((fault.target, fault.how))
    elif fault.kind in ("crash", "empty"):
        await _crash(fabric, fault)
    elif fault.kind == "pause":
        link = fabric.clients[fault.target].link
        link.pause()
        await anyio.sleep(fault.for_s)
        link.wake()
    elif kill is not None:
        fabric.clients[fault.target].alive = False
        kill.cancel()


async def _crash(fabric: Fabric, fault: ScheduledFault) -> None:
    host = fabric.hosts[fault.target]
    if not host.up:
        return
    host.crash()
    await anyio.sleep(fault.for_s)
    if fault.kind == "empty":
        fabric.empty(fault.target)
    else:
        host.restart(adopt=True)
