"""The simulated fabric: a plane, a network and many clients in one process."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.errors import DataPlaneError
from asyncdp.factory import DEFAULT_LAYERS, layers_of, stack
from asyncdp.middleware.policy.budget import RetryBudget
from asyncdp.middleware.port_rotation import PortRotation
from asyncdp.middleware.reconcile import Reconcile
from asyncdp.transports.memory import MemoryTransport
from asyncdp.transports.memory.host import Host
from asyncdp.transports.memory.plane import Plane

from ..recording.history import Budgets, Event, History
from ..recording.recorded import Recorded
from .link import NetworkLink, Tap
from .network import Conditions, Network
from .serving import slow_to_serve
from .simulated_clock import SimulatedClock

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.abc import TaskGroup

    from asyncdp.calls import Call, CallContext
    from asyncdp.client import Client
    from asyncdp.service import Service

__all__ = ["Fabric", "Simulated"]

#: Names of the events that are recorded, which are those that help to read a trace.
KEPT = frozenset(
    {"probe", "quarantine", "recovered", "settled", "unsettled", "ambiguous", "budget_refused", "outage_over"}
)


class Simulated:
    """One client of a fabric.

    Attributes:
        name: Name of the client, which is also its ``owner`` towards the plane.
        client: The client with its layers.
        link: Its link to the simulated network.
        alive: Whether it still runs; False once it was killed.
    """

    def __init__(self, name: str, client: Client, link: NetworkLink) -> None:
        """Start alive."""
        self.name = name
        self.client = client
        self.link = link
        self.alive = True

    @property
    def rotation(self) -> PortRotation | None:
        """Its PortRotation layer; None if it has none."""
        return next((layer for layer in layers_of(self.client) if isinstance(layer, PortRotation)), None)


class Fabric:
    """Hosts, ports, a directory and clients, built on the memory transport and run in virtual time.

    ::

        async def main() -> None:
            async with anyio.create_task_group() as group:
                fabric = Fabric(group, seed=7, conditions=Conditions(lose_reply=0.05))
                alice = fabric.client("alice", attempt_timeout_s=0.5)
                ...
                group.cancel_scope.cancel()

        run_virtual(main, "trio", seed=7)

    Args:
        group: Task group that runs requests whose sender has given up.
        seed: Seed of the network and of all clients.
        conditions: Latency and fault probabilities of the network.
        config: Keys of the plane's config that differ from the defaults.
        memory: Its ``memory`` settings: ports_per_host, slots_per_host, rows_per_slot, checksum.
        replace: {class: replacement} for layers, Host, Plane, MemoryTransport and RetryBudget; used to test that the
            checks detect faulty implementations.
    """

    def __init__(
        self,
        group: TaskGroup,
        *,
        seed: int = 0,
        conditions: Conditions | None = None,
        config: Mapping[str, Any] | None = None,
        memory: Mapping[str, Any] | None = None,
        replace: Mapping[type[Any], type[Any]] | None = None,
    ) -> None:
        """Start the plane."""
        self.seed = seed
        self.replace = {} if replace is None else dict(replace)
        self.group = group
        self.clock = SimulatedClock()
        self.network = Network(conditions or Conditions(), random.Random(f"{seed}:network"))  # noqa: S311
        self.history = History(now=self.clock.now)
        self._config = {
            "enabled": True,
            "impl": "memory",
            "backend": "simple",
            "storage_capacity": 1 << 40,
            "num_storage_units": 2,
            "claim_meta_poll_interval_s": 0.05,
            "memory": dict(memory or {}),
            **({} if config is None else config),
        }
        self.history.lease_s = self._config.get("claim_lease_s")
        rng = random.Random(f"{seed}:serving")  # noqa: S311
        self._transport = slow_to_serve(self._kind(MemoryTransport), rng, 2.0 * self.network.conditions.latency_s)
        self.transport = self._transport({**self._config, "controller_address": f"memory://sim-{id(self)}"})
        plane: Any = self.transport.plane
        plane.clock = self.clock
        plane.__class__ = self._kind(Plane)
        for host in plane.hosts.values():
            host.__class__ = self._kind(Host)
        self.clients: dict[str, Simulated] = {}

    def _kind(self, kind: type[Any]) -> type[Any]:
        return self.replace.get(kind, kind)

    @property
    def plane(self) -> Plane:
        """The simulated plane."""
        plane: Plane = self.transport.plane
        return plane

    @property
    def hosts(self) -> Mapping[str, Host]:
        """The slot hosts of the plane, by id."""
        return self.plane.hosts

    # -- clients

    def client(
        self,
        name: str,
        *,
        layers: Mapping[str, Mapping[str, Any]] | None = None,
        budget: Mapping[str, float] | None = None,
    ) -> Simulated:
        """Attach a client.

        Args:
            name: Name of the client.
            layers: Settings of its layers, by their names in :data:`~asyncdp.layering.DEFAULT_LAYERS`; layers without
                an entry are left out. None: all layers.
            budget: Settings of its retry budget.

        Raises:
            ValueError: A layer is unknown.
        """
        chosen = {name: {} for name in DEFAULT_LAYERS} if layers is None else layers
        if unknown := chosen.keys() - DEFAULT_LAYERS.keys():
            raise ValueError(f"unknown layers {sorted(unknown)}; there are {sorted(DEFAULT_LAYERS)}")
        transport = self._transport({**self.transport.attach_config(), "owner": name}, bootstrap=False)
        link: list[NetworkLink] = []

        def linked(inner: Client) -> NetworkLink:
            link.append(NetworkLink(inner, self, name))
            return link[0]

        factories: list[Any] = []
        for layer, default in DEFAULT_LAYERS.items():
            if layer in chosen:
                kind: Any = self._kind(default)
                factories.append(partial(kind, **chosen[layer]))
        rng = random.Random(f"{self.seed}:{name}")  # noqa: S311 - jitter
        client = stack(transport, [*factories, linked], clock=self.clock, rng=rng, retry_budget=budget)
        env = client.env
        env.session = name  # not random, so that runs are reproducible
        env.sink = Tap(env.sink, link[0])
        if RetryBudget in self.replace:
            budget_kind: Any = self.replace[RetryBudget]
            env.budget = budget_kind(0.0, **(budget or {}))
        made = self.clients[name] = Simulated(name, client, link[0])
        self.history.budgets[name] = self._budgets(client, budget)
        if any(isinstance(layer, Reconcile) for layer in layers_of(client)):
            self.history.settles.add(name)
        return made

    def _budgets(self, client: Client, budget: Mapping[str, float] | None) -> Budgets:
        # A row with a stale slot is located and read again, with all of its slots. It may move more often (REREADS),
        # but not with every attempt of each read used up, for which a ceiling would have to be higher.
        per_slot = 2
        tries, patience_s = 1, 0.0
        for layer in layers_of(client):
            per_slot *= getattr(layer, "max_rounds", 1) * getattr(layer, "max_attempts", 1)
            patience_s = max(patience_s, getattr(layer, "outage_patience_s", 0.0))
            tries *= 2 if isinstance(layer, PortRotation) else 1
        known = {"ratio": 0.2, "floor_per_s": 10.0, "window_s": 10.0, **(budget or {})}
        return Budgets(**known, per_slot=per_slot * tries, after_wait=tries, patience_s=patience_s)

    def recorded(self, name: str, *, tags: Sequence[str] = ()) -> Recorded:
        """Return recorded verbs of a client; each task that calls them needs its own."""
        return Recorded(self.clients[name].client, self.history, name, tags=tags)

    async def close(self, name: str) -> None:
        """Close a client and record the call; a pending outcome that it could not reconcile is recorded as an error."""
        client = self.clients[name].client
        op = self.history.begin(name, "close", timeout_s=10.0)
        await client.close()
        left = len(client.env.pending_outcomes)
        self.history.ended(op, DataPlaneError(f"{left} outcomes are still pending", ambiguous=True) if left else None)

    # -- the network

    def deliver(
        self, transport: Service, call: Call[Any], ctx: CallContext, after_s: float, awake: anyio.Event | None
    ) -> None:
        """Execute a request later, without a sender that waits for it."""
        self.group.start_soon(self._deliver, transport, call, ctx, after_s, awake)

    async def _deliver(
        self, transport: Service, call: Call[Any], ctx: CallContext, after_s: float, awake: anyio.Event | None
    ) -> None:
        if awake is not None:
            await awake.wait()
        await anyio.sleep(after_s * self.network.rng.uniform(0.5, 20.0))
        with suppress(Exception):  # there is no sender to receive the error
            await transport.execute(call, ctx)

    def record_event(self, client: str, what: str, labels: Mapping[str, Any]) -> None:
        """Record an event of a layer."""
        if what in KEPT:
            self.history.events.append(Event(self.clock.now(), client, what, dict(labels)))

    # -- faults

    def empty(self, host_id: str) -> None:
        """Restart a host empty, in a new epoch, and record its samples as lost."""
        host = self.hosts[host_id]
        for part in self.plane.partitions.values():
            gone = [row.id for row in part.rows.values() if (host.id, host.ref.epoch) in row.homes()]
            self.history.lose(part.id, gone, f"{host_id} came back empty")
        host.restart(adopt=False)

    def calm_down(self) -> None:
        """End all faults: restart hosts, restore ports, resume clients, and lose no further messages."""
        self.network.calm_down()
        for host in self.hosts.values():
            if not host.up:
                host.restart(adopt=True)
        for client in self.clients.values():
            client.link.wake()

    # -- queries

    def slots(self) -> dict[str, int]:
        """Return the number of slots by state over all hosts, after reclaiming expired reservations."""
        total: dict[str, int] = {}
        for host in self.hosts.values():
            host.sweep(self.clock.time())
            for state, count in host.counts().items():
                total[state] = total.get(state, 0) + count
        return total

    def homes(self, partition: str, field: str) -> Iterator[tuple[str, str]]:
        """Iterate over the (host, sample) pairs of the readable rows of a field."""
        part, gone = self.plane.partitions.get(partition), self.plane.gone()
        for row in () if part is None else part.rows.values():
            cell = row.cells.get(field)
            if cell is not None and cell.place.home not in gone:
                yield cell.place.host.id, row.id
