"""The tables of docs/performance.md, made of the JSON of runs: ``asyncdp bench --page PAGE FILE...``.

A page says where: what stands between ``<!-- measured NAME -->`` and ``<!-- end -->`` is replaced.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from benchmarks import _report, _scale

if TYPE_CHECKING:
    from benchmarks._results import Result, Table

__all__ = ["written"]

BLOCK: Final = re.compile(r"(<!-- measured (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
#: On paper, of one port of NDR InfiniBand: bytes a second, and seconds of one round trip (two ways of less than 2 us).
RDMA_BYTES_S, RDMA_TRIP_S = 50e9, 4e-6
MIB, GIB = 1 << 20, 1 << 30


def written(page: str, results: Sequence[Result]) -> str:
    """Return the page with its tables made anew; those of which nothing was measured stay.

    Raises:
        ValueError: The page names a table that is none.
    """

    def block(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in TABLES:
            raise ValueError(f"no table {name!r}; there are {', '.join(TABLES)}")
        made = TABLES[name](results)
        return f"{begin}\n{made}\n\n{end}" if made else found[0]

    return BLOCK.sub(block, page)


def aims(results: Sequence[Result]) -> str:
    """Return what each aim is, and what was reached."""
    rows = [["aim", "what", "reached", "should be", "", "command"]]
    for result in results:
        for table in result.tables:
            for one in table.figures:
                if one.must:
                    reached = _report.ratio(one.values, one.width) + f" {one.unit}" * bool(one.unit)
                    said = "holds" if one.reached else "does not hold"
                    rows.append(
                        [one.must, f"{table.case}: {one.name}", reached, one.bound, said, f"`{result.command}`"]
                    )
    rows[1:] = sorted(rows[1:], key=lambda row: row[0])
    return _report.ruled(rows) if len(rows) > 1 else ""


def floors(results: Sequence[Result]) -> str:
    """Return what bytes and round trips imply, what was reached, and what RDMA would give on paper."""
    rows = [["what", "floor", "reached", "times the floor", "over RDMA, on paper", "command"]]
    for result in results:
        for table in result.tables:
            for name in table.works:
                if of := table.of_floor(name):
                    floor = statistics.median(took / by for took, by in zip(table.seconds[name], of, strict=True))
                    reached = statistics.median(table.seconds[name])
                    cells = [_report.time(floor), _report.time(reached), _report.ratio(of), _rdma(table, name)]
                    rows.append([f"{table.case}: {name}", *cells, f"`{result.command}`"])
    return _report.ruled(rows) if len(rows) > 1 else ""


def _rdma(table: Table, name: str) -> str:
    """Return what a wire of RDMA would take: the bytes once, and each round trip, also that for the bytes."""
    floor = table.floors[name]
    moved = bool(floor.copies or floor.sent or floor.received)
    return _report.time(table.nbytes / RDMA_BYTES_S * moved + RDMA_TRIP_S * (floor.trips + moved))


def machines(results: Sequence[Result]) -> str:
    """Return what was measured when, on what, and how busy that was."""
    return "\n".join(f"- `{result.command}`: {_report.machine(result)}" for result in results)


# -- the directory at sizes


def _scaled(results: Sequence[Result]) -> Result | None:
    return next((result for result in results if result.scenario == "directory"), None)


def costs(results: Sequence[Result]) -> str:
    """Return what the model says that each verb costs the server, and how far it is off at large partitions."""
    result = _scaled(results)
    if result is None:
        return ""
    off: dict[str, list[str]] = {}
    for one in (one for table in result.tables for one in table.figures if one.name.endswith("/ model")):
        name = one.name.partition(",")[0].partition(":")[0]
        off.setdefault(name.split()[0], []).append(f"{name}: {_report.ratio(one.values)}")
    rows = [["verb", "a call", "a row", "a row, a doubling", "measured / model"]]
    for verb, cost in _scale.costs_of(result.tables, _scale.FITTED).items():
        if verb not in WHOLE:
            parts = map(_report.time, (cost.call, cost.row, cost.doubling))
            rows.append([verb, *parts, "<br>".join(off.get(verb, []))])
    for verb, cost in _scale.costs_of(result.tables, _scale.FITTED, server=False).items():
        if verb in WHOLE:
            parts = map(_report.time, (cost.call, cost.row, cost.doubling))
            rows.append([f"{verb} (the caller's time)", *parts, "<br>".join(off.get(verb, []))])
    return _report.ruled(rows)


def sizes(results: Sequence[Result]) -> str:
    """Return what one caller waits for, beside so many rows, as the model says."""
    result = _scaled(results)
    if result is None:
        return ""
    seen = _scale.costs_of(result.tables, _scale.FITTED, server=False)
    rows = [["one caller waits for", *(f"{size:,} rows" for size in SIZES)]]
    for verb, cost in seen.items():
        whole = verb in WHOLE
        name = f"{verb} of all" if whole else f"{verb} of 256"
        rows.append([name, *(_report.time(cost.seconds(size if whole else 256, size)) for size in SIZES)])
    return _report.ruled(rows)


def cluster(results: Sequence[Result]) -> str:
    """Return what one Valkey and clusters give to 1,000 clients, and which hosts and partitions follow."""
    result = _scaled(results)
    if result is None:
        return ""
    step = _scale.Step.of(result.tables)
    pause = "1,000 clients with a step each 10 s: mean, p99 of a step"
    rows = [["primaries", "partitions", "the fullest", "rows a second", pause, "hosts for 64 KiB a row"]]
    for nodes in NODES:
        partitions = _scale.partitions_for(nodes)
        held = _scale.shares_of(partitions, nodes)
        most = 256 * _scale.USED / (step.seconds * max(held))
        load = _scale.simulate(1000, 10.0, step.seconds, held)
        hosts = _scale.hosts_for(most, 64 << 10, 1_000_000, HOST_BYTES, HOST_BYTES_S)
        steps = f"{_report.time(load.mean_s)}, {_report.time(load.p99_s)}"
        share = f"{max(held) * nodes:.2f} of its share"
        rows.append([str(nodes), str(partitions), share, f"{most:,.0f}", steps, str(hosts)])
    return _report.ruled(rows)


#: Verbs that look at all rows.
WHOLE: Final = ("list", "depth")
#: Rows of partitions that the page speaks of, and primaries of a cluster.
SIZES, NODES = (1_000, 100_000, 1_000_000), (1, 2, 4, 8, 16)
#: Of a slot host: its arena, and bytes a second, in and out, of a network of 100 Gb/s.
HOST_BYTES, HOST_BYTES_S = 64 * GIB, 12.5e9

TABLES: Final = {
    "aims": aims, "floors": floors, "machines": machines, "costs": costs, "sizes": sizes, "cluster": cluster,
}  # fmt: skip
