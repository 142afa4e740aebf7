"""This transport beside TransferQueue's own key-value calls, on the same controller and storage units, in one run.

    python -m benchmarks.transfer_queue [--rounds 15] [--largest-mb 256] [--backend mooncake_cpu]

Both sides are asked in turn, round by round, the first one last in the next round. A ratio is the median of those of
the rounds; below 1 means that asyncdp is faster. With ``mooncake_cpu`` both have their rows in one Mooncake.
What asyncdp does more: tags before readiness, whole or absent, exact answers, each sample's life checked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TQ_NUM_THREADS", "2")
os.environ.setdefault("RAY_DISABLE_IMPORT_WARNING", "1")

import torch
from tensordict import TensorDict

from asyncdp import stack

if TYPE_CHECKING:
    from asyncdp.client import Client

#: (rows, bytes per row)
SIZES = ((1, 1 << 10), (64, 8 << 10), (256, 64 << 10), (256, 1 << 20), (32, 16 << 20))


def batch(rows: int, size: int) -> TensorDict:
    """Make rows of float32."""
    return TensorDict({"x": torch.rand(rows, size // 4)}, batch_size=[rows])


async def once(call: Callable[[], Awaitable[Any]]) -> float:
    """Return the milliseconds that a call took."""
    began = time.perf_counter()
    await call()
    return (time.perf_counter() - began) * 1e3


async def one_size(client: Client, raw: Any, rounds: int, rows: int, size: int) -> dict[str, float]:
    """Return the median milliseconds, and ratios, of puts and gets of one size, both sides in turn."""
    data = batch(rows, size)
    ids = [f"r{at}" for at in range(rows)]
    tags = [{"n": at} for at in range(rows)]
    spent: dict[str, list[float]] = {}
    for number in range(rounds + 2):
        calls = {
            "raw put": lambda: raw.async_kv_batch_put(ids, "raw", data, tags),
            "our put": lambda: client.put_samples(ids, "ours", data, tags),
            "raw get": lambda: raw.async_kv_batch_get(ids, "raw", ["x"]),
            "our get": lambda: client.get_samples(ids, "ours", ["x"]),
        }
        raw_first = ["raw put", "our put", "raw get", "our get"]
        order = raw_first if number % 2 else ["our put", "raw put", "our get", "raw get"]
        times = {name: await once(calls[name]) for name in order}
        await raw.async_kv_clear(ids, "raw")
        await client.clear_samples(ids, "ours")
        if number > 1:  # the first two are warm-up
            for verb in ("put", "get"):
                times[verb] = times[f"our {verb}"] / times[f"raw {verb}"]
            for key, value in times.items():
                spent.setdefault(key, []).append(value)
    return {key: statistics.median(values) for key, values in spent.items()}


async def sizes(client: Client, raw: Any, rounds: int, largest: int) -> None:
    """Compare puts and gets of several sizes."""
    print(f"{'rows x bytes':>15} {'put raw':>8} {'ours':>8} {'ratio':>6} {'get raw':>9} {'ours':>8} {'ratio':>6}  (ms)")
    for rows, size in SIZES:
        if rows * size > largest:
            continue
        mid = await one_size(client, raw, rounds, rows, size)
        print(
            f"{rows:>5} x {size:>7} {mid['raw put']:>8.2f} {mid['our put']:>8.2f} {mid['put']:>6.2f}"
            f" {mid['raw get']:>9.2f} {mid['our get']:>8.2f} {mid['get']:>6.2f}",
            flush=True,
        )


async def claims(client: Client, tq: Any, rounds: int, ready: int = 10_000, take: int = 32) -> None:
    """Compare a claim of 32 where 10,000 samples are ready."""
    ids = [f"c{at}" for at in range(ready)]
    data = TensorDict({"x": torch.zeros(ready, 1)}, batch_size=[ready])
    await client.put_samples(ids, "ours", data)
    await tq.async_kv_batch_put(ids, "claims", data, [{} for _ in ids])
    raw = tq.get_client()
    fetch = lambda: raw.async_get_meta(["x"], take, "claims", mode="fetch", task_name="train")  # noqa: E731
    ours = lambda: client.claim_meta("ours", "train", ["x"], take)  # noqa: E731
    times = [(await once(fetch), await once(ours)) for _ in range(rounds + 2)][2:]
    theirs, mine = (statistics.median(column) for column in zip(*times, strict=True))
    print(f"claim {take} of {ready} ready: raw {theirs:.2f} ms, ours {mine:.2f} ms, ratio {mine / theirs:.2f}")


def main() -> None:
    """Start Ray and a plane, attach TransferQueue's own client to the same servers, and compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--largest-mb", type=int, default=512)
    parser.add_argument("--backend", choices=("simple", "mooncake_cpu"), default="simple")
    asked = parser.parse_args()
    import ray

    ray.init(
        num_cpus=4,
        include_dashboard=False,
        object_store_memory=78643200,
        log_to_driver=False,
        _node_ip_address="127.0.0.2",  # for 127.0.0.1 Ray takes the address of the network
    )
    from asyncdp.transports.transfer_queue import TQTransport

    transport = TQTransport(
        {
            "enabled": True,
            "impl": "transfer_queue",
            "backend": asked.backend,
            "storage_capacity": 1 << 20,
            "num_storage_units": 2,
            "claim_meta_poll_interval_s": 0.02,
            "global_segment_size": 1 << 30,  # of Mooncake
            "local_buffer_size": 64 << 20,
        }
    )
    import transfer_queue as tq

    tq.init()  # attaches; never closed here: that would end the controller for everyone

    async def run() -> None:
        client = stack(transport)
        await client.register_partition("ours", ["x"], 1, ["train"])
        try:
            await sizes(client, tq, asked.rounds, asked.largest_mb << 20)
            await claims(client, tq, asked.rounds)
        finally:
            await client.close()

    asyncio.run(run())
    ray.shutdown()


if __name__ == "__main__":
    main()
