"""The figures of ``benchmarks ucxx`` beside those of another checkout, in turns: is any row slower than before?

    python -m benchmarks ucxx_against PATH [--turns 12] [--quick]

Slot hosts, clients and directories of both checkouts run side by side, each with code of its own; ``_turns.py`` says
how rows are measured and compared. A row is slower where all of the range of its median lies above 1.05; small reads
(1 and 64 KiB) where the ratio itself does and the range lies above 1. The exit code is 1 where any is.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

import torch

from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._results import Result, this_machine
from benchmarks._runner import ENVIRONMENT, NAMESPACE
from benchmarks._scenario import Bench
from benchmarks._turns import Turn, compare, line, pairs, serve
from benchmarks._ucxx_plane import Plane
from benchmarks._ucxx_slots import KIB, MIB, SECRET, Slots, host

#: Rows, bytes of each, and rounds in one turn.
LAYOUTS: Final = ((1, KIB, 60), (1, 64 * KIB, 40), (256, 64 * KIB, 3), (1, MIB, 20), (1, 16 * MIB, 5), (1, 64 * MIB, 3))
#: What no release changes: it shows how quiet the machine is.
BESIDE: Final = ("memcpy", "raw ucx")
SLOWER: Final = 1.05


# -- one checkout


@asynccontextmanager
async def _bench() -> AsyncIterator[Bench]:
    async with AsyncExitStack() as stack:
        yield Bench(Result("", "", "", this_machine(), "", []), stack)


def _medians(seconds: dict[str, list[float]], case: str) -> Turn:
    return {f"{name}, {case}": statistics.median(values) for name, values in seconds.items()}


async def _slots(layouts: tuple[tuple[int, int, int], ...]) -> None:
    """Measure slots once for each line of standard input."""
    engine = Engine(devices="lo")
    with host() as (told, _):
        slots = Slots(told, engine)
        async with _bench() as bench:

            async def turn() -> Turn:
                measured: Turn = {}
                for n, size, bench.rounds in layouts:
                    seconds = (await slots.measure(bench, n, size)).table.seconds
                    measured |= _medians(seconds, f"{n} x {size // KIB} KiB")
                return measured

            await serve(turn)
        slots.pool.close()
    await engine.close()


async def _calls() -> None:
    """Measure whole calls once for each line of standard input."""
    plane = Plane()
    async with _bench() as bench:
        works = await plane.works(bench)

        async def turn() -> Turn:
            return _medians((await plane.measure(bench, works)).table.seconds, "256 x 64 KiB")

        try:
            await serve(turn)
        finally:
            await plane.close()


# -- both


def _slower(name: str, middle: float, low: float) -> bool:
    """Return whether a row is slower than before."""
    small = name.startswith("get") and name.endswith((", 1 x 1 KiB", ", 1 x 64 KiB"))
    return not name.startswith(BESIDE) and (low > SLOWER or (small and middle > SLOWER and low > 1))


def main() -> int:
    """Measure, in a namespace of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "before", type=Path, metavar="PATH", help="the checkout to compare with, such as a git worktree"
    )
    parser.add_argument(
        "--turns", type=int, default=12, help="turns of both (default: 12); six at the least say anything"
    )
    parser.add_argument("--quick", action="store_true", help="the two small layouts only")
    parser.add_argument("--here", action="store_true", help="not in a namespace: UCX listeners bind everywhere")
    parser.add_argument("--measure", choices=("slots", "small", "calls"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    before = args.before.resolve()
    if args.measure:
        torch.set_num_threads(1)
        os.environ["ASYNCDP_SECRET"] = SECRET
        asyncio.run(
            _calls() if args.measure == "calls" else _slots(LAYOUTS[:2] if args.measure == "small" else LAYOUTS)
        )
        return 0
    if not args.here:
        env = {**ENVIRONMENT, **os.environ}
        told = ["ucxx_against", str(before), "--here", "--turns", str(args.turns), *(["--quick"] if args.quick else [])]
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks", *told]
        return subprocess.run(command, env=env, check=False).returncode
    slower = []
    line(f"this checkout beside {before}"[:44], "before", "now", "now / before", "95 %")
    for what in ("small",) if args.quick else ("slots", "calls"):
        slower += compare(pairs(before, "benchmarks.ucxx_against", what, args.turns), _slower)
    print(f"slower: {', '.join(slower) or 'none'}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
