"""Kills processes while the example runs: a rollout worker, which is started anew, and a part of the plane.

No process gets a warning (SIGKILL). What the worker had sent last stays unanswered; the plane shows whether it arrived.
The rows that only the storage unit held are lost: the plane names them, and their groups are evicted.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from asyncdp.examples.grpo_plane import FAULTS, ROLLOUTS

if TYPE_CHECKING:
    from asyncdp import BaseClient
    from asyncdp.examples.grpo_crew import Crew

__all__ = ["strike"]

WORKER_AT = 0.15
"""When the worker is killed, as a part of the run."""
UNIT_AT = 0.4
"""When the storage unit is."""
LOOK_S = 1.0
"""Seconds for which the plane is asked, once the unit is dead, what was lost with it."""


async def strike(crew: Crew, plane: BaseClient, stop: anyio.Event) -> None:
    """Kill each at its time, unless ``stop`` is set before."""
    async with anyio.create_task_group() as tasks:
        if await _waited(WORKER_AT * crew.config.seconds, stop):
            tasks.start_soon(crew.replace, crew.workers[0], stop)
        if await _waited((UNIT_AT - WORKER_AT) * crew.config.seconds, stop):
            await _kill_unit(crew, plane, stop)


async def _waited(seconds: float, stop: anyio.Event) -> bool:
    with anyio.move_on_after(seconds):
        await stop.wait()
    return not stop.is_set()


async def _kill_unit(crew: Crew, plane: BaseClient, stop: anyio.Event) -> None:
    """Kill the first storage unit while it holds something, and note what the plane names as lost with it."""
    # More than one step's worth: of that, the trainer cannot have read all already.
    while await _depth(plane) <= crew.config.groups_per_step:
        if stop.is_set():
            return
        await anyio.sleep(0.01)
    unit = plane.attach_config()["transfer_queue"]["endpoints"]["units"][0]
    pid = _listens_at(set(unit["ports"].values()))
    os.kill(pid, signal.SIGKILL)
    crew.progress.struck("storage unit killed", unit=unit["id"], pid=pid)
    lost: set[str] = set()
    with anyio.move_on_after(LOOK_S):
        while True:
            with suppress(*FAULTS):
                for group in await plane.list_metadata(ROLLOUTS):
                    lost.update(group.lost_keys)
            await anyio.sleep(0.02)
    crew.progress.struck("samples named as lost", samples=sorted(lost))


async def _depth(plane: BaseClient) -> int:
    with suppress(*FAULTS):
        return await plane.depth(ROLLOUTS)
    return 0


def _listens_at(ports: set[int]) -> int:
    """Return the process that listens at one of these ports of this machine."""
    import psutil  # type: ignore[import-untyped] # it comes with TransferQueue

    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port in ports and one.pid:
            return int(one.pid)
    raise LookupError(f"no process listens at {sorted(ports)}")
