import asyncio
import contextlib
import json
import os
import select
import signal
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp.calls.slots import HostRef
from asyncdp.errors import DataPlaneUnavailable, StaleSlotError
from asyncdp.rows.block import Block
from tests.ucxx.clients import LOCAL, client, cpu_of, end, get, hammer, put, value
from tests.ucxx.hosts import Spawned, needs_ucx, ref_of, spawned
from tests.ucxx.segments import rows

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.client.connection_pool import Pool

pytestmark = [pytest.mark.anyio, *needs_ucx()]


async def test_an_idle_host_and_an_idle_client_use_no_processor() -> None:
    """16 idle connections: neither side polls."""
    with spawned(ucx=True) as host:
        async with client(per_port=16) as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 16))

            async def connect() -> None:
                async with pool.use(LOCAL, host.ref.ports[0]) as connection:
                    await connection.read(host.ref, refs)
                    await asyncio.sleep(0.3)

            await asyncio.gather(*[connect() for _ in range(16)])
            assert pool.idle == 16
            mine, theirs = time.process_time(), cpu_of(host.process.pid)
            await asyncio.sleep(2.0)
            assert time.process_time() - mine <= 0.6
            assert cpu_of(host.process.pid) - theirs <= 0.6


@pytest.mark.slow
async def test_garbage_at_the_ucx_listener_does_not_cost_a_core_for_long() -> None:
    """S15: random bytes make UCX's own thread spin: it is started anew, and clients connect again."""
    with spawned(ucx=True, watch_ucx_s=0.3) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 16))
            async with pool.use(LOCAL, host.ref.ports[0]) as connection:
                port = connection.welcome.ucx_port
            before = len(os.listdir(f"/proc/{host.process.pid}/fd"))  # noqa: PTH208 - as short as it gets
            for _ in range(3):
                with socket.create_connection((LOCAL, port)) as stranger:
                    stranger.sendall(os.urandom(3000))
            async with asyncio.timeout(60):
                spent = -1.0
                while cpu_of(host.process.pid) - spent > 0.15:
                    spent = cpu_of(host.process.pid)
                    await asyncio.sleep(1.0)
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()
            assert len(os.listdir(f"/proc/{host.process.pid}/fd")) <= before  # noqa: PTH208 - as above


@pytest.mark.slow
async def test_garbage_is_noticed_while_clients_keep_the_host_busy() -> None:
    """S15: who sends garbage under load costs no core for long: what it left is closed, and if by a new process."""
    with spawned(ucx=True, watch_ucx_s=0.5, inline_bytes=0) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 14))
            port = await ucx_port(pool, host)
            before = descriptors(host)
            for _ in range(4):
                with socket.create_connection((LOCAL, port)) as stranger:
                    stranger.sendall(os.urandom(3000))
            here, cured = host.ref, False
            async with asyncio.timeout(60):
                while not cured:
                    with contextlib.suppress(DataPlaneUnavailable):  # a new listener ends all connections
                        assert (value(await get(pool, here, refs)) == 1.0).all()
                        cured = await ucx_port(pool, host, here) != port and descriptors(host) <= before + 3
                    here = said_anew(host) or here


@pytest.mark.slow
async def test_strangers_that_hold_connections_are_got_rid_of() -> None:
    """S15: UCX never gives up who connects and says nothing; before they use up the descriptors, the host does."""
    with spawned(ucx=True, watch_ucx_s=0.5, inline_bytes=0) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 14))
            port = await ucx_port(pool, host)
            before = descriptors(host)
            with contextlib.ExitStack() as strangers:
                for _ in range(300):
                    strangers.enter_context(socket.create_connection((LOCAL, port)))
                async with asyncio.timeout(60):
                    while descriptors(host) > before + 150:  # noqa: ASYNC110 - what is looked at has no event
                        await asyncio.sleep(0.05)
            async with asyncio.timeout(60):
                while True:
                    with contextlib.suppress(DataPlaneUnavailable):
                        assert (value(await get(pool, host.ref, refs)) == 1.0).all()
                        break
            assert descriptors(host) <= before + 3


def descriptors(host: Spawned) -> int:
    """How many a host has open."""
    return len(os.listdir(f"/proc/{host.process.pid}/fd"))  # noqa: PTH208 - as short as it gets


async def ucx_port(pool: "Pool", host: Spawned, here: HostRef | None = None) -> int:
    """Where its UCX listener is now."""
    async with pool.use(LOCAL, (here or host.ref).ports[0]) as connection:
        await connection.ask()
        return connection.welcome.ucx_port


def said_anew(host: Spawned) -> HostRef | None:
    """Where a host is that has begun anew, once."""
    assert host.process.stdout is not None
    if not select.select([host.process.stdout], [], [], 0)[0]:
        return None
    return ref_of(json.loads(host.process.stdout.readline()))


@pytest.mark.parametrize("adopts", [True, False], ids=["adopts", "does not adopt"])
async def test_a_killed_host_is_started_again(adopts: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """S14: killed during a read: an error at once. Started again: the same rows, or (adoption off) stale ones."""
    name = f"killed-{os.getpid()}-{adopts}"
    keys: dict[str, Any] = {"ucx": True, "host_id": name, "adopt": adopts, "arena_bytes": 64 << 20}
    with spawned(**keys) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 19, 3.0))
            reads = [asyncio.ensure_future(get(pool, host.ref, refs)) for _ in range(4)]
            await asyncio.sleep(0.01)
            host.signal(signal.SIGKILL)
            async with asyncio.timeout(60):
                done = await asyncio.gather(*reads, return_exceptions=True)
            assert all(isinstance(each, (Block, DataPlaneUnavailable)) for each in done)
            await host.gone()
            with pytest.raises(DataPlaneUnavailable):
                await get(pool, host.ref, refs)
            with spawned(**keys) as again:
                assert (again.ref.epoch == host.ref.epoch) == adopts
                moved = type(host.ref)(host.ref.id, host.ref.epoch, again.ref.ports)
                if adopts:
                    assert (value(await get(pool, moved, refs)) == 3.0).all()
                else:
                    with pytest.raises(StaleSlotError):
                        await get(pool, moved, refs)
                end(again, "end of its parent")
                assert await again.gone() == 0


async def test_a_stopped_host_costs_its_timeout_and_nothing_else() -> None:
    """T1: SIGSTOP: only the caller's own timeout tells; afterwards the host is used as before."""
    with spawned(ucx=True) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 19))
            host.signal(signal.SIGSTOP)
            for port in (0, 1):
                began = time.monotonic()
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(0.3):
                        await get(pool, host.ref, refs, port)
                assert time.monotonic() - began < 60.0  # not for ever; how late is the machine's affair
            host.signal(signal.SIGCONT)
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()


@pytest.mark.parametrize("by", ["SIGTERM", "end of its parent"])
async def test_a_host_ends_in_order_with_reads_in_flight(by: str) -> None:
    """X1: exit code 0, each time, and no segment is left."""
    async with client() as pool:
        for _ in range(2):
            with spawned(ucx=True) as host:
                refs = await put(pool, host.ref, "op", rows(1, 1 << 19))
                readers = [asyncio.ensure_future(hammer(pool, host.ref, refs)) for _ in range(4)]
                await asyncio.sleep(0.1)
                end(host, by)
                assert await host.gone() == 0
                async with asyncio.timeout(60):
                    await asyncio.gather(*readers)
                assert not (Path("/dev/shm") / host.told["arena"]).exists()


#: A host whose first life believes that UCX's thread spins, whatever is done about it.
SPOILT = """
import os
from asyncdp.transports.ucxx.host.ucx_watchdog import SpinDetector
from asyncdp.transports.ucxx.host.main import main
if "ASYNCDP_BEGUN_ANEW" not in os.environ:
    SpinDetector.look = lambda *args, **options: True
main()
"""


@pytest.mark.slow
async def test_a_host_that_ucx_has_spoilt_begins_anew_as_the_same_process() -> None:
    """S15: where a new worker does not help: same process and rows, nothing of the old UCX; no parent sees an end."""
    with spawned(ucx=True, watch_ucx_s=3.0, inline_bytes=0, command=["-c", SPOILT]) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(1, 1 << 14))
            assert host.process.stdout is not None
            async with asyncio.timeout(60):
                told = json.loads(await asyncio.to_thread(host.process.stdout.readline))
            assert told["pid"] == host.process.pid
            again = ref_of(told)
            assert again.epoch == host.ref.epoch
            assert (value(await get(pool, again, refs)) == 1.0).all()
            assert descriptors(host) < 40  # those of one UCX, a few connections and the ports
            end(host, "SIGTERM")
            assert await host.gone() == 0
            assert not (Path("/dev/shm") / told["arena"]).exists()
