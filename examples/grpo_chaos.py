"""Kills processes while the example runs: a rollout worker, which is started anew, and a part of the plane.

No process gets a warning (SIGKILL). What the worker had sent last stays unanswered; the plane shows whether it arrived.
The rows that only a storage unit of TransferQueue held are lost: the plane names them, and their groups are evicted. A
slot host of UCXX comes back with its rows, which outlived it in shared memory; before, one of its ports dies.
"""

from __future__ import annotations

import importlib
import os
import signal
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import anyio
import anyio.to_thread

from asyncdp.examples.grpo_plane import FAULTS, ROLLOUTS
from asyncdp.service import layers_of

if TYPE_CHECKING:
    from asyncdp import Client
    from asyncdp.examples.grpo_crew import Crew
    from asyncdp.transports.ucxx.process.embedded import EmbeddedPlane

__all__ = ["listens_at", "plane_of", "strike"]

WORKER_AT = 0.15
"""When the worker is killed, as a part of the run."""
UNIT_AT = 0.4
"""When the storage unit or the slot host is."""
PORT_AT = 0.25
"""When a port of the slot host dies."""
AWAY_S = 1.0
"""Seconds before the slot host is started again: time to see what it is like without it."""
HOST = 0
"""Which slot host."""
LOOK_S = 1.0
"""Seconds for which the plane is asked, once it has begun to name them, which samples were lost with the unit."""
NOTICE_S = 5.0
"""Seconds within which it begins to, on a busy machine; the controller may evict them all before it is asked."""


async def strike(crew: Crew, plane: Client, stop: anyio.Event) -> None:
    """Kill each at its time, unless ``stop`` is set before."""
    async with anyio.create_task_group() as tasks:
        if await _waited(WORKER_AT * crew.config.seconds, stop):
            tasks.start_soon(crew.replace, crew.workers[0], stop)
        hosts = plane_of(plane)
        if hosts is None:
            if await _waited((UNIT_AT - WORKER_AT) * crew.config.seconds, stop):
                await _kill_unit(crew, plane, stop)
            return
        if await _waited((PORT_AT - WORKER_AT) * crew.config.seconds, stop):
            crew.progress.struck("port died", host=HOST, port=hosts.fail_port(HOST, 0))
        if await _waited((UNIT_AT - PORT_AT) * crew.config.seconds, stop):
            await _kill_host(crew, hosts, stop)


def plane_of(client: Client) -> EmbeddedPlane | None:
    """Return the slot hosts that a client has started, if it has."""
    *_, transport = layers_of(client)
    return getattr(transport, "plane", None)


async def _kill_host(crew: Crew, hosts: EmbeddedPlane, stop: anyio.Event) -> None:
    """Kill a slot host, and start it again: it adopts its slots, and nothing that was acknowledged is lost."""
    pid = hosts.pids[HOST]
    os.kill(pid, signal.SIGKILL)
    crew.progress.struck("slot host killed", host=HOST, pid=pid)
    await _waited(AWAY_S, stop)  # also where the run ends now: at the end the rows of all hosts are counted
    with anyio.CancelScope(shield=True):
        await anyio.to_thread.run_sync(hosts.start_host, HOST)
    crew.progress.struck("slot host back", host=HOST, pid=hosts.pids[HOST], bytes=hosts.reports[HOST]["load"])


async def _waited(seconds: float, stop: anyio.Event) -> bool:
    with anyio.move_on_after(seconds):
        await stop.wait()
    return not stop.is_set()


async def _kill_unit(crew: Crew, plane: Client, stop: anyio.Event) -> None:
    """Kill the first storage unit while it holds something, and note what the plane names as lost with it."""
    # More than one step's worth: of that, the trainer cannot have read all already.
    while await _depth(plane) <= crew.config.groups_per_step:
        if stop.is_set():
            return
        await anyio.sleep(0.01)
    unit = plane.attach_config()["transfer_queue"]["endpoints"]["units"][0]
    pid = listens_at(set(unit["ports"].values()))
    os.kill(pid, signal.SIGKILL)
    crew.progress.struck("storage unit killed", unit=unit["id"], pid=pid)
    lost: set[str] = set()
    with anyio.move_on_after(NOTICE_S) as look:
        while not stop.is_set():
            with suppress(*FAULTS):
                for group in await plane.list_metadata(ROLLOUTS):
                    if group.lost_keys and not lost:
                        look.deadline = anyio.current_time() + LOOK_S
                    lost.update(group.lost_keys)
            await anyio.sleep(0.02)
    crew.progress.struck("samples named as lost", samples=sorted(lost))


async def _depth(plane: Client) -> int:
    with suppress(*FAULTS):
        return await plane.depth(ROLLOUTS)
    return 0


def listens_at(ports: set[int]) -> int:
    """Return the process that listens at one of these ports of this machine."""
    psutil: Any = importlib.import_module("psutil")  # it comes with TransferQueue
    for one in psutil.net_connections(kind="tcp"):
        if one.status == psutil.CONN_LISTEN and one.laddr.port in ports and one.pid:
            return int(one.pid)
    raise LookupError(f"no process listens at {sorted(ports)}")
