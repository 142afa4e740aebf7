"""Gets and puts over UCX beside UCX alone, from 64 KiB to 2 GiB.

A slot host and UCX's other end are processes of their own. A get is compared with bytes that the other end sends into
memory that is used again (``raw ucx, received``), a put with the same the other way (``raw ucx``).

The rows of a put share slots, as many as fit, as they do unless a host is set to other ``rows_per_slot``. ``a slot
each`` is a host with ``rows_per_slot: 1``, where small rows are copied out of joined messages into slots of their own.
"""

from __future__ import annotations

import os
import statistics
from typing import TYPE_CHECKING, Any

import torch

from asyncdp.rows.block import Block
from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._scenario import Bench, Floor
from benchmarks._ucxx_slots import KIB, MIB, SECRET, Slots, host

if TYPE_CHECKING:
    from benchmarks._results import Table

NAMESPACE = True
#: Rows, bytes of each, and rounds.
LAYOUTS = (
    (1, 64 * KIB, 60), (256, 64 * KIB, 30), (1, MIB, 60), (16, MIB, 30), (1, 16 * MIB, 30), (1, 64 * MIB, 15),
    (4, 64 * MIB, 9), (16, 64 * MIB, 6), (32, 64 * MIB, 6),
)  # fmt: skip
#: By rows and bytes of each, which part of UCX's own speed it should have.
SHOULD = {(256, 64 * KIB): 0.7, (1, 64 * MIB): 0.9, (16, 64 * MIB): 0.9}


async def measure(bench: Bench, *, most_mib: int = 2048) -> None:
    """Measure gets and puts of at most so many MiB."""
    os.environ["ASYNCDP_SECRET"] = SECRET
    most = min(most_mib, 64 if bench.quick else most_mib)
    engine = Engine(devices="lo")
    bench.stack.push_async_callback(engine.close)
    slots = slots_of(bench, engine, "shared", arena_bytes=(2 * most + 512) * MIB, rows_per_slot=None)
    for n, size, rounds in LAYOUTS:
        if n * size <= most * MIB:
            aim = {"at_least": SHOULD[n, size], "must": "3"} if (n, size) in SHOULD else {}
            await one_layout(bench, slots, (n, size), rounds, aim)
    each = slots_of(bench, engine, "each", arena_bytes=512 * MIB, rows_per_slot=1)
    await one_layout(bench, each, (256, 64 * KIB), 30, {}, how=", a slot each")
    shared = [table for table in bench.result.tables if "slot each" not in table.case and table.nbytes >= MIB]
    for verb in ("get", "put", "raw ucx, received", "raw ucx"):
        times = [per_byte(table, verb) for table in shared]
        aim = {"at_most": 1.15, "must": "3"} if verb in ("get", "put") else {}
        bench.figure("time per byte, from 1 MiB on", f"{verb}: slowest / fastest", [max(times) / min(times)], **aim)


def per_byte(table: Table, verb: str) -> float:
    """Return the seconds of a byte."""
    return statistics.median(table.seconds[verb]) / table.nbytes


def slots_of(bench: Bench, engine: Engine, name: str, **settings: Any) -> Slots:
    """Start a host of this name, with these settings."""
    told, _ = bench.stack.enter_context(host(name, **settings))
    slots = Slots(told, engine)
    bench.stack.callback(slots.pool.close)
    return slots


async def one_layout(
    bench: Bench, slots: Slots, rows: tuple[int, int], rounds: int, aim: dict[str, Any], *, how: str = ""
) -> None:
    """Measure rows, so many of so many bytes each."""
    n, size = rows
    block = Block.from_fields({"a": torch.ones(n, size // 4)}, n)
    op_id, refs = await slots.reserve(slots.ucx, block)
    await slots.ucx.write(slots.here, slots.route, op_id, refs, block)

    async def get() -> None:
        left = list(refs)
        while left:  # a reply has at most 1 GiB; the client's layers ask again for what did not fit
            result = await slots.ucx.read(slots.here, slots.route, left)
            assert all(err.retryable for err in result.errors.values()), result.errors
            left = [left[at] for at in result.errors]

    read = await bench.measure(
        (f"{n} x {size // KIB} KiB" if size < MIB else f"{n} x {size // MIB} MiB") + how,
        {"get": get, "put": slots.put(slots.ucx, block)},
        beside=("raw ucx, received", "raw ucx"),
        nbytes=n * size,
        rounds=rounds,
        floors={"get": Floor(received=1), "put": Floor(sent=1)},
    )
    read.ratio("raw ucx, received", "get", **aim)
    read.ratio("raw ucx", "put", **aim)
    await slots.drop(refs)
