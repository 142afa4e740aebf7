"""Schedule of the faults of a simulation: what fails, when, and for how long."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from .link import DIRECTORY
from .network import DoorState

if TYPE_CHECKING:
    from .fabric import Fabric

__all__ = ["KINDS", "Trouble", "draw_troubles", "make_trouble"]


@dataclass(frozen=True, slots=True)
class Trouble:
    """One scheduled fault.

    Attributes:
        at_s, for_s: Start and duration in seconds.
        kind: One of :data:`KINDS`.
        target: Id of a host, name of a client, or the directory.
        port: Port number, for faults of one port.
        how: For ``door`` and ``outage``, the state of the port; for ``cut``, the unreachable host; for ``slow``, the
            factor of the latency.
    """

    at_s: float
    for_s: float
    kind: str
    target: str
    port: int | None = None
    how: str = ""


#: Kinds of faults and their weights.
KINDS = {"door": 5, "slow": 3, "crash": 3, "empty": 1, "outage": 2, "cut": 2, "pause": 3, "kill": 1}
#: Seconds within which faults start.
UNTIL_S = 6.0


def draw_troubles(rng: random.Random, hosts: int, ports: int, clients: Sequence[str]) -> tuple[Trouble, ...]:
    """Draw a schedule, ordered by time; at most one client is killed, and never the only one."""
    drawn: list[Trouble] = []
    for kind in rng.choices(list(KINDS), list(KINDS.values()), k=rng.randint(0, 7)):
        at_s, for_s = rng.uniform(0.05, UNTIL_S), rng.uniform(0.2, 3.0)
        number = rng.randrange(hosts)
        host, client = f"host-{number}", rng.choice(clients)
        port = number * ports + rng.randint(1, ports)
        state = rng.choice(list(DoorState)).value
        if kind == "door":
            drawn.append(Trouble(at_s, for_s, kind, host, port, state))
        elif kind == "slow":
            drawn.append(Trouble(at_s, for_s, kind, host, port, str(rng.choice([10.0, 100.0, 1000.0]))))
        elif kind in ("crash", "empty"):
            drawn.append(Trouble(at_s, for_s, kind, host))
        elif kind == "outage":
            state = rng.choice([DoorState.REFUSES, DoorState.SILENT, DoorState.MUTE, DoorState.RESETS]).value
            drawn.append(Trouble(at_s, min(for_s, 1.5), kind, DIRECTORY, None, state))
        elif kind == "cut":
            drawn.append(Trouble(at_s, for_s, kind, client, None, rng.choice([host, DIRECTORY])))
        elif kind == "pause" or (len(clients) > 1 and not any(t.kind == "kill" for t in drawn)):
            drawn.append(Trouble(at_s, for_s, kind, client))
    return tuple(sorted(drawn, key=lambda trouble: trouble.at_s))


async def make_trouble(fabric: Fabric, trouble: Trouble, kill: anyio.CancelScope | None = None) -> None:
    """Start a fault at its time and end it after its duration; ``kill`` is the cancel scope of a client to kill."""
    await anyio.sleep(trouble.at_s)
    network = fabric.network
    network.faults[trouble.kind] += 1
    door = (trouble.target, trouble.port)
    if trouble.kind in ("door", "outage"):
        network.doors[door] = DoorState(trouble.how)
        await anyio.sleep(trouble.for_s)
        network.doors.pop(door, None)
    elif trouble.kind == "slow":
        network.slow[door] = float(trouble.how)
        await anyio.sleep(trouble.for_s)
        network.slow.pop(door, None)
    elif trouble.kind == "cut":
        network.cut.add((trouble.target, trouble.how))
        await anyio.sleep(trouble.for_s)
        network.cut.discard((trouble.target, trouble.how))
    elif trouble.kind in ("crash", "empty"):
        await _crash(fabric, trouble)
    elif trouble.kind == "pause":
        link = fabric.clients[trouble.target].link
        link.pause()
        await anyio.sleep(trouble.for_s)
        link.wake()
    elif kill is not None:
        fabric.clients[trouble.target].alive = False
        kill.cancel()


async def _crash(fabric: Fabric, trouble: Trouble) -> None:
    host = fabric.hosts[trouble.target]
    if not host.up:
        return
    host.crash()
    await anyio.sleep(trouble.for_s)
    if trouble.kind == "empty":
        fabric.empty(trouble.target)
    else:
        host.restart(adopt=True)
