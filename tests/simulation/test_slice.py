"""A slice of the simulation, with fixed seeds; ``make simulate`` goes on from there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncdp.testing import simulate as command
from asyncdp.testing.simulation import Report, draw, seed_runner, simulate
from asyncdp.transports.memory.host import Host
from tests.planted.hosts import NoEpoch
from tests.planted.table import PLANTED, emptied

#: Seeds of one test.
BLOCK = 3


@pytest.mark.parametrize(
    "first", [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(BLOCK, 36, BLOCK))]
)
def test_random_stacks_keep_their_promises_on_asyncio(first: int) -> None:
    """Random stacks, conditions and faults break no promise."""
    for seed in range(first, first + BLOCK):
        report = simulate(seed)
        assert not report.violations, "\n".join(report.describe())
        assert report.operations > 100


@pytest.mark.parametrize("first", [106, *(pytest.param(first, marks=pytest.mark.slow) for first in (100, 103, 109))])
def test_random_stacks_keep_their_promises_on_trio(first: int) -> None:
    """The same on trio."""
    for seed in range(first, first + BLOCK):
        report = simulate(seed, "trio")
        assert not report.violations, "\n".join(report.describe())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_the_same_seed_is_the_same_history(backend: str) -> None:
    """Twice in this process, and in others whose strings hash otherwise, a seed gives the same events."""
    here = {simulate(11, backend, steps=25).history.digest() for _ in range(2)}
    assert len(here) == 1
    assert simulate(12, backend, steps=25).history.digest() not in here
    words = ["-m", "asyncdp.testing.simulate", "--once", "--seed", "11", "--backend", backend, "--steps", "25"]
    for hashing in ("1", "2"):
        env = {**os.environ, "PYTHONHASHSEED": hashing}
        done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=env, check=True)
        assert f"hash of the history: {here.copy().pop()}" in done.stdout


def test_seeds_differ_in_all_that_is_drawn() -> None:
    """Stacks with and without each layer, all faults, plain and lossy networks come up within a hundred seeds."""
    drawn = [draw(seed) for seed in range(100)]
    layers = [set(client.layers) for scenario in drawn for client in scenario.clients]
    for optional in ("batch_retry", "slot_retry", "port_rotation"):
        assert 0 < sum(optional in chosen for chosen in layers) < len(layers)
    kinds = {fault.kind for scenario in drawn for fault in scenario.faults}
    assert kinds == {"port", "slow", "crash", "empty", "outage", "cut", "pause", "kill"}
    assert {scenario.lease_s is None for scenario in drawn} == {True, False}
    assert {scenario.group_size for scenario in drawn} == {None, 2, 3}


def test_the_command_says_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    """It prints seeds, operations, simulated time, faults by kind, violations, and ends with 0 without these."""
    assert command.main(["--runs", "2", "--seed", "40", "--steps", "20", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    for told in ("seeds from 40 on", "2 seeds, ", " operations, ", " simulated s, ", "0 violations", "faults: "):
        assert told in said


def test_a_violation_is_told_with_what_repeats_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken promise ends it with 1, and is printed with its seed, the command that repeats it, and the calls."""

    def broken(seed: int, backend: str, *, steps: int) -> Report:
        return simulate(seed, backend, scenario=emptied(draw(seed, steps=steps)), replace={Host: NoEpoch})

    monkeypatch.setattr(seed_runner, "simulate", broken)
    assert command.main(["--runs", "3", "--seed", "1", "--jobs", "1", "--backend", "asyncio"]) == 1
    said = capsys.readouterr().out
    assert "VIOLATION register: " in said
    assert "repeat: python -m asyncdp.testing.simulate --once --seed " in said
    assert "* #" in said
    assert "violations: " in said


def test_a_crash_of_the_simulation_is_a_violation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is wrong with the simulation itself is told with its seed, and is no success."""

    def broken(seed: int, backend: str, *, steps: int) -> Report:
        raise LookupError(f"{seed} {backend} {steps}")

    monkeypatch.setattr(seed_runner, "simulate", broken)
    assert command.main(["--once", "--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "CRASH at seed 7" in said
    assert "LookupError: 7" in said


def test_each_check_is_documented() -> None:
    """The table of docs/simulation.md names what violations are named by."""
    text = (Path(__file__).parents[2] / "docs" / "simulation.md").read_text()
    named = {name.strip() for row in re.findall(r"^\| ([a-z, -]+) \|", text, re.MULTILINE) for name in row.split(",")}
    assert {planted.check for planted in PLANTED} <= named
