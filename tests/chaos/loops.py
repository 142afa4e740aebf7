"""One client over many event loops: descriptors, threads and memory stay as they are.

``python -m tests.chaos.loops memory|ucxx|ucxx-wire|transfer_queue [--times 10000]`` prints them on the way, and fails
where they grow. A loop each is what a synchronous program makes: ``asyncio.run`` per step.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from asyncdp import stack
from asyncdp.testing.contract.rig import BASE

__all__ = ["NAMES", "run"]

NAMES = ("memory", "ucxx", "ucxx-wire", "transfer_queue")
#: Descriptors and threads more than after the first steps that are no growth: a server may just be closing its own.
SPARE = 6
#: Growth of memory per thousand loops that is none: what the allocator keeps in pieces (measured: 0.0 to 0.4 MiB).
MIB_PER_1000 = 2.0


@contextmanager
def client_of(name: str) -> Iterator[Any]:
    """Start a plane, and give a client of it that no loop has used yet."""
    if name == "memory":
        from asyncdp import MemoryTransport

        yield stack(MemoryTransport())
    elif name == "transfer_queue":
        from asyncdp.transports.transfer_queue import TQTransport
        from tests.transfer_queue.servers import Servers, config_for

        servers = Servers()
        try:
            yield stack(TQTransport(config_for(servers.endpoints, "loops")))
        finally:
            servers.close()
    else:
        from asyncdp.transports.ucxx import UCXXTransport

        host = {"arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20, "ports": 2, "devices": "lo", "inline_bytes": 0}
        own = {"host": host, "devices": "lo", "lane": "off" if name == "ucxx-wire" else "auto"}
        yield stack(UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "num_storage_units": 1, "ucxx": own}))


def gauge() -> tuple[int, int, float, int]:
    """Descriptors, threads, MiB of memory, mappings of arenas."""
    gc.collect()
    status = Path("/proc/self/status").read_text()
    mib = int(status.split("VmRSS:")[1].split()[0]) / 1024
    mapped = sum("/dev/shm/asyncdp-" in line for line in Path("/proc/self/maps").read_text().splitlines())
    return len(os.listdir("/proc/self/fd")), threading.active_count(), mib, mapped  # noqa: PTH208 - as short as it gets


async def step(client: Any, at: int) -> None:
    """Put a row, read it, claim it, pop it."""
    await client.put_samples([f"s{at}"], "p", {"x": torch.full((1, 1 << 14), float(at))})
    meta = await client.claim_meta("p", "train", ["x"], 1, timeout_s=30)
    assert float((await client.get_data(meta))["x"][0, -1]) == at
    await client.pop(meta, "p")


def say(what: str, found: tuple[int, int, float, int]) -> None:
    """Print what was measured."""
    files, running, mib, mapped = found
    line = f"{what}: {files} descriptors, {running} threads, {mib:.0f} MiB, {mapped} arenas mapped"
    print(line, flush=True)  # noqa: T201 - a report for a person


def run(name: str, times: int, looks: int = 10) -> list[tuple[int, int, float, int]]:
    """Use one client over so many loops; returns what was measured: after a tenth, on the way, at the end, closed."""
    with client_of(name) as client:
        asyncio.run(client.register_partition("p", ["x"], 8, ["train"]))
        measured, began = [], time.monotonic()
        every = max(1, times // looks)
        for at in range(times):
            asyncio.run(step(client, at))
            if (at + 1) % every == 0:
                measured.append(gauge())
                rate = (at + 1) / (time.monotonic() - began)
                say(f"{name} {at + 1:6d} loops ({rate:.0f}/s)", measured[-1])
        asyncio.run(client.close())
        measured.append(gauge())
        say(f"{name} closed", measured[-1])
        return measured


def check(measured: list[tuple[int, int, float, int]], times: int) -> None:
    """Fail where anything grew."""
    first, *_, last, closed = measured
    assert last[0] <= first[0] + SPARE, "descriptors grow"
    assert last[1] <= first[1] + SPARE, "threads grow"
    assert last[3] <= 1, "arenas are mapped again and again"
    assert closed[3] == 0, "an arena stays mapped"
    if times >= 1000:
        assert last[2] - first[2] <= MIB_PER_1000 * times / 1000, "memory grows"


def main() -> None:
    """Run what the arguments name; by default each transport."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*NAMES, []], help="which; default: all")
    parser.add_argument("--times", type=int, default=10_000)
    args = parser.parse_args()
    for name in args.names or NAMES:
        check(run(name, args.times), args.times)


if __name__ == "__main__":
    main()
