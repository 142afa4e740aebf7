"""A save of a plane on UCXX beside ``cp`` of as many bytes, a later save with 1 % new rows, a check and a restore.

Run ``python -m benchmarks checkpoint --gib 8 --folder /disk``: the folder needs twice as much room, and shared memory
once. All is on this machine; ``cp`` copies the files of the checkpoint within the folder. A save has the disk keep its
files, so ``cp`` is timed with ``sync`` as well. Needs the extras ``ucxx`` and ``embedded``.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

import anyio
import torch

from asyncdp import Client, build_data_plane_client
from asyncdp.checkpoint import restore, save, verify

R = TypeVar("R")

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


async def timed(name: str, work: Awaitable[R], beside: float | None = None) -> tuple[float, R]:
    """Print the seconds of a step, and how many times those of another one they are."""
    began = time.perf_counter()
    done = await work
    took = time.perf_counter() - began
    print(f"  {name:44s}{took:9.2f} s" + ("" if beside is None else f"{took / beside:9.2f} x"), flush=True)
    return took, done


async def copied(folder: Path, *, sync: bool) -> None:
    """Copy the checkpoint with ``cp``; with ``sync`` until the disk has it."""
    await anyio.run_process(["cp", "-r", folder / "ckpt", folder / "copy"])
    if sync:
        await anyio.to_thread.run_sync(os.sync)


async def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--folder", type=Path, default=None, help="where files are made, and removed again")
    args = parser.parse_args()
    rows = int(args.gib * 1024)
    folder = Path(tempfile.mkdtemp(prefix="asyncdp-bench-", dir=args.folder))
    target = folder / "ckpt"
    try:
        async with plane(args.gib) as client:
            await client.register_partition("p", ["x"], rows, ["train"])
            await put(client, 0, rows)
            print(f"{rows} rows of 1 MiB, {args.gib:g} GiB")
            await anyio.to_thread.run_sync(os.sync)
            saved_s, done = await timed("save", save(client, target))
            for sync in (False, True):
                name = "cp of its files, and sync" if sync else "cp of its files"
                took, _ = await timed(name, copied(folder, sync=sync))
                print(f"    save / cp = {saved_s / took:.2f}")
                shutil.rmtree(folder / "copy")
                await anyio.to_thread.run_sync(os.sync)
            await put(client, rows, max(1, rows // 100))
            _, later = await timed("save with 1 % new rows", save(client, target), saved_s)
            print(f"    {later.written_bytes / done.size_bytes:.4f} of the bytes were written")
            await timed("save with nothing new", save(client, target), saved_s)
            await timed("verify", anyio.to_thread.run_sync(verify, target), saved_s)
            await client.drop_partition("p")
            await timed("restore, which verifies first", restore(client, target), saved_s)
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    anyio.run(main)
