import asyncio
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncdp.block import Block
from asyncdp.errors import DataPlaneError, DataPlaneUnavailable, StaleSlotError
from asyncdp.slots import ReadSlots, verify
from asyncdp.transports.ucxx.engine import Engine
from asyncdp.transports.ucxx.host_directory import HostReport
from asyncdp.transports.ucxx.pool import Pool
from tests.ucxx.hosts import Spawned, hosted, needs_ucx, pool_of, put_over, ref_of, spawned
from tests.ucxx.segments import rows

pytestmark = [pytest.mark.anyio, *needs_ucx()]
LOCAL = "127.0.0.1"


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The UCXX transport is asyncio's."""
    return "asyncio"


@asynccontextmanager
async def client(**options: Any) -> AsyncIterator[Pool]:
    """An engine and a pool on it."""
    engine = Engine(devices="lo")
    try:
        with pool_of(engine, **options) as pool:
            yield pool
    finally:
        await engine.close()


async def put(pool: Pool, here: Any, op_id: str, block: Block, **options: Any) -> Any:
    """Put a block over a connection of the pool."""
    async with pool.use(LOCAL, here.ports[0]) as connection:
        return await put_over(connection, here, op_id, block, **options)


async def get(pool: Pool, here: Any, refs: Any, port: int = 0) -> Block:
    """Read rows back, verified; an error of any is raised."""
    async with pool.use(LOCAL, here.ports[port]) as connection:
        result = verify(await connection.read(here, refs), ReadSlots(here, tuple(refs)))
    for err in result.errors.values():
        raise err
    (part,) = result.parts
    return part.block


def value(block: Block) -> torch.Tensor:
    """Field a."""
    out: torch.Tensor = block.columns["a"].values  # type: ignore[attr-defined]
    return out


@pytest.mark.parametrize("checksum", [False, True], ids=["plain", "checksum"])
async def test_payload_travels_over_ucx_in_pieces(checksum: bool) -> None:  # noqa: FBT001 - a parameter of the test
    """40 MB put and read back through another port: several messages, one request each."""
    async with hosted(ucx=True, arena_bytes=96 << 20, max_slot_bytes=64 << 20, checksum=checksum) as host:
        here = ref_of(host.report())
        block = Block.from_fields({"a": torch.randn(10, 1 << 20)}, 10)
        async with client() as pool:
            refs = await put(pool, here, "op", block, checksum=checksum)
            assert torch.equal(value(await get(pool, here, refs, port=1)), value(block))


async def test_many_slots_in_one_request() -> None:
    """64 slots of one row, in another order than they were put."""
    async with hosted(ucx=True, rows_per_slot=1) as host:
        here = ref_of(host.report())
        block = Block.from_fields({"a": torch.arange(64.0).repeat(1024, 1).T.contiguous()}, 64)
        async with client() as pool:
            refs = await put(pool, here, "op", block)
            assert len(refs) == 64
            back = await get(pool, here, refs[::-1])
            assert value(back)[:, 7].tolist() == list(range(63, -1, -1))


async def test_a_cancelled_read_harms_nobody() -> None:
    """T2, T3: cancelled at any point of a transfer, buffers dropped at once: no crash, the next read gets its own."""
    async with hosted(ucx=True, arena_bytes=64 << 20, max_slot_bytes=32 << 20) as host:
        here = ref_of(host.report())
        async with client() as pool:
            refs = await put(pool, here, "a", rows(4, 1 << 20, 1.0))
            others = await put(pool, here, "b", rows(4, 1 << 20, 2.0))
            for number in range(30):
                task = asyncio.ensure_future(get(pool, here, refs))
                await asyncio.sleep(0.0005 * (number % 15))
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                if number % 5 == 0:
                    assert (value(await get(pool, here, others)) == 2.0).all()
            assert host.service.table.counts()["reading"] == 0


async def test_a_cancelled_put_gives_its_slots_back_when_the_receive_has_ended() -> None:
    """P12: the host's own receive ends with the connection; then the put can be given up, and its space returns."""
    async with hosted(ucx=True, arena_bytes=64 << 20, max_slot_bytes=32 << 20) as host:
        here = ref_of(host.report())
        table = host.service.table
        async with client() as pool:
            for number in range(10):
                task = asyncio.ensure_future(put(pool, here, f"op{number}", rows(4, 1 << 20, 1.0)))
                await asyncio.sleep(0.004 * number)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                async with pool.use(LOCAL, here.ports[0]) as connection:
                    await connection.abort(f"op{number}", idle=True)
            async with asyncio.timeout(5):
                while table.slots:  # noqa: ASYNC110 - what is looked at has no event
                    await asyncio.sleep(0.01)
            assert table.extents.largest == host.arena.units


async def test_strangers_at_the_ucx_listener_are_sent_away() -> None:
    """It binds everywhere and takes tokens only: mute and wrong ones are closed, and the host serves on."""
    async with hosted(ucx=True, greeting_s=0.2) as host:
        here = ref_of(host.report())
        async with client() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                port = connection.welcome.ucx_port
            engine = Engine(devices="lo")
            wrong = torch.arange(16, dtype=torch.uint8).numpy()
            mute, bad = engine.connect(LOCAL, port), engine.connect(LOCAL, port)
            engine.send_token(bad, wrong)
            await asyncio.sleep(0.5)
            assert not host._claims or not host._claims._tasks
            await engine.close()
            del mute
            for _ in range(3):
                with socket.create_connection((LOCAL, port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            refs = await put(pool, here, "op", rows(1, 1 << 16))
            assert (value(await get(pool, here, refs)) == 1.0).all()


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
            assert time.process_time() - mine <= 0.1
            assert cpu_of(host.process.pid) - theirs <= 0.1


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
            await asyncio.sleep(2.0)
            spent = cpu_of(host.process.pid)
            await asyncio.sleep(1.0)
            assert cpu_of(host.process.pid) - spent <= 0.15
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()
            assert len(os.listdir(f"/proc/{host.process.pid}/fd")) <= before  # noqa: PTH208 - as above


def cpu_of(pid: int) -> float:
    """Processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
            async with asyncio.timeout(5):
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
                assert time.monotonic() - began < 1.0
            host.signal(signal.SIGCONT)
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()


async def hammer(pool: Pool, here: Any, refs: Any) -> None:
    """Read for ever, until there is nobody to read from."""
    while True:
        try:
            await get(pool, here, refs)
        except DataPlaneError:
            return


@pytest.mark.parametrize("by", ["SIGTERM", "end of its parent"])
async def test_a_host_ends_in_order_with_reads_in_flight(by: str) -> None:
    """X1: exit code 0, each time, and no segment is left."""
    async with client() as pool:
        for _ in range(3):
            with spawned(ucx=True) as host:
                refs = await put(pool, host.ref, "op", rows(1, 1 << 19))
                readers = [asyncio.ensure_future(hammer(pool, host.ref, refs)) for _ in range(4)]
                await asyncio.sleep(0.1)
                end(host, by)
                assert await host.gone() == 0
                async with asyncio.timeout(5):
                    await asyncio.gather(*readers)
                assert not (Path("/dev/shm") / host.told["arena"]).exists()


def end(host: Spawned, by: str) -> None:
    """End a host in one way or the other."""
    if by == "SIGTERM":
        host.signal(signal.SIGTERM)
    else:
        assert host.process.stdin is not None
        host.process.stdin.close()


class Known:
    """A directory that is told what is published, and when to say that the host was replaced."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], set[int]] = {}
        self.now = 1000.0
        self.fails: DataPlaneError | None = None
        self.reports: list[HostReport] = []

    async def next_epoch(self, host_id: str) -> int:
        """Count nothing."""
        return 5

    async def beat(self, report: HostReport) -> float:
        """Answer, or fail."""
        if self.fails is not None:
            raise self.fails
        self.reports.append(report)
        return self.now

    async def leave(self, host_id: str, epoch: int) -> None:
        """Strike it off."""
        self.reports.clear()

    async def live(self, host_id: str, epoch: int) -> dict[tuple[int, int], set[int]]:
        """Those that the test said."""
        return self.rows


async def test_what_was_never_published_is_taken_back_after_the_grace() -> None:
    """By the directory's clock, and longer than any put may take; what is published stays."""
    known = Known()
    async with hosted(known, ucx=True, grace_s=100.0, beat_s=0.02) as host:
        here = ref_of(host.report())
        async with client() as pool:
            kept, lost = await put(pool, here, "a", rows(2)), await put(pool, here, "b", rows(1))
            known.rows = {(kept[0].slot, kept[0].generation): {0}}
            assert await host.reconcile() == 0
            assert len(host.service.table.slots) == 2
            known.now = 1161.0  # the put may publish until 1060
            await asyncio.sleep(0.1)
            assert await host.reconcile() == 2
            assert await host.reconcile() == 0
            assert list(host.service.table.slots) == [kept[0].slot]
            for gone in (lost, kept):
                with pytest.raises(StaleSlotError):
                    await get(pool, here, gone)
            kept = [replace(kept[0], index=[0], rows=[0])]
            async with pool.use(LOCAL, here.ports[0]) as connection:
                await connection.abort("a", idle=True)
            assert (value(await get(pool, here, kept)) == 1.0).all()


async def test_a_host_serves_on_while_the_directory_is_away_and_ends_when_it_was_replaced() -> None:
    """Heartbeats fail: rows are read as before. Another life of the host has registered: this one ends."""
    known = Known()
    async with hosted(known, ucx=True, beat_s=0.02) as host:
        here = ref_of(host.report())
        async with client() as pool:
            refs = await put(pool, here, "a", rows(1))
            known.fails = DataPlaneUnavailable("away")
            await asyncio.sleep(0.1)
            assert (value(await get(pool, here, refs)) == 1.0).all()
            assert not host.ended.is_set()
            known.fails = DataPlaneUnavailable("replaced", retryable=False)
            async with asyncio.timeout(5):
                await host.ended.wait()
    assert not known.reports


async def test_two_hosts_of_one_name_do_not_share_an_arena() -> None:
    """The second one says so and does not start."""
    async with hosted(host_id="twin", ucx=False):
        with pytest.raises(DataPlaneUnavailable, match="lives"):
            async with hosted(host_id="twin", ucx=False):
                pass
