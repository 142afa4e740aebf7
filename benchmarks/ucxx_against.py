"""The figures of ``benchmarks ucxx`` beside those of another checkout, in turns: is any row slower than before?

    python -m benchmarks ucxx_against PATH [--turns 12] [--quick]

Slot hosts, clients and directories of both checkouts run side by side, each with code of its own; in each turn both
measure the same rows one after the other, in changing order. A row is the median over turns of the ratio (this checkout
by that one) and the range in which that median lies with 95 %, which is the noise that the run shows. A row is slower
where all of that range lies above 1.02; small reads (1 and 64 KiB) where the ratio itself is above 1.05 as well and the
range above 1. The exit code is 1 where any is.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import io
import json
import math
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Final

import torch

from asyncdp.transports.ucxx.wire.engine import Engine
from benchmarks._ucxx_plane import Plane
from benchmarks._ucxx_raw import raw_peer
from benchmarks._ucxx_slots import KIB, MIB, SECRET, Slots, host
from benchmarks._ucxx_table import line

ROOT: Final = Path(__file__).parents[1]
NAMESPACE: Final = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
#: Rows, bytes of each, and rounds in one turn.
LAYOUTS: Final = ((1, KIB, 60), (1, 64 * KIB, 40), (256, 64 * KIB, 3), (1, MIB, 20), (1, 16 * MIB, 5), (1, 64 * MIB, 3))
#: What no release changes: it shows how quiet the machine is.
BESIDE: Final = ("memcpy", "raw ucx")
SLOWER: Final = 1.02
SMALL_SLOWER: Final = 1.05

Turn = dict[str, float]


# -- one checkout


async def _slots(layouts: tuple[tuple[int, int, int], ...]) -> None:
    """Measure slots once for each line of standard input."""
    engine = Engine(devices="lo")
    with host() as (told, _):
        bench = Slots(told, engine, 0)
        async with raw_peer(engine) as raw:
            while await asyncio.to_thread(sys.stdin.readline):
                turn: Turn = {}
                for n, size, rounds in layouts:
                    bench.rounds = rounds
                    with contextlib.redirect_stdout(io.StringIO()):
                        made = await bench.layout(n, size, raw)
                    for name, seconds in made.seconds.items():
                        turn[f"{name}, {n} x {size // KIB} KiB"] = statistics.median(seconds)
                print(json.dumps(turn), flush=True)
        bench.pool.close()
    await engine.close()


async def _calls() -> None:
    """Measure whole calls once for each line of standard input."""
    plane = Plane(3)
    try:
        while await asyncio.to_thread(sys.stdin.readline):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                await plane.shares()
            found = re.findall(r"^  (\w+, \w+) +([\d.]+) ms", out.getvalue(), re.MULTILINE)
            print(json.dumps({f"{name}, 256 x 64 KiB": float(ms) / 1e3 for name, ms in found}), flush=True)
    finally:
        await plane.close()


# -- both


@contextlib.contextmanager
def _worker(checkout: Path, what: str) -> Iterator[tuple[IO[str], IO[str]]]:
    # Its own code first; this file, where it has none, from here: folders of benchmarks are looked through in order.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)]), "ASYNCDP_SECRET": ""}
    command = [sys.executable, "-m", "benchmarks.ucxx_against", "--measure", what, str(checkout)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, cwd=checkout, env=env, stdin=pipe, stdout=pipe, text=True)
    assert process.stdin
    assert process.stdout
    try:
        yield process.stdin, process.stdout
        process.stdin.close()
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def _turn(worker: tuple[IO[str], IO[str]]) -> Turn:
    stdin, stdout = worker
    stdin.write("\n")
    stdin.flush()
    told: Any = json.loads(stdout.readline() or "null")
    assert told, "a checkout's benchmark ended"
    return dict(told)


def _pairs(before: Path, what: str, turns: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of each row in that checkout and in this one, turn by turn."""
    rows: dict[str, list[tuple[float, float]]] = {}
    with _worker(before, what) as old, _worker(ROOT, what) as new:
        for number in range(turns + 1):
            first, second = (old, new) if number % 2 else (new, old)
            told = {id(first): _turn(first), id(second): _turn(second)}
            if number:
                for name in told[id(old)].keys() & told[id(new)].keys():
                    rows.setdefault(name, []).append((told[id(old)][name], told[id(new)][name]))
    return rows


def _range(ratios: list[float]) -> tuple[float, float]:
    """Where the median lies with 95 %: between two of the values themselves (the sign test's interval)."""
    ordered, n = sorted(ratios), len(ratios)
    tail, beyond = 1 / 2**n, 0
    while 2 * tail <= 0.05:
        beyond += 1
        tail += math.comb(n, beyond) / 2**n
    cut = max(0, beyond - 1)
    return ordered[cut], ordered[n - 1 - cut]


def _compare(rows: dict[str, list[tuple[float, float]]]) -> list[str]:
    """Print the rows; returns the slower ones."""
    slower = []
    for name, pairs in rows.items():
        ratios = [new / old for old, new in pairs]
        middle, (low, high) = statistics.median(ratios), _range(ratios)
        medians = [f"{statistics.median(side) * 1e3:.3f} ms" for side in zip(*pairs, strict=True)]
        small = name.startswith("get") and name.endswith((", 1 x 1 KiB", ", 1 x 64 KiB"))
        bad = low > SLOWER or (small and middle > SMALL_SLOWER and low > 1)
        beside = name.startswith(BESIDE)
        line(name, *medians, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", "slower" if bad and not beside else "")
        if bad and not beside:
            slower.append(name)
    return slower


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
        env = {"UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n", "OMP_NUM_THREADS": "1", **os.environ}
        told = ["ucxx_against", str(before), "--here", "--turns", str(args.turns), *(["--quick"] if args.quick else [])]
        command = [*NAMESPACE, sys.executable, "-m", "benchmarks", *told]
        return subprocess.run(command, env=env, check=False).returncode
    slower = []
    line(f"this checkout beside {before}"[:44], "before", "now", "now / before", "95 %")
    for what in ("small",) if args.quick else ("slots", "calls"):
        slower += _compare(_pairs(before, what, args.turns))
    print(f"slower: {', '.join(slower) or 'none'}")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
