"""How much ``batches(prefetch=...)`` hides of the reads, where a read takes as long as the step that follows it.

Run with ``python -m benchmarks batches``. On the memory transport, whose reads are made slow on purpose: what is
measured is the iterator, not a transport.
"""

from __future__ import annotations

import argparse
import time

import anyio
import torch

from asyncdp import Client, MemoryTransport
from asyncdp.testing import FaultPlan, faulty_stack

ROWS = 4


async def epoch(client: Client, batches: int, prefetch: int, step_s: float) -> float:
    """Seconds for so many batches with a step each."""
    task = f"train-{prefetch}"
    await client.register_partition("p", ["x"], 1, [task])
    began = time.perf_counter()
    async with client.batches("p", task, ["x"], ROWS, prefetch=prefetch, idle="end", timeout_s=0.0) as ahead:
        async for _ in ahead:
            await anyio.sleep(step_s)
    took = time.perf_counter() - began
    assert all(len(one.sample_ids) == ROWS for one in await client.list_claims("p", task))
    assert len(await client.list_claims("p", task)) == batches
    return took


async def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--step-s", type=float, default=0.02)
    args = parser.parse_args()
    plan = FaultPlan().on("get_data", call="ReadSlots").delay(p50_s=args.step_s, p99_s=args.step_s)
    async with faulty_stack(MemoryTransport(), plan) as client:
        ids = [f"s{number}" for number in range(args.batches * ROWS)]
        await client.register_partition("p", ["x"], len(ids), [])
        await client.put_samples(ids, "p", {"x": torch.arange(len(ids))})
        in_turn = await epoch(client, args.batches, 0, args.step_s)
        print(f"prefetch  seconds  against in turn\n       0  {in_turn:7.2f}")
        for prefetch in (1, 2, 4):
            took = await epoch(client, args.batches, prefetch, args.step_s)
            print(f"{prefetch:8}  {took:7.2f}  {in_turn / took:.2f}x")


anyio.run(main)
