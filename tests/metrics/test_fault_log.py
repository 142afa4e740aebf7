"""One log line for each fault, at the right level, with what it is about; and no harm if it cannot be written."""

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog
import torch
from structlog.testing import capture_logs
from tensordict import TensorDict

from asyncdp import DataPlaneUnavailable, Metrics
from asyncdp.calls import CallContext, PutSamples
from asyncdp.metrics.observer import Observer, observe
from asyncdp.middleware.fault_log import LEVELS, FaultLog
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, virtual


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    """Leave structlog as it was."""
    before, configured = structlog.get_config(), structlog.is_configured()
    yield
    if configured:
        structlog.configure(**before)
    else:
        structlog.reset_defaults()


def events_of(lines: list[Any]) -> list[tuple[str, str]]:
    """Return event and level of each line."""
    return [(line["event"], line["log_level"]) for line in lines]


@virtual
async def test_a_quarantine_and_its_end_are_a_line_each() -> None:
    """With verb, partition, ids, host, port, attempt, reason and time; retries only where structlog is configured."""
    plan = FaultPlan().on("get_samples", call="ReadSlots", port=1).refuse(times=1)
    structlog.reset_defaults()
    async with Rig(plan, ports=2, quarantine_s=1.0, rows_per_slot=None) as rig:
        ids = await rig.fill(5)
        with capture_logs() as lines:
            for _ in range(3):
                await rig.get(ids)
            await rig.client.env.clock.sleep(2.0)
            for _ in range(3):
                await rig.get(ids)
        told = [line for line in lines if line["event"] in ("quarantine", "recovered")]
        assert events_of(told) == [("quarantine", "warning"), ("recovered", "info")]
        line = told[0]
        assert (line["op"], line["partition"], line["host"], line["port"]) == ("get_samples", "p", "host-0", 1)
        assert (line["ids"], line["n_ids"], line["attempt"]) == (["s0", "s1", "s2"], 5, 1)
        assert (line["reason"], line["for_s"], line["client"]) == ("DataPlaneUnavailable", 1.0, rig.client.owner)
        assert line["elapsed_s"] >= 0


@virtual
async def test_what_is_said_again_and_again_is_one_line() -> None:
    """A retry budget that is spent is told once in ten seconds, with how often it was meanwhile."""
    plan = FaultPlan().on("depth").refuse()
    async with Rig(plan, backoff_base_s=0.001, backoff_cap_s=0.001) as rig:
        with capture_logs() as lines:
            for _ in range(300):
                with pytest.raises(DataPlaneUnavailable):
                    await rig.client.depth("p")
            await rig.client.env.clock.sleep(20.0)
            rig.client.env.budget.withdraw(rig.client.env.clock.now(), 1000)
            for _ in range(300):
                with pytest.raises(DataPlaneUnavailable):
                    await rig.client.depth("p")
        spent = [line for line in lines if line["event"] == "budget_refused"]
        assert 1 <= len(spent) <= 4
        assert sum(line.get("repeated", 0) for line in spent) > 10
        assert rig.events["budget_refused"] > 50


@virtual
async def test_a_program_that_configured_nothing_keeps_its_standard_output(capsys: pytest.CaptureFixture[str]) -> None:
    """Lines go to standard error, without those of level debug."""
    plan = FaultPlan().on("get_samples", call="ReadSlots", port=1).refuse(times=1)
    structlog.reset_defaults()
    async with Rig(plan, ports=1, rows_per_slot=None) as rig:
        await rig.get(await rig.fill(1))
    written = capsys.readouterr()
    assert not written.out
    assert "quarantine" in written.err
    assert "retry" not in written.err


def test_each_event_of_a_layer_has_a_level() -> None:
    """So that none is forgotten."""
    import re
    from pathlib import Path

    import asyncdp

    root = Path(asyncdp.__file__).parent  # as installed, too
    emitted = {
        name
        for folder in ("middleware", "transports", "compose")
        for file in (root / folder).rglob("*.py")
        for name in re.findall(r'\.emit\("(\w+)"', file.read_text())
    }
    assert emitted == set(LEVELS)


@virtual
async def test_no_tensor_is_ever_in_a_line() -> None:
    """Only ids of the call, cut."""
    async with Rig() as rig:
        env = rig.client.env
        call = PutSamples(("x" * 1000, "b"), "p", TensorDict({"f": torch.ones(2)}, [2]))
        ctx = CallContext(env, "op", env.clock.now() + 1, "put_samples", env.clock.now(), call=call)
        with capture_logs() as lines:
            FaultLog().write("quarantine", {"host": "h", "port": 1, "other": torch.ones(1)}, ctx)
        (line,) = lines
        assert "ensor" not in repr(line)
        assert max(map(len, line["ids"])) <= 64


@pytest.fixture
def full_disk() -> Iterator[TextIO]:
    """A file that takes no line: each write raises that no space is left."""
    file = Path("/dev/full").open("w", buffering=1)  # noqa: SIM115 - closing it raises
    yield file
    with contextlib.suppress(OSError):
        file.close()


@virtual
@pytest.mark.parametrize("where", ["file", "stderr", "closed"])
async def test_a_log_that_cannot_be_written_harms_no_call(
    where: str, full_disk: TextIO, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A full disk below the program's log, or below standard error, or none: calls, sinks and observers go on."""

    def angry(*_: Any) -> None:
        raise RuntimeError

    class Bad(Observer):
        call_ended = angry

    structlog.reset_defaults()
    if where == "file":
        structlog.configure(logger_factory=structlog.PrintLoggerFactory(full_disk))
    else:
        monkeypatch.setattr(sys, "stderr", full_disk if where == "stderr" else None)
    async with Rig(FaultPlan().on("get_samples", call="ReadSlots").refuse(times=1)) as rig:
        rig.layer(Metrics).on_event = angry
        observe(rig.client, Bad())
        ids = await rig.fill(1)
        assert (await rig.get(ids))["x"].shape == (1, 2)
        seen = rig.client.snapshot()
        assert seen["events"]["quarantine"] == 1
        assert min(seen["callback_errors"], seen["observer_errors"]) > 0
        assert capsys.readouterr().out == ""
