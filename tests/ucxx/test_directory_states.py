"""A directory that is out of memory, busy, loading, read-only, without disk or replicas: what each verb does."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest

from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
)
from asyncdp.factory import stack
from asyncdp.middleware.attempt_timeout import AttemptTimeout

if TYPE_CHECKING:
    from pathlib import Path

    from asyncdp.client import DataPlaneClient
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio

Verb = Callable[["DataPlaneClient"], Any]


@pytest.fixture
async def frail(server: "EmbeddedServer") -> "AsyncIterator[EmbeddedServer]":
    """A server that a test may hurt."""
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    frail = EmbeddedServer()
    await frail.start()
    yield frail
    await frail.stop()


def client_of(url: str, namespace: str, **settings: Any) -> "DataPlaneClient":
    """Make a client of a plane without slot hosts: enough for samples that are tags only."""
    from asyncdp.transports.ucxx import UCXXTransport

    config = {"enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 1000, "num_storage_units": 1}
    config |= {"claim_meta_poll_interval_s": 0.05, "controller_address": url}
    config |= {"ucxx": {"namespace": namespace, "directory": {"host_timeout_s": 600.0}}}
    return stack(UCXXTransport(config, bootstrap=False), **settings)


@pytest.fixture
async def client(frail: "EmbeddedServer", namespace: str) -> "AsyncIterator[DataPlaneClient]":
    """A client of the frail server that has a partition of eight samples, one of them claimed."""
    async with client_of(frail.url, namespace) as client:
        await client.register_partition("p", [], 8, ["t"])
        await client.register_partition("dropped", [], 8, ["t"])
        await client.put_samples([f"s{i}" for i in range(8)], "p", tags=[{"k": i} for i in range(8)])
        await client.claim_meta("p", "t", [], 1)
        yield client


@pytest.fixture
async def admin(frail: "EmbeddedServer", connect: Callable[..., "Directory"]) -> Callable[..., Any]:
    """Send a command to the frail server."""
    return connect(frail.url)._link.command


READS: dict[str, Verb] = {
    "list_metadata": lambda c: c.list_metadata("p"),
    "depth": lambda c: c.depth("p"),
    "list_claims": lambda c: c.list_claims("p", "t"),
    "list_partitions": lambda c: c.list_partitions(),
    "describe": lambda c: c.describe("p"),
    "check_consumption_status": lambda c: c.check_consumption_status("p", ["t"]),
}
REMOVALS: dict[str, Verb] = {
    "release_claims": lambda c: c.release_claims("p", c.owner),
    "claim_meta": lambda c: c.claim_meta("p", "t", [], 1),
    "pop": lambda c: c.pop(["s1"], "p"),
    "evict": lambda c: c.evict(["s2"], "p"),
    "clear_samples": lambda c: c.clear_samples(["s3"], "p"),
    "drop_partition": lambda c: c.drop_partition("dropped"),
}
GROWTH: dict[str, Verb] = {
    "put_samples": lambda c: c.put_samples(["new"], "p", tags=[{"k": 1}]),
    "register_partition": lambda c: c.register_partition("q", [], 1, ["t"]),
}


async def test_a_directory_out_of_memory_can_be_emptied(
    client: "DataPlaneClient", admin: Callable[..., Any], frail: "EmbeddedServer", connect: Callable[..., "Directory"]
) -> None:
    """U5: at maxmemory reads, claims, removals and heartbeats work; only what needs memory is refused, as not ready."""
    from asyncdp.transports.ucxx.directory import HostInfo

    held = await client.claim_meta("p", "t", [], 1)
    await admin("CONFIG", "SET", "maxmemory", "100kb")
    for name, verb in GROWTH.items():
        with pytest.raises(DataPlaneNotReady, match="out of memory") as caught:
            await verb(client)
        assert not caught.value.ambiguous, name
    await connect(frail.url).beat(HostInfo("h", 1))
    await connect(frail.url).next_epoch("h")
    await client.ping()
    await client.release_claim(held)
    for verb in (*READS.values(), *REMOVALS.values()):
        await verb(client)
    await admin("CONFIG", "SET", "maxmemory", "0")
    await client.register_partition("p", [], 1, ["t"])
    await client.put_samples(["new"], "p", tags=[{"k": 1}])


@pytest.mark.parametrize("verb", ["pop", "put_samples", "depth"])
async def test_functions_that_a_full_directory_does_not_take_are_named(
    client: "DataPlaneClient", admin: Callable[..., Any], verb: str
) -> None:
    """A full directory that lost the functions, or has those of another release: not ready, with what to do."""
    client.call_timeout_s = 1.0  # type: ignore[attr-defined]
    await admin("CONFIG", "SET", "maxmemory", "100kb")
    await admin("FUNCTION", "FLUSH")
    with pytest.raises(DataPlaneNotReady, match="raise its maxmemory until they are loaded") as caught:
        await {**READS, **REMOVALS, **GROWTH}[verb](client)
    assert not caught.value.ambiguous
    client.call_timeout_s = 60.0  # type: ignore[attr-defined]
    await admin("CONFIG", "SET", "maxmemory", "0")
    await {**READS, **REMOVALS, **GROWTH}[verb](client)


@pytest.mark.parametrize("state", ["READONLY", "OOM"])
async def test_a_server_that_never_saw_the_plane_and_takes_no_writes_is_named(
    frail: "EmbeddedServer", admin: Callable[..., Any], namespace: str, state: str
) -> None:
    """The first call of a client on a replica, or on a full server: a typed error that names the state."""
    await admin(*(("CONFIG", "SET", "maxmemory", "100kb") if state == "OOM" else ("REPLICAOF", "127.0.0.1", "1")))
    kind = DataPlaneNotReady if state == "OOM" else DataPlaneUnavailable
    async with client_of(frail.url, namespace, call_timeout_s=1.0) as client:
        for verb in (READS["list_partitions"], GROWTH["register_partition"]):
            with pytest.raises(kind, match="out of memory" if state == "OOM" else "answers READONLY"):
                await verb(client)


@pytest.mark.parametrize("answer", [None, b"OK"])
async def test_a_server_that_is_emptied_while_it_is_opened_is_unavailable(
    connect: Callable[..., "Directory"], monkeypatch: pytest.MonkeyPatch, answer: bytes | None
) -> None:
    """The plane's id is removed between its writing and its reading: a typed error, and the next call opens it."""
    directory = connect()
    pipeline = directory._link.pipeline

    async def emptied(commands: Any) -> list[Any]:
        return [answer, None, None, None] if commands[0][0] == "SET" else await pipeline(commands)

    with monkeypatch.context() as patch:
        patch.setattr(directory._link, "pipeline", emptied)
        with pytest.raises(DataPlaneUnavailable, match="was emptied while it was opened"):
            await directory.epoch()
    await directory.epoch()


async def test_a_put_is_refused_before_its_payload_is_sent(
    client: "DataPlaneClient", admin: Callable[..., Any], connect: Callable[..., "Directory"], frail: "EmbeddedServer"
) -> None:
    """A put asks a full or read-only directory for a place, and is refused there."""
    from redis.exceptions import OutOfMemoryError, ReadOnlyError

    directory = connect(frail.url)
    await directory.ping()
    await admin("CONFIG", "SET", "maxmemory", "100kb")
    with pytest.raises(OutOfMemoryError):
        await directory.place("p", ["new"], ["x"])
    await admin("CONFIG", "SET", "maxmemory", "0")
    await admin("REPLICAOF", "127.0.0.1", "1")
    with pytest.raises(ReadOnlyError):
        await directory.place("p", ["new"], ["x"])


# -- states that end


@contextlib.asynccontextmanager
async def busy(frail: "EmbeddedServer") -> AsyncIterator[None]:
    """Another plane's function runs for long."""
    from redis.asyncio import Redis
    from redis.exceptions import ResponseError

    async with Redis.from_url(frail.url) as one, Redis.from_url(frail.url) as other:
        await one.config_set("busy-reply-threshold", 10)
        await one.function_load(
            "#!lua name=spin\nredis.register_function('spin', function() while true do end end)", replace=True
        )
        spinning = asyncio.create_task(other.fcall("spin", 0))
        await anyio.sleep(0.2)
        try:
            yield
        finally:
            await one.execute_command("FUNCTION", "KILL")
            with contextlib.suppress(ResponseError):
                await spinning


@contextlib.asynccontextmanager
async def read_only(frail: "EmbeddedServer") -> AsyncIterator[None]:
    """It is the replica of a server that is not there."""
    from redis.asyncio import Redis

    async with Redis.from_url(frail.url) as one:
        await one.execute_command("REPLICAOF", "127.0.0.1", "1")
        yield
        await one.execute_command("REPLICAOF", "NO", "ONE")


@contextlib.asynccontextmanager
async def primary_lost(frail: "EmbeddedServer") -> AsyncIterator[None]:
    """It is a replica that does not serve what may be stale."""
    from redis.asyncio import Redis

    async with read_only(frail), Redis.from_url(frail.url) as one:
        await one.config_set("replica-serve-stale-data", "no")
        yield


@contextlib.asynccontextmanager
async def too_few_replicas(frail: "EmbeddedServer") -> AsyncIterator[None]:
    """It wants a replica that is not connected."""
    from redis.asyncio import Redis

    async with Redis.from_url(frail.url) as one:
        await one.config_set("min-replicas-to-write", 1)
        yield
        await one.config_set("min-replicas-to-write", 0)


@contextlib.asynccontextmanager
async def disk_fails(frail: "EmbeddedServer") -> AsyncIterator[None]:
    """It cannot write its snapshots."""
    from redis.asyncio import Redis

    async with Redis.from_url(frail.url) as one:
        (frail.folder / "dump.rdb").mkdir()
        await one.config_set("save", "3600 1")
        await one.execute_command("BGSAVE")
        with anyio.fail_after(60):
            while (await one.info("persistence"))["rdb_last_bgsave_status"] != "err":  # noqa: ASYNC110
                await anyio.sleep(0.02)
        yield
        (frail.folder / "dump.rdb").rmdir()
        await one.config_set("save", "")
        await one.execute_command("BGSAVE")


STATES = {
    "BUSY": (busy, {**READS, **GROWTH, **REMOVALS}),
    "READONLY": (read_only, {**GROWTH, **REMOVALS}),
    "MASTERDOWN": (primary_lost, READS),
    "NOREPLICAS": (too_few_replicas, {**GROWTH, **REMOVALS}),
    "MISCONF": (disk_fails, {**GROWTH, **REMOVALS}),
}


#: In make test-all each state meets each test; in make test one that passes by itself and one that somebody has to end.
SHORT = {"BUSY", "READONLY"}
CODES = [pytest.param(code, marks=() if code in SHORT else pytest.mark.slow) for code in STATES]


@pytest.mark.parametrize("code", CODES)
async def test_a_state_that_passes_is_waited_for(code: str, client: "DataPlaneClient", frail: "EmbeddedServer") -> None:
    """Every verb asks again until the server serves, for longer than four attempts take; none is terminal."""
    enter, verbs = STATES[code]
    async with anyio.create_task_group() as group, enter(frail):
        for name in verbs:
            group.start_soon(verbs[name], client)
        await anyio.sleep(1.0)
        for _ in range(400):
            if client.snapshot()["events"].get("retry", 0) >= 4 * len(verbs):  # type: ignore[attr-defined]
                break
            await anyio.sleep(0.05)
    assert client.snapshot()["events"].get("budget_refused", 0) == 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", CODES)
async def test_a_state_that_does_not_pass_is_unavailable(
    code: str, client: "DataPlaneClient", frail: "EmbeddedServer", monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of the call's time the error names the state and what to do, as unavailable; in time.

    It is ambiguous only where the call's time ended while an attempt waited for its answer.
    """
    enter, verbs = STATES[code]
    cut: set[str] = set()
    late = AttemptTimeout._late

    def noted(layer: AttemptTimeout, call: Any, ctx: Any, *limits: float, sent: bool = True) -> Any:
        if sent:
            cut.add(ctx.verb)
        return late(layer, call, ctx, *limits, sent=sent)

    monkeypatch.setattr(AttemptTimeout, "_late", noted)

    async def fails(name: str) -> None:
        with pytest.raises(DataPlaneUnavailable, match=f"answers {code}: ") as caught:
            await verbs[name](client)
        assert not caught.value.ambiguous or name in cut, name

    usual, client.call_timeout_s = client.call_timeout_s, 2.0  # type: ignore[attr-defined]
    async with enter(frail), anyio.create_task_group() as group:
        for name in verbs:
            group.start_soon(fails, name)
    client.call_timeout_s = usual  # type: ignore[attr-defined]
    for verb in verbs.values():
        await verb(client)


async def test_a_ping_says_soon_how_it_is(client: "DataPlaneClient", frail: "EmbeddedServer") -> None:
    """A ping of a busy directory fails after its attempts, however much time it has."""
    async with busy(frail):
        with pytest.raises(DataPlaneUnavailable, match="BUSY") as caught:
            await client.ping(timeout_s=600)
    assert caught.value.attempts == 4


@pytest.mark.slow
async def test_a_directory_that_loads_is_waited_for(
    client: "DataPlaneClient", frail: "EmbeddedServer", connect: Callable[..., "Directory"]
) -> None:
    """Killed and started with much to load, it answers LOADING: calls wait for the end of it."""
    from redis.asyncio import Redis
    from redis.exceptions import BusyLoadingError

    async with Redis.from_url(frail.url) as one:
        pipe = one.pipeline(transaction=False)
        for i in range(16_384):  # while it loads, it answers after each 1024 commands
            pipe.set(f"ballast{i}", i)
        await pipe.execute()
        await one.config_set("appendfsync", "always")
        await one.set("ballast", "")
    frail.kill()
    configure = frail._configure

    def slowly() -> "Path":
        config = configure()
        config.write_text(config.read_text() + "key-load-delay 300\n")
        return config

    frail._configure = slowly  # type: ignore[method-assign]
    frail._spawn()
    link = connect(frail.url)._link
    with anyio.fail_after(60):
        while True:
            try:
                await link.command("PING")
            except ConnectionRefusedError:
                await anyio.sleep(0.01)
            except BusyLoadingError:
                break
            else:
                pytest.fail("it had loaded before it was asked")
    async with anyio.create_task_group() as group:
        group.start_soon(GROWTH["put_samples"], client)
        group.start_soon(READS["depth"], client)
        group.start_soon(REMOVALS["pop"], client)


# -- what does not pass by itself


async def test_what_no_retry_cures_says_what_to_do(frail: "EmbeddedServer", admin: Callable[..., Any]) -> None:
    """A wrong or missing password, and an ACL that forbids the plane, are terminal and name where to look."""
    socket = frail.folder / "valkey.sock"
    await admin("ACL", "SETUSER", "reader", "on", ">pw", "~*", "&*", "+@read", "+hello", "+info")
    await admin("ACL", "SETUSER", "stranger", "on", ">pw", "~other:*", "&*", "+@all")
    for url, words in {
        f"unix://:wrong@{socket}": "user or password in controller_address",
        f"unix://nobody:pw@{socket}": "ASYNCDP_DIRECTORY",
        f"unix://{socket}": "user or password in controller_address",
        f"unix://reader:pw@{socket}": "ACL forbids .*asyncdp directory acl",
        f"unix://stranger:pw@{socket}": "ACL forbids .*asyncdp directory acl",
    }.items():
        async with client_of(url, "mine") as client:
            with pytest.raises(DataPlaneBadRequest, match=words) as caught:
                await client.put_samples(["a"], "p", tags=[{"k": 1}])
            assert caught.value.attempts == 1
            assert "wrong" not in str(caught.value)


async def test_a_server_without_room_for_clients_is_unavailable(
    frail: "EmbeddedServer", admin: Callable[..., Any], namespace: str
) -> None:
    """A server at maxclients closes connections: unavailable, and served as soon as there is room."""
    await admin("CONFIG", "SET", "maxclients", "1")
    async with client_of(frail.url, namespace, call_timeout_s=20.0) as client:
        with pytest.raises(DataPlaneUnavailable):
            await client.ping()
        await admin("CONFIG", "SET", "maxclients", "100")
        await client.list_partitions()


async def test_a_cluster_of_which_it_is_a_node_is_refused_by_name() -> None:
    """A key that another node keeps is no state that passes: the error says what to name instead."""
    exceptions = pytest.importorskip("redis.exceptions", reason="needs the extra: pip install 'asyncdp[ucxx]'")
    from asyncdp.transports.ucxx.directory import ERROR_TABLE

    moved = exceptions.MovedError("1234 127.0.0.1:6381")
    err = dict(ERROR_TABLE)["MovedError"](f"MovedError: {moved}", cause=moved)
    assert isinstance(err, DataPlaneUnsupported)
    assert "cluster" in str(err)


# -- a server that evicts


async def test_an_evicting_policy_is_refused_at_opening(
    frail: "EmbeddedServer", admin: Callable[..., Any], namespace: str
) -> None:
    """U7: a directory that removes keys when it is full is refused by the name of its policy, until that is changed."""
    await admin("CONFIG", "SET", "maxmemory", "1gb")
    for policy in ("allkeys-lru", "volatile-ttl"):
        await admin("CONFIG", "SET", "maxmemory-policy", policy)
        async with client_of(frail.url, namespace) as client:
            for verb in (client.ping, client.list_partitions):
                with pytest.raises(DataPlaneUnsupported, match=f"maxmemory-policy {policy}"):
                    await verb()
            await admin("CONFIG", "SET", "maxmemory-policy", "noeviction")
            await client.list_partitions()
    await admin("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
    await admin("CONFIG", "SET", "maxmemory", "0")
    async with client_of(frail.url, namespace) as client:  # without a limit nothing is ever evicted
        await client.list_partitions()


async def test_a_policy_that_begins_to_evict_is_told(
    frail: "EmbeddedServer", admin: Callable[..., Any], connect: Callable[..., "Directory"]
) -> None:
    """A change under an open client is an error in the log, once; its calls go on, so that rows can be saved."""
    import structlog

    directory = connect(frail.url)
    await directory.ping()
    await admin("CONFIG", "SET", "maxmemory", "1gb")
    await admin("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    with structlog.testing.capture_logs() as logs:
        await directory.epoch()
        await directory.epoch()
    (line,) = [line for line in logs if line.get("maxmemory_policy") == "allkeys-lfu"]
    assert line["log_level"] == "error"
    await directory.ping()


# -- the controller of docs/testing.md


@pytest.mark.parametrize(
    "code", ["READONLY", "OOM", *(pytest.param(code, marks=pytest.mark.slow) for code in ("BUSY", "MISCONF"))]
)
async def test_the_controller_of_the_docs_outlives_it(
    code: str, client: "DataPlaneClient", frail: "EmbeddedServer", connect: Callable[..., "Directory"]
) -> None:
    """It waits where it has to, removes what is too old or has no tags, and a full directory does not stop it."""
    from asyncdp.transports.ucxx.directory import HostInfo
    from tests.docs.test_recovery import controller

    await client.register_partition("rollouts", [], 8, ["t"])
    await client.put_samples(["old", "new"], "rollouts", tags=[{"weight_version": 1}, {"weight_version": 9}])
    await client.put_samples(["untagged"], "rollouts", tags=[{}])
    client.call_timeout_s = 1.0  # type: ignore[attr-defined]
    one = controller(client, oldest=5)
    if code == "OOM":
        await connect(frail.url)._link.command("CONFIG", "SET", "maxmemory", "100kb")
        await one.step()
    else:
        await connect(frail.url).beat(HostInfo("h", 1))  # else no ping succeeds
        async with anyio.create_task_group() as group:
            group.cancel_scope.deadline = anyio.current_time() + 60
            async with STATES[code][0](frail):
                group.start_soon(one.run, 600)
                while not one.outages:  # noqa: ASYNC110 - it is the page's, and has no events
                    await anyio.sleep(0.02)
            client.call_timeout_s = 60.0  # type: ignore[attr-defined]
            while await client.depth("rollouts") > 1:  # noqa: ASYNC110 - as above
                await anyio.sleep(0.05)
            group.cancel_scope.cancel()
    assert [group.keys for group in await client.list_metadata("rollouts")] == [("new",)]
