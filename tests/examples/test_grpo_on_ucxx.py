"""The demo on UCXX: slot hosts, a directory and roles, each a process; some are killed on the way."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from typer.testing import CliRunner

from asyncdp import MemoryTransport, stack
from asyncdp.cli.app import app
from asyncdp.examples import async_grpo, grpo_processes
from asyncdp.examples.async_grpo import DemoConfig
from asyncdp.examples.grpo_account import Account
from asyncdp.examples.grpo_crew import Crew
from asyncdp.examples.grpo_failure import said, why_it_ended
from asyncdp.examples.grpo_plane import EXTRAS, TRANSPORTS, from_afar, register, start
from asyncdp.examples.grpo_progress import Progress
from asyncdp.metrics.published import read_reports
from tests.ucxx.hosts import _can_unshare

ROOT = Path(__file__).parents[2]
needs_ucxx = pytest.mark.skipif(
    any(importlib.util.find_spec(module) is None for module in EXTRAS["ucxx"][1]),
    reason="needs the extras: asyncdp[ucxx,embedded]",
)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A short run as a person starts it; in a namespace with only loopback, since a UCX listener binds everywhere."""
    file = tmp_path_factory.mktemp("demo") / "report.json"
    options = ["demo", "--transport", "ucxx", "--chaos", "--seconds", "10", "--json", str(file)]
    inside = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"] if _can_unshare() else []
    done = subprocess.run(
        [*inside, sys.executable, "-m", "asyncdp.cli.main", *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert file.exists(), done.stdout[-3000:] + done.stderr[-3000:]
    assert "Traceback" not in done.stdout + done.stderr
    report: dict[str, Any] = json.loads(file.read_text()) | {"output": done.stdout}
    return report


@needs_ucxx
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_account_adds_up_over_all_processes(told: dict[str, Any]) -> None:
    """Produced = trained + evicted + left, nothing lost, nothing trained on twice."""
    assert told["adds_up"], told
    assert told["trained"] > 0
    assert "the account adds up" in told["output"]


@needs_ucxx
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_a_port_and_a_slot_host_died_on_the_way(told: dict[str, Any]) -> None:
    """Each is told, in order; worker and host are there again, and clients quarantined what was dead."""
    events = {event["what"]: event for event in told["chaos"]}
    assert [event["what"] for event in told["chaos"][:3]] == ["worker killed", "port died", "slot host killed"]
    assert events["slot host back"]["pid"] != events["slot host killed"]["pid"]
    assert events["worker started"]["role"] == "worker-2"
    assert told["quarantines"]["DataPlaneUnavailable"] > 0
    assert told["rotations"]["DataPlaneUnavailable"] > 0


@needs_ucxx
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_roles_publish_for_top(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each tells of its client, if the run is to; of slot hosts without a UCX listener, which binds everywhere."""
    monkeypatch.setitem(
        TRANSPORTS["ucxx"]["ucxx"], "host", {"arena_bytes": 64 << 20, "ucx": False, "inline_bytes": 1 << 20}
    )
    config = DemoConfig(transport="ucxx", workers=1, faults=False, publish=True)

    async def main() -> list[str]:
        stop = anyio.Event()
        async with start(config, "driver", None) as plane:
            await register(plane, config)
            with Crew(config, plane.attach_config(), Account(), Progress()) as crew:
                await crew.gather()
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(crew.perform, stop)
                    while len(reports := await read_reports(plane)) < 3:  # noqa: ASYNC110 - there is no event for it
                        await anyio.sleep(0.1)
                    stop.set()
        return [report.owner for report in reports]

    assert anyio.run(main) == ["controller", "trainer", "worker-0"]


def test_a_config_is_written_where_others_can_attach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For its owner alone, since it holds the secret; not on memory, where nobody can attach."""
    file = tmp_path / "plane.json"
    result = CliRunner().invoke(app, ["demo", "--config", str(file)], env={"COLUMNS": "200"})
    assert (result.exit_code, file.exists()) == (2, False)
    assert "--config goes with --transport ucxx or transfer_queue" in result.output

    async def run(*_: Any) -> None:
        raise RuntimeError("the file is written")

    monkeypatch.setattr(grpo_processes, "start", lambda *_: stack(MemoryTransport()))
    monkeypatch.setattr(grpo_processes, "_run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    result = CliRunner().invoke(app, ["demo", "--transport", "ucxx", "--config", str(file)])
    assert "asyncdp demo: the file is written" in result.output
    assert (json.loads(file.read_text())["impl"], file.stat().st_mode & 0o777) == ("memory", 0o600)


def test_the_trainer_reads_over_ports() -> None:
    """As if it were on another machine; the other roles use shared memory, and other transports know of neither."""
    config = {"impl": "ucxx", "ucxx": {"namespace": "demo"}}
    assert from_afar(config)["ucxx"] == {"namespace": "demo", "lane": "off"}
    assert config["ucxx"] == {"namespace": "demo"}
    assert from_afar({"impl": "memory"}) == {"impl": "memory"}


def test_without_the_extra_the_demo_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A usage error before anything is started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(async_grpo, "run", None)
    result = CliRunner().invoke(app, ["demo", "--transport", "ucxx"])
    assert result.exit_code == 2
    assert "asyncdp[ucxx,embedded]" in result.output


@pytest.mark.slow
def test_a_role_that_crashes_is_one_line() -> None:
    """Its process sends its reason before it ends; nobody has to look for a traceback."""
    wrong = {"enabled": True, "impl": "ucxx", "backend": "nonsense"}

    async def main() -> None:
        with Crew(DemoConfig(transport="ucxx", workers=1), wrong, Account(), Progress()) as crew:
            await crew.gather()

    with pytest.raises(BaseException) as caught:  # noqa: PT011 - a group, of which the first is said
        anyio.run(main)
    line = said(caught.value)
    assert "did not start: ValueError: " in line
    assert "\n" not in line


def test_what_ended_a_run_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of errors in groups the first, without a traceback; exit code 1."""

    async def run(*_: Any) -> None:
        raise ExceptionGroup("g", [ExceptionGroup("h", [RuntimeError("trainer ended\ntoo soon")]), ValueError("x")])

    monkeypatch.setattr(grpo_processes, "run", run)
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: True)
    result = CliRunner().invoke(app, ["demo", "--transport", "ucxx"])
    assert result.exit_code == 1
    assert "asyncdp demo: trainer ended too soon" in result.output
    assert "Traceback" not in result.output


def test_an_exit_code_in_words() -> None:
    """A role that said nothing was killed, or ended by itself."""
    assert why_it_ended(-9) == "it was killed by SIGKILL"
    assert why_it_ended(3) == "it ended with code 3"
