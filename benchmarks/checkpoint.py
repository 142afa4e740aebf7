"""A save of a plane on UCXX beside `cp` of as many bytes, a save with 1 % new rows, a check and a restore.

``--folder /disk --gib 8``: the folder needs twice as much room, and shared memory once. A save has the disk keep its
files, so ``cp`` is timed with ``sync`` too.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncdp import Client, build_data_plane_client
from asyncdp.checkpoint import restore, save, verify

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from benchmarks._scenario import Bench

ROW_BYTES = 1 << 20
BATCH = 32


def plane(gib: float) -> Client:
    """Start a plane of two hosts with room for so many GiB and a tenth more."""
    own = {"host": {"arena_bytes": int(gib * 1.2 * (1 << 29)) + (256 << 20), "max_slot_bytes": 64 << 20}}
    return build_data_plane_client({"enabled": True, "impl": "ucxx", "num_storage_units": 2, "ucxx": own})


async def put(client: Client, first: int, count: int) -> None:
    """Put so many rows of 1 MiB: random numbers, and that of the row in front."""
    rows = torch.randn(BATCH, ROW_BYTES // 4)
    for at in range(first, first + count, BATCH):
        n = min(BATCH, first + count - at)
        rows[:, 0] = torch.arange(at, at + BATCH)
        await client.put_samples([f"s{at + i}" for i in range(n)], "p", {"x": rows[:n]})


class Steps:
    """The steps of a round, each of which returns its seconds and begins with nothing left for the disk to do."""

    def __init__(self, client: Client, folder: Path, rows: int) -> None:
        """Keep the checkpoint in this folder."""
        self.client, self.rows, self.new = client, rows, max(1, rows // 100)
        self.target, self.copy = folder / "ckpt", folder / "copy"
        #: By kind of save, the bytes that it wrote.
        self.written: dict[str, int] = {}

    async def saved(self, what: str) -> float:
        """Save once more."""

        async def run() -> None:
            self.written[what] = (await save(self.client, self.target)).written_bytes

        return await synced(run())

    async def whole(self) -> float:
        """Save where no checkpoint is."""
        shutil.rmtree(self.target, ignore_errors=True)
        return await self.saved("whole")

    async def copied(self, *, sync: bool) -> float:
        """Copy the files of the checkpoint; with ``sync`` until the disk has them."""

        async def run() -> None:
            await anyio.run_process(["cp", "-r", self.target, self.copy])
            if sync:
                await anyio.to_thread.run_sync(os.sync)

        took = await synced(run())
        shutil.rmtree(self.copy)
        return took

    async def later(self) -> float:
        """Save with 1 % new rows."""
        await put(self.client, self.rows, self.new)
        return await self.saved("later")

    async def restored(self) -> float:
        """Restore all into a plane that has none of it."""
        await self.client.drop_partition("p")
        took = await synced(restore(self.client, self.target))
        await self.client.clear_samples([f"s{self.rows + at}" for at in range(self.new)], "p")
        return took


async def synced(work: Awaitable[Any]) -> float:
    """Return the seconds of a step that begins with nothing left for the disk to do."""
    await anyio.to_thread.run_sync(os.sync)
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


async def measure(bench: Bench, *, gib: float = 0.5, folder: str = tempfile.gettempdir()) -> None:
    """Measure rounds that begin with a whole save and end with its restore."""
    rows = int(gib * 1024)
    where = bench.stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncdp-bench-", dir=folder))
    client = await bench.stack.enter_async_context(plane(gib))
    await client.register_partition("p", ["x"], rows, ["train"])
    await put(client, 0, rows)
    steps = Steps(client, Path(where), rows)
    works = {
        "save": steps.whole,
        "cp of its files": lambda: steps.copied(sync=False),
        "cp of its files, and sync": lambda: steps.copied(sync=True),
        "save with 1 % new rows": steps.later,
        "save with nothing new": lambda: steps.saved("nothing new"),
        "verify": lambda: synced(anyio.to_thread.run_sync(verify, steps.target)),
        "restore, which verifies first": steps.restored,
    }
    case, beside = f"{rows} rows of 1 MiB", ["cp of its files, and sync", "cp of its files"]
    await bench.measure(case, works, beside=beside, nbytes=rows << 20, rounds=6, in_order=True)
    written = steps.written
    bench.check(written["whole"] >= rows * ROW_BYTES, f"a whole save wrote {written['whole']} bytes only")
    for what, most in (("later", 0.03), ("nothing new", 0.01)):
        bench.figure(case, f"bytes of a save, {what}, beside all", [written[what] / written["whole"]], at_most=most)
