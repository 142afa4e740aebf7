"""Slots of UCXX over UCX and over shared memory, the directory's part of whole calls, and what idle clients cost.

Slot hosts, a directory, UCX's other end and idle clients are processes of their own. ``the lane's copy alone`` is its
copy out of slots, or into them, without any request; ``a request per slot`` is what batching saves.
"""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._ucxx_idle import Idlers
from benchmarks._ucxx_plane import Plane
from benchmarks._ucxx_slots import KIB, MIB, SECRET, Slots, host

if TYPE_CHECKING:
    from benchmarks._scenario import Bench

NAMESPACE = True
LAYOUTS = ((256, 64 * KIB), (1, MIB), (1, 16 * MIB), (1, 64 * MIB))


async def measure(bench: Bench) -> None:
    """Measure what is idle first: its clients have to be forked before this process has UCX."""
    os.environ["ASYNCDP_SECRET"] = SECRET
    idlers = Idlers()
    bench.stack.callback(idlers.close)
    told, pid = bench.stack.enter_context(host())
    for name, cores, most in await asyncio.to_thread(idlers.measure, told, pid):
        bench.figure("16 clients connected over UCX, idle", name, [cores], at_most=most, unit="cores")
    engine = Engine(devices="lo")
    bench.stack.push_async_callback(engine.close)
    slots = Slots(told, engine)
    bench.stack.callback(slots.pool.close)
    for n, size in LAYOUTS[:2] if bench.quick else LAYOUTS:
        read = await slots.measure(bench, n, size)
        if n > 1:
            for verb in ("get", "put"):
                read.ratio(f"{verb}, ucx, a request per slot", f"{verb}, ucx", at_least=5)
                read.ratio("memcpy", f"{verb}, the lane's copy alone", at_least=0.5)
    plane = Plane()
    bench.stack.push_async_callback(plane.close)
    await plane.measure(bench, await plane.works(bench))
