import importlib.util
import multiprocessing

import anyio
import pytest
from typer.testing import CliRunner

from asyncdp.cli.app import app
from asyncdp.examples import async_grpo, grpo_processes
from asyncdp.examples.async_grpo import DemoConfig, Report
from asyncdp.examples.grpo_role import _listen
from tests.transfer_queue.needs_mooncake import needs_mooncake

NEEDS_TQ = pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is None, reason="needs the extra: asyncdp[tq]")


@pytest.fixture(scope="module", params=[None, "mooncake_cpu"])
def report(request: pytest.FixtureRequest) -> Report:
    """A run of some seconds on a Ray of its own, with a worker and a storage unit killed."""
    from tests.transfer_queue.opener import CLUSTER

    if request.param is not None:
        needs_mooncake()
    CLUSTER.close()  # one Ray at a time
    config = DemoConfig(transport="transfer_queue", seconds=8.0, enough=0.0, chaos=True, backend=request.param)
    return anyio.run(grpo_processes.run, config)


@NEEDS_TQ
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_processes_cost_no_sample_its_account(report: Report) -> None:
    """Produced = trained + evicted + left, nothing lost, nothing trained on twice, over all processes."""
    assert report.balance.adds_up, report.balance
    assert report.balance.trained > 0


@NEEDS_TQ
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_what_was_killed_is_told(report: Report) -> None:
    """A worker, another one in its place, a storage unit; and the plane named the samples that went with it."""
    told = {event["what"]: event for event in report.as_dict()["chaos"]}
    assert told["worker killed"]["role"] == "worker-0"
    assert told["worker started"]["role"] == f"worker-{report.config.workers}"
    assert told["storage unit killed"]["unit"]
    assert "samples named as lost" in told  # which ones is a race: the controller evicts them as soon as it sees them
    assert report.evicted_by_reason["gone"] > 0


@NEEDS_TQ
@pytest.mark.slow
@pytest.mark.timeout(300)
def test_processes_tell_their_counts(report: Report) -> None:
    """Every role that was there, those that were killed too, has told what its client counted; faults were injected."""
    assert report.progress.told.keys() == {"driver", "controller", "trainer", "worker-0", "worker-1", "worker-2"}
    told = report.as_dict()
    assert told["faults"]
    assert told["retries"]
    # TransferQueue's planes that other tests keep for the session have processes of their own.
    assert not [child for child in multiprocessing.active_children() if child.name in report.progress.told]


@pytest.mark.slow
def test_a_process_ends_with_the_one_that_started_it() -> None:
    """The end of its pipe is the end of the process, whatever it is doing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_listen, args=(theirs, None, {}), daemon=True)
    process.start()
    theirs.close()
    ours.close()
    process.join(240)
    assert process.exitcode == 1


def test_chaos_needs_processes() -> None:
    """On memory there is nothing to kill: a usage error."""
    result = CliRunner().invoke(app, ["demo", "--chaos"])
    assert result.exit_code == 2
    assert "--transport" in result.output


@pytest.mark.parametrize(("backend", "extra"), [([], "tq"), (["--backend", "mooncake_cpu"], "mooncake")])
def test_without_the_extra_the_demo_names_it(monkeypatch: pytest.MonkeyPatch, backend: list[str], extra: str) -> None:
    """A usage error before anything is started."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    monkeypatch.setattr(async_grpo, "run", None)
    result = CliRunner().invoke(app, ["demo", "--transport", "transfer_queue", *backend])
    assert result.exit_code == 2
    assert f"asyncdp[{extra}]" in result.output


def test_another_backend_is_refused_by_name() -> None:
    """A usage error that says which there is, with which transport."""
    result = CliRunner().invoke(app, ["demo", "--transport", "ucxx", "--backend", "mooncake_cpu"])
    assert result.exit_code == 2
    assert "mooncake_cpu with --transport transfer_queue" in " ".join(result.output.replace("│", " ").split())
