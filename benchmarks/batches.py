"""How much `batches(prefetch=...)` hides of the reads, where a read takes as long as the step that follows it.

On the memory transport, whose reads are made slow on purpose: what is measured is the iterator, not a transport.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import anyio
import torch

from asyncdp import MemoryTransport
from asyncdp.testing import FaultPlan, faulty_stack

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from benchmarks._scenario import Bench

ROWS = 4


async def measure(bench: Bench, *, batches: int = 20, step_s: float = 0.02) -> None:
    """Measure epochs of so many batches, each followed by a step of ``step_s`` seconds."""
    plan = FaultPlan().on("get_data", call="ReadSlots").delay(p50_s=step_s, p99_s=step_s)
    client = await bench.stack.enter_async_context(faulty_stack(MemoryTransport(), plan))
    ids = [f"s{number}" for number in range(batches * ROWS)]
    await client.register_partition("p", ["x"], len(ids), [])
    await client.put_samples(ids, "p", {"x": torch.arange(len(ids))})
    tasks = itertools.count()

    def epoch(prefetch: int) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            task = f"train-{next(tasks)}"
            await client.register_partition("p", ["x"], 1, [task])
            async with client.batches("p", task, ["x"], ROWS, prefetch=prefetch, idle="end", timeout_s=0.0) as ahead:
                async for _ in ahead:
                    await anyio.sleep(step_s)
            claims = await client.list_claims("p", task)
            bench.check([len(one.sample_ids) for one in claims] == [ROWS] * batches, "not every row was read, once")

        return run

    works = {f"prefetch {number}": epoch(number) for number in (1, 2, 4, 0)}
    read = await bench.measure(f"{batches} batches", works, beside=["prefetch 0"], rounds=8)
    read.ratio("prefetch 1", "prefetch 0", at_most=0.65)
