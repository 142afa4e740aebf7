"""Whole calls through the stack on an embedded plane: the directory's share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import torch

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport

if TYPE_CHECKING:
    from benchmarks._scenario import Bench, Measured

__all__ = ["Plane"]

KIB, MIB = 1 << 10, 1 << 20
N, SIZE = 256, 64 * KIB


class Plane:
    """An embedded plane and clients of it."""

    def __init__(self) -> None:
        """Start it; takes seconds."""
        config = {
            "enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 1 << 20, "num_storage_units": 1,
            "claim_meta_poll_interval_s": 0.01,
            "ucxx": {"devices": "lo", "host": {"rows_per_slot": 1, "arena_bytes": 512 * MIB, "ports": 4}},
        }  # fmt: skip
        self.owner = UCXXTransport(config)

    def client(self, lane: str) -> UCXXTransport:
        """Another client of it."""
        config = self.owner.attach_config()
        return UCXXTransport({**config, "ucxx": {**config.get("ucxx", {}), "lane": lane}}, bootstrap=False)

    async def works(self, bench: Bench) -> dict[str, Callable[[], Awaitable[Any]]]:
        """Return calls over UCX and over the lane."""
        return {**await self._verbs(bench, "off", "ucx"), **await self._verbs(bench, "auto", "lane")}

    async def measure(self, bench: Bench, works: dict[str, Callable[[], Awaitable[Any]]]) -> Measured:
        """Put, claim, get and clear 256 x 64 KiB through the whole stack; how much of it is the directory's?"""
        case = f"{N} x {SIZE // KIB} KiB through the stack"
        read = await bench.measure(case, works, nbytes=N * SIZE, rounds=16, in_order=True)
        for name in works:
            read.figure(f"directory's part of {name}", lambda s, name=name: s[f"{name}, its directory"] / s[name])
        return read

    async def _verbs(self, bench: Bench, lane: str, way: str) -> dict[str, Callable[[], Awaitable[Any]]]:
        transport = self.client(lane)
        asked = Clock(transport._directory)  # noqa: SLF001 - it is what is measured
        client = await bench.stack.enter_async_context(stack(transport))
        await client.register_partition(way, ["x"], N, ["t"])
        ids, fields = [f"s{at}" for at in range(N)], {"x": torch.randn(N, SIZE // 4)}
        metas: list[Any] = [None]

        async def claim() -> None:
            metas[0] = await client.claim_meta(way, "t", ["x"], N)

        verbs: dict[str, Callable[[], Awaitable[Any]]] = {
            "put_samples": lambda: client.put_samples(ids, way, fields),
            "claim_meta": claim,
            "get_data": lambda: client.get_data(metas[0]),
            "get_samples": lambda: client.get_samples(ids, way, ["x"]),
            "clear_samples": lambda: client.clear_samples(ids, way),
        }
        return {f"{verb}, {way}": asked.beside(call) for verb, call in verbs.items()}

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

    def beside(self, call: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[dict[str, float]]]:
        """Return a work that tells the seconds of a call, and those of its directory."""

        async def work() -> dict[str, float]:
            self.seconds, began = 0.0, time.perf_counter()
            await call()
            return {"": time.perf_counter() - began, "its directory": self.seconds}

        return work

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
