"""What slots cost over UCX and over the shared-memory lane, beside a plain copy, in one run.

    python -m benchmarks.ucxx [--rounds 7] [--quick]

A slot host runs in a process of its own. Rows of one slot each are put and read: over the wire (UCX) and on the lane.
``memcpy`` copies as many bytes between two arrays of this process that are used again and again. GB/s of the median
round, best round in brackets; ms are the median. Run it in a network namespace (the UCX listener binds everywhere)::

    unshare -rn sh -c 'ip link set lo up; UCX_TLS=tcp,self python -m benchmarks.ucxx'
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import numpy as np
import torch

from asyncdp.block import PICKLE, Block
from asyncdp.errors import DataPlaneError
from asyncdp.slots import HostRef, SlotRef
from asyncdp.transports.ucxx.access import Access, Door
from asyncdp.transports.ucxx.buffers import BufferPool
from asyncdp.transports.ucxx.engine import Engine
from asyncdp.transports.ucxx.handshake import Secret
from asyncdp.transports.ucxx.host_settings import HostSettings
from asyncdp.transports.ucxx.pool import Pool

KIB, MIB = 1 << 10, 1 << 20
LAYOUTS = ((256, 64 * KIB), (1, MIB), (1, 16 * MIB), (1, 64 * MIB))
SECRET = secrets.token_hex(16)


@contextmanager
def host() -> Iterator[dict[str, Any]]:
    """Run a slot host; yields its readiness line."""
    settings = HostSettings(f"bench-{os.getpid()}", arena_bytes=512 * MIB, rows_per_slot=1, keep_arena=False)
    command = [sys.executable, "-m", "asyncdp.transports.ucxx.host", "--watch-stdin"]
    process = subprocess.Popen(
        [*command, "--settings", msgspec.json.encode(settings).decode()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "ASYNCDP_SECRET": SECRET},
    )
    assert process.stdin
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


async def timed(work: Callable[[], Awaitable[Any]], rounds: int) -> list[float]:
    """Seconds of each round, after one that is not counted."""
    await work()
    seconds = []
    for _ in range(rounds):
        began = time.perf_counter()
        await work()
        seconds.append(time.perf_counter() - began)
    return seconds


def show(what: str, nbytes: int, seconds: list[float], whole: float | None = None) -> None:
    """Print one line."""
    middle, best = statistics.median(seconds), min(seconds)
    share = "" if whole is None else f"  {whole / best:5.2f} of memcpy"
    rate = f"{nbytes / middle / 1e9:6.2f} GB/s ({nbytes / best / 1e9:.2f})"
    print(f"  {what:34s} {middle * 1e3:9.2f} ms  {rate}{share}")


class Bench:
    """One host and a client of it, by wire and by lane."""

    def __init__(self, told: dict[str, Any], engine: Engine, rounds: int) -> None:
        """Open both."""
        self.here = HostRef(told["id"], told["epoch"], tuple(told["ports"]))
        self.door = Door(told["address"], told["boot_id"], told["arena"])
        self.rounds = rounds
        buffers = BufferPool()
        self.pool = Pool(engine, Secret(SECRET), PICKLE, buffers)
        self.ways = {"ucx": Access(self.pool, PICKLE, buffers, lane=False), "lane": Access(self.pool, PICKLE, buffers)}
        self.count = 0

    async def reserve(self, access: Access, block: Block) -> tuple[str, tuple[SlotRef, ...]]:
        """Reserve slots for a block."""
        self.count += 1
        op_id = f"op{self.count}"
        sizes = block.row_nbytes().tolist()
        return op_id, await access.reserve(self.here, self.door, op_id, ("a",), sizes, 0, ttl_s=60.0)

    async def put_and_free(self, access: Access, block: Block, spent: list[float]) -> None:
        """Put a block, noting how long it took, and free it."""
        began = time.perf_counter()
        op_id, refs = await self.reserve(access, block)
        await access.write(self.here, self.door, op_id, refs, block)
        spent.append(time.perf_counter() - began)
        await access.drop(self.here, self.door, [(ref.slot, ref.generation, ref.index, ()) for ref in refs])

    async def layout(self, n: int, size: int) -> None:
        """Measure n rows of ``size`` bytes."""
        nbytes = n * size
        print(f"{n} x {size // KIB} KiB")
        block = Block.from_fields({"a": torch.randn(n, size // 4)}, n)
        source = np.ones(nbytes, np.uint8)
        target = np.zeros(nbytes, np.uint8)

        async def copy() -> None:
            for begin in range(0, nbytes, 16 * MIB):
                target[begin : begin + 16 * MIB] = source[begin : begin + 16 * MIB]

        plain = await timed(copy, self.rounds)
        show("memcpy, in pieces of 16 MiB", nbytes, plain)
        for way, access in self.ways.items():
            spent: list[float] = []
            for _ in range(self.rounds + 1):
                await self.put_and_free(access, block, spent)
            show(f"put, {way}", nbytes, spent[1:], min(plain))
            op_id, refs = await self.reserve(access, block)
            await access.write(self.here, self.door, op_id, refs, block)
            show(
                f"get, {way}",
                nbytes,
                await timed(lambda a=access, r=refs: a.read(self.here, self.door, r), self.rounds),  # type: ignore[misc]
                min(plain),
            )
            if n > 1:
                await self.one_by_one(way, access, refs, nbytes)
            await access.drop(self.here, self.door, [(ref.slot, ref.generation, ref.index, ()) for ref in refs])

    async def one_by_one(self, way: str, access: Access, refs: tuple[SlotRef, ...], nbytes: int) -> None:
        """Read slot by slot: what coalescing saves."""

        async def each() -> None:
            for ref in refs:
                await access.read(self.here, self.door, [ref])

        show(f"get, {way}, a request per slot", nbytes, await timed(each, max(2, self.rounds // 3)))

    async def dead_port(self) -> None:
        """How soon a port where nobody listens is known to be dead."""
        access = self.ways["ucx"]
        seconds = []
        for _ in range(self.rounds):
            began = time.perf_counter()
            try:
                await access.ask(self.here, self.door, port=1)
            except DataPlaneError:
                seconds.append(time.perf_counter() - began)
        print(f"a port where nobody listens: {statistics.median(seconds) * 1e3:.2f} ms until the error")

    async def raw(self, nbytes: int, engine: Engine) -> None:
        """UCX alone, within this process: one message of ``nbytes`` after the other."""
        arrived: asyncio.Future[Any] = engine.loop.create_future()
        near = engine.connect("127.0.0.1", engine.listen(arrived.set_result))
        await engine.send_token(near, np.zeros(16, np.uint8)).wait()
        far = await arrived
        await engine.receive_token(far, np.zeros(16, np.uint8)).wait()
        source, target = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)

        async def message() -> None:
            tag = engine.next_tag()
            receiving, sending = engine.receive(far, tag, target), engine.send(near, tag, source)
            await receiving.wait()
            await sending.wait()

        show(f"raw ucx, {nbytes // KIB} KiB, one process", nbytes, await timed(message, self.rounds))
        engine.abandon(near)
        engine.abandon(far)


async def main(rounds: int, *, quick: bool) -> None:
    """Run all."""
    torch.set_num_threads(1)
    engine = Engine()
    with host() as told:
        bench = Bench(told, engine, rounds)
        for n, size in LAYOUTS[:2] if quick else LAYOUTS:
            await bench.layout(n, size)
        await bench.dead_port()
        for size in (64 * KIB, MIB, 16 * MIB):
            await bench.raw(size, engine)
        bench.pool.close()
    await engine.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each measurement")
    parser.add_argument("--quick", action="store_true", help="the two small layouts only")
    args = parser.parse_args()
    asyncio.run(main(args.rounds, quick=args.quick))
