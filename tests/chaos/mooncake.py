"""Kills and pauses Mooncake's master and a unit of a real cluster, and fills its segments, with every verb under way.

    python -m tests.chaos mooncake ["pause master" ...]

Prints what tests.chaos.transfer_queue does.
"""

# ruff: noqa: T201 - it prints its report
from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncdp import DataPlaneError, stack
from asyncdp.transports.transfer_queue.endpoints import Endpoints
from tests.chaos.transfer_queue import Chaos, Report, pid_of, told
from tests.chaos.transfer_queue_idle import IdleLoop
from tests.chaos.transfer_queue_verbs import KEPT, fill
from tests.transfer_queue.needs_mooncake import lacking

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["FAULTS", "main", "on_ray"]

#: All faults, in an order in which each finds what it needs.
FAULTS = ("pause master", "pause unit", "full", "kill unit", "kill master")
SIZES = {"global_segment_size": 64 << 20, "local_buffer_size": 16 << 20}


class Filler:
    """Fills the plane, and clears what it filled it with."""

    def __init__(self, client: Client) -> None:
        """Start with nothing."""
        self._client = client
        self.ids: list[str] = []

    async def fill(self) -> None:
        """Put rows, ever smaller ones, until none is taken."""
        for size in (1 << 20, 1 << 15, 1 << 10, 1):
            while True:
                ids = [f"f{len(self.ids)}"]
                try:
                    await self._client.put_samples(ids, "p", {"fill": [b"x" * size]}, timeout_s=2.0)
                except DataPlaneError:
                    break
                self.ids += ids

    async def clear(self) -> None:
        """Make room."""
        await self._client.clear_samples(self.ids, "p")


async def _chaos(transport: Any, again: Callable[[], Any], faults: tuple[str, ...], idle: IdleLoop) -> list[Report]:
    from asyncdp.transports.transfer_queue import TQTransport

    endpoints = Endpoints.from_config(transport.attach_config()["transfer_queue"]["endpoints"])
    run = Chaos(lambda: TQTransport(transport.attach_config(), bootstrap=False), idle)
    owner = stack(transport)
    await fill(run.client)
    await run.once.get_samples(KEPT, "p", ["x"])
    pids = {"master": transport._cluster._master.pid, "unit": pid_of(endpoints.units[0])}
    reports = [await run.rest()]
    for fault in faults:
        kind, _, what = fault.partition(" ")
        if fault == "full":
            filler = Filler(run.once)
            reports.append(await run.strike(fault, lambda: None, None, filler.fill))
            reports[-1].outcomes["filled with"] = f"{len(filler.ids)} rows"
            await filler.clear()
        else:
            number = signal.SIGSTOP if kind == "pause" else signal.SIGKILL
            undo = (lambda pid=pids[what]: os.kill(pid, signal.SIGCONT)) if kind == "pause" else None
            reports.append(await run.strike(fault, lambda pid=pids[what], by=number: os.kill(pid, by), undo))
        if fault == "kill master":
            began = time.monotonic()
            await owner.close()
            reports[-1].outcomes["owner closed"] = f"{time.monotonic() - began:.0f} s"
            reports.append(await run.next_life(again))
            break
        await run.account(reports[-1])
    await run.close()
    await owner.close()
    return reports


def on_ray(faults: tuple[str, ...] = FAULTS) -> list[Report]:
    """Run faults on a Ray cluster of their own; a master that dies costs a bootstrap, some 20 s."""
    from asyncdp.transports.transfer_queue import TQTransport
    from tests.transfer_queue.ray_cluster import base_config, start_ray

    config = base_config(backend="mooncake_cpu", transfer_queue={"split_bytes": 1}, **SIZES)
    idle = IdleLoop()
    ray = start_ray()
    try:
        return asyncio.run(_chaos(TQTransport(config), lambda: TQTransport(config), faults, idle))
    finally:
        ray.shutdown()
        idle.close()


def main(argv: list[str]) -> int:
    """Run the named faults, by default all of them, and print the report."""
    unknown = [name for name in argv if name not in FAULTS]
    if unknown:
        print(f"no fault {unknown[0]!r}; there are {', '.join(map(repr, FAULTS))}")
        return 2
    if reason := lacking():
        print(f"skipped: {reason}")
        return 0
    return told(on_ray(tuple(argv) or FAULTS))
