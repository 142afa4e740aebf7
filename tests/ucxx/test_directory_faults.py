"""The directory's server is killed, paused, restarted, emptied; calls are cancelled: what is left afterwards."""

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import Publish
from asyncdp.errors import DataPlaneBadRequest, DataPlaneClosed, DataPlaneUnavailable

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer, OperationId

pytestmark = pytest.mark.anyio


def mutation(name: str, left_s: float = 10.0) -> "OperationId":
    """Name a mutation."""
    from asyncdp.transports.ucxx.directory import OperationId

    return OperationId(name, left_s)


async def tag(directory: "Directory", name: str, ids: list[str]) -> None:
    """Put samples that are tags only."""
    await directory.publish(mutation(name), Publish(tuple(ids), "p", (), ({"k": 1},) * len(ids), {}), "me")


@pytest.fixture
async def frail(server: "EmbeddedServer") -> "AsyncIterator[EmbeddedServer]":
    """A server that a test may hurt."""
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    frail = EmbeddedServer()
    await frail.start()
    yield frail
    if frail.pid is not None:
        os.kill(frail.pid, signal.SIGCONT)
    await frail.stop()


async def test_what_was_acknowledged_survives_a_kill(
    frail: "EmbeddedServer", connect: Callable[..., "Directory"]
) -> None:
    """SIGKILL while eight clients publish: after the restart every acknowledged put is there, and each put is whole."""
    from redis.exceptions import RedisError

    directory = connect(frail.url)
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    acknowledged: set[str] = set()

    async def publish(worker: int) -> None:
        for i in range(10_000):
            name = f"{worker}.{i}"
            try:
                await tag(directory, name, [f"{name}.{row}" for row in range(4)])
            except (RedisError, OSError):
                return
            acknowledged.add(name)

    async with anyio.create_task_group() as group:
        for worker in range(8):
            group.start_soon(publish, worker)
        with anyio.fail_after(60):
            while len(acknowledged) < 20:  # noqa: ASYNC110 - it has no event
                await anyio.sleep(0.01)
        frail.kill()
    await frail.start()
    rows = [key for meta in await directory.list_metadata("p") for key in meta.keys]
    puts: dict[str, int] = {}
    for row in rows:
        puts[row.rpartition(".")[0]] = puts.get(row.rpartition(".")[0], 0) + 1
    assert acknowledged
    assert acknowledged <= puts.keys()
    assert set(puts.values()) == {4}
    claimed = await directory.claim(mutation("c"), "p", "t", [], len(rows), 1, "me")
    assert sorted(claimed.meta.sample_ids) == sorted(rows)


async def test_one_client_goes_on_after_a_restart(frail: "EmbeddedServer", connect: Callable[..., "Directory"]) -> None:
    """After a crash and a restart the same client goes on: claims, remembered outcomes and the plane are the same."""
    from redis.exceptions import ConnectionError as RedisConnectionError

    directory = connect(frail.url)
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    await tag(directory, "put", ["a", "b"])
    first = await directory.claim(mutation("c"), "p", "t", [], 1, 1, "me")
    epoch = await directory.epoch()
    frail.kill()
    with pytest.raises((RedisConnectionError, ConnectionRefusedError)):
        await directory.depth("p")
    with pytest.raises(ConnectionRefusedError):  # nothing was sent
        await directory.depth("p")
    await frail.start()
    assert await directory.claim(mutation("c"), "p", "t", [], 1, 1, "me") == first
    assert await directory.epoch() == epoch
    await tag(directory, "put", ["a", "b"])
    assert (await directory.describe("p")).size == 2


async def test_an_emptied_plane_is_not_an_unknown_partition(
    frail: "EmbeddedServer", connect: Callable[..., "Directory"]
) -> None:
    """A partition that this client knew and the restarted, empty plane does not is unavailable; others are unknown."""
    directory = connect(frail.url)
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    await directory._link.command("FLUSHALL")
    await directory._link.command("FUNCTION", "FLUSH")
    with pytest.raises(DataPlaneUnavailable, match="restarted"):
        await tag(directory, "put", ["a"])
    with pytest.raises(DataPlaneBadRequest):
        await directory.depth("other")
    with pytest.raises(DataPlaneBadRequest):
        await connect(frail.url).depth("p")
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    await tag(directory, "put", ["a"])


SLOW_DISK = """
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int fd) { sleep(3); return syscall(SYS_fdatasync, fd); }
int fsync(int fd) { sleep(3); return syscall(SYS_fsync, fd); }
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="a slow disk is made with a C compiler")
async def test_what_was_acknowledged_survives_a_kill_on_a_slow_disk(
    server: "EmbeddedServer", connect: Callable[..., "Directory"], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each sync takes three seconds; with appendfsync everysec about one put of thirty was lost."""
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    (tmp_path / "slow.c").write_text(SLOW_DISK)
    built = ["cc", "-shared", "-fPIC", "-o", str(tmp_path / "slow.so"), str(tmp_path / "slow.c")]
    await anyio.run_process(built)
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "slow.so"))
    slow = EmbeddedServer()
    try:
        for turn in range(3):
            await slow.start()
            directory = connect(slow.url)
            await directory.register(RegisterPartition("p", (), 1, ("t",)))
            for number in range(20):
                await tag(directory, f"{turn}.{number}", [f"{turn}.{number}"])
                await anyio.sleep(0.1)
            slow.kill()
            await slow.start()
            there = {key for group in await connect(slow.url).list_metadata("p") for key in group.keys}
            assert there >= {f"{turn}.{number}" for number in range(20)}
    finally:
        slow.kill()
        await slow.stop()


async def test_heartbeats_look_old_after_a_restart(
    frail: "EmbeddedServer", connect: Callable[..., "Directory"]
) -> None:
    """Just after a restart of the server no host counts as dead and none is struck off; a little later they are."""
    from asyncdp.transports.ucxx.directory import HostInfo

    for patience_s in (0.2, 2.0, 20.0):  # "just after" is as long as a busy machine makes it
        directory = connect(frail.url, host_timeout_s=patience_s, host_forget_s=patience_s)
        await directory.beat(HostInfo("h", 1))
        frail.kill()
        await anyio.sleep(patience_s * 1.25)
        began = anyio.current_time()
        await frail.start()
        (host,) = await directory.hosts()
        reaped = await directory.reap()
        if anyio.current_time() - began < patience_s:
            break
    assert host.age_s > patience_s
    assert host.alive
    assert reaped == ()
    await anyio.sleep(patience_s * 1.25)
    assert await directory.reap() == ("h",)


async def test_a_paused_server_hangs_nobody(frail: "EmbeddedServer", connect: Callable[..., "Directory"]) -> None:
    """Calls on a server that does not answer end when their scope does, and a mutation arrives too late afterwards."""
    directory, late = connect(frail.url), connect(frail.url, connect_timeout_s=0.1)
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    assert frail.pid is not None
    os.kill(frail.pid, signal.SIGSTOP)
    with anyio.move_on_after(0.1) as scope:
        await directory.publish(mutation("put", 0.1), Publish(("a",), "p", (), ({"k": 1},), {}), "me")
    assert scope.cancelled_caught
    with anyio.fail_after(60), pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        await late.depth("p")  # a new connection: the greeting is not answered
    os.kill(frail.pid, signal.SIGCONT)
    assert (await directory.describe("p")).size == 0
    assert (await directory.resolve("put", "p")).state == "refused"


async def test_cancelled_at_random_everybody_gets_his_own_reply(directory: "Directory") -> None:
    """Calls cancelled at any moment: the next one on the same client gets its own reply, and all connections work."""
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    ids = [f"s{i}" for i in range(20)]
    made = await directory.publish(
        mutation("put"), Publish(tuple(ids), "p", (), tuple({"k": i} for i in range(20)), {}), "me"
    )
    rng = random.Random(1)
    answered = 0

    async def ask() -> None:
        nonlocal answered
        at = rng.randrange(20)
        found = await directory.locate("p", [ids[at]], [])
        assert found.handles == [made.handles[at]]
        answered += 1

    for turn in range(40):
        tasks = [asyncio.create_task(ask()) for _ in range(8)]
        if turn % 4 == 0:  # the rest are cancelled where a busy machine may answer nobody in 3 ms
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(rng.random() * 0.003)
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert result is None or isinstance(result, asyncio.CancelledError), result
    assert answered
    await asyncio.gather(*(ask() for _ in range(64)))


async def test_cancelled_claims_are_resolved(directory: "Directory") -> None:
    """Claims cancelled at any moment and then abandoned leave every sample claimable."""
    await directory.register(RegisterPartition("p", (), 1, ("t",)))
    ids = [f"s{i}" for i in range(30)]
    await tag(directory, "put", ids)
    rng = random.Random(2)
    for i in range(60):
        task = asyncio.create_task(
            directory.claim(mutation(f"c{i}"), "p", "t", [], 3, 1, "me", wait_s=rng.choice([0, 1]))
        )
        await asyncio.sleep(rng.random() * 0.001)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await directory.abandon("p", f"c{i}")
    assert await directory.list_claims("p", "t") == []
    left = await directory.claim(mutation("rest"), "p", "t", [], 99, 1, "me")
    assert sorted(left.meta.sample_ids) == sorted(ids)


async def test_close_wakes_who_waits(connect: Callable[..., "Directory"]) -> None:
    """A claim that waits when the client is closed ends at once, and every later call says that it is closed."""
    directory = connect(wake_s=300.0)
    await directory.register(RegisterPartition("p", (), 1, ("t",)))

    async def wait() -> None:
        with pytest.raises(DataPlaneClosed):
            await directory.claim(mutation("c"), "p", "t", [], 1, 1, "me", wait_s=300.0)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(wait)
            await anyio.sleep(0.05)
            await directory.close()
            await directory.close()
    with pytest.raises(DataPlaneClosed):
        await directory.depth("p")


async def test_passwords_and_users(frail: "EmbeddedServer", connect: Callable[..., "Directory"]) -> None:
    """A wrong password is told by redis-py's own error; a user of an ACL, over TCP, gets what he may do."""
    from redis.exceptions import AuthenticationError

    wrong = connect(f"unix://:no@{frail.folder / 'valkey.sock'}")
    with pytest.raises(AuthenticationError):
        await wrong.ping()
    admin = connect(frail.url)
    rules = ["on", ">pw", "~*", "&*", "+@all", "-@dangerous", "+info"]
    await admin._link.command("ACL", "SETUSER", "worker", *rules)
    worker = connect(f"unix://worker:pw@{frail.folder / 'valkey.sock'}")
    await admin.ping()
    await worker.register(RegisterPartition("p", (), 1, ("t",)))
    await tag(worker, "put", ["a"])
    assert repr(frail).count(frail.url.split(":")[2].split("@")[0]) == 0


async def test_every_raw_error_has_its_row() -> None:
    """What redis-py raises becomes the plane's errors: unavailable, timeout, not ready."""
    exceptions = pytest.importorskip("redis.exceptions", reason="needs the extra: pip install 'asyncdp[ucxx]'")
    from asyncdp.transports.ucxx.directory.server.error_table import ERROR_TABLE, PASSING

    table: dict[str, Any] = dict(ERROR_TABLE)
    assert all(hasattr(exceptions, name) for name in table)
    assert type(table["ConnectionError"]("gone")) is DataPlaneUnavailable
    for name in ("BusyLoadingError", "ReadOnlyError", "MasterDownError", "ClusterDownError", "TryAgainError"):
        passing = table[name]("now", ambiguous=True)
        assert type(passing) is DataPlaneUnavailable
        assert passing.retry_after_s > 0
        assert not passing.ambiguous  # the server did nothing
    for code in PASSING:
        words = "Script killed by user with FUNCTION KILL." if code == "KILLED" else f"{code} Valkey says so."
        assert table["ResponseError"]("", cause=exceptions.ResponseError(words)).retry_after_s > 0
    assert table["ResponseError"]("", cause=exceptions.ResponseError("ERR no such thing")) is None
    assert not table["AuthenticationError"]("no").retryable


# -- the embedded server


async def test_stop_leaves_nothing(server: "EmbeddedServer") -> None:
    """A stopped server has left no process and no folder; twice is fine, and so is a stop without a start."""
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    one = EmbeddedServer()
    await one.start()
    await one.start()
    server_pid, dog_pid = one.pid, one._dog.pid
    await one.stop()
    await one.stop()
    for pid in (server_pid, dog_pid):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert not one.folder.exists()
    await EmbeddedServer().stop()


async def test_a_server_that_cannot_start_says_why(server: "EmbeddedServer", tmp_path: Path) -> None:
    """A start that fails ends at once with the end of the log."""
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    (tmp_path / "appendonlydir").write_text("no folder")
    one = EmbeddedServer(tmp_path)
    with pytest.raises(DataPlaneUnavailable, match=r"ended at once: .*appendonlydir"):
        await one.start()
    assert one.pid is None
    with pytest.raises(ValueError, match="too long"):
        await EmbeddedServer(tmp_path / ("x" * 100)).start()


def runs(pid: int) -> bool:
    """Whether it has not ended; where the first process of a container waits for nobody, it stays as a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.slow
@pytest.mark.parametrize("end", ["kill", "exit", "return"])
async def test_it_dies_with_its_parent(server: "EmbeddedServer", end: str) -> None:
    """However the parent ends, by SIGKILL, sys.exit or at its end, the server ends too and its folder goes away."""
    code = f"""
        import anyio, os, signal, sys
        from asyncdp.transports.ucxx.directory import EmbeddedServer
        one = EmbeddedServer()
        anyio.run(one.start)
        print(one.pid, one.folder, flush=True)
        if {end!r} == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if {end!r} == "exit":
            sys.exit(0)
    """
    done = await anyio.to_thread.run_sync(
        lambda: subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=240, check=False
        )
    )
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr
    pid, folder = done.stdout.split()
    with anyio.fail_after(60.0):
        while runs(int(pid)) or await anyio.Path(folder).exists():  # noqa: ASYNC110
            await anyio.sleep(0.02)
