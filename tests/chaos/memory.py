"""A client and a slot host over 10,000 puts, gets and claims with cancels: their memory and descriptors stay.

``python -m tests.chaos.memory lane|wire [--calls 10000] [--seed 1]`` prints at each tenth what both have at rest, and
fails where the second half has more than the first, or where anything is left in the arena.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import os
import random
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from asyncdp import stack
from asyncdp.errors import DataPlaneError
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.testing.contract.rig import BASE
from asyncdp.transports.ucxx import UCXXTransport

__all__ = ["Run", "problems"]

KIB, MIB = 1 << 10, 1 << 20
ARENA_BYTES = 96 * MIB
#: Rows of a put, and bytes of a row.
SHAPES = ((1, 64), (64, 64), (256, 4 * KIB), (16, 64 * KIB), (3, MIB), (2, 5 * MIB))
CUT_CHANCE = 0.2
#: Groups of rows that live at a time.
KEPT = 4
LOOKS = 10
#: Bytes of memory, and of those for each call, from the first half to the second that are no growth: allocators keep
#: pieces.
SPARE_BYTES, SPARE_PER_CALL = 4 * MIB, 512
SPARE_DESCRIPTORS = 4
#: Seconds at rest before a look: a slot host returns memory after 5 s.
REST_S = 7.0

Look = dict[str, int]


def statm(pid: int) -> int:
    """Bytes in memory that are a process's own, without the arena that it maps."""
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")


def descriptors(pid: int) -> int:
    """Open descriptors of a process."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


class Run:
    """One run.

    Args:
        wire: ``lane`` or ``wire``.
        calls: Number of calls, the removals beside them not counted.
        seed: Of what is drawn.
        rest_s: Seconds of rest before each look.
    """

    def __init__(self, wire: str, calls: int, seed: int = 1, *, rest_s: float = REST_S) -> None:
        """Draw nothing yet."""
        self._wire, self._calls, self._rest_s = wire, calls, rest_s
        self._rng = random.Random(seed)
        self._groups: list[list[str]] = []
        self.counts: Counter[str] = Counter()
        self.looks: list[Look] = []
        self.used_at_end = -1
        self._pool = BufferPool()

    async def main(self, between: Callable[[], object] = lambda: None) -> None:
        """Start a plane and work on it; ``between`` is called after each call."""
        host = {
            "arena_bytes": ARENA_BYTES,
            "max_slot_bytes": 16 * MIB,
            "ports": 2,
            "devices": "lo",
            "inline_bytes": 4096,
        }
        own = {"host": host, "devices": "lo", "lane": "auto" if self._wire == "lane" else "off"}
        owner = UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "num_storage_units": 1, "ucxx": own})
        transport = UCXXTransport(owner.attach_config(), bootstrap=False)
        client = stack(transport)
        self._pool = transport._resolver._buffers
        assert owner.plane is not None
        pid = owner.plane.pids[0]
        await client.register_partition("p", ["x"], 64, ["train"])
        every = max(1, self._calls // LOOKS)
        for at in range(self._calls):
            await self._step(client, at)
            between()
            if (at + 1) % every == 0:
                await self._look(client, pid, at + 1)
        await client.drop_partition("p")
        await client.close()  # only now it is known what became of each put that was cut
        async with stack(owner) as watcher:
            for _ in range(300):
                gc.collect()
                self.used_at_end = ARENA_BYTES - ((await watcher.list_hosts())[0].free_bytes or 0)
                if not self.used_at_end:
                    break
                await asyncio.sleep(0.2)

    async def _step(self, client: Any, at: int) -> None:
        """Make one call, which may be cancelled at any moment; rows of earlier ones are removed."""
        rng = self._rng
        kind = rng.choice(("put", "get", "borrow", "claim")) if self._groups else "put"
        call = getattr(self, f"_{kind}")(client, at)
        self.counts[kind] += 1
        if rng.random() < CUT_CHANCE:
            task = asyncio.ensure_future(call)
            await asyncio.sleep(rng.random() ** 3 * 0.02)
            self.counts["cancelled"] += task.cancel()
            with suppress(asyncio.CancelledError, DataPlaneError):
                await task
        else:
            try:
                await call
            except DataPlaneError as err:  # rows of a put that was cancelled are not there
                self.counts[type(err).__name__] += 1
        while len(self._groups) > KEPT:
            await client.clear_samples(self._groups.pop(0), "p")

    async def _put(self, client: Any, at: int) -> None:
        n, size = self._rng.choice(SHAPES)
        ids = [f"{at}-{row}" for row in range(n)]
        self._groups.append(ids)
        await client.put_samples(ids, "p", {"x": torch.full((n, size), at % 100, dtype=torch.uint8)})

    async def _get(self, client: Any, _: int, **options: Any) -> None:
        ids = self._rng.choice(self._groups)
        found = (await client.get_samples(ids, "p", ["x"], **options))["x"]
        assert all(int(row[-1]) == int(ids[0].split("-")[0]) % 100 for row in found)

    async def _borrow(self, client: Any, at: int) -> None:
        await self._get(client, at, borrow=True)

    async def _claim(self, client: Any, _: int) -> None:
        meta = await client.claim_meta("p", "train", ["x"], 8, blocking=False)
        if meta.size:
            await client.get_data(meta)
            await client.pop(meta, "p")

    async def _look(self, client: Any, pid: int, at: int) -> None:
        """Measure both at rest."""
        gc.collect()
        await asyncio.sleep(self._rest_s)
        kept = self._pool.idle_bytes
        self._pool.trim(0.0)
        ctypes.CDLL(None).malloc_trim(0)
        info = (await client.list_hosts())[0]
        look = {
            "client": statm(os.getpid()), "host": statm(pid), "client descriptors": descriptors(os.getpid()),
            "host descriptors": descriptors(pid), "arena": ARENA_BYTES - (info.free_bytes or 0), "client pool": kept,
        }  # fmt: skip
        self.looks.append(look)
        say(f"{self._wire} {at:6d} calls: " + ", ".join(f"{name} {_shown(name, look[name])}" for name in look))


def _shown(name: str, value: int) -> str:
    return str(value) if name.endswith("descriptors") else f"{value / MIB:.1f} MiB"


def problems(looks: list[Look], calls: int) -> list[str]:
    """Say what grew: the median of the last looks beside that of the first, of which the very first does not count."""
    warm = looks[1:]
    half = len(warm) // 2
    found = []
    for name in ("client", "host", "client descriptors", "host descriptors"):
        first = statistics.median(look[name] for look in warm[:half])
        second = statistics.median(look[name] for look in warm[-half:])
        spare = SPARE_DESCRIPTORS if name.endswith("descriptors") else SPARE_BYTES + SPARE_PER_CALL * calls / 2
        if second - first > spare:
            found.append(f"{name}: {_shown(name, int(first))} -> {_shown(name, int(second))}")
    return found


def say(text: str) -> None:
    """Print at once."""
    print(text, flush=True)  # noqa: T201 - a report for a person


def main() -> int:
    """Run what the arguments name; by default both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wires", nargs="*", choices=["lane", "wire", []], help="how payload travels; default: both")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    wrong = []
    for wire in args.wires or ("lane", "wire"):
        run = Run(wire, args.calls, args.seed)
        asyncio.run(run.main())
        say(f"{wire}: {dict(run.counts)}")
        wrong += [f"{wire}: {what}" for what in problems(run.looks, args.calls)]
        if run.used_at_end:
            wrong.append(f"{wire}: {run.used_at_end} bytes of the arena are still used")
    say("flat" if not wrong else "GROWN: " + "; ".join(wrong))
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
