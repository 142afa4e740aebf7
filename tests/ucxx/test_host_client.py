import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import HostRef, ReadSlots
from asyncdp.errors import DataPlaneNotReady, DataPlaneUnavailable, DataPlaneWriteError, StaleSlotError
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE, Block
from asyncdp.transports.ucxx.client.host_client import HostClient, Route
from asyncdp.transports.ucxx.host import session
from asyncdp.transports.ucxx.host.host import Host
from asyncdp.transports.ucxx.payload import payload as payload_module
from asyncdp.transports.ucxx.slots.writer_process import Process
from tests.ucxx.hosts import hosted, pool_of, ref_of
from tests.ucxx.segments import rows

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def reaching(host: Host, *, lane: bool = True) -> AsyncIterator[tuple[HostClient, HostRef, Route]]:
    """A client of a host, and where that is."""
    report = host.report()
    with pool_of() as pool:
        host_client = HostClient(pool, PICKLE, BufferPool(), lane=lane)
        yield host_client, ref_of(report), Route(report.address, report.boot_id, report.arena)
        await host_client.close()


async def put(host_client: HostClient, here: HostRef, route: Route, op_id: str, block: Block) -> Any:
    """Reserve and write."""
    sizes = block.row_nbytes().tolist()
    refs = await host_client.reserve(here, route, op_id, tuple(block.columns), sizes, 0, ttl_s=5.0)
    over_lane = host_client.lane_of(here, route) is not None
    assert await host_client.write(here, route, op_id, refs, block) is not over_lane
    return refs


@pytest.mark.parametrize(("writes", "reads"), [(True, True), (True, False), (False, True), (False, False)])
async def test_lane_and_wire_see_the_same_rows(*, writes: bool, reads: bool) -> None:
    """Whoever wrote them, and whoever reads them."""
    ragged = torch.nested.nested_tensor([torch.arange(k) for k in (2, 0, 3)], layout=torch.jagged)
    block = Block.from_fields({"a": torch.randn(3, 4), "r": ragged, "o": ["x", None, (1, 2)]}, 3)
    async with (
        hosted() as host,
        reaching(host, lane=writes) as (writer, here, route),
        reaching(host, lane=reads) as (reader, _, _),
    ):
        assert (writer.lane_of(here, route) is not None) == writes
        refs = await put(writer, here, route, "op", block)
        picked = tuple(replace(ref, index=[2, 0], rows=[0, 1]) for ref in refs)
        result = verify(await reader.read(here, route, picked), ReadSlots(here, picked))
        assert not result.errors
        assert result.through_port is not reads
        td = result.parts[0].block.to_tensordict()
        assert torch.equal(td["a"], block.columns["a"].values[[2, 0]])  # type: ignore[attr-defined]
        assert [row.tolist() for row in td["r"].unbind()] == [[0, 1, 2], [0, 1]]
        assert td["o"] == [(1, 2), "x"]
        assert await reader.drop(here, route, [(refs[0].slot, refs[0].generation, [0], ())]) == 1
        assert isinstance((await reader.read(here, route, picked)).errors[0], StaleSlotError)


async def test_errors_name_the_host_by_its_id() -> None:
    """A connection that is refused, that breaks, or whose request is refused: by the name that users know."""
    async with hosted() as host, reaching(host, lane=False) as (host_client, here, route):
        refs = await put(host_client, here, route, "op", rows(1))
        with pytest.raises(DataPlaneWriteError) as refused:
            await host_client.write(here, route, "nobody's", refs, rows(1))
        (connection,) = host_client._pool._idle[route.address, here.ports[0]]
        connection._control._transport.abort()
        with pytest.raises(DataPlaneUnavailable) as broken:
            await host_client.read(here, route, refs)
        await host.stop()
        with pytest.raises(DataPlaneUnavailable) as gone:
            await host_client.read(here, route, refs)
    for caught in (refused, broken, gone):
        assert (caught.value.host, caught.value.port) == (here.id, here.ports[0])


async def test_another_machine_has_no_lane() -> None:
    """Told by the boot id and a readable arena, never by the address."""
    async with hosted() as host, reaching(host) as (host_client, here, route):
        assert host_client.lane_of(here, replace(route, boot_id="another")) is None
        assert host_client.lane_of(HostRef(here.id, here.epoch + 1, here.ports), route) is None
        assert host_client.lane_of(HostRef("another", here.epoch, here.ports), route) is None


async def test_a_put_that_was_cancelled_on_the_lane_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any point of it: after the abort all space is back, and what arrives late is refused."""
    monkeypatch.setattr(payload_module, "PIECE_BYTES", 1 << 16)
    async with hosted() as host, reaching(host) as (host_client, here, route):
        for turns in range(12):
            task = asyncio.ensure_future(put(host_client, here, route, f"op{turns}", rows(2, 1 << 18)))
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await host_client.abort(here, route, f"op{turns}")
            async with asyncio.timeout(60):
                while host.service.table.slots:
                    await asyncio.sleep(0.005)
                    host.service.table.sweep(0.0)
            with pytest.raises(DataPlaneWriteError):
                await put(host_client, here, route, f"op{turns}", rows(1))
        assert host.service.table.extents.largest == host.arena.units


@pytest.mark.parametrize("by_itself", [False, True])
async def test_an_abort_waits_for_a_copy_that_is_under_way(monkeypatch: pytest.MonkeyPatch, *, by_itself: bool) -> None:
    """Its space is not used again before the writer stopped, whoever gives the put up."""
    monkeypatch.setattr(payload_module, "PIECE_BYTES", 1 << 16)
    async with hosted() as host, reaching(host) as (host_client, here, route):
        task = asyncio.ensure_future(put(host_client, here, route, "op", rows(1, 1 << 19)))
        while not host_client._copying:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0)
        free, copying = host.service.table._free, []
        watched = lambda slot: copying.append(bool(host_client._copying)) or free(slot)  # noqa: E731 - a spy
        monkeypatch.setattr(host.service.table, "_free", watched)
        if by_itself:
            assert await host_client.abort(here, route, "op") == 0
        else:
            async with host_client._use(here, route, None) as connection:
                assert await connection.abort("op", idle=False) == 1
            assert host.service.table.counts()["given_up"] == 1
        with pytest.raises(DataPlaneWriteError, match="given up"):
            await task
        host.service.table.sweep(0.0)
        assert not host.service.table.slots
        assert copying == [False]


async def test_only_the_writer_can_say_that_it_copies_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another client that names the same put gives nothing up: the slot is kept, and its writer may still end it."""
    async with hosted() as host, reaching(host) as (host_client, here, route):
        await host_client.reserve(here, route, "op", ("a",), [32], 0, ttl_s=5.0)
        monkeypatch.setattr("asyncdp.transports.ucxx.client.connection.this_process", lambda: Process(os.getpid(), 1))
        async with reaching(host) as (other, _, _):
            assert await other.abort(here, route, "op") == 0
        assert host.service.table.counts()["writing"] == 1
        assert await host_client.abort(here, route, "op") == 0


async def test_a_lane_that_was_not_granted_once_is_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host did not find the socket of this process: a long row is DataPlaneUnavailable, the next put is written."""
    with monkeypatch.context() as patched:
        async with hosted() as host, reaching(host) as (host_client, here, route):
            patched.setattr(session, "holds_socket", lambda *_: False)
            block = rows(1, 1 << 18)
            refs = await host_client.reserve(
                here, route, "op", tuple(block.columns), block.row_nbytes().tolist(), 0, ttl_s=5.0
            )
            with pytest.raises(DataPlaneUnavailable, match="granted no shared memory") as caught:
                await host_client.write(here, route, "op", refs, block)
            assert caught.value.retryable
            patched.undo()
            await put(host_client, here, route, "op2", block)


async def test_a_full_host_is_not_ready_on_the_lane_too() -> None:
    """Space is reserved before anything is copied."""
    async with hosted(on_full="raise") as host, reaching(host) as (host_client, here, route):
        for at in range(2):
            await put(host_client, here, route, f"op{at}", rows(1, 3 << 18))
        with pytest.raises(DataPlaneNotReady):
            await put(host_client, here, route, "more", rows(1, 3 << 18))


async def test_a_host_without_ports_is_unavailable() -> None:
    """It was struck off the directory."""
    async with hosted() as host, reaching(host, lane=False) as (host_client, here, route):
        with pytest.raises(DataPlaneUnavailable):
            await host_client.ask(HostRef(here.id, here.epoch, ()), route)
        assert (await host_client.ask(here, route))["epoch"] == here.epoch
