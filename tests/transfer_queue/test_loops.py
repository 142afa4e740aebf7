"""Loops, fallbacks, names: where this transport meets its surroundings."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import Client, DataPlaneClosed, DataPlaneUnavailable, DataPlaneUnsupported, stack
from asyncdp.rows.device_memory import Staging
from asyncdp.transports.transfer_queue import TQTransport, private
from asyncdp.transports.transfer_queue.endpoints import Endpoints
from tests.transfer_queue.servers import Servers, config_for
from tests.unit.test_device_memory import StandIn, on_device

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.transfer_queue.ray_cluster import RayCluster


def test_under_trio_it_says_what_it_needs(lasting: RayCluster) -> None:
    """A clear error in words, not one from deep within."""
    client = Client(TQTransport(config_for(lasting.endpoints, "trio"), bootstrap=False))

    async def use() -> None:
        with pytest.raises(DataPlaneUnsupported, match="asyncio"):
            await client.ping()

    anyio.run(use, backend="trio")


def test_one_client_in_two_loops_one_after_the_other(lasting: RayCluster) -> None:
    """T9: sockets of the first loop are left behind, the second gets its own."""
    client = stack(TQTransport(config_for(lasting.endpoints, "two-loops")))

    async def use(name: str) -> int:
        await client.register_partition("p", ["x"], 1, ["train"])
        await client.put_samples([name], "p", {"x": torch.ones(1)})
        return (await client.describe("p")).size

    assert asyncio.run(use("a")) == 1
    assert asyncio.run(use("b")) == 2
    asyncio.run(client.close())


@pytest.mark.anyio
async def test_tensors_of_a_device_are_put_through_pinned_memory(
    plane: Callable[..., Client], lasting: RayCluster
) -> None:
    """Each is copied once; a stand-in plays the device."""
    client, device = plane(lasting), StandIn()
    client.env.staging = Staging(device)
    await client.register_partition("p", ["x", "h"], 64, ["train"])
    await client.put_samples(["a", "b"], "p", {"x": on_device(torch.arange(2)), "h": torch.ones(2)})
    assert len(device.copies) == 1
    assert (await client.get_samples(["b", "a"], "p", ["x"]))["x"].tolist() == [1, 0]


@pytest.mark.anyio
@pytest.mark.slow
async def test_close_ends_what_waits(plane: Callable[..., Client], servers: Servers) -> None:
    """X2: a call that hangs in a paused controller is told at once that the client was closed."""
    client = plane(servers)
    await client.ping()
    servers.pause(servers.endpoints.controller)
    results: list[Any] = []

    async def call() -> None:
        try:
            results.append(await client.ping(timeout_s=300))
        except Exception as err:  # noqa: BLE001 - looked at below
            results.append(err)

    with anyio.fail_after(60):
        async with anyio.create_task_group() as group:
            group.start_soon(call)
            await anyio.sleep(0.2)
            await client.close()
    servers.resume(servers.endpoints.controller)
    assert isinstance(results[0], (DataPlaneClosed, DataPlaneUnavailable)), results


@pytest.mark.anyio
async def test_calls_at_once_may_report_the_same_garbage(plane: Callable[..., Client], lasting: RayCluster) -> None:
    """What one of them reported swept is no trouble to the others: a put that happened is not told as failed."""
    client = plane(lasting)
    await client.register_partition("p", ["x"], 64, ["train"])
    for _ in range(3):
        async with anyio.create_task_group() as group:
            for at in range(16):
                group.start_soon(client.put_samples, [f"r{at}"], "p", {"x": torch.full((1,), float(at))})
    assert (await client.get_samples([f"r{at}" for at in range(16)], "p", ["x"]))["x"].tolist() == list(range(16))


@pytest.mark.anyio
@pytest.mark.slow
async def test_a_controller_with_another_sampler_is_named() -> None:
    """A TransferQueue that is not ours, or was restarted by somebody else: typed, at once."""
    foreign = Servers(units=1, ours=False)
    try:
        client = stack(TQTransport(config_for(foreign.endpoints, "none"), bootstrap=False), max_attempts=1)
        with pytest.raises(DataPlaneUnavailable, match="serves no asyncdp plane"):
            await client.ping()
        await client.close()
    finally:
        foreign.close()


def test_what_nothing_can_stand_in_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Public calls that are gone or lack a parameter: opening says so (test_public_path.py has what has a stand-in)."""
    from transfer_queue.client import AsyncTransferQueueClient

    server = {"id": "c", "ip": "127.0.0.1", "ports": {"handshake_socket": 1, "request_handle_socket": 2}}
    endpoints = Endpoints.from_config({"controller": server, "units": []})
    monkeypatch.setattr(AsyncTransferQueueClient, "async_kv_retrieve_meta", lambda _self, keys: keys)
    with pytest.raises(DataPlaneUnsupported, match=r"async_kv_retrieve_meta\(partition_id, create\)"):
        private.Client("me", endpoints)
    monkeypatch.delattr(AsyncTransferQueueClient, "close")
    with pytest.raises(DataPlaneUnsupported, match=r"AsyncTransferQueueClient\.close"):
        private.Client("me", endpoints)


@pytest.mark.parametrize("spoilt", [{}, {"controller": {}, "units": []}, {"controller": 3, "units": 4}])
def test_endpoints_of_another_form_are_refused(spoilt: Any) -> None:
    """X7: ValueError that names the key."""
    with pytest.raises(ValueError, match=r"transfer_queue\.endpoints"):
        Endpoints.from_config(spoilt)


def test_another_backend_than_that_of_the_plane_is_refused(lasting: RayCluster) -> None:
    """The storage units of a plane of TransferQueue's own hold no segments of Mooncake."""
    with pytest.raises(ValueError, match="mooncake_cpu"):
        TQTransport(config_for(lasting.endpoints, "m", backend="mooncake_cpu"))


def test_knobs_that_the_user_set_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """TransferQueue's own timeouts are set from ours, before it is imported, unless somebody chose them."""
    import os
    import sys

    monkeypatch.delitem(sys.modules, "transfer_queue", raising=False)
    monkeypatch.setenv("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "7")
    monkeypatch.delenv("TQ_SOCKET_POOL_SIZE", raising=False)
    private.prepare_environment(60)
    assert os.environ["TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT"] == "7"
    assert os.environ["TQ_SOCKET_POOL_SIZE"] == "16"
