"""Memory and descriptors of a client and a slot host over many puts, gets and claims, of which some are cancelled.

Both are looked at ten times, at rest. What is told is how much more the later half of the looks found than the earlier
half did, of which the very first does not count; allocators keep pieces, for which there is room.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from tests.chaos.memory import MIB, SPARE_BYTES, SPARE_DESCRIPTORS, SPARE_PER_CALL, Run

if TYPE_CHECKING:
    from benchmarks._scenario import Bench

NAMESPACE = True


async def measure(bench: Bench, *, calls: int = 10_000) -> None:
    """Make so many calls on the lane, then as many over the wire."""
    calls = 500 if bench.quick else calls
    spare = (SPARE_BYTES + SPARE_PER_CALL * calls / 2) / MIB
    for wire in ("lane", "wire"):
        run = Run(wire, calls, rest_s=0.5 if bench.quick else 7.0)
        await run.main()
        bench.check(run.counts["cancelled"] > calls // 50, f"too few calls were cancelled: {dict(run.counts)}")
        for name in ("client", "host", "client descriptors", "host descriptors"):
            size, most, unit = (1, SPARE_DESCRIPTORS, "") if "descriptors" in name else (MIB, spare, "MiB")
            before = statistics.median(look[name] for look in run.looks[1:5])
            grown = [(look[name] - before) / size for look in run.looks[-5:]]
            told = {"at_most": most, "width": most, "unit": unit, "must": "8"}
            bench.figure(f"{calls:,} calls, {wire}", f"{name}: later looks less earlier ones", grown, **told)
