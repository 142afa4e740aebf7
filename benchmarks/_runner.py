"""Scenarios by name, each in a process of its own, and their results.

    asyncdp bench                        the scenarios there are
    asyncdp bench borrow layers          these two
    asyncdp bench all --quick            all of them, in few rounds
    asyncdp bench borrow --json now.json --markdown now.md --plots pictures
    asyncdp bench --compare before.json now.json
    asyncdp bench --page docs/performance.md now.json more.json

Ratios say how many times as long as the reference of the same round it
took: below 1 is faster.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import importlib
import inspect
import os
import shlex
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

from benchmarks import _page, _report
from benchmarks._results import Result, Table, decode, encode, load, now, this_machine
from benchmarks._scenario import Bench, WrongMeasurement, unknown

__all__ = ["main", "scenarios"]

HERE: Final = Path(__file__).parent
NAMESPACE: Final = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
ENVIRONMENT: Final = {"UCX_TLS": "tcp,self", "UCX_WARN_UNUSED_ENV_VARS": "n", "OMP_NUM_THREADS": "1"}


def scenarios() -> dict[str, str]:
    """Return the scenarios by name, with their titles; what has no ``measure`` is no scenario."""
    found = {}
    for path in sorted(HERE.glob("[!_]*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        if any(isinstance(node, ast.AsyncFunctionDef) and node.name == "measure" for node in tree.body):
            found[path.stem] = (ast.get_docstring(tree) or "").partition("\n")[0]
    return found


def scripts() -> list[str]:
    """Return the benchmarks that are programs of their own, such as those of two checkouts."""
    return sorted({path.stem for path in HERE.glob("[!_]*.py")} - set(scenarios()))


def parser(name: str | None = None) -> argparse.ArgumentParser:
    """Return the options of a run, with those of one scenario."""
    made = argparse.ArgumentParser(
        prog="asyncdp bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("names", nargs="*", metavar="SCENARIO", help="which, or all")
    made.add_argument("--rounds", type=int, help="rounds of each case (default: the scenario's own)")
    made.add_argument("--quick", action="store_true", help="few rounds: to see that it works")
    made.add_argument("--without", action="append", default=[], metavar="EXTRA", help="do without ray, valkey or ucx")
    made.add_argument("--processor-time", action="store_true", help="count the processor time of the loop's thread")
    made.add_argument("--here", action="store_true", help="in no network namespace: UCX listeners bind everywhere")
    made.add_argument("--json", type=Path, metavar="FILE", help="write every value, with the machine")
    made.add_argument("--markdown", type=Path, metavar="FILE", help="write the tables")
    made.add_argument("--plots", type=Path, metavar="FOLDER", help="draw the ratios; needs the extra plot")
    made.add_argument(
        "--page", nargs="+", type=Path, metavar=("PAGE", "FILE"), help="the tables of a page, of JSON files"
    )
    made.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="ratios of two JSON files")
    if name is not None:
        group = made.add_argument_group(name)
        for key, default in options(name).items():
            flag = f"--{key.replace('_', '-')}"
            if isinstance(default, bool):
                group.add_argument(flag, action="store_true")
            elif isinstance(default, tuple):
                group.add_argument(flag, nargs="+", type=type(default[0]), default=default, help=f"default: {default}")
            else:
                group.add_argument(flag, type=type(default), default=default, help=f"default: {default!r}")
    return made


def options(name: str) -> dict[str, Any]:
    """Return a scenario's own options, with their defaults."""
    measure = importlib.import_module(f"benchmarks.{name}").measure
    return {key: it.default for key, it in inspect.signature(measure).parameters.items() if it.kind is it.KEYWORD_ONLY}


class Terminal:
    """Shows how far a run is, and each case when it ended."""

    def __init__(self, keep: Callable[[], object] = lambda: None) -> None:
        """Begin now; ``keep`` is called after each case."""
        self._keep = keep
        self._began = time.monotonic()
        self._live = sys.stderr.isatty()

    def step(self, case: str, number: int, rounds: int) -> None:
        """Show a line that the next one replaces."""
        if self._live:
            said = f"  {case}: round {number} of {rounds}, {time.monotonic() - self._began:.0f} s"
            print(f"\r{said:<100}", end="\r", file=sys.stderr, flush=True)

    def done(self, table: Table) -> None:
        """Show a case."""
        if self._live:
            print(f"\r{'':<100}", end="\r", file=sys.stderr, flush=True)
        print(_report.terminal(table), flush=True)
        self._keep()


async def _measure(result: Result, asked: argparse.Namespace) -> None:
    module = importlib.import_module(f"benchmarks.{result.scenario}")
    own = {key: getattr(asked, key) for key in options(result.scenario)}
    clock = time.thread_time if asked.processor_time else time.perf_counter
    async with AsyncExitStack() as stack:
        bench = Bench(
            result, stack, rounds=asked.rounds, quick=asked.quick, without=tuple(asked.without), clock=clock,
            progress=Terminal(lambda: asked.json.write_bytes(encode([result]))),
        )  # fmt: skip
        await module.measure(bench, **own)
        bench.show()


def measured(name: str, words: Sequence[str]) -> Result:
    """Measure a scenario in this process."""
    import torch

    torch.set_num_threads(1)
    asked = parser(name).parse_args([name, *words])
    command = shlex.join(["asyncdp", "bench", name, *_passed_on(words, asked)])
    result = Result(name, scenarios()[name], command, this_machine(), now(), load())
    print(f"{name}: {result.title}\n", flush=True)
    try:
        asyncio.run(_measure(result, asked))
    except Exception as error:  # noqa: BLE001 - whatever it is, what was measured before is kept
        result.failed = f"{type(error).__name__}: {error}"
        if not isinstance(error, WrongMeasurement):
            traceback.print_exc()
    finally:
        result.ended, result.load_end = now(), load()
        asked.json.write_bytes(encode([result]))
    return result


def _apart(name: str, words: Sequence[str], *, here: bool) -> Result | None:
    """Measure a scenario in a process of its own, in a network namespace where it needs one."""
    with tempfile.TemporaryDirectory(prefix="asyncdp-bench-") as folder:
        file = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks._runner", name, *words, "--json", str(file)]
        if getattr(importlib.import_module(f"benchmarks.{name}"), "NAMESPACE", False) and not here:
            command = [*NAMESPACE, *command]
        done = subprocess.run(command, env={**ENVIRONMENT, **os.environ}, check=False)
        result = decode(file.read_bytes())[0] if file.exists() else None
        if result is not None and done.returncode and not result.failed:
            result.failed = f"its process ended with {done.returncode}"
        return result


def main(words: Sequence[str]) -> int:
    """Run scenarios; 1 if one of them failed, 2 if the command says nothing that can be done."""
    known = scenarios()
    named = [word for word in words if word in known]
    asked = parser(named[0] if len(named) == 1 else None).parse_args(words)
    if asked.compare:
        print(_report.compared(*(decode(file.read_bytes()) for file in asked.compare)))
        return 0
    if asked.page:
        page, *files = asked.page
        found = [result for file in files for result in decode(file.read_bytes())]
        page.write_text(_page.written(page.read_text(encoding="utf-8"), found), encoding="utf-8")
        return 0
    names = list(known) if asked.names == ["all"] else asked.names
    for name in names:
        if name not in known:
            print(unknown("scenario", name, [*known, "all"]), file=sys.stderr)
            return 2
    if not names:
        print("\n".join(f"{name:16}{title}" for name, title in known.items()))
        print(f"\nPrograms of their own, with two checkouts: {', '.join(scripts())}")
        return 0
    passed = _passed_on(words, asked)
    results: list[Result | None] = []
    for name in names:
        results.append(_apart(name, passed, here=asked.here))
        found = [result for result in results if result is not None]
        if asked.json:  # after each: what was measured is kept if a later one is stopped
            asked.json.write_bytes(encode(found))
    if asked.markdown:
        asked.markdown.write_text(_report.markdown(found), encoding="utf-8")
    if asked.plots:
        asked.plots.mkdir(parents=True, exist_ok=True)
        _report.plots(found, asked.plots)
    failed = {name: it.failed if it else "no result" for name, it in zip(names, results, strict=True)}
    print("\n".join(f"{name} failed: {why}" for name, why in failed.items() if why) or f"{len(found)} measured")
    return int(any(failed.values()))


def _passed_on(words: Sequence[str], asked: argparse.Namespace) -> list[str]:
    """Return the words without the names and without what is made of the results."""
    out, skip = [], 0
    for word in words:
        if skip:
            skip -= 1
        elif word in ("--json", "--markdown", "--plots"):
            skip = 1
        elif not word.startswith(("--json=", "--markdown=", "--plots=")) and word not in asked.names:
            out.append(word)
    return out


if __name__ == "__main__":
    sys.exit(bool(measured(sys.argv[1], sys.argv[2:]).failed))
