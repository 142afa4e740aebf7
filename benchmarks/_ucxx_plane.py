"""Whole calls through the stack on an embedded plane: the directory's share, and what a bad port costs."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from benchmarks._ucxx_table import line

__all__ = ["Plane"]

KIB, MIB = 1 << 10, 1 << 20
N, SIZE = 256, 64 * KIB
#: Of the calls on ports; so a muted port is given up after this many seconds.
ATTEMPT_S = 1.0
CALLS = 40


class Route:
    """Stands before one port of a host, open, closed, or mute: it takes requests, and nothing comes back."""

    def __init__(self, port: int) -> None:
        """Lead to this port."""
        self._port = port
        self._mute = False
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server
        self.number = 0

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.number = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        near, far = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, far]
        await asyncio.gather(self._carry(reader, far), self._carry(near, writer))

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                if not self._mute:
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
        for writer in self._writers:
            writer.transport.abort()


class Plane:
    """An embedded plane and clients of it.

    Args:
        rounds: Of each measurement.
    """

    def __init__(self, rounds: int) -> None:
        """Start it; takes seconds."""
        config = {
            "enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 1 << 20, "num_storage_units": 1,
            "claim_meta_poll_interval_s": 0.01,
            "ucxx": {"devices": "lo", "host": {"rows_per_slot": 1, "arena_bytes": 512 * MIB, "ports": 4}},
        }  # fmt: skip
        self.owner = UCXXTransport(config)
        self.rounds = rounds

    def client(self, lane: str) -> UCXXTransport:
        """Another client of it."""
        config = self.owner.attach_config()
        return UCXXTransport({**config, "ucxx": {**config.get("ucxx", {}), "lane": lane}}, bootstrap=False)

    async def shares(self) -> None:
        """Put, claim, get and clear 256 x 64 KiB through the whole stack; how much of it is the directory's."""
        line(f"{N} x {SIZE // KIB} KiB through the stack", "whole call", "its directory", "share")
        ids = [f"s{at}" for at in range(N)]
        fields = TensorDict({"x": torch.randn(N, SIZE // 4)}, [N])
        for lane, way in (("off", "ucx"), ("auto", "lane")):
            transport = self.client(lane)
            asked = Clock(transport._directory)  # noqa: SLF001 - it is what is measured
            client = stack(transport)
            await client.register_partition("p", ["x"], N, ["t"])
            metas: list[Any] = []

            async def claim(client: Any = client, metas: list[Any] = metas) -> None:
                metas[:] = [await client.claim_meta("p", "t", ["x"], N)]

            verbs: dict[str, Callable[[], Awaitable[Any]]] = {
                "put_samples": lambda client=client: client.put_samples(ids, "p", fields),  # type: ignore[misc]
                "claim_meta": claim,
                "get_data": lambda client=client, metas=metas: client.get_data(metas[0]),  # type: ignore[misc]
                "get_samples": lambda client=client: client.get_samples(ids, "p", ["x"]),  # type: ignore[misc]
                "clear_samples": lambda client=client: client.clear_samples(ids, "p"),  # type: ignore[misc]
            }
            whole: dict[str, list[float]] = {verb: [] for verb in verbs}
            parts: dict[str, list[float]] = {verb: [] for verb in verbs}
            for number in range(self.rounds + 1):
                for verb, call in verbs.items():
                    asked.seconds, began = 0.0, time.perf_counter()
                    await call()
                    if number:
                        whole[verb].append(time.perf_counter() - began)
                        parts[verb].append(asked.seconds)
            for verb in verbs:
                all_of_it, part = statistics.median(whole[verb]), statistics.median(parts[verb])
                line(f"{verb}, {way}", f"{all_of_it * 1e3:.2f} ms", f"{part * 1e3:.2f} ms", f"{part / all_of_it:.0%}")
            await client.close()

    async def ports(self) -> None:
        """Get 16 x 64 KiB over ucx through four ports, of which one closes or falls silent."""
        line("get of 16 x 64 KiB, one of four ports is bad", "healthy", "first call", "later calls", "x healthy")
        ids = [f"b{at}" for at in range(16)]
        fields = TensorDict({"x": torch.randn(16, SIZE // 4)}, [16])
        p95 = 0.0
        for what in ("closed", "mute", "mute, hedged"):
            transport = self.client("off")
            hedge: dict[str, Any] = {"hedge_after_s": p95} if what == "mute, hedged" else {}
            client = stack(transport, attempt_timeout_s=ATTEMPT_S, **hedge)
            await client.register_partition("p", ["x"], N, ["t"])
            await client.put_samples(ids, "p", fields)
            (info,) = await transport._directory.hosts()  # noqa: SLF001 - to put a proxy before one of its ports
            route = Route(info.ports[0])
            await route.open()
            told = replace(info, ports=(route.number, *info.ports[1:]))
            _tell(transport, told)
            healthy = await _calls(client, ids)
            route.close() if what == "closed" else route.mute()
            after = await _calls(client, ids)
            worst, rest = max(after), sorted(after)[:-1]
            p95 = statistics.quantiles(healthy, n=20)[-1]
            cells = [f"{statistics.median(healthy) * 1e3:.2f} ms", f"{worst * 1e3:.2f} ms"]
            ratio = statistics.median(rest) / statistics.median(healthy)
            line(f"one port {what}", *cells, f"{statistics.median(rest) * 1e3:.2f} ms", f"{ratio:.2f}")
            if hedge:
                ninety = [statistics.quantiles(seconds, n=10)[-1] for seconds in (after, healthy)]
                line(
                    "  the same, of ten calls the slowest but one",
                    f"{ninety[1] * 1e3:.2f} ms",
                    "",
                    f"{ninety[0] * 1e3:.2f} ms",
                    f"{ninety[0] / ninety[1]:.2f}",
                )
            await client.close()
            if what != "closed":
                route.close()

    async def close(self) -> None:
        """End it."""
        await self.owner.close()


class Clock:
    """Adds up the time in which calls wait for the directory."""

    def __init__(self, directory: Any) -> None:
        """Measure whatever it is asked."""
        self.seconds = 0.0
        for name in ("place", "publish", "locate", "claim", "clear", "hosts"):
            setattr(directory, name, self._timed(getattr(directory, name)))
        self._depth = 0

    def _timed(self, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def timed(*args: Any, **kwargs: Any) -> Any:
            self._depth += 1
            began = time.perf_counter()
            try:
                return await call(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # asked from within another question, it is part of that
                    self.seconds += time.perf_counter() - began

        return timed


def _tell(transport: UCXXTransport, info: Any) -> None:
    """Let a client see a host's ports as told here."""
    directory: Any = transport._directory  # noqa: SLF001

    directory._refs[info.id, info.epoch] = info.ref  # noqa: SLF001

    async def hosts(_: float = 0.0) -> tuple[Any, ...]:
        directory._refs[info.id, info.epoch] = info.ref  # noqa: SLF001
        return (info,)

    directory.hosts = hosts
    transport._resolver.know((info,))  # noqa: SLF001


async def _calls(client: Any, ids: list[str]) -> list[float]:
    seconds = []
    for _ in range(CALLS):
        began = time.perf_counter()
        await client.get_samples(ids, "p", ["x"])
        seconds.append(time.perf_counter() - began)
    return seconds
