"""The same rows in two checkouts, in turns: each checkout runs in a process of its own, with its own code.

In each turn both measure all rows one after the other, in changing order. A row is the median over turns of the ratio
(this checkout by that one) and the range in which that median lies with 95 %, which is the noise that the run shows.

Every few turns both are started anew, since where a process lies in memory makes all its rows faster or slower
(a plain memcpy by a fifth, measured), as long as it lives.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final

from ._statistics import median_range

__all__ = ["Rows", "Turn", "compare", "line", "pairs", "serve"]

ROOT: Final = Path(__file__).parents[1]

#: Turns of one start of both checkouts; one more before them is not counted.
TURNS_PER_START: Final = 2

#: Seconds of each row, as one checkout measured them in one turn.
Turn = dict[str, float]
#: By row: seconds in that checkout and in this one, turn by turn.
Rows = dict[str, list[tuple[float, float]]]
Worker = tuple[IO[str], IO[str]]


def line(*cells: str) -> None:
    """Print a row of a table: a name, then numbers."""
    print("  " + f"{cells[0]:44s}" + "".join(f"{cell:>16s}" for cell in cells[1:]), flush=True)


async def serve(measure: Callable[[], Awaitable[Turn]]) -> None:
    """In a checkout's process: measure once for each line of standard input."""
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(await measure()), flush=True)


@contextlib.contextmanager
def _worker(checkout: Path, module: str, what: str) -> Iterator[Worker]:
    # Its own code first; the module, where it has none, from here: folders of benchmarks are looked through in order.
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout), str(ROOT)]), "ASYNCDP_SECRET": ""}
    command = [sys.executable, "-m", module, "--measure", what, str(checkout)]
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


def _turn(worker: Worker) -> Turn:
    stdin, stdout = worker
    stdin.write("\n")
    stdin.flush()
    told: Any = json.loads(stdout.readline() or "null")
    assert told, "a checkout's benchmark ended"
    return dict(told)


def pairs(before: Path, module: str, what: str, turns: int) -> Rows:
    """Have both checkouts run ``python -m module --measure what``, which calls :func:`serve`, for so many turns."""
    rows: Rows = {}
    for begun in range(0, turns, TURNS_PER_START):
        with _worker(before, module, what) as old, _worker(ROOT, module, what) as new:
            for number in range(min(TURNS_PER_START, turns - begun) + 1):
                first, second = (old, new) if (begun + number) % 2 else (new, old)
                told = {id(first): _turn(first), id(second): _turn(second)}
                if number:
                    for name in told[id(new)]:
                        if name in told[id(old)]:
                            rows.setdefault(name, []).append((told[id(old)][name], told[id(new)][name]))
    return rows


def compare(rows: Rows, slower: Callable[[str, float, float], bool]) -> list[str]:
    """Print the rows; return those that are slower: ``slower(name, median, lower end of its range)``."""
    found = []
    for name, measured in rows.items():
        ratios = [new / old for old, new in measured]
        middle, (low, high) = statistics.median(ratios), median_range(ratios)
        medians = [_time(statistics.median(side)) for side in zip(*measured, strict=True)]
        bad = slower(name, middle, low)
        line(name, *medians, f"{middle:.3f}", f"{low:.3f} - {high:.3f}", "slower" if bad else "")
        if bad:
            found.append(name)
    return found


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.3f} ms"
