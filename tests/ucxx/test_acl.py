"""Users of the server who may do less than everything, and planes that share one server."""

from __future__ import annotations

import re
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING

import anyio
import pytest
from redis.exceptions import NoPermissionError, ResponseError
from typer.testing import CliRunner

from asyncdp.calls import RegisterPartition
from asyncdp.cli.app import app
from asyncdp.errors import DataPlaneUnavailable
from asyncdp.transports.ucxx.directory import lua as library
from asyncdp.transports.ucxx.directory.server import acl
from asyncdp.transports.ucxx.directory.settings import DirectorySettings
from tests.ucxx.test_directory import mutation, put

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio

Connect = Callable[..., "Directory"]


async def _user(connect: Connect, server: EmbeddedServer, namespace: str, name: str) -> str:
    """Make a user with the rights that ``asyncdp directory acl`` prints; returns a URL with its name."""
    printed = CliRunner().invoke(app, ["directory", "acl", "--namespace", namespace, "--user", name])
    assert printed.exit_code == 0, printed.output
    line = printed.output.strip()
    assert "\n" not in line
    await connect()._link.command(*line.replace(">PASSWORD", ">pw").split())
    await acl.install_functions(server.url, namespace)
    return f"unix://{name}:pw@{server.folder / 'valkey.sock'}"


@pytest.fixture
async def plane(server: EmbeddedServer, connect: Connect, namespace: str) -> Directory:
    """A client of a plane whose user has the least rights."""
    await connect()._link.command("ACL", "LOG", "RESET")
    return connect(await _user(connect, server, namespace, f"user-{namespace}"))


def test_the_rights_name_all_that_the_functions_use() -> None:
    """Each command that stands in the functions' text, and no write of the whole server."""
    text = "".join(part.read_text() for part in files(library.__name__).iterdir() if part.name.endswith(".lua"))
    used = {name.lower() for name in re.findall(r"(?:redis\.p?call|many)\('([A-Z]+)'", text)}
    assert len(used) > 15
    assert used <= set(acl.COMMANDS)
    assert not {"function", "eval", "scan", "select", "keys", "flushall", "config", "script"} & set(acl.COMMANDS)


async def test_the_least_rights_are_enough(plane: Directory, connect: Connect) -> None:
    """A plane's whole life, with claims that wait for notices, hosts and removals; the server refused nothing."""
    from asyncdp.transports.ucxx.directory import HostInfo

    async with anyio.create_task_group() as group:
        await plane.register(RegisterPartition("p", ("x",), 64, ("t",), 2))
        await plane.beat(HostInfo("host", 1, "127.0.0.1", (1,), 1 << 30, 1 << 30, "machine", "arena"))
        claimed: list[list[str]] = []

        async def claim() -> None:
            claimed.append(
                (await plane.claim(mutation("claim"), "p", "t", ["x"], 2, 1, "me", wait_s=50)).meta.sample_ids
            )

        group.start_soon(claim)
        await anyio.sleep(0.05)
        await put(plane, ["g_g0", "g_g1"], tags=[{"input_lengths": 3}, {"input_lengths": 4}])
    assert sorted(claimed[0]) == ["g_g0", "g_g1"]
    assert len(await plane.list_claims("p", "t")) == 1
    assert await plane.consumed("p", ["t"])
    assert (await plane.locate("p", ["g_g0"], ["x"])).refs
    assert len(await plane.list_metadata("p")) == 1
    assert await plane.depth("p") == 1
    await plane.share_secret("secret")
    await plane.epoch()
    assert (await plane.clear(mutation(), "p", ["g_g0", "g_g1"])).count == 2
    await plane.drop(mutation(), "p")
    await plane.leave("host", 1)
    assert await connect()._link.command("ACL", "LOG") == []
    assert await plane.excess_rights() == []


async def test_a_plane_cannot_reach_another_one(
    plane: Directory, server: EmbeddedServer, connect: Connect, namespace: str
) -> None:
    """Nothing of it can be read, written, heard, run or replaced, and the server cannot be stopped or searched."""
    await plane.register(RegisterPartition("p", ("x",), 64, ("t",)))
    other = f"{namespace}x"
    await _user(connect, server, other, f"user-{other}")
    theirs = connect(namespace=other)
    await theirs.register(RegisterPartition("p", ("x",), 64, ("t",)))
    await put(theirs, ["a"])
    library_name = f"asyncdp_{library.version(other)}"
    attacks: list[tuple[str, ...]] = [
        ("FUNCTION", "LOAD", "REPLACE", library.source(other)),
        ("FUNCTION", "LOAD", "REPLACE", library.source(namespace)),
        ("FUNCTION", "LOAD", f"#!lua name=new\nredis.register_function('f{namespace}', function() return 1 end)"),
        ("FUNCTION", "DELETE", library_name),
        ("FUNCTION", "FLUSH"),
        ("FUNCTION", "LIST"),
        ("FUNCTION", "DUMP"),
        ("SCRIPT", "FLUSH"),
        ("EVAL", "while true do end", "0"),
        ("EVAL_RO", "return 1", "0"),
        ("SCRIPT", "LOAD", "return 1"),
        ("SCAN", "0"),
        ("KEYS", "*"),
        ("RANDOMKEY",),
        ("DBSIZE",),
        ("SELECT", "1"),
        ("SWAPDB", "0", "1"),
        ("FLUSHALL",),
        ("FLUSHDB",),
        ("CONFIG", "GET", "*"),
        ("ACL", "LIST"),
        ("CLIENT", "LIST"),
        ("CLIENT", "KILL", "TYPE", "normal"),
        ("MONITOR",),
        ("SHUTDOWN", "NOSAVE"),
        ("REPLICAOF", "127.0.0.1", "1"),
        ("RENAME", f"{other}:plane", f"{namespace}:plane"),
        ("COPY", f"{other}:secret", f"{namespace}:stolen"),
        ("GET", f"{other}:plane"),
        ("SET", f"{other}:plane", "mine"),
        ("HGETALL", f"{other}:{{p}}:p"),
        ("UNLINK", f"{other}:{{p}}:p"),
        ("SMEMBERS", f"{other}:partitions"),
        ("FCALL", f"locate_{library.version(other)}", "1", f"{other}:{{p}}:", "", "0", "", ""),
        ("FCALL", f"locate_{library.version(namespace)}", "1", f"{other}:{{p}}:", "", "0", "", ""),
        ("SUBSCRIBE", f"{other}:{{p}}:n"),
        ("PUBLISH", f"{other}:{{p}}:n", ""),
        ("PSUBSCRIBE", "*"),
    ]
    for attack in attacks:
        with pytest.raises(NoPermissionError):
            raise (await plane._link.pipeline([attack]))[0]
    assert (await theirs.locate("p", ["a"], ["x"])).refs


async def test_functions_that_reach_for_other_keys_are_refused_inside(plane: Directory, namespace: str) -> None:
    """The server checks the caller's rights at each command in a function too, not only at the keys it is told of."""
    await plane.register(RegisterPartition("p", ("x",), 64, ("t",)))
    call = ("FCALL", f"hosts_{library.version(namespace)}", "1", "elsewhere:", "", "0", "", "")
    (reply,) = await plane._link.pipeline([call])
    assert isinstance(reply, ResponseError)


async def test_functions_that_are_missing_are_for_an_administrator(
    plane: Directory, server: EmbeddedServer, connect: Connect, namespace: str
) -> None:
    """A plane's user who may not load them is told which command to ask for; then everything works."""
    await connect()._link.command("FUNCTION", "DELETE", f"asyncdp_{library.version(namespace)}")
    with pytest.raises(DataPlaneUnavailable, match=f"asyncdp directory install --namespace {namespace}") as caught:
        await plane.register(RegisterPartition("p", ("x",), 64, ("t",)))
    assert not caught.value.retryable
    told = {"args": ["directory", "install", "--namespace", namespace], "env": {"ASYNCDP_DIRECTORY": server.url}}
    asked = await anyio.to_thread.run_sync(lambda: CliRunner().invoke(app, **told))
    assert asked.exit_code == 0, asked.output
    await plane.register(RegisterPartition("p", ("x",), 64, ("t",)))


async def test_too_many_rights_are_told(connect: Connect) -> None:
    """Of a user who may do everything: what `asyncdp serve` warns of on a server that planes share."""
    assert await connect().excess_rights() == ["FUNCTION", "EVAL", "CONFIG", "SCAN"]


def test_planes_share_no_library() -> None:
    """A namespace is part of a library's name and of each function's: to replace one touches no other plane."""
    one, two = library.source("one"), library.source("two")
    names = [set(re.findall(r"register_function[({](?: function_name = )?'(\w+)'", text)) for text in (one, two)]
    assert len(names[0]) == len(names[1]) > 15
    assert not names[0] & names[1]
    assert one.splitlines()[0] != two.splitlines()[0]


@pytest.mark.parametrize("name", ["", "a:b", "a*", "a b", "a?", "[a]", "a\n", "x" * 65, "ä"])
def test_a_namespace_that_would_reach_into_others_is_refused(name: str) -> None:
    """It ends at its colon, and is part of patterns: 'a' would hold the keys of 'a:b', and 'a*' those of all."""
    import msgspec

    with pytest.raises(msgspec.ValidationError, match="namespace"):
        msgspec.convert({"namespace": name}, DirectorySettings)
    for command in ("acl", "install"):
        options = ["--namespace", name, *(["--directory", "redis://x"] if command == "install" else [])]
        refused = CliRunner().invoke(app, ["directory", command, *options])
        assert refused.exit_code == 2
        assert "--namespace" in refused.output


def test_a_server_that_cannot_be_reached_is_said_in_a_line() -> None:
    """Without the password, and without a traceback."""
    told = CliRunner().invoke(app, ["directory", "install", "--directory", "unix://me:hush@/nowhere/valkey.sock"])
    assert told.exit_code == 1
    assert "hush" not in told.output
    assert len(told.output.strip().splitlines()) == 1


@pytest.fixture
async def worker(server: EmbeddedServer, connect: Callable[..., Directory]) -> Directory:
    """A client whose user may use no channels: what Valkey gives a new user by itself."""
    admin = connect()
    await admin._link.command("ACL", "SETUSER", "nochannels", "on", ">pw", "resetchannels", "~*", "+@all")
    return connect(f"unix://nochannels:pw@{server.folder / 'valkey.sock'}")


async def test_what_was_done_is_no_error_where_notices_may_not_be_sent(worker: Directory) -> None:
    """A notice only saves others a look: a mutation whose notice is refused has happened, and says so."""
    await worker.register(RegisterPartition("p", ("x",), 64, ("t",)))
    await put(worker, ["a"])
    batch = await worker.claim(mutation("claim"), "p", "t", ["x"], 1, 1, "me")
    assert batch.meta.sample_ids == ["a"]
    await worker.abandon("p", "claim")
    assert (await worker.clear(mutation(), "p", ["a"])).count == 1


async def test_who_may_not_hear_notices_looks_by_itself(
    worker: Directory, connect: Callable[..., Directory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits no longer than it was told, and finds what was put meanwhile; it asks once to hear, not at each look."""
    monkeypatch.setattr("asyncdp.transports.ucxx.directory.server.notices.CONFIRM_S", 60.0)
    await worker.register(RegisterPartition("p", ("x",), 64, ("t",)))
    with anyio.fail_after(60):
        assert (await worker.claim(mutation(), "p", "t", ["x"], 1, 1, "me", wait_s=0.2)).meta.size == 0
    asked = (await worker._link.command("INFO", "commandstats")).decode().split("cmdstat_subscribe:")[1]

    async def soon() -> None:
        await anyio.sleep(0.05)
        await put(connect(), ["a"])

    async with anyio.create_task_group() as group:
        group.start_soon(soon)
        with anyio.fail_after(60):
            assert (await worker.claim(mutation(), "p", "t", ["x"], 1, 1, "me", wait_s=50)).meta.sample_ids == ["a"]
    again = (await worker._link.command("INFO", "commandstats")).decode().split("cmdstat_subscribe:")[1]
    assert asked.split("rejected_calls=")[1].split(",")[0] == again.split("rejected_calls=")[1].split(",")[0]
