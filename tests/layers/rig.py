"""One stack over a memory plane, on virtual time, with all that a test wants to look at."""

from __future__ import annotations

import functools
import inspect
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio
import pytest
import torch

from asyncdp import Client, Layer, MemoryTransport, Metrics, PortRotation, SlotRetry, default_layers, stack
from asyncdp.middleware.policy.budget import RetryBudget
from asyncdp.service import layers_of
from asyncdp.testing import FaultPlan, run_virtual
from asyncdp.transports.memory.host import Host
from asyncdp.transports.memory.transport import DEFAULTS

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.calls import Call, CallContext
    from asyncdp.middleware.policy.permit import TargetSnapshot

R = TypeVar("R")
Swap = Mapping[type[Any], type[Any]]
BACKENDS = ("asyncio", "trio")
#: Which layers a rig replaces by broken ones.
SWAP: ContextVar[Swap] = ContextVar("swap", default={})  # noqa: B039 - read only


@contextmanager
def swapped(swap: Swap) -> Iterator[None]:
    """Break the layers of every rig that is made meanwhile."""
    token = SWAP.set(swap)
    try:
        yield
    finally:
        SWAP.reset(token)


def virtual(fn: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Make an async test a test on both event loops, in virtual time; the plain function stays there as ``.check``."""

    def test(backend: str, **kwargs: Any) -> None:
        run_virtual(partial(fn, **kwargs), backend)

    functools.update_wrapper(test, fn)
    del test.__wrapped__  # type: ignore[attr-defined]
    backend = inspect.Parameter("backend", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    test.__signature__ = inspect.Signature([backend, *inspect.signature(fn).parameters.values()])  # type: ignore[attr-defined]
    test.check = fn  # type: ignore[attr-defined]
    return pytest.mark.parametrize("backend", BACKENDS)(test)


@dataclass(frozen=True)
class Sent:
    """One wire request: when, what, how it ended (None: well)."""

    at: float
    kind: str
    call: Call[Any]
    ctx: CallContext
    ended: list[BaseException | None]

    @property
    def port(self) -> int | None:
        """The port it went through."""
        return getattr(self.call, "port", None)

    @property
    def error(self) -> str:
        """Name of the exception that it ended with; empty where it ended well."""
        return type(self.ended[0]).__name__ if self.ended and self.ended[0] is not None else ""


class Wire(Layer):
    """Sees every wire request, those that the faults below swallow among them."""

    def __init__(self, inner: Client, sent: list[Sent]) -> None:
        super().__init__(inner)
        self.sent = sent
        self.hook: Callable[[Call[Any], Coroutine[Any, Any, Any]], Coroutine[Any, Any, Any]] | None = None

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Note the request and how it ended."""
        note = Sent(ctx.env.clock.now(), type(call).__name__, call, ctx, [])
        self.sent.append(note)
        going = self.inner.execute(call, ctx)
        try:
            result = await (going if self.hook is None else self.hook(call, going))
        except BaseException as err:
            note.ended.append(err)
            raise
        note.ended.append(None)
        return result


class Rig:
    """A client with faults under its layers.

    Args:
        plan: The faults.
        hosts: Slot hosts, named host-0, host-1, ...; their ports are numbered through, from 1.
        ports: Ports of each host.
        rows_per_slot: 1, so that rows can fail alone.
        slots: Slots per host; None: as many as needed.
        checksum: Whether payloads carry checksums.
        transport: What to put the layers around.
        config: Further keys of the config.
        seed: Of jitter and rotation.
        settings: Settings of the layers.
    """

    def __init__(  # noqa: PLR0913 - what a test may want to choose
        self,
        plan: FaultPlan | None = None,
        *,
        hosts: int = 1,
        ports: int = 4,
        rows_per_slot: int | None = 1,
        slots: int | None = None,
        checksum: bool = False,
        transport: type[MemoryTransport] = MemoryTransport,
        config: Mapping[str, Any] | None = None,
        seed: int = 0,
        call_timeout_s: float | None = None,
        **settings: Any,
    ) -> None:
        self.plan = FaultPlan() if plan is None else plan
        memory = {"ports_per_host": ports, "rows_per_slot": rows_per_slot, "checksum": checksum}
        if slots is not None:
            memory["slots_per_host"] = slots
        self.transport = transport({**DEFAULTS, "num_storage_units": hosts, "memory": memory, **(config or {})})
        self.swap = SWAP.get()
        if Host in self.swap:
            for host in self.transport.plane.hosts.values():
                host.__class__ = self.swap[Host]
        self.seed = seed
        self.settings = settings
        self.sent: list[Sent] = []
        self.client = self.attach(self.transport, call_timeout_s=call_timeout_s)
        self.plain = stack(MemoryTransport(self.transport.attach_config(), bootstrap=False))

    def attach(self, transport: MemoryTransport, *, call_timeout_s: float | None = None) -> Client:
        """Put layers and faults around a transport."""
        layers: list[Any] = []
        for factory in default_layers(**self.settings):
            kind = factory.func if isinstance(factory, partial) else factory
            new = self.swap.get(kind, kind)
            layers.append(partial(new, **factory.keywords) if isinstance(factory, partial) else new)
        client = stack(
            transport,
            [*layers, lambda inner: Wire(inner, self.sent), self.plan.layer],
            rng=random.Random(self.seed),
            call_timeout_s=call_timeout_s,
        )
        client.env.session += f"-{id(client)}"
        budget = self.swap.get(RetryBudget)
        if budget is not None:
            client.env.budget = budget(0.0)
        return client

    async def __aenter__(self) -> Self:
        """Declare a partition; faults and counts begin after it."""
        await self.plain.register_partition("p", ["x", "y"], 64, ["t"])
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Close both clients."""
        await self.plain.close()
        await self.client.close()

    # -- doing

    async def fill(self, n: int, first: int = 0, value: float = 0.0) -> list[str]:
        """Put n rows by a client without faults; row i of field x holds (i + value, i + value)."""
        ids = [f"s{i}" for i in range(first, first + n)]
        await self.plain.put_samples(ids, "p", {"x": rows(n, first, value)}, [{"v": value}] * n)
        return ids

    async def get(self, ids: list[str], **kwargs: Any) -> TensorDict:
        """Read x by the client under test."""
        return await self.client.get_samples(ids, "p", ["x"], **kwargs)

    # -- looking

    def layer(self, kind: type[R], client: Client | None = None) -> R:
        """Return a layer of the stack."""
        return next(layer for layer in layers_of(client or self.client) if isinstance(layer, kind))

    def wire(self, kind: str = "", **matches: Any) -> list[Sent]:
        """Return the wire requests of one kind."""
        return [s for s in self.sent if kind in ("", s.kind) and all(getattr(s, k) == v for k, v in matches.items())]

    @property
    def events(self) -> Counter[str]:
        """What the layers emitted, without the faults themselves."""
        counts = Counter(self.layer(Metrics).snapshot()["events"])
        del counts["fault"]
        return counts

    @property
    def ports(self) -> dict[tuple[str, int], TargetSnapshot]:
        """Health of the ports."""
        return self.layer(PortRotation).ports(anyio.current_time())

    @property
    def hosts(self) -> list[Host]:
        """The slot hosts."""
        return list(self.transport.plane.hosts.values())

    def slots(self) -> Counter[str]:
        """Count slots by state over all hosts."""
        total: Counter[str] = Counter()
        for host in self.hosts:
            total.update(host.counts())
        return total

    def leftovers(self) -> dict[str, Any]:
        """Return all that a call must not leave behind, but for what is owed; empty where there is none."""
        quarantine = self.layer(PortRotation)._quarantine
        states = {} if quarantine is None else quarantine._states
        held: dict[str, Any] = {
            "permits": {key: s.in_flight for key, s in states.items() if s.in_flight},
            "probes": [key for key, s in states.items() if s.probe is not None],
            "readers": self.slots()["reading"],
            "scopes": len(self.client.env.open_waits.scopes),
            "in_flight": self.client._in_flight.number,
            "watches": len(self.layer(SlotRetry)._overlaps._watches),
            "wakers": len(self.transport.plane._wakers),
        }
        return {name: count for name, count in held.items() if count}


def rows(n: int, first: int = 0, value: float = 0.0) -> torch.Tensor:
    """Return the rows that ``Rig.fill`` puts, shape (n, 2)."""
    return (torch.arange(float(first), float(first + n)) + value)[:, None].expand(n, 2).contiguous()


async def until(condition: Any) -> None:
    """Wait, in small steps, until something is so."""
    for _ in range(100_000):
        if condition():
            return
        await anyio.sleep(0.0005)
    pytest.fail("it never was so")


async def read(rig: Rig, ids: list[str], times: int, every_s: float = 0.1) -> list[float]:
    """Read several times, check each answer, and return how long each took."""
    took = []
    for _ in range(times):
        began = anyio.current_time()
        got = await rig.get(ids)
        assert bool((got["x"] == rows(len(ids))).all())
        took.append(anyio.current_time() - began)
        await anyio.sleep(every_s)
    return took
