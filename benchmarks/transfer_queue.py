"""TransferQueue through asyncdp beside TransferQueue's own key-value calls, on the same controller and storage units.

With ``--backend mooncake_cpu`` both have their rows in one Mooncake. What asyncdp does more: tags before readiness,
whole or absent, exact answers, each sample's life checked. Each get is compared with what was put.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

os.environ.setdefault("TQ_NUM_THREADS", "2")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import torch
from tensordict import TensorDict

from asyncdp import stack
from benchmarks._layouts import LAYOUTS, MIB, bytes_of
from benchmarks._references import ray_here

if TYPE_CHECKING:
    from asyncdp import Client
    from benchmarks._scenario import Bench

CASES = (
    "1 x 1 KiB", "1 x 64 KiB", "64 x 8 KiB", "256 x 64 KiB", "256 x 1 MiB", "32 x 16 MiB", "GRPO, 1,024 rows",
)  # fmt: skip
READY, TAKE = 10_000, 32


async def measure(
    bench: Bench, *, cases: tuple[str, ...] = CASES, largest_mb: int = 512, backend: str = "simple"
) -> None:
    """Attach TransferQueue's own client to the servers of a plane, and compare."""
    await bench.stack.enter_async_context(ray_here(num_cpus=4, store_bytes=75 * MIB))
    from asyncdp.transports.transfer_queue import TQTransport

    config = {
        "enabled": True, "impl": "transfer_queue", "backend": backend, "storage_capacity": 1 << 20,
        "num_storage_units": 2, "claim_meta_poll_interval_s": 0.02,
        "global_segment_size": 1 << 30, "local_buffer_size": 64 << 20,  # of Mooncake
    }  # fmt: skip
    transport = await asyncio.to_thread(TQTransport, config)
    client = await bench.stack.enter_async_context(stack(transport))
    import transfer_queue as tq

    await asyncio.to_thread(tq.init)  # attaches; never closed here: that would end the controller for everyone
    await client.register_partition("ours", ["x"], 1, ["train"])
    for case in cases:
        data = LAYOUTS[case]()
        if bytes_of(data) <= largest_mb * MIB:
            await one_batch(bench, client, tq, case, data)
    await claims(bench, client, tq)


async def one_batch(bench: Bench, client: Client, tq: Any, case: str, data: TensorDict) -> None:
    """Compare puts and gets of a batch; what it takes to remove the last one does not count."""
    ids, names = [f"r{at}" for at in range(len(data))], list(data.keys())
    tags = [{"n": at} for at in range(len(data))]

    def after(clear: Callable[[], Awaitable[Any]], put: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[float]]:
        async def work() -> float:
            await clear()
            began = time.perf_counter()
            await put()
            return time.perf_counter() - began

        return work

    def checked(get: Callable[[], Awaitable[Any]], what: str) -> Callable[[], Awaitable[float]]:
        async def work() -> float:
            began = time.perf_counter()
            got = await get()
            took = time.perf_counter() - began
            same = all(torch.equal(flat(got[name]), flat(data[name])) for name in names)
            bench.check(same, f"{what} returned other values than were put")
            return took

        return work

    await client.put_samples(ids, "ours", data, tags)
    await tq.async_kv_batch_put(ids, "raw", data, tags)
    works = {
        "put": after(lambda: client.clear_samples(ids, "ours"), lambda: client.put_samples(ids, "ours", data, tags)),
        "TransferQueue put": after(
            lambda: tq.async_kv_clear(ids, "raw"), lambda: tq.async_kv_batch_put(ids, "raw", data, tags)
        ),
        "get": checked(lambda: client.get_samples(ids, "ours", names), "asyncdp"),
        "TransferQueue get": checked(lambda: tq.async_kv_batch_get(ids, "raw", names), "TransferQueue"),
    }
    read = await bench.measure(
        case,
        works,
        beside=("TransferQueue put", "TransferQueue get"),
        nbytes=bytes_of(data),
        rounds=15 if bytes_of(data) < 128 * MIB else 7,
    )
    for verb in ("put", "get"):
        read.ratio(verb, f"TransferQueue {verb}", at_most=0.6 if case == "256 x 1 MiB" else 1.0, must="5")
    await tq.async_kv_clear(ids, "raw")
    await client.clear_samples(ids, "ours")


def flat(values: torch.Tensor) -> torch.Tensor:
    """Return the numbers of all rows one after another."""
    return (values.values() if values.is_nested else values).reshape(-1)


async def claims(bench: Bench, client: Client, tq: Any) -> None:
    """Compare a claim of 32 where 10,000 samples are ready."""
    ids = [f"c{at}" for at in range(READY)]
    data = TensorDict({"x": torch.zeros(READY, 1)}, batch_size=[READY])
    await client.put_samples(ids, "ours", data)
    await tq.async_kv_batch_put(ids, "claims", data, [{} for _ in ids])
    raw = tq.get_client()
    works = {
        "claim": lambda: client.claim_meta("ours", "train", ["x"], TAKE),
        "TransferQueue fetch": lambda: raw.async_get_meta(["x"], TAKE, "claims", mode="fetch", task_name="train"),
    }
    case = f"claim {TAKE} of {READY:,} ready"
    read = await bench.measure(case, works, beside=("TransferQueue fetch",), rounds=15)
    read.ratio("claim", "TransferQueue fetch")
