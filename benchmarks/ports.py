"""Reads through four ports of a slot host of which one is mute or closed, and what a storm of faults sends.

Each read gets 16 x 64 KiB over UCX, through all layers. A client meets the bad port anew in each round, beside one
whose ports are healthy, with which it reads in turn: ``first`` is its slowest read, ``others`` the median of the rest.
The hedged client knows from healthy reads how long they take (``hedge_quantile``), then the port turns mute, and the
slowest but one of ten of its reads is told. A storm is on the memory transport: so many of the reads are lost, and all
requests that are sent are counted.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from asyncdp import Layer, MemoryTransport, default_layers, stack
from asyncdp.errors import DataPlaneError
from asyncdp.testing import FaultPlan
from asyncdp.transports.ucxx import UCXXTransport

if TYPE_CHECKING:
    from benchmarks._scenario import Bench

NAMESPACE = True

KIB, MIB = 1 << 10, 1 << 20
N, SIZE = 16, 64 * KIB
#: Reads of one client: of them a quarter would go through the bad port.
READS = 40
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 16,
    "ucxx": {"devices": "lo", "lane": "off", "host": {"rows_per_slot": 1, "arena_bytes": 64 * MIB, "ports": 4}},
}  # fmt: skip
#: A read through a mute port that is not hedged is given up after this many seconds.
ATTEMPT_S = 1.0
#: The retry budget allows so many requests more than calls, and so many a second besides (``RetryBudget``).
BUDGET_RATIO, FLOOR_PER_S, WINDOW_S = 0.2, 10.0, 10.0


class Route:
    """Stands before one port of a host, open, closed, or mute: it takes requests, and nothing comes back."""

    def __init__(self, port: int) -> None:
        """Lead to this port."""
        self._port = port
        self._mute = False
        self._ends: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server
        self.number = 0
        self.swallowed = 0

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.number = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_connection("127.0.0.1", self._port)
        self._ends += [writer, far]
        await asyncio.gather(self._carry(reader, far), self._carry(near, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if self._mute:
                    self.swallowed += len(data)
                    continue
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        writer.close()

    def mute(self) -> None:
        """Let nothing through any more, and close nothing."""
        self._mute = True

    def close(self) -> None:
        """Close it, and all that was open."""
        self._server.close()
        for end in self._ends:
            end.transport.abort()


async def measure(bench: Bench) -> None:
    """Measure the bad ports, then the storm."""
    torch.set_num_threads(1)
    owner: Any = await bench.stack.enter_async_context(stack(UCXXTransport(CONFIG)))
    ids = [f"b{at}" for at in range(N)]
    await owner.register_partition("p", ["x"], N, ["t"])
    await owner.put_samples(ids, "p", {"x": torch.randn(N, SIZE // 4)})
    config = owner.attach_config()

    async def mute() -> dict[str, float]:
        return await _meet(bench, config, ids, "mute")

    async def closed() -> dict[str, float]:
        return await _meet(bench, config, ids, "closed")

    async def hedged() -> dict[str, float]:
        return await _meet(bench, config, ids, "mute", hedge_after_s=ATTEMPT_S, hedge_quantile=0.95)

    works = {"mute": mute, "closed": closed, "hedged": hedged}
    read = await bench.measure("one of four ports is bad", works, rounds=9, in_order=True)
    ratio = "healthy / {}, reads after the first hit"
    read.figure(ratio.format("mute"), lambda s: s["mute, healthy"] / s["mute, others"], at_least=0.9, must="6")
    read.figure(ratio.format("closed"), lambda s: s["closed, healthy"] / s["closed, others"], at_least=0.9, must="6")
    read.figure(
        "hedged, p90 / healthy p90", lambda s: s["hedged, p90"] / s["hedged, healthy p90"], at_most=2.0, must="6"
    )
    for lost in (0.1, 0.5, 1.0):
        sent = [await _storm(lost, seed) for seed in range(3 if bench.quick else 9)]
        case = f"storm: {lost:.0%} of the reads are lost"
        bench.figure(case, "requests beyond the floor / calls", sent, at_most=1.3, must="6")


async def _meet(bench: Bench, config: Mapping[str, Any], ids: list[str], how: str, **settings: Any) -> dict[str, float]:
    """Let a new client, of which one port turns bad, and a healthy one read in turn; return seconds of a read."""
    transport, well = (UCXXTransport(config, bootstrap=False) for _ in range(2))
    async with stack(transport, attempt_timeout_s=ATTEMPT_S, **settings) as client, stack(well) as beside:
        await client.ping()
        (info,) = await transport._directory.hosts()  # noqa: SLF001 - to put a proxy before one of its ports
        route = Route(info.ports[0])
        await route.open()
        _tell(transport, replace(info, ports=(route.number, *info.ports[1:])))
        try:
            for _ in range(3):  # opens connections, and of the reads that are known few have waited for one
                await _reads(ids, beside, client)
            route.close() if how == "closed" else route.mute()
            healthy, after = await _reads(ids, beside, client)
            counts = client.snapshot()["events"]
        finally:
            route.close()
    bench.check(how != "mute" or route.swallowed > 0, "the mute port was never asked")
    bench.check(counts.get("hedge" if settings else "rotation", 0) > 0, f"the {how} port was not noticed: {counts}")
    rest = sorted(after)[:-1]
    told = {"healthy": statistics.median(healthy), "first": max(after), "others": statistics.median(rest)}
    if settings:
        told |= {"healthy p90": statistics.quantiles(healthy, n=10)[-1], "p90": statistics.quantiles(after, n=10)[-1]}
    return told


def _tell(transport: UCXXTransport, info: Any) -> None:
    """Let a client see a host's ports as told here."""
    directory: Any = transport._directory  # noqa: SLF001

    directory._refs[info.id, info.epoch] = info.ref  # noqa: SLF001

    async def hosts(_: float = 0.0) -> tuple[Any, ...]:
        directory._refs[info.id, info.epoch] = info.ref  # noqa: SLF001
        return (info,)

    directory.hosts = hosts
    transport._resolver.know((info,))  # noqa: SLF001


async def _reads(ids: list[str], *clients: Any) -> list[list[float]]:
    """Return the seconds of the reads of each client, which read in turn."""
    seconds: list[list[float]] = [[] for _ in clients]
    for _ in range(READS):
        for client, taken in zip(clients, seconds, strict=True):
            began = time.perf_counter()
            await client.get_samples(ids, "p", ["x"])
            taken.append(time.perf_counter() - began)
    return seconds


class _Counted(Layer):
    """Counts the requests that are sent."""

    sent = 0

    async def execute(self, call: Any, ctx: Any) -> Any:
        """Count it and pass it on."""
        self.sent += 1
        return await self.inner.execute(call, ctx)


async def _storm(lost: float, seed: int) -> float:
    """Return how many requests a client sent for each that its calls would send without faults, less the floor."""
    counted: list[_Counted] = []

    def count(inner: Any) -> _Counted:
        counted.append(_Counted(inner))
        return counted[-1]

    plan = FaultPlan(seed)
    layers = default_layers(
        backoff_base_s=0.001, backoff_cap_s=0.002, round_backoff_base_s=0.001, outage_patience_s=0.0
    )
    async with stack(MemoryTransport(), [*layers, count, plan.layer]) as client:
        await client.register_partition("p", ["x"], 1, ["t"])
        await client.put_samples(["s"], "p", {"x": torch.zeros(1, 8)})
        before = counted[0].sent
        await client.get_samples(["s"], "p", ["x"])
        needed = counted[0].sent - before
        plan.on("get_samples").reset(p=lost)
        began, before, calls = time.perf_counter(), counted[0].sent, 2000
        for _ in range(calls):
            try:
                await client.get_samples(["s"], "p", ["x"])
            except DataPlaneError:
                continue
        floor = FLOOR_PER_S * (WINDOW_S + time.perf_counter() - began)
        return (counted[0].sent - before - floor) / (calls * needed)
