"""Whole calls through the stack on an embedded plane: the directory's share."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
from tensordict import TensorDict

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from benchmarks._ucxx_table import line

__all__ = ["Plane"]

KIB, MIB = 1 << 10, 1 << 20
N, SIZE = 256, 64 * KIB


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
