"""Puts on UCXX, on the lane and over the wire, beside the work that they cannot do without.

``ring`` is a bare write of the same bytes into a ring in shared memory, ``publish`` one call to the directory that
publishes as many rows. What it takes to remove them again does not count.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from asyncdp import stack
from asyncdp.calls.slots import HostRef, Publish, SlotRef
from asyncdp.rows.block import Block
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.directory import OperationId
from benchmarks._layouts import LAYOUTS, MIB, bytes_of
from benchmarks._scenario import Bench, Floor, Measured

if TYPE_CHECKING:
    from tensordict import TensorDict

NAMESPACE = True
CASES = ("1 x 64 KiB", "256 x 64 KiB", "256 x 1 MiB", "32 x 16 MiB", "GRPO, 1,024 rows")
#: Most times as long as ring and publish together.
MOST = {"1 x 64 KiB": 3, "256 x 64 KiB": 2}
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20, "call_timeout_s": 60.0,
    "ucxx": {"devices": "lo", "host": {"arena_bytes": 2048 * MIB, "ports": 2}},
}  # fmt: skip


async def measure(bench: Bench, *, cases: tuple[str, ...] = CASES) -> None:
    """Measure puts of several batches."""
    transport = UCXXTransport(CONFIG)
    lane: Any = await bench.stack.enter_async_context(stack(transport))
    config = transport.attach_config()
    other = UCXXTransport({**config, "ucxx": {**config["ucxx"], "lane": "off"}}, bootstrap=False)
    wire: Any = await bench.stack.enter_async_context(stack(other))
    for case in cases:
        fields = LAYOUTS[case]()
        nbytes, ids = bytes_of(fields), [f"s{at}" for at in range(len(fields))]
        await lane.register_partition("p", list(fields.keys()), len(ids), ["t"])
        put = await bench.measure(
            case,
            {
                "put, lane": _put(lane, ids, fields),
                "put, wire": _put(wire, ids, fields),
                "publish": _publish(transport, ids, fields),
            },
            beside=("ring", "publish", "memcpy", "memcpy, fresh pages", "raw ucx", "ray put"),
            nbytes=nbytes,
            rounds=30 if nbytes < 128 * MIB else 10,
            floors={"put, lane": Floor(copies=1, trips=1), "put, wire": Floor(sent=1, trips=1)},
        )
        _aims(put, case, nbytes)
        await lane.drop_partition("p")


def _aims(put: Measured, case: str, nbytes: int) -> None:
    if case in MOST:
        of = lambda s: s["put, lane"] / (s["ring"] + s["publish"])  # noqa: E731
        put.figure("put, lane / (ring + publish)", of, at_most=MOST[case], must="2")
    if nbytes >= 256 * MIB:
        put.ratio("memcpy", "put, lane", at_least=0.5, must="2")
    put.ratio("put, lane", "ray put", at_most=1.5, must="2")
    if case == "256 x 64 KiB":
        put.ratio("raw ucx", "put, wire", at_least=0.7, must="3")


def _put(client: Any, ids: list[str], fields: TensorDict) -> Callable[[], Awaitable[float]]:
    async def put() -> float:
        began = time.perf_counter()
        await client.put_samples(ids, "p", fields)
        took = time.perf_counter() - began
        await client.clear_samples(ids, "p")
        return took

    return put


def _publish(transport: UCXXTransport, ids: list[str], fields: TensorDict) -> Callable[[], Awaitable[float]]:
    """Publish rows as a put would; nobody reads them, so the slots that it names need not be there."""
    directory, n, names = transport._directory, len(ids), tuple(fields.keys())  # noqa: SLF001 - it is measured

    async def publish() -> float:
        refs = (SlotRef(HostRef("nobody", 1, ()), 0, 1, names, range(n), range(n)),)
        block = Block.from_fields(fields, n)
        nbytes = {name: tuple(column.row_nbytes().tolist()) for name, column in block.columns.items()}
        call = Publish(tuple(ids), "p", refs, None, block.observed(), nbytes)
        began = time.perf_counter()
        await directory.publish(OperationId(uuid.uuid4().hex, 60.0), call, "benchmark")
        took = time.perf_counter() - began
        await directory.clear(OperationId(uuid.uuid4().hex, 60.0), "p", tuple(ids), None, None, None)
        return took

    return publish
