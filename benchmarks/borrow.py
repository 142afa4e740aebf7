"""What a read of 256 rows costs with and without a copy, beside one locate, a memcpy and Ray's view, in one run.

    python -m benchmarks borrow [--rounds 50] [--no-ray]

One put wrote the rows, on an embedded plane, so they lie in one slot. Works are measured in turns; all numbers are
medians. ``locate`` is the directory's answer alone, ``ray`` a ``ray.get`` of one array of as many bytes from Ray's
object store, which is a view. ``of the bound``: a borrowed get beside one locate and 1.5 times Ray's view.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import torch

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from benchmarks._ucxx_table import Rounds, line

KIB, MIB = 1 << 10, 1 << 20
N = 256
SIZES = (4 * KIB, 64 * KIB, 512 * KIB)
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20,
    "ucxx": {"host": {"arena_bytes": 512 * MIB, "ports": 2, "ucx": False}},
}  # fmt: skip


async def measure(ray: Any, rounds: int) -> None:
    """Measure all sizes."""
    transport = UCXXTransport(CONFIG)
    client = stack(transport)
    ids = [f"s{at}" for at in range(N)]
    await client.register_partition("p", ["x"], N, ["t"])
    line(f"{N} rows of", "4 KiB", "64 KiB", "512 KiB")
    tables = []
    for size in SIZES:
        await client.put_samples(ids, "p", {"x": torch.randn(N, size // 4)})
        tables.append(await one_size(client, transport, ids, size, ray, rounds))
        await client.clear_samples(ids, "p")
    for name in tables[0].seconds:
        line(name, *[f"{statistics.median(table.seconds[name]) * 1e3:.3f} ms" for table in tables])
    bounded = "get, borrow" in tables[0].seconds and "ray, a view" in tables[0].seconds
    if bounded:
        line("get, borrow: of the bound", *[f"{_of_bound(table):.2f}" for table in tables])
    await client.close()


async def one_size(client: Any, transport: UCXXTransport, ids: list[str], size: int, ray: Any, rounds: int) -> Rounds:
    """Measure rows of one size."""
    source, target = np.ones(N * size, np.uint8), np.zeros(N * size, np.uint8)

    async def memcpy() -> None:
        target[:] = source

    works: dict[str, Callable[[], Awaitable[Any]]] = {
        "locate": lambda: transport._directory.locate("p", tuple(ids), ("x",), None),  # noqa: SLF001 - it is measured
        "get, borrow": lambda: client.get_samples(ids, "p", ["x"], borrow=True),
        "get": lambda: client.get_samples(ids, "p", ["x"]),
        "memcpy": memcpy,
    }
    if ray is not None:
        held = ray.put(source)

        async def view() -> None:
            ray.get(held)

        works["ray, a view"] = view
    table = Rounds()

    def unpacked(work: Callable[[], Awaitable[Any]]) -> Callable[[], Awaitable[None]]:
        async def run() -> None:
            await work()

        return run

    await table.run({name: unpacked(work) for name, work in works.items()}, rounds)
    return table


def _of_bound(table: Rounds) -> float:
    """Return the median of a borrowed get by one locate and 1.5 times Ray's view, round by round."""
    turns = zip(*(table.seconds[name] for name in ("get, borrow", "locate", "ray, a view")), strict=True)
    return statistics.median(get / (locate + 1.5 * ray) for get, locate, ray in turns)


def main() -> None:
    """Start Ray where it is wanted, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="rounds of each size")
    parser.add_argument("--no-ray", action="store_true", help="without Ray")
    args = parser.parse_args()
    torch.set_num_threads(1)
    ray: Any = None
    if not args.no_ray:
        import ray

        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        ray.init(
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=512 * MIB,
            log_to_driver=False,
            _node_ip_address="127.0.0.2",  # for 127.0.0.1 Ray takes the address of the network
        )
    try:
        asyncio.run(measure(ray, args.rounds))
    finally:
        if ray is not None:
            ray.shutdown()


if __name__ == "__main__":
    main()
