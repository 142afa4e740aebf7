import asyncio
import itertools
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from asyncdp.errors import CorruptPayload, DataPlaneError, DataPlaneUnavailable, StaleSlotError
from asyncdp.rows.block import Block
from asyncdp.testing.contract.rig import until
from asyncdp.transports.ucxx.client import connection
from asyncdp.transports.ucxx.host.registration import HostReport
from asyncdp.transports.ucxx.payload.layout import Layout
from asyncdp.transports.ucxx.wire.engine import Engine
from tests.ucxx.clients import LOCAL, client, get, put, value
from tests.ucxx.hosts import hosted, needs_ucx, ref_of
from tests.ucxx.segments import rows

pytestmark = [pytest.mark.anyio, *needs_ucx()]


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


async def test_slots_of_all_sizes_in_one_put() -> None:
    """Small payloads share messages, large ones travel alone: each lands whole in its own slot, however they mix."""
    lengths = [1, 5_000, 200_000, 3, 120_000, *[60_000] * 40, 5_000_000, 2, 140_000, 7, 131_000]
    parts = [torch.full((length,), float(at)) for at, length in enumerate(lengths)]
    block = Block.from_fields({"a": torch.nested.nested_tensor(parts, layout=torch.jagged)}, len(lengths))
    async with hosted(ucx=True, arena_bytes=96 << 20, max_slot_bytes=32 << 20, rows_per_slot=1) as host:
        here = ref_of(host.report())
        async with client() as pool:
            for op_id in "ab":
                refs = await put(pool, here, op_id, block, checksum=True)
                assert len(refs) == len(lengths)
                back = await get(pool, here, refs)
                assert torch.equal(value(back), torch.cat(parts))
                assert back.row_nbytes().tolist() == [4 * length for length in lengths]


async def test_a_damaged_payload_is_told_once_all_are_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """P1: a part of the first of several messages is none: an error, no slot is READY, and all can be freed."""
    real = connection.segments_of
    count = itertools.count()

    def segments_of(part: Block, layout: Layout) -> Iterator[Any]:
        return real(part, layout) if next(count) != 1 else iter([np.zeros(layout.nbytes, np.uint8)])

    monkeypatch.setattr(connection, "segments_of", segments_of)
    async with hosted(ucx=True, arena_bytes=64 << 20, rows_per_slot=1) as host:
        here, table = ref_of(host.report()), host.service.table
        async with client() as pool:
            with pytest.raises(CorruptPayload):
                await put(pool, here, "op", rows(32, 1 << 16, 1.0))
            assert table.counts()["ready"] == 0
            assert table.counts()["writing"] == 32
            async with pool.use(LOCAL, here.ports[0]) as again:
                assert await again.abort("op", idle=False) == 0
            assert not table.slots
            refs = await put(pool, here, "other", rows(32, 1 << 16, 2.0))
            assert (value(await get(pool, here, refs)) == 2.0).all()


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
            await until(lambda: host.service.table.counts()["reading"] == 0)


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
            async with asyncio.timeout(60):
                while table.slots:  # noqa: ASYNC110 - what is looked at has no event
                    await asyncio.sleep(0.01)
            assert table.extents.largest == host.arena.units


async def test_strangers_at_the_ucx_listener_are_sent_away() -> None:
    """It binds everywhere and takes tokens only: mute and wrong ones are closed, and the host serves on."""
    async with hosted(ucx=True, greeting_s=1.5) as host:
        here = ref_of(host.report())
        async with client() as pool:
            async with pool.use(LOCAL, here.ports[0]) as connection:
                port = connection.welcome.ucx_port
            engine = Engine(devices="lo")
            seen: set[int] = set()
            wrong = torch.arange(16, dtype=torch.uint8).numpy()
            mute, bad = engine.connect(LOCAL, port), engine.connect(LOCAL, port)
            engine.send_token(bad, wrong)
            claims = host._claims
            assert claims is not None
            async with asyncio.timeout(60):
                while len(seen) < 2 or claims._tasks:
                    seen |= {id(task) for task in claims._tasks}
                    await asyncio.sleep(0.01)
            await engine.close()
            del mute
            for _ in range(3):
                with socket.create_connection((LOCAL, port)) as stranger:
                    stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            refs = await put(pool, here, "op", rows(1, 1 << 16))
            assert (value(await get(pool, here, refs)) == 1.0).all()


class Known:
    """A directory that is told what is published, and when to say that the host was replaced."""

    def __init__(self) -> None:
        self.rows: dict[tuple[int, int], set[int]] = {}
        self.now = 1000.0
        self.fails: DataPlaneError | None = None
        self.reports: list[HostReport] = []
        self.asked = 0

    async def asks(self, times: int = 2) -> None:
        """Wait until the host has told of itself so often: the answer of the last but one is then known to it."""
        wanted = self.asked + times
        async with asyncio.timeout(60):
            while self.asked < wanted:  # noqa: ASYNC110 - what is looked at has no event
                await asyncio.sleep(0.005)

    async def next_epoch(self, host_id: str) -> int:
        """Count nothing."""
        return 5

    async def beat(self, report: HostReport) -> float:
        """Answer, or fail."""
        self.asked += 1
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

    async def shared_secret(self) -> str | None:
        """Tell none."""
        return None

    async def reap(self) -> tuple[str, ...]:
        """Strike off nobody."""
        return ()


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
            await known.asks()
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
            await known.asks(3)
            assert (value(await get(pool, here, refs)) == 1.0).all()
            assert not host.ended.is_set()
            known.fails = DataPlaneUnavailable("replaced", retryable=False)
            async with asyncio.timeout(60):
                await host.ended.wait()
    assert not known.reports


async def test_two_hosts_of_one_name_do_not_share_an_arena() -> None:
    """The second one says so and does not start."""
    async with hosted(host_id="twin", ucx=False):
        with pytest.raises(DataPlaneUnavailable, match="runs"):
            async with hosted(host_id="twin", ucx=False):
                pass
