"""The runner of benchmarks: what its rounds say, and what it refuses to say."""

import json
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from benchmarks import _report, _runner
from benchmarks._results import Figure, Floor, Machine, Result, Table, decode, encode
from benchmarks._scenario import Bench, WrongMeasurement
from benchmarks._statistics import median_range, moved, wide

pytestmark = pytest.mark.anyio
MACHINE = Machine(2, "a processor", 7.8, "Linux 6", {"python": "3.11"}, "abc")


@pytest.fixture
def anyio_backend() -> str:
    """Benchmarks run on asyncio."""
    return "asyncio"


def result(*tables: Table, name: str = "borrow") -> Result:
    """A result with these cases."""
    return Result(name, "Reads", "asyncdp bench borrow", MACHINE, "2026-01-01", [0.5], tables=list(tables))


def telling(values: list[float]) -> Callable[[], Any]:
    """A work that took these seconds, one a round; the first is that of the round that is not counted."""
    left = iter(values)

    async def work() -> float:
        return next(left)

    return work


# -- statistics


@pytest.mark.parametrize(
    ("values", "range_"),
    [([3.0, 1.0, 2.0], (1.0, 3.0)), ([float(at) for at in range(6)], (0.0, 5.0)), (list(range(15)), (3, 11))],
)
def test_the_median_lies_between_two_of_the_values(values: list[float], range_: tuple[float, float]) -> None:
    """Those of the sign test at 95 %: of fifteen values the fourth and the twelfth."""
    assert median_range(values) == range_


def test_a_reference_that_moved_is_seen() -> None:
    """By the medians of both halves, whichever is larger; of few values nothing is said."""
    assert moved([1, 1, 1, 2, 2, 2]) == moved([2, 2, 2, 1, 1, 1]) == 2
    assert moved([1, 9, 1, 1, 9, 1]) == 1
    assert moved([1, 2, 3]) == 1


def test_a_wide_range_is_said() -> None:
    """Half of the median, unless it is said how wide is narrow."""
    assert wide([1.0] * 5 + [1.4] * 5) == ""
    assert wide([1.0] * 5 + [2.0] * 5) == "1 to 2"
    assert wide([0.0, 0.4] * 5, width=1) == ""
    assert wide([1.0, 9.0]) == ""  # of two values it is said that they are few


def test_what_cannot_be_believed_is_said_of_each_case() -> None:
    """A reference that moved, a ratio that varies, and too few rounds."""
    steady = Table("c", {"get": [2.0] * 6, "memcpy": [1.0] * 6}, ["memcpy"])
    assert steady.doubts() == []
    steady.seconds["memcpy"] = [1.0] * 3 + [1.5] * 3
    steady.seconds["get"] = [2.0] * 3 + [3.0] * 3
    assert steady.doubts() == ["moved: memcpy, 1.50 times between the halves of the run"]
    steady.seconds["get"] = [2.0, 9.0] * 3
    assert "spread: get / memcpy from 1.33 to 9" in steady.doubts()
    assert Table("c", {"get": [2.0], "m": [1.0]}, ["m"]).doubts() == ["1 rounds, fewer than 6"]


# -- a scenario


async def bench_of(stack: AsyncExitStack, **kwargs: Any) -> Bench:
    """A bench whose result nobody reads elsewhere."""
    return Bench(result(), stack, **kwargs)


async def test_works_are_measured_in_rounds_and_compared_round_by_round() -> None:
    """The first round is not counted, and the ratio is the median of those of the rounds."""
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, rounds=3)
        works = {"get": telling([99, 2.0, 30.0, 4.0]), "copy": telling([99, 1.0, 10.0, 4.0])}
        done = await bench.measure("case", works, beside=["copy"])
        assert done.table.seconds == {"get": [2.0, 30.0, 4.0], "copy": [1.0, 10.0, 4.0]}
        assert done.table.ratios("get", "copy") == [2.0, 3.0, 1.0]
        done.figure("twice", lambda s: 2 * s["get"] / s["copy"], at_most=4, must="1")
        (figure,) = done.table.figures
        assert (figure.values, figure.median, figure.reached, figure.bound) == ([4, 6, 2], 4, True, "<= 4")
        done.ratio("copy", "get", at_least=0.6)
        assert (done.table.figures[1].name, done.table.figures[1].reached) == ("copy / get", False)


async def test_the_order_changes_unless_it_matters() -> None:
    """Every second round goes backwards."""
    order: list[str] = []

    def noted(name: str) -> Callable[[], Any]:
        async def work() -> None:
            order.append(name)

        return work

    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, rounds=1)
        await bench.measure("case", {"a": noted("a"), "b": noted("b")})
        await bench.measure("case 2", {"a": noted("a"), "b": noted("b")}, in_order=True)
    assert order == ["b", "a", "a", "b", "a", "b", "a", "b"]


async def test_a_work_may_tell_several_numbers() -> None:
    """Each is a row of its own."""

    async def calls() -> dict[str, float]:
        return {"p50": 1.0, "p99": 5.0}

    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, rounds=2)
        done = await bench.measure("64 callers", {"get": calls})
        assert done.table.seconds == {"get, p50": [1.0, 1.0], "get, p99": [5.0, 5.0]}


async def test_an_unknown_reference_or_work_is_named_with_what_is_meant() -> None:
    """Both in ``beside`` and in what a number is made of."""
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, rounds=1)
        with pytest.raises(WrongMeasurement, match=r"no reference 'memcopy'; did you mean 'memcpy'"):
            await bench.measure("case", {"get": telling([1.0, 1.0])}, beside=["memcopy"])
        done = await bench.measure("case", {"get": telling([1.0, 1.0])}, beside=["memcpy"], nbytes=8)
        with pytest.raises(WrongMeasurement, match="no work 'gte'; did you mean 'get'"):
            done.figure("wrong", lambda s: s["gte"])


async def test_a_reference_that_cannot_be_had_is_left_out() -> None:
    """With the numbers that need it, and the floors."""
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack, rounds=1, without=("ray", "valkey"))
        done = await bench.measure(
            "case",
            {"get": telling([1.0, 1.0])},
            beside=["ray view", "memcpy"],
            nbytes=8,
            floors={"get": Floor(trips=1)},
        )
        done.figure("beside Ray", lambda s: s["get"] / s["ray view"])
        assert (done.table.beside, done.table.figures, done.table.of_floor("get")) == (["memcpy"], [], [])


async def test_a_scenario_that_measures_something_else_fails() -> None:
    """And says what."""
    async with AsyncExitStack() as stack:
        bench = await bench_of(stack)
        bench.check(holds=True, said="fine")
        with pytest.raises(WrongMeasurement, match="the mute port answered"):
            bench.check(holds=False, said="the mute port answered")


def test_a_floor_is_made_of_the_references_of_its_round() -> None:
    """Copies of the bytes and round trips are added up."""
    table = Table(
        "c",
        {"get": [10.0, 20.0], "memcpy": [2.0, 4.0], "valkey round trip": [1.0, 1.0]},
        ["memcpy"],
        floors={"get": Floor(copies=2, trips=1)},
    )
    assert table.of_floor("get") == [2.0, 20 / 9]
    assert (table.works, table.references) == (["get"], ["memcpy", "valkey round trip"])


# -- results


def shown() -> Result:
    """A result with all that one may hold."""
    table = Table("256 x 64 KiB", {"get": [2.0] * 6, "memcpy": [1.0] * 6}, ["memcpy"], 1 << 24)
    table.floors = {"get": Floor(copies=1)}
    table.figures = [Figure("memcpy / get", [0.5] * 6, at_least=0.6, must="1")]
    return result(table)


def test_results_survive_json() -> None:
    """With what cannot be believed beside them, for other readers."""
    made = shown()
    assert decode(encode([made])) == [made]
    made.tables[0].seconds["memcpy"] = [1.0] * 3 + [2.0] * 3
    (read,) = json.loads(encode([made]))
    assert read["tables"][0]["doubts"][0].startswith("moved: memcpy")


def test_tables_name_command_machine_and_what_does_not_hold() -> None:
    """In Markdown; the terminal shows the same cells."""
    page = _report.markdown([shown()])
    assert "`asyncdp bench borrow`" in page
    assert "2 cores, a processor, 7.8 GiB" in page
    assert "| get | 2 s | 2.00 (2.00-2.00) | 2.00 (2.00-2.00) |" in page
    assert "| memcpy / get | 0.50 (0.50-0.50) | >= 0.6 | does not hold |" in page
    assert "does not hold" in _report.terminal(shown().tables[0])


def test_two_runs_are_compared_by_ratios_alone() -> None:
    """A machine twice as fast changes nothing; times do not appear; what one run alone has is left out."""
    before, after = shown(), shown()
    after.tables[0].seconds = {"get": [1.0] * 6, "memcpy": [0.5] * 6, "new": [1.0] * 6}
    said = _report.compared([before], [after])
    assert "get / memcpy" in said
    assert "1.00" in said
    assert not {"slower", "new"} & set(said.split())
    assert " s" not in said.replace("  ", "")
    after.tables[0].seconds["get"] = [2.0] * 6
    assert "2.00  slower" in _report.compared([before], [after])
    assert _report.compared([], [after]) == "the two runs have no ratio in common"


def test_plots_are_drawn(tmp_path: Path) -> None:
    """One a scenario that has a ratio."""
    pytest.importorskip("matplotlib")
    assert _report.plots([shown(), result(name="layers")], tmp_path) == [tmp_path / "borrow.png"]
    assert (tmp_path / "borrow.png").read_bytes().startswith(b"\x89PNG")


# -- the command


def test_an_unknown_scenario_is_named_with_what_is_meant(capsys: pytest.CaptureFixture[str]) -> None:
    """And nothing is measured."""
    assert _runner.main(["borow"]) == 2
    assert "no scenario 'borow'; did you mean 'borrow'" in capsys.readouterr().err


def test_every_scenario_has_a_title_and_options_of_known_types(capsys: pytest.CaptureFixture[str]) -> None:
    """They are listed without a name; options appear as flags."""
    assert _runner.main([]) == 0
    listed = capsys.readouterr().out
    for name, title in _runner.scenarios().items():
        assert f"{name:16}{title}" in listed
        assert title.endswith("."), name
        assert all(isinstance(it, int | float | str | bool | tuple) for it in _runner.options(name).values())
    assert _runner.parser("callers").parse_args(["callers", "--callers", "1", "2"]).callers == [1, 2]


@pytest.mark.slow
def test_a_run_writes_all_that_was_asked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Of a scenario that needs no backend, in a process of its own."""
    told = ["layers", "--quick", "--count", "2", "--json", str(tmp_path / "a.json")]
    assert _runner.main([*told, "--markdown", str(tmp_path / "a.md"), "--plots", str(tmp_path)]) == 0
    (made,) = decode((tmp_path / "a.json").read_bytes())
    assert (made.scenario, made.failed, bool(made.ended)) == ("layers", "", True)
    assert made.command == "asyncdp bench layers --quick --count 2"
    assert (tmp_path / "layers.png").exists()
    assert "default stack" in (tmp_path / "a.md").read_text()
    assert "default stack" in capfd.readouterr().out
