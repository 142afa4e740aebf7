"""The tables of docs/performance.md: made of the JSON of runs, and each with the command that repeats it."""

import re
from pathlib import Path

import pytest

from benchmarks import _page, _runner
from benchmarks._results import Figure, Floor, Machine, Result, Table

PAGE = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
MACHINE = Machine(2, "a processor", 7.8, "Linux 6", {"python": "3.11"}, "abc")


def run(name: str, *tables: Table) -> Result:
    """A run of a scenario."""
    return Result(name, "Title.", f"asyncdp bench {name}", MACHINE, "2026-01-01", [0.5], tables=list(tables))


def read() -> Result:
    """A read of 50 GB, which a wire of RDMA takes a second for."""
    seconds = {"get": [3.0] * 6, "memcpy": [1.0] * 6, "valkey round trip": [0.5] * 6}
    table = Table("c", seconds, ["memcpy"], int(50e9), {"get": Floor(copies=1, trips=1)})
    table.figures = [Figure("memcpy / get", [0.33] * 6, at_least=0.6, must="1"), Figure("aside", [1.0])]
    return run("borrow", table)


def scaled() -> Result:
    """A run of ``directory`` whose server takes 1 us a row, and twice that beside 100,000 rows."""
    seconds = {
        f"{verb} {rows} beside {size}{which}": [rows * each] * 6
        for size, each in ((1000, 1e-6), (4000, 1e-6), (16_000, 1e-6), (100_000, 2e-6))
        for verb in ("publish", "claim", "locate", "clear")
        for rows in (32, 256)
        for which in ("", ", server")
    }
    table = Table("by size", {**seconds, "valkey round trip": [1e-4] * 6}, ["valkey round trip"])
    table.figures = [Figure("claim 256 beside 100000, server: measured / model", [2.0] * 6)]
    return run("directory", table)


def test_tables_are_replaced_where_the_page_says() -> None:
    """The rest of the page stays, and so does a table of which nothing was measured."""
    page = "before\n<!-- measured aims -->\nold\n<!-- end -->\nafter\n<!-- measured costs -->\nkept\n<!-- end -->\n"
    made = _page.written(page, [read()])
    assert made.startswith("before\n<!-- measured aims -->\n\n| aim |")
    assert "\nold\n" not in made
    assert made.endswith("<!-- end -->\nafter\n<!-- measured costs -->\nkept\n<!-- end -->\n")
    assert "| 1 | c: memcpy / get | 0.33 (0.33-0.33) | >= 0.6 | does not hold | `asyncdp bench borrow` |" in made
    assert "aside" not in made
    with pytest.raises(ValueError, match="no table 'floor'"):
        _page.written("<!-- measured floor -->\n<!-- end -->", [])


def test_a_floor_is_told_beside_what_was_reached_and_what_rdma_would_take() -> None:
    """One copy and one round trip here; there the bytes once over the wire, and a round trip for each."""
    assert "| c: get | 1.5 s | 3 s | 2.00 (2.00-2.00) | 1 s | `asyncdp bench borrow` |" in _page.floors([read()])


def test_the_model_of_a_run_is_told_with_how_far_it_is_off() -> None:
    """Costs, what one caller waits for, and what clusters give."""
    costs = _page.costs([scaled()])
    assert "| claim | 0 us | 1 us | 0 us | claim 256 beside 100000: 2.00 (2.00-2.00) |" in costs
    assert "| claim of 256 | 256 us | 256 us | 256 us |" in _page.sizes([scaled()])
    lines = _page.cluster([scaled()]).splitlines()[2:]
    assert [line.split(" | ")[0] for line in lines] == ["| 1", "| 2", "| 4", "| 8", "| 16"]
    assert _page.costs([read()]) == _page.sizes([read()]) == _page.cluster([read()]) == ""


def test_the_plot_of_the_model_is_drawn(tmp_path: Path) -> None:
    """By the scenario's own module."""
    pytest.importorskip("matplotlib")
    from benchmarks import _report

    assert tmp_path / "directory.svg" in _report.plots([scaled()], tmp_path)


def test_each_command_of_the_page_names_a_benchmark() -> None:
    """And the page has all tables."""
    named = {word for line in re.findall(r"`asyncdp bench ([^`]*)`", PAGE) for word in line.split()[:1]}
    assert named
    assert {word for word in named if not word.startswith("-")} <= {*_runner.scenarios(), "all"}
    assert set(re.findall(r"<!-- measured (\w+) -->", PAGE)) == set(_page.TABLES)
