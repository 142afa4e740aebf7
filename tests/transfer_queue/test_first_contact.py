"""The first call of a client where a server does not answer: bounded, typed, and it knows who is lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch
from zmq.sugar.context import Context

from asyncdp import DataPlaneTimeout, DataPlaneUnavailable, build_data_plane_client
from asyncdp.transports.transfer_queue.connection import connecting, link
from asyncdp.transports.transfer_queue.connection.heartbeat import Heartbeat

if TYPE_CHECKING:
    from asyncdp.client import Client
    from tests.transfer_queue.ray_cluster import RayCluster
    from tests.transfer_queue.servers import Servers

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Begin = Callable[..., "Client"]


async def test_a_paused_controller_ends_the_first_call_in_its_time(plane: Begin, servers: Servers) -> None:
    """Promise 10: TransferQueue's handshake waits 4 s, which no call has to; then the same client works."""
    owner = plane(servers)
    worker = build_data_plane_client(owner.attach_config(), bootstrap=False)
    servers.pause(servers.endpoints.controller)
    began = time.monotonic()
    try:
        with pytest.raises((DataPlaneTimeout, DataPlaneUnavailable)):
            await worker.ping(timeout_s=0.5)
        assert time.monotonic() - began < 60.0
    finally:
        servers.resume(servers.endpoints.controller)
    await worker.ping()
    await worker.close()


async def test_a_dead_controller_ends_the_first_call_at_once(plane: Begin, servers: Servers) -> None:
    """T1: refused by the machine, it is DataPlaneUnavailable, not a handshake that nobody answers."""
    config = plane(servers).attach_config()
    servers.kill(servers.endpoints.controller)
    worker = build_data_plane_client({**config, "layers": {"slot_retry": {"max_attempts": 1}}}, bootstrap=False)
    began = time.monotonic()
    with pytest.raises(DataPlaneUnavailable) as caught:
        await worker.put_samples(["a"], "p", {"x": torch.ones(1)}, timeout_s=30)
    assert time.monotonic() - began < 29.0  # by its refusal, not by the call's timeout
    assert not caught.value.ambiguous
    await worker.close()


async def test_a_directory_of_another_version_is_refused_by_name(
    plane: Begin, lasting: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old clients of a new plane and new ones of an old: said at the first call, and no plane is begun beside it."""
    owner = plane(lasting)
    monkeypatch.setattr(link, "VERSION", 1)
    worker = build_data_plane_client(owner.attach_config(), bootstrap=False)
    words = "runs version 2 of asyncdp's directory, this client speaks 1: use one release"
    with pytest.raises(DataPlaneUnavailable, match=words):
        await worker.put_samples(["a"], "p", {"x": torch.ones(1)})
    await worker.close()
    with pytest.raises(DataPlaneUnavailable, match=words):
        plane(lasting)
    monkeypatch.undo()
    await owner.ping()


async def test_a_connection_that_nobody_waits_for_is_closed(
    plane: Begin, lasting: RayCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 11: cancelled in the handshake; left to the garbage collector, libzmq could wait for ever."""
    config = plane(lasting).attach_config()
    closed, go = threading.Event(), threading.Event()

    class Slow(connecting.Client):
        def __init__(self, *args: Any) -> None:
            assert go.wait(120)
            super().__init__(*args)

        def close(self) -> None:
            super().close()
            closed.set()

    monkeypatch.setattr(connecting, "Client", Slow)
    worker = build_data_plane_client(config, bootstrap=False)
    with pytest.raises((DataPlaneTimeout, DataPlaneUnavailable)):
        await worker.ping(timeout_s=0.3)
    go.set()
    assert await anyio.to_thread.run_sync(closed.wait, 10)
    await worker.ping()
    await worker.close()


async def test_a_client_that_just_came_names_the_rows_of_a_silent_unit(plane: Begin, servers: Servers) -> None:
    """Who restarts after a fault asks for just that: lost_keys and depth are those of a client that saw it happen."""
    owner = plane(servers, transfer_queue={"split_bytes": 1})
    await owner.register_partition("p", ["x"], 8, ["train"])
    await owner.put_samples([f"s{at}" for at in range(8)], "p", {"x": torch.arange(8.0)})
    servers.pause(servers.endpoints.units[0])
    try:
        for ask in ("depth", "list_metadata"):
            worker = build_data_plane_client(owner.attach_config(), bootstrap=False)
            answer = await getattr(worker, ask)("p")
            if ask == "list_metadata":
                answer = sum(not group.lost_keys for group in answer)
            assert answer == 4, ask
            await worker.close()
    finally:
        servers.resume(servers.endpoints.units[0])


async def test_a_machine_that_is_off_is_down_after_the_heartbeats_time() -> None:
    """Its silence is news: TCP would go on trying for minutes."""
    with socket.socket() as off:
        off.bind(("127.0.0.1", 0))
        off.listen(0)
        waiting = []
        for _ in range(8):  # nobody accepts: once its queue is full the kernel drops what comes, as a dead machine does
            waiting.append(socket.socket())
            waiting[-1].setblocking(False)  # noqa: FBT003 - the standard library's signature
            waiting[-1].connect_ex(off.getsockname())
        await anyio.sleep(0.1)
        context: Any = Context()
        address = f"tcp://127.0.0.1:{off.getsockname()[1]}"
        heartbeat = Heartbeat(context, "the unit", address, interval_s=0.05, timeout_s=0.3)
        try:
            assert not heartbeat.down
            with anyio.fail_after(60):
                await heartbeat.heard()
            assert heartbeat.down
            assert not heartbeat.refused
        finally:
            heartbeat.close()
            context.term()
            for one in waiting:
                one.close()
