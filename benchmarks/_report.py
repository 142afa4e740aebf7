"""Results as tables for the terminal and for Markdown, as plots, and beside those of another run."""

from __future__ import annotations

import importlib
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks._statistics import median_range, wide

if TYPE_CHECKING:
    from benchmarks._results import Result, Table

__all__ = ["compared", "machine", "markdown", "plots", "ratio", "ruled", "terminal", "time"]

LEGEND = (
    "Ratios say how many times as long as the reference of the same round it took: below 1 is faster. In brackets: the "
    "range in which the median lies with 95 %; where that is wide, a question mark."
)


def time(seconds: float) -> str:
    """Return seconds with three digits."""
    unit, factor = next(((unit, by) for unit, by in (("us", 1e6), ("ms", 1e3)) if seconds * by < 999.5), ("s", 1.0))
    value = round(seconds * factor, 3)
    return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def ratio(values: Sequence[float], width: float | None = None) -> str:
    """Return median and range, with a question mark where it says little."""
    low, high = median_range(values)
    return f"{statistics.median(values):.2f} ({low:.2f}-{high:.2f}){'?' if wide(values, width) else ''}"


def _cells(table: Table) -> list[list[str]]:
    """Return a table, its head first, the references last."""
    floors = {name: table.of_floor(name) for name in table.works}
    last = ["x floor"] * any(floors.values())
    out = [[table.case, "median", *[f"x {name}" for name in table.beside], *last]]
    for name in (*table.works, *table.references):
        cells = [ratio(table.ratios(name, other)) if name in table.works else "" for other in table.beside]
        floor = [ratio(floors[name]) if floors.get(name) else ""] * len(last)
        out.append([name, time(statistics.median(table.seconds[name])), *cells, *floor])
    return out


def _figures(table: Table) -> list[list[str]]:
    if not table.figures:
        return []
    out = [["", "reached", "should be", ""]]
    for one in table.figures:
        said = {None: "", True: "holds", False: "does not hold"}[one.reached]
        out.append([one.name, f"{ratio(one.values, one.width)} {one.unit}".strip(), one.bound, said])
    return out


def _aligned(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(["  " + row[0].ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def terminal(table: Table) -> str:
    """Return a case for the terminal: works, numbers made of them, and what cannot be believed."""
    parts = [_aligned(_cells(table))] if table.seconds else [f"  {table.case}"]
    parts += [_aligned(_figures(table))] if table.figures else []
    return "\n".join([*parts, *(f"  ? {said}" for said in table.doubts()), ""])


def machine(result: Result) -> str:
    """Return in one line what it was measured on, and how busy that was."""
    it = result.machine
    versions = ", ".join(f"{name} {version}" for name, version in it.versions.items())
    busy = f"load {result.load_begin[0]:g} at the start, {(result.load_end or [0.0])[0]:g} at the end"
    return f"{result.began}; {it.cores} cores, {it.processor}, {it.memory_gib:g} GiB; {busy}; {it.commit}; {versions}"


def ruled(rows: list[list[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def markdown(results: Sequence[Result]) -> str:
    """Return a page: each scenario with its command, its machine, and its cases."""
    parts = [LEGEND]
    for result in results:
        parts += [f"## {result.title}", f"`{result.command}`", machine(result)]
        parts += [f"It failed: {result.failed}"] if result.failed else []
        for table in result.tables:
            parts += [ruled(_cells(table))] if table.seconds else [f"**{table.case}**"]
            parts += [ruled(_figures(table))] if table.figures else []
            parts += ["\n".join(f"- {said}" for said in table.doubts())]
    return "\n\n".join(part for part in parts if part) + "\n"


def plots(results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw the ratios of each scenario, and what it draws itself (``plots`` of its module); returns the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    made = []
    for result in results:
        own = getattr(importlib.import_module(f"benchmarks.{result.scenario}"), "plots", None)
        made += own(result, folder) if own else []
        bars: list[tuple[str, float, float, float]] = []
        for table in result.tables:
            for other in table.beside[:1]:
                for name in table.works:
                    values = table.ratios(name, other)
                    bars.append((f"{table.case}: {name} / {other}", statistics.median(values), *median_range(values)))
        if not bars:
            continue
        figure, axes = plt.subplots(figsize=(9, 1 + 0.28 * len(bars)), layout="constrained")
        at = range(len(bars))[::-1]
        middles = [middle for _, middle, _, _ in bars]
        ends = [[middle - low for _, middle, low, _ in bars], [high - middle for _, middle, _, high in bars]]
        axes.barh(at, middles, xerr=ends, height=0.6, color="#4c72b0", ecolor="#333333")
        axes.set_yticks(at, [name for name, *_ in bars], fontsize=8)
        axes.axvline(1, color="#333333", linewidth=1)
        if min(middles) > 0 and max(middles) > 20 * min(middles):
            axes.set_xscale("log")
        axes.set_xlabel("times as long as the reference; below 1 is faster")
        axes.set_title(result.title, fontsize=10)
        file = folder / f"{result.scenario}.png"
        figure.savefig(file, dpi=120, metadata={"Software": None})
        plt.close(figure)
        made.append(file)
    return made


def compared(before: Sequence[Result], after: Sequence[Result]) -> str:
    """Return the ratios that both runs have, side by side; times of two runs say nothing of each other."""
    olds = {(one.scenario, table.case): table for one in before for table in one.tables}
    rows: list[list[Any]] = [["ratio", "before", "after", "after / before", ""]]
    for result in after:
        for table in result.tables:
            old = olds.get((result.scenario, table.case))
            for name, values, others in _both(old, table) if old else ():
                middle, was = statistics.median(values), statistics.median(others)
                (low, high), (least, most) = median_range(values), median_range(others)
                apart = "slower" if low > most else "faster" if high < least else ""
                change = f"{middle / was:.2f}" if was else "-"
                rows.append([f"{table.case}: {name}", ratio(others), ratio(values), change, apart])
    return _aligned(rows) if len(rows) > 1 else "the two runs have no ratio in common"


def _both(old: Table, new: Table) -> list[tuple[str, list[float], list[float]]]:
    out = [
        (f"{name} / {other}", new.ratios(name, other), old.ratios(name, other))
        for other in new.beside
        for name in new.works
        if {name, other} <= old.seconds.keys()
    ]
    figures = {one.name: one for one in old.figures}
    return out + [(one.name, one.values, figures[one.name].values) for one in new.figures if one.name in figures]
