"""Puts and gets of slots, over UCX and on the shared-memory lane, beside a plain copy and UCX alone."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch

from asyncdp.calls.slots import HostRef, SlotRef
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE, Block
from asyncdp.transports.ucxx.client.connection_pool import Pool
from asyncdp.transports.ucxx.client.host_client import HostClient, Route
from asyncdp.transports.ucxx.host.settings import HostSettings
from asyncdp.transports.ucxx.payload.blocks import layout_of, pack, rows_of
from asyncdp.transports.ucxx.payload.gather import Selection, gathers
from asyncdp.transports.ucxx.wire.handshake import Secret

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.wire.engine import Engine
    from benchmarks._scenario import Bench, Measured

__all__ = ["SECRET", "Slots", "host"]

KIB, MIB = 1 << 10, 1 << 20
SECRET = secrets.token_hex(16)

Work = Callable[[], Awaitable[float | None]]


@contextmanager
def host(name: str = "bench", **keys: Any) -> Iterator[tuple[dict[str, Any], int]]:
    """Run a slot host; yields its readiness line and its pid."""
    given: dict[str, Any] = {"arena_bytes": 512 * MIB, "rows_per_slot": 1, "keep_arena": False, "devices": "lo"}
    settings = HostSettings(f"{name}-{os.getpid()}", **{**given, **keys})
    command = [sys.executable, "-m", "asyncdp.transports.ucxx.host.main", "--watch-stdin"]
    pipe, env = subprocess.PIPE, {**os.environ, "ASYNCDP_SECRET": SECRET}
    process = subprocess.Popen(
        [*command, "--settings", msgspec.json.encode(settings).decode()],
        stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True, env=env,
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    try:
        yield json.loads(process.stdout.readline()), process.pid
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


class Slots:
    """One host and a client of it, by wire and by lane."""

    def __init__(self, told: dict[str, Any], engine: Engine) -> None:
        """Open both."""
        self.here = HostRef(told["id"], told["epoch"], tuple(told["ports"]))
        self.route = Route(told["address"], told["boot_id"], told["arena"])
        self.buffers = BufferPool()
        self.pool = Pool(engine, Secret(SECRET), PICKLE, self.buffers)
        self.ucx = HostClient(self.pool, PICKLE, self.buffers, lane=False)
        self.lane = HostClient(self.pool, PICKLE, self.buffers)
        self.count = 0

    async def reserve(self, host_client: HostClient, block: Block) -> tuple[str, tuple[SlotRef, ...]]:
        """Reserve slots for a block."""
        self.count += 1
        op_id, sizes = f"op{self.count}", block.row_nbytes().tolist()
        return op_id, await host_client.reserve(self.here, self.route, op_id, ("a",), sizes, 0, ttl_s=60.0)

    async def drop(self, refs: tuple[SlotRef, ...]) -> None:
        """Free slots."""
        await self.ucx.drop(self.here, self.route, [(ref.slot, ref.generation, ref.index, ()) for ref in refs])

    def put(self, host_client: HostClient, *blocks: Block) -> Work:
        """Put blocks, one request after the other; what it takes to free them does not count."""

        async def work() -> float:
            made: list[SlotRef] = []
            began = time.perf_counter()
            for block in blocks:
                op_id, refs = await self.reserve(host_client, block)
                await host_client.write(self.here, self.route, op_id, refs, block)
                made += refs
            took = time.perf_counter() - began
            await self.drop(tuple(made))
            return took

        return work

    def get(self, host_client: HostClient, *requests: tuple[SlotRef, ...]) -> Work:
        """Get slots, one request after the other."""

        async def work() -> None:
            for refs in requests:
                await host_client.read(self.here, self.route, refs)

        return work

    def copies(self, refs: tuple[SlotRef, ...], block: Block, reserved: tuple[SlotRef, ...]) -> dict[str, Work]:
        """The lane's copies alone: out of slots into memory that is used again, and into slots."""
        lane = self.lane.lane_of(self.here, self.route)
        assert lane is not None
        heads: Any = {}
        picks = [Selection(at, lane._look(ref, heads), ref.fields, ref.index) for at, ref in enumerate(refs)]  # noqa: SLF001
        made, _ = gathers(picks)
        outs = [np.zeros(gather.layout.nbytes, np.uint8) for gather in made]
        parts = [rows_of(block, ref.rows[0], ref.rows[-1] + 1) for ref in reserved]
        layouts = [layout_of(part) for part in parts]
        slots = [
            lane.arena.slice(lane.arena.payload_at(ref.slot), part.nbytes)
            for ref, part in zip(reserved, layouts, strict=True)
        ]

        async def out() -> None:
            for gather, target in zip(made, outs, strict=True):
                for _ in gather.fill(target):
                    pass

        async def into() -> None:
            for part, layout, slot in zip(parts, layouts, slots, strict=True):
                for _ in pack(part, layout, slot):
                    pass

        return {"get, the lane's copy alone": out, "put, the lane's copy alone": into}

    async def measure(self, bench: Bench, n: int, size: int) -> Measured:
        """Measure n rows of ``size`` bytes, one slot each."""
        block = Block.from_fields({"a": torch.randn(n, size // 4)}, n)
        op_id, refs = await self.reserve(self.ucx, block)
        await self.ucx.write(self.here, self.route, op_id, refs, block)
        pending, reserved = await self.reserve(self.lane, block)
        works: dict[str, Work] = {
            "put, ucx": self.put(self.ucx, block),
            "get, ucx": self.get(self.ucx, refs),
            "put, lane": self.put(self.lane, block),
            "get, lane": self.get(self.lane, refs),
            **self.copies(refs, block, reserved),
        }
        if n > 1:
            each = [rows_of(block, row, row + 1) for row in range(n)]
            works["put, ucx, a request per slot"] = self.put(self.ucx, *each)
            works["get, ucx, a request per slot"] = self.get(self.ucx, *[(ref,) for ref in refs])
        name = f"{n} x {size // KIB} KiB"
        read = await bench.measure(name, works, beside=("memcpy", "raw ucx"), nbytes=n * size, rounds=9)
        await self.drop(refs)
        await self.lane.abort(self.here, self.route, pending)
        return read
