"""Reads of 256 rows on one machine, with and without a copy, beside one locate, a memcpy and Ray's view.

One put wrote the rows, on an embedded plane, so they lie in one slot. ``locate`` is the directory's answer alone,
``ray view`` a ``ray.get`` of one array of as many bytes from Ray's object store.
"""

from __future__ import annotations

from typing import Any

import torch

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from benchmarks._scenario import Bench, Floor

KIB, MIB = 1 << 10, 1 << 20
N = 256
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20,
    "ucxx": {"host": {"arena_bytes": 512 * MIB, "ports": 2, "ucx": False}},
}  # fmt: skip


async def measure(bench: Bench, *, kib: tuple[int, ...] = (4, 64, 512)) -> None:
    """Measure rows of several sizes."""
    transport = UCXXTransport(CONFIG)
    client: Any = await bench.stack.enter_async_context(stack(transport))
    ids = [f"s{at}" for at in range(N)]
    await client.register_partition("p", ["x"], N, ["t"])
    for size in kib:
        await client.put_samples(ids, "p", {"x": torch.randn(N, size * KIB // 4)})
        read = await bench.measure(
            f"{N} rows of {size} KiB",
            {
                "get, borrow": lambda: client.get_samples(ids, "p", ["x"], borrow=True),
                "get": lambda: client.get_samples(ids, "p", ["x"]),
                "locate": lambda: transport._directory.locate("p", tuple(ids), ("x",), None),  # noqa: SLF001
            },
            beside=("memcpy", "locate", "ray view"),
            nbytes=N * size * KIB,
            rounds=50,
            floors={"get": Floor(copies=1, trips=1), "get, borrow": Floor(trips=1)},
        )
        read.figure(
            "borrowed get / (one locate + 1.5 x Ray's view)",
            lambda s: s["get, borrow"] / (s["locate"] + 1.5 * s["ray view"]),
            at_most=1.0,
            must="1",
        )
        read.figure("memcpy / copying get", lambda s: s["memcpy"] / s["get"], at_least=0.6, must="1")
        await client.clear_samples(ids, "p")
