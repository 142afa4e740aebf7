"""Reads on one machine, with and without a copy, beside one locate, a memcpy and Ray's view.

Rows of one put lie in one slot. ``get`` is ``get_data`` by the meta of a claim, which has said where they lie; the
directory confirms that during the copy. ``get by ids`` is ``get_samples``, which looks them up first. ``locate`` is the
directory's answer alone, ``ray view`` a ``ray.get`` of one array of as many bytes from Ray's object store. ``first
get`` is a copying get into pages that the system has just given, as ``memcpy, fresh pages`` is; the others use memory
that earlier reads gave back.
"""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from benchmarks._layouts import LAYOUTS, MIB, bytes_of
from benchmarks._scenario import Bench, Floor

#: By name: the batch of one put, and how many puts.
BATCHES = {
    "256 x 4 KiB": ("256 x 4 KiB", 1),
    "256 x 64 KiB": ("256 x 64 KiB", 1),
    "256 x 64 KiB of 32 puts": ("8 x 64 KiB", 32),
    "256 x 1 MiB": ("256 x 1 MiB", 1),
    "32 x 16 MiB": ("32 x 16 MiB", 1),
    "GRPO, 1,024 rows": ("GRPO, 1,024 rows", 1),
    "GRPO, 1,024 rows of 64 puts": ("GRPO, 16 rows", 64),
}
CONFIG = {
    "enabled": True, "impl": "ucxx", "storage_capacity": 1 << 20,
    "ucxx": {"host": {"arena_bytes": 1536 * MIB, "max_slot_bytes": 640 * MIB, "ports": 2, "ucx": False}},
}  # fmt: skip


async def measure(bench: Bench, *, cases: tuple[str, ...] = tuple(BATCHES)) -> None:
    """Measure reads of several batches."""
    transport = UCXXTransport(CONFIG)
    client: Any = await bench.stack.enter_async_context(stack(transport))
    for case in cases:
        meta, nbytes = await _claimed(client, case)
        await one_batch(bench, transport, client, meta, nbytes)
        await client.drop_partition(case)
    small, large = "256 x 64 KiB", "256 x 1 MiB"  # 16 times the bytes; in turn, with no copy between them
    metas = {case: (await _claimed(client, case))[0] for case in (small, large)}
    works = {case: partial(client.get_data, meta, borrow=True) for case, meta in metas.items()}
    read = await bench.measure("flat in bytes: borrowed get", works, rounds=61)
    read.ratio(large, small, at_most=1.2, must="1")


async def _claimed(client: Any, case: str) -> tuple[Any, int]:
    """Put the rows of a case; return the meta of a claim of all of them, and their bytes."""
    layout, puts = BATCHES[case]
    rows = LAYOUTS[layout]()
    ids, names = [f"s{at}" for at in range(puts * len(rows))], list(rows.keys())
    await client.register_partition(case, names, len(ids), ["t"])
    for first in range(0, len(ids), len(rows)):
        await client.put_samples(ids[first : first + len(rows)], case, rows)
    return await client.claim_meta(case, "t", names, len(ids)), puts * bytes_of(rows)


async def one_batch(bench: Bench, transport: UCXXTransport, client: Any, meta: Any, nbytes: int) -> None:
    """Measure reads of one batch, of all fields."""
    case, ids, names = meta.partition_id, tuple(meta.sample_ids), tuple(meta.fields)
    buffers = transport._resolver._buffers  # noqa: SLF001 - what it keeps is measured

    async def first() -> float:
        buffers.trim(0.0)
        began = time.perf_counter()
        await client.get_data(meta)
        return time.perf_counter() - began

    slots = len((await transport._directory.locate(case, ids, names, None)).refs)  # noqa: SLF001
    of_put = " of " not in case
    bench.check(slots == 1 or not of_put, f"{case} lies in {slots} slots: it would be copied, not borrowed")
    borrow: dict[str, Any] = {}
    if slots == 1:
        borrow["get, borrow"] = lambda: client.get_data(meta, borrow=True)
    read = await bench.measure(
        case,
        {
            **borrow,
            "get": lambda: client.get_data(meta),
            "get by ids": lambda: client.get_samples(ids, case, names),
            "first get": first,
            "locate": lambda: transport._directory.locate(case, ids, names, None),  # noqa: SLF001
        },
        beside=("memcpy", "memcpy, fresh pages", "locate", "ray view"),
        nbytes=nbytes,
        rounds=40 if nbytes < 64 * MIB else 12,
        floors={"get": Floor(copies=1), "get by ids": Floor(copies=1, trips=1)},
    )
    read.ratio("memcpy", "get", **({"at_least": 0.6, "must": "1"} if of_put and nbytes > MIB else {}))
    read.ratio("memcpy", "get by ids")
    if borrow:
        read.figure(
            "borrowed get / (one locate + 1.5 x Ray's view)",
            lambda s: s["get, borrow"] / (s["locate"] + 1.5 * s["ray view"]),
            **({"at_most": 1.0, "must": "1"} if case == "256 x 64 KiB" else {}),
        )
