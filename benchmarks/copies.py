"""What reads of the shared-memory lane that copy take beside a memcpy of as many bytes, in one run.

    python -m benchmarks copies [--rounds 20] [--only 64KiB]

Each shape is read by ``get_data`` through the whole stack into memory that earlier reads gave back. ``copy alone`` is
what the slot host's client does of it, ``locate`` what the directory does. ``memcpy`` writes into memory that is used
again. ``first get`` and ``memcpy, fresh`` write into pages that the system has just given. Works are measured in turns;
the ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import mmap
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from benchmarks._ucxx_table import Rounds, line

KIB, MIB = 1 << 10, 1 << 20
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20,
    "ucxx": {"host": {"arena_bytes": 1280 * MIB, "ports": 2, "ucx": False}},
}  # fmt: skip
Fields = dict[str, Any]


def rows_of(n: int, size: int) -> Fields:
    """Return n rows of ``size`` bytes."""
    return {"x": torch.randn(n, size // 4)}


def grpo(n: int) -> Fields:
    """Return n ragged rows of 64 to 4,096 tokens, as rollouts of GRPO have them."""
    lengths = [random.Random(n).randint(64, 4096) for _ in range(n)]

    def ragged(dtype: torch.dtype) -> torch.Tensor:
        return torch.nested.nested_tensor([torch.ones(one, dtype=dtype) for one in lengths], layout=torch.jagged)

    return {
        "input_ids": ragged(torch.int64), "logprobs": ragged(torch.float32), "mask": ragged(torch.bool),
        "reward": torch.ones(n),
    }  # fmt: skip


#: Name, number of rows, rows of one put, and what makes the fields of a put.
SHAPES: list[tuple[str, int, int, Callable[[int], Fields]]] = [
    ("256 x 64 KiB", 256, 256, lambda n: rows_of(n, 64 * KIB)),
    ("256 x 64 KiB of 32 puts", 256, 8, lambda n: rows_of(n, 64 * KIB)),
    ("256 x 1 MiB", 256, 256, lambda n: rows_of(n, MIB)),
    ("32 x 16 MiB", 32, 32, lambda n: rows_of(n, 16 * MIB)),
    ("GRPO, 1,024 rows of one put", 1024, 1024, grpo),
    ("GRPO, 1,024 rows of 64 puts", 1024, 16, grpo),
]


async def shape(client: Any, transport: UCXXTransport, what: tuple[Any, ...], rounds: int) -> None:
    """Measure one shape."""
    title, n, each, make = what
    fields = make(each)
    ids = [f"s{at}" for at in range(n)]
    for first in range(0, n, each):
        await client.put_samples(ids[first : first + each], "p", fields)
    meta = await client.claim_meta("p", "t", list(fields), n, timeout_s=60)
    data = await client.get_data(meta)
    leaves = [data[name] for name in fields]
    nbytes = sum((leaf.values() if leaf.is_nested else leaf).nbytes for leaf in leaves)
    del data, leaves
    source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
    buffers = transport._resolver._buffers  # noqa: SLF001 - it is measured
    directory, host_client = transport._directory, transport._resolver.host_client  # noqa: SLF001
    asked = "p", tuple(meta.sample_ids), tuple(fields), tuple(meta.handles)
    refs = (await directory.locate(*asked)).refs
    place = await transport._resolver.find(refs[0].host)  # noqa: SLF001

    async def memcpy() -> None:
        for begin in range(0, nbytes, 16 * MIB):
            target[begin : begin + 16 * MIB] = source[begin : begin + 16 * MIB]

    async def fresh() -> float:
        began = time.perf_counter()
        new = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        new[:] = source
        return time.perf_counter() - began

    async def first() -> float:
        buffers.trim(0.0)
        began = time.perf_counter()
        await client.get_data(meta)
        return time.perf_counter() - began

    async def get() -> None:
        await client.get_data(meta)

    async def alone() -> None:
        await host_client.read(refs[0].host, place.route, refs, None)

    async def locate() -> None:
        await directory.locate(*asked)

    works: dict[str, Callable[[], Awaitable[float | None]]] = {
        "memcpy": memcpy, "get": get, "copy alone": alone, "locate": locate, "memcpy, fresh": fresh, "first get": first,
    }  # fmt: skip
    table = Rounds()
    await table.run(works, rounds)
    await client.clear_samples(ids, "p")
    both = zip(table.seconds["get"], table.seconds["locate"], strict=True)
    table.seconds["get, less a locate"] = [whole - part for whole, part in both]
    line(f"{title}, {nbytes / MIB:.0f} MiB", "median", "", "x memcpy", "x fresh")
    for name in table.seconds:
        table.show(name, nbytes, ("memcpy", "memcpy, fresh"))


async def measure(rounds: int, only: str) -> None:
    """Measure all shapes on one plane."""
    transport = UCXXTransport(CONFIG)
    client = stack(transport)
    await client.register_partition("p", ["x"], 256, ["t"])
    for what in SHAPES:
        if only.replace(" ", "") in what[0].replace(" ", ""):
            await shape(client, transport, what, rounds)
    await client.close()


def main() -> None:
    """Measure what the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each shape")
    parser.add_argument("--only", default="", help="measure only shapes with this in their name")
    args = parser.parse_args()
    torch.set_num_threads(1)
    asyncio.run(measure(args.rounds, args.only))


if __name__ == "__main__":
    main()
