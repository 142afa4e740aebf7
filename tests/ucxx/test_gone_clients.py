"""Clients that go away in the midst of things: the host keeps nothing of them, and nothing of UCX stays open."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import signal
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp.process.buffer_pool import BufferPool
from asyncdp.transports.ucxx.slots.writer_process import this_machine, this_process
from asyncdp.transports.ucxx.wire.control import Control
from asyncdp.transports.ucxx.wire.handshake import authenticate
from asyncdp.transports.ucxx.wire.messages import Read, Rows, SlotRows, Tie
from tests.ucxx.clients import LOCAL, client, cpu_of, put, value
from tests.ucxx.hosts import ROOT, SECRET, hosted, needs_ucx, ref_of, spawned
from tests.ucxx.segments import rows

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdp.calls.slots import HostRef
    from asyncdp.transports.ucxx.client.connection_pool import Pool
    from asyncdp.transports.ucxx.host.host import Host

pytestmark = [pytest.mark.anyio, *needs_ucx()]

#: A host with room for rows of 16 MiB.
LARGE: dict[str, Any] = {"ucx": True, "arena_bytes": 64 << 20, "max_slot_bytes": 32 << 20}
PATIENCE_S = 60.0


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """No garbage collection: what is kept by a cycle of references stays, as in a process at rest."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def until(true: Any) -> None:
    """Wait until something is true."""
    async with asyncio.timeout(PATIENCE_S):
        while not true():  # noqa: ASYNC110 - there is no event for what is looked at from outside
            await asyncio.sleep(0.01)


async def let_in(host: Host) -> Control:
    """A control stream that was let in."""
    control = Control()
    await asyncio.get_running_loop().create_connection(lambda: control, LOCAL, host.report().ports[0])
    await authenticate(control, SECRET, this_machine(), this_process())
    return control


@pytest.mark.parametrize("tied", [False, True], ids=["before it ties", "after"])
async def test_a_reply_is_let_go_when_its_client_is_gone(*, tied: bool) -> None:
    """U21: a client that never connects UCX, and ends: the session ends with it, whatever ``greeting_s`` allows."""
    async with hosted(greeting_s=600.0, **LARGE) as host, client() as pool:
        refs = await put(pool, ref_of(host.report()), "op", rows(1, 4 << 20))
        pool.close()
        await until(lambda: not host._sessions)
        control = await let_in(host)
        read = Read([refs[0].fields], [SlotRows(refs[0].slot, refs[0].generation, 0, 0, 1)], 1, host.arena.epoch)
        await control.send(read)
        assert isinstance(await control.receive(), Rows)
        if tied:
            await control.send(Tie())
        await asyncio.sleep(0.05)
        assert len(host._sessions) == 1
        control.end()
        await until(lambda: not host._sessions)
        assert host.service.table.counts()["reading"] == 0


async def cancelled_reads(pool: Pool, here: HostRef, refs: Any, times: int, seed: int) -> None:
    """Read 16 MiB again and again, eight at a time, each cancelled somewhere between its first step and its last."""
    rng = random.Random(seed)

    async def read() -> None:
        async with pool.use(LOCAL, here.ports[0]) as connection:
            await connection.read(here, refs)

    loop, longest = asyncio.get_running_loop(), 0.05
    for _ in range(times // 8):
        began = loop.time()
        tasks = [loop.create_task(read()) for _ in range(8)]
        for task in tasks[1:]:
            loop.call_later(rng.random() * longest, task.cancel)
        await asyncio.gather(*tasks, return_exceptions=True)
        longest = max(0.05, loop.time() - began)


async def test_after_cancelled_reads_no_operation_of_ucx_stays(
    monkeypatch: pytest.MonkeyPatch, no_garbage_collection: None
) -> None:
    """U22: on neither side, no reply, and no buffer, without the garbage collector: then both are idle."""
    taken: list[weakref.ref[Any]] = []
    take = BufferPool.take

    def recorded(pool: BufferPool, nbytes: int) -> tuple[Any, bool]:
        out = take(pool, nbytes)
        taken.append(weakref.ref(out[0]))
        return out

    monkeypatch.setattr(BufferPool, "take", recorded)
    async with hosted(**LARGE) as host, client() as pool:
        here = ref_of(host.report())
        refs = await put(pool, here, "op", rows(1, 4 << 20))
        await cancelled_reads(pool, here, refs, 120, seed=5)
        async with pool.use(LOCAL, here.ports[0]) as connection:
            (part,) = (await connection.read(here, refs)).parts
            assert (value(part.block) == 1.0).all()
        assert pool._engine is not None
        assert host._engine is not None
        for engine in (pool._engine, host._engine):
            await until(lambda engine=engine: not engine.under_way)
        del part
        await until(lambda: all(buffer() is None for buffer in taken))
        host.service.buffers.trim(0.0)
        assert not host.service.buffers._free


def memory_of(pid: int) -> float:
    """MiB that a process has of its own: without what it shares with its arena."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_a_host_is_as_small_and_idle_as_before() -> None:
    """U21, U22: 400 cancels, the client gone: memory, descriptors and processor time as before, and an end at once."""
    with spawned(**LARGE) as host:
        pid = host.process.pid
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 4 << 20))
            before, files = memory_of(pid), len(os.listdir(f"/proc/{pid}/fd"))  # noqa: PTH208 - as short as it gets
            await cancelled_reads(pool, host.ref, refs, 400, seed=2)
            assert memory_of(pid) <= before + 32 * 16
        await until(lambda: memory_of(pid) <= before + 16)
        await until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= files)  # noqa: PTH208 - as above
        spent = cpu_of(pid)
        await asyncio.sleep(3.0)
        assert cpu_of(pid) - spent <= 0.09
        host.signal(signal.SIGTERM)
        assert await host.gone(PATIENCE_S) == 0


KILLED = """
import asyncio, json, sys
from asyncdp.calls.slots import HostRef, SlotRef
from tests.ucxx.clients import LOCAL, client, put
from tests.ucxx.segments import rows

async def main():
    told = json.loads(sys.argv[1])
    here = HostRef(told["id"], told["epoch"], tuple(told["ports"]))
    async with client() as pool:
        print("here", flush=True)
        for number in range(10**6):
            refs = await put(pool, here, f"{told['op']}-{number}", rows(1, 4 << 20))
            for _ in range(3):
                async with pool.use(LOCAL, here.ports[0]) as connection:
                    await connection.read(here, refs)
                    await connection.drop(here, [(r.slot, r.generation, [0], ()) for r in refs])

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_clients_that_are_killed_in_mid_transfer_leave_nothing() -> None:
    """P12, U22: SIGKILL at random moments of puts and reads: slots come back, no operation of UCX stays."""
    rng = random.Random(3)
    async with hosted(**{**LARGE, "arena_bytes": 256 << 20}) as host, client() as pool:
        here = ref_of(host.report())
        for number in range(4):
            told = {"id": here.id, "epoch": here.epoch, "ports": here.ports, "op": f"k{number}"}
            command = (sys.executable, "-c", KILLED, json.dumps(told))
            child = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
            assert child.stdout is not None
            assert await child.stdout.readline() == b"here\n"
            await asyncio.sleep(0.2 + rng.random())
            child.kill()
            assert await child.wait() == -signal.SIGKILL
        await until(lambda: not host._sessions)
        assert host._engine is not None
        await until(lambda: not host._engine.under_way)
        counts = host.service.table.counts()
        assert counts["reading"] == 0
        for slot in list(host.service.table.slots.values()):
            assert not slot.receiving
        refs = await put(pool, here, "after", rows(1, 1 << 10))
        async with pool.use(LOCAL, here.ports[0]) as connection:
            assert len((await connection.read(here, refs)).parts) == 1
