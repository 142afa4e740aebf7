import json
import sys
from collections import Counter
from dataclasses import replace
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import anyio
import pytest
from rich.console import Console
from typer.testing import CliRunner

from asyncdp import __version__
from asyncdp.cli import main as cli
from asyncdp.cli.app import app
from asyncdp.examples import async_grpo
from asyncdp.examples.async_grpo import DemoConfig, Report, run
from asyncdp.examples.grpo_account import Account
from asyncdp.examples.grpo_progress import Point, Progress
from asyncdp.examples.grpo_view import LiveView, PlainView, sparkline
from asyncdp.testing import run_virtual

KEYS = {
    "seed",
    "transport",
    "produced",
    "trained",
    "evicted",
    "left",
    "lost",
    "trained_twice",
    "reward_start",
    "reward_end",
    "faults",
    "retries",
}


@pytest.fixture(scope="module", params=[False, True], ids=["calm", "faults"])
def report(request: pytest.FixtureRequest) -> Report:
    """A run of a few seconds, without and with faults."""
    return anyio.run(run, DemoConfig(seed=1, seconds=6.0, enough=0.0, faults=request.param))


@pytest.mark.slow
def test_a_short_run_accounts_for_every_sample(report: Report) -> None:
    """Produced = trained + evicted + left, nothing lost, nothing trained on twice, with faults as without."""
    assert report.balance.adds_up, report.balance
    assert report.balance.trained > 0


@pytest.mark.slow
def test_faults_happen_only_where_asked_for(report: Report) -> None:
    """With faults on they are injected and retried; with faults off there are none."""
    told = report.as_dict()
    assert bool(told["faults"]) is report.config.faults
    if report.config.faults:
        assert {"refuse", "lose_reply", "crash_host", "restart_host"} <= told["faults"].keys()
        assert sum(told["retries"].values()) > 0


@pytest.mark.slow
def test_the_account_can_be_written_as_json(report: Report) -> None:
    """All keys are there, with plain values."""
    told = json.loads(json.dumps(report.as_dict()))
    assert told.keys() >= KEYS
    assert 0.0 <= told["reward_start"] <= 1.0
    assert 0.0 <= told["reward_end"] <= 1.0


@pytest.mark.slow
def test_a_run_ends_on_its_goal() -> None:
    """A goal that is reached, or the last step, ends the run before its time."""
    config = DemoConfig(seconds=60.0, faults=False, max_steps=2)
    made = anyio.run(run, config)
    assert made.progress.steps == 2
    assert made.balance.adds_up


def test_a_slow_machine_gets_more_time() -> None:
    """Past its time a run goes on until the reward is enough, for as long again at most."""

    async def ends_after(seconds: float, enough_at: float | None) -> float:
        stop, progress = anyio.Event(), Progress(evaluations=[Point(0.0, 0.1)])
        began = anyio.current_time()
        async with anyio.create_task_group() as group:
            group.start_soon(async_grpo.time_is_up, DemoConfig(seconds=seconds), progress, stop)
            if enough_at is not None:
                await anyio.sleep(enough_at)
                progress.evaluations.append(Point(enough_at, 0.6))
        return anyio.current_time() - began

    assert run_virtual(partial(ends_after, 40.0, 5.0)) == pytest.approx(40.0)
    assert run_virtual(partial(ends_after, 40.0, 60.0)) == pytest.approx(60.0, abs=1.0)
    assert run_virtual(partial(ends_after, 40.0, None)) == pytest.approx(80.0)


def _report(*, lost: int = 0, end: float = 0.9) -> Report:
    """Fabricate what a run came to."""
    ids = [f"a_g{i}" for i in range(8)]
    account = Account()
    account.produced(ids)
    account.trained(ids[:4])
    progress = Progress(steps=1, evaluations=[Point(0.0, 0.1), Point(9.0, end)])
    progress.trained([0.5, 1.0], [0, 1])
    progress.looked(3, [0, 0, 1])
    return Report(DemoConfig(), account.balance(ids[4 + lost :]), progress, {}, account.puts)


def _demo(monkeypatch: pytest.MonkeyPatch, made: Report, *args: str) -> Any:
    """Run the command with a run that is over at once."""

    async def over(config: DemoConfig, view: Any) -> Report:
        assert isinstance(view, PlainView)  # the runner's output is no terminal
        return replace(made, config=config)

    monkeypatch.setattr(async_grpo, "run", over)
    return CliRunner().invoke(app, ["demo", *args])


@pytest.fixture(autouse=True)
def _keep_switch_interval() -> Any:
    """The command sets it for its process."""
    before = sys.getswitchinterval()
    yield
    sys.setswitchinterval(before)


def test_the_command_ends_well_when_all_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 0, and the account in words."""
    result = _demo(monkeypatch, _report())
    assert result.exit_code == 0, result.output
    assert "produced 8 = trained 4 + evicted 0 + left 4" in result.output
    assert "lost 0, trained twice 0" in result.output


def test_the_command_fails_when_a_sample_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fabricated loss is code 1."""
    result = _demo(monkeypatch, _report(lost=1))
    assert result.exit_code == 1
    assert "THE ACCOUNT DOES NOT ADD UP" in result.output


def test_the_command_fails_when_the_reward_did_not_rise(monkeypatch: pytest.MonkeyPatch) -> None:
    """An account that adds up is not enough."""
    result = _demo(monkeypatch, _report(end=0.15))
    assert result.exit_code == 1
    assert "IT DID NOT RISE" in result.output


def test_the_command_writes_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """--json and --plot write what they say, also for a run that failed."""
    account, plot = tmp_path / "account.json", tmp_path / "run.png"
    result = _demo(monkeypatch, _report(lost=1), "--seed", "7", "--json", str(account), "--plot", str(plot))
    assert result.exit_code == 1
    assert json.loads(account.read_text())["seed"] == 7
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_transport_that_is_not_there_is_named() -> None:
    """A clear message and the code of a usage error, before anything is started."""
    result = CliRunner().invoke(app, ["demo", "--transport", "smoke"])
    assert result.exit_code == 2
    assert "smoke" in result.output


def test_version() -> None:
    """--version prints the package's."""
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"asyncdp {__version__}\n")


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing package is no traceback but one line that names the extra."""
    monkeypatch.setattr(cli, "NEEDS", ("typer", "no_such_package"))
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert str(ended.value).startswith("asyncdp: no_such_package not installed")
    assert "pip install 'asyncdp[cli]'" in str(ended.value)


def test_a_plot_without_its_extra_is_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line that names the extra; all other commands do without it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = CliRunner().invoke(app, ["demo", "--plot", "x.png"], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert "pip install 'asyncdp[plot]'" in result.output


def test_a_sparkline_shows_the_whole_run() -> None:
    """Values are averaged over the width there is; a full bar is the top."""
    assert sparkline([], 5) == ""
    assert sparkline([Point(0, 0.0), Point(1, 1.0)], 5) == "▁█"
    assert sparkline([Point(i, i // 50) for i in range(100)], 2, top=1.0) == "▁█"
    assert sparkline([Point(0, 0.0)], 5) == "▁"


@pytest.mark.slow
def test_the_live_view_shows_what_a_person_wants_to_see(report: Report) -> None:
    """One frame names curves, counts, ports, retries and faults."""
    console = Console(width=120, record=True, file=StringIO())
    account = Account()
    account.evicted(["a"], "stale")

    async def frame() -> None:  # the health of a port is a matter of the loop's clock
        console.print(LiveView(console, report.config).render(report.progress, account))

    anyio.run(frame)
    shown = console.export_text()
    for word in ("reward", "depth", "age", "stale 1", "host-0", "retries", "rotations", "faults"):
        assert word in shown
    if report.config.faults:
        assert "lose_reply" in shown


@pytest.mark.slow
def test_the_plain_view_prints_whole_lines(report: Report) -> None:
    """Where there is no terminal, one line says it all."""

    async def made() -> str:
        return PlainView(Console()).line(report.progress, Account())

    line = anyio.run(made)
    assert f"step {report.progress.steps}" in line
    assert "\n" not in line


def test_ages_are_counted() -> None:
    """The controller's look at the plane is kept as a number of groups per age."""
    assert _report().progress.ages == Counter({0: 2, 1: 1})
