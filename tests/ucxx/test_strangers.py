"""Messages at the UCX listener that nobody awaits: they are not kept, and are never another client's payload."""

import asyncio
import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from asyncdp.transports.ucxx.payload.blocks import packed
from asyncdp.transports.ucxx.wire.engine import Engine
from asyncdp.transports.ucxx.wire.messages import Ready, Write
from tests.ucxx.clients import LOCAL, client, get, put, value
from tests.ucxx.hosts import needs_ucx, spawned
from tests.ucxx.segments import rows
from tests.ucxx.strangers import flood, rss_mib

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.client.connection_pool import Pool
    from tests.ucxx.hosts import Spawned

pytestmark = [pytest.mark.anyio, *needs_ucx()]


async def _ucx_port(pool: "Pool", host: "Spawned") -> int:
    async with pool.use(LOCAL, host.ref.ports[0]) as connection:
        await connection.ask()
        return connection.welcome.ucx_port


@pytest.mark.parametrize(
    ("kind", "nbytes", "count"), [("tag", 8000, 20_000), ("tag", 60_000, 2000), ("am", 8000, 20_000)]
)
async def test_messages_that_nobody_awaits_are_not_kept(kind: str, nbytes: int, count: int) -> None:
    """A2: hundreds of MB in messages of a stranger who shows no token: it keeps next to none, clients are served."""
    with spawned(ucx=True, inline_bytes=0) as host:
        async with client() as pool:
            refs = await put(pool, host.ref, "op", rows(4, 1 << 14))
            port = await _ucx_port(pool, host)
            before = most = rss_mib(host.process.pid)
            stranger = flood(port, kind, nbytes, count)
            try:
                async with asyncio.timeout(60):
                    while stranger.poll() is None:
                        assert (value(await get(pool, host.ref, refs)) == 1.0).all()
                        most = max(most, rss_mib(host.process.pid))
                        await asyncio.sleep(0.01)
            finally:
                stranger.kill()
                stranger.wait()
            assert stranger.returncode == 0  # all were sent
            assert most - before < 40
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()


async def test_tags_of_transfers_cannot_be_foretold() -> None:
    """A3: what one transfer was given says nothing of the next: they do not count, and differ in high bits and low."""
    engine = Engine(devices="lo")
    tags = [engine.next_tag() for _ in range(64)]
    await engine.close()
    steps = {after - before for before, after in itertools.pairwise(tags)}
    assert len(steps) == 63
    for shift in (0, 20, 40, 56):
        assert len({tag >> shift & 63 for tag in tags}) > 16


async def test_who_saw_one_ready_cannot_forge_the_next_payload() -> None:
    """A3: messages with all tags that may follow the one that was seen: the victim's rows are its own all the same."""
    with spawned(ucx=True, inline_bytes=0) as host:
        async with client(per_port=2) as pool, pool.use(LOCAL, host.ref.ports[0]) as attacker:
            engine, endpoint = await attacker._tied()
            fields, epoch = ("a",), host.ref.epoch
            granted = await attacker.reserve(host.ref, "mine", fields, [1024], 0, ttl_s=60.0, wait_s=0.0, lane=False)
            slot, generation, _, _ = granted.grants[0]
            await attacker._control.send(Write("mine", [(slot, generation, 1024)], epoch))
            ready = await attacker._control.expect(Ready)
            forged: Any = np.full(1024, 7, np.uint8)
            nexts = {
                ready.tag + (number << shift) for number in range(1, 9) for shift in (0, 8, 16, 20, 22, 24, 32, 40)
            }
            for tag in nexts:
                engine.send(endpoint, tag & (1 << 62) - 1, forged)
            await asyncio.sleep(0.05)
            refs = await put(pool, host.ref, "theirs", rows(1, 1 << 14))
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()
            engine.send(endpoint, ready.tag, forged)


async def test_a_write_of_many_messages_is_awaited_message_by_message() -> None:
    """Of a write that has more messages than are received at once, none comes before its receive: none is dropped."""
    with spawned(ucx=True, inline_bytes=0, arena_bytes=256 << 20) as host:
        async with client() as pool:
            block = rows(80, 1 << 18)
            refs = await put(pool, host.ref, "op", block)
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()


async def test_a_message_shorter_than_announced_is_not_reported_as_written() -> None:
    """A3: a client breaks off its own payload: its connection ends, nothing is READY, others are served."""
    with spawned(ucx=True, inline_bytes=0) as host:
        async with client(per_port=2) as pool:
            refs = await put(pool, host.ref, "theirs", rows(1, 1 << 14))
            for size, sent in ((100096, 60096), (100096, 100032), (100096, 0), (2 << 20, 1 << 20)):
                async with pool.use(LOCAL, host.ref.ports[0]) as attacker:
                    engine, endpoint = await attacker._tied()
                    data = packed(rows(1, (size - 64) // 4))
                    assert len(data) == size
                    given: dict[str, Any] = {"ttl_s": 60, "wait_s": 0, "lane": False}
                    granted = await attacker.reserve(host.ref, f"op{sent}", ("a",), [size - 64], 0, **given)
                    slot, generation, _, _ = granted.grants[0]
                    await attacker._control.send(Write(f"op{sent}", [(slot, generation, size)], host.ref.epoch))
                    ready = await attacker._control.expect(Ready)
                    await engine.send(endpoint, ready.tag, data[:sent].copy()).wait()
                    with pytest.raises(ConnectionResetError):
                        await attacker._control.receive()
                    attacker.spend()
            assert (value(await get(pool, host.ref, refs)) == 1.0).all()
            async with pool.use(LOCAL, host.ref.ports[0]) as again:
                assert (await again.ask())["ready"] == 1
