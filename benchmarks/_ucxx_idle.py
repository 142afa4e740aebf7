"""What a host and its clients cost while nobody asks for anything."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any

import torch

from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._ucxx_slots import Slots

__all__ = ["Idlers"]

CLIENTS = 16
WATCH_S = 5.0


class Idlers:
    """Sixteen clients in processes of their own; to be made while this process has neither threads nor UCX."""

    def __init__(self) -> None:
        """Fork them; they wait to be told where a host is."""
        context = multiprocessing.get_context("fork")
        self._made: list[tuple[ForkProcess, Connection]] = []
        for _ in range(CLIENTS):
            ours, theirs = context.Pipe()
            process = context.Process(target=_idle, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._made.append((process, ours))

    def measure(self, told: dict[str, Any], host_pid: int) -> list[tuple[str, float, float]]:
        """Let each read once over UCX, then look for a while: name, cores in use, how many it should be at most."""
        for _, order in self._made:
            order.send(told)
        for _, order in self._made:
            order.recv()
        time.sleep(1.0)
        before, began = _processor_s(host_pid), time.monotonic()
        for _, order in self._made:
            order.send(WATCH_S)
        used = [order.recv() for _, order in self._made]
        host = (_processor_s(host_pid) - before) / (time.monotonic() - began)
        return [("host", host, 0.02), ("mean client", sum(used) / len(used), 0.005), ("worst", max(used), 0.02)]

    def close(self) -> None:
        """End them."""
        for process, order in self._made:
            order.close()
            process.join(10)


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _idle(order: Connection) -> None:
    torch.set_num_threads(1)
    try:
        told = order.recv()
    except EOFError:
        return
    asyncio.run(_connected(told, order))


async def _connected(told: dict[str, Any], order: Connection) -> None:
    """Read once, then sleep on the loop; tell how many cores that takes."""
    loop, engine = asyncio.get_running_loop(), Engine(devices="lo")
    slots = Slots(told, engine)
    block = Block.from_fields({"a": torch.randn(1, 1 << 14)}, 1)
    slots.count = os.getpid() << 20  # op_ids of its own
    op_id, refs = await slots.reserve(slots.ucx, block)
    await slots.ucx.write(slots.here, slots.route, op_id, refs, block)
    await slots.ucx.read(slots.here, slots.route, refs)
    order.send("ready")
    heard: asyncio.Future[None] = loop.create_future()
    loop.add_reader(order.fileno(), lambda: heard.done() or heard.set_result(None))
    await heard
    loop.remove_reader(order.fileno())
    seconds = order.recv()
    before = time.process_time()
    await asyncio.sleep(seconds)
    order.send((time.process_time() - before) / seconds)
    slots.pool.close()
    await engine.close()
