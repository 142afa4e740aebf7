"""Mooncake's own faults under a plane: a full store, a master that is killed or paused, a dead unit."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import (
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PartialReadError,
)
from asyncdp.transports.transfer_queue.mooncake.line import Line
from tests.transfer_queue.mooncake_servers import SIZES, MooncakeServers
from tests.transfer_queue.needs_mooncake import needs_mooncake

if TYPE_CHECKING:
    from asyncdp.client import Client

needs_mooncake()
pytestmark = [pytest.mark.anyio, pytest.mark.slow]

Begin = Callable[..., "Client"]
CONFIG = {"backend": "mooncake_cpu", **SIZES}
IDS = [f"s{at}" for at in range(32)]
#: What a client that is told of a master's silence may raise.
SILENT = (DataPlaneUnavailable, DataPlaneTimeout)


@pytest.fixture
def servers() -> Iterator[MooncakeServers]:
    """Give servers of one test's own, with little room."""
    mine = MooncakeServers(segment_bytes=64 << 20)
    yield mine
    mine.close()


async def filled(plane: Begin, servers: MooncakeServers, **layers: Any) -> Client:
    """Begin a plane with 32 samples; which of them lie on which unit is the plane's choice."""
    client = plane(servers, layers, transfer_queue={"split_bytes": 1}, **CONFIG)
    await client.register_partition("p", ["x"], 256, ["train"])
    await client.put_samples(IDS, "p", {"x": torch.arange(32.0)})
    return client


async def test_a_full_store_refuses_a_put_as_a_whole(plane: Begin, servers: MooncakeServers) -> None:
    """NotReady, none of its rows is there, what was there stays; and room that is made is room."""
    client = await filled(plane, servers, max_attempts=2)
    wide = torch.arange(16.0)[:, None].expand(16, 1 << 18)  # 16 MiB
    batches = [[f"w{number}-{at}" for at in range(16)] for number in range(16)]
    took: list[list[str]] = []

    async def fill() -> None:
        for ids in batches:
            await client.put_samples(ids, "p", {"wide": wide}, timeout_s=5)
            took.append(ids)

    with pytest.raises(DataPlaneNotReady, match="full"):
        await fill()
    assert took
    refused = batches[len(took)]
    listed = {one for group in await client.list_metadata("p") for one in group.keys}
    assert listed == {*IDS, *(one for ids in took for one in ids)}
    assert (await client.get_samples(IDS, "p", ["x"]))["x"].tolist() == list(range(32))
    await client.clear_samples(took[0], "p")
    await client.put_samples(refused, "p", {"wide": wide})
    assert (await client.get_samples(refused, "p", ["wide"]))["wide"][:, -1].tolist() == list(range(16))


async def test_a_dead_master_is_told(plane: Begin, servers: MooncakeServers) -> None:
    """Reads and puts are refused at once, what only the directory knows is still answered, and closing ends."""
    client = await filled(plane, servers, max_attempts=1, max_rounds=1)
    os.kill(servers.master.pid, signal.SIGKILL)
    line = Line(servers.master.address)
    with anyio.fail_after(30):
        while not line.is_dead():  # noqa: ASYNC110 - a process sets no event
            await anyio.sleep(0.01)
    for _ in range(2):
        with pytest.raises(DataPlaneUnavailable, match="master"):
            await client.get_samples(IDS, "p", ["x"], timeout_s=4)  # Mooncake itself would take five seconds
        with pytest.raises(DataPlaneUnavailable, match="master"):
            await client.put_samples(["new"], "p", {"x": torch.zeros(1)}, timeout_s=4)
    assert (await client.claim_meta("p", "train", ["x"], 4)).size == 4
    assert "new" not in {one for group in await client.list_metadata("p") for one in group.keys}
    with anyio.fail_after(60):
        await client.close()


async def test_a_unit_that_was_paused_for_long_has_its_rows(plane: Begin, servers: MooncakeServers) -> None:
    """Longer than Mooncake waits for a client's ping by default, which is ten seconds."""
    client = await filled(plane, servers)
    servers.pause(servers.endpoints.units[0])
    await anyio.sleep(15)
    servers.resume(servers.endpoints.units[0])
    with anyio.fail_after(60):
        while True:
            try:
                rows = await client.get_samples(IDS, "p", ["x"])
            except DataPlaneError:
                await anyio.sleep(0.1)
            else:
                break
    assert rows["x"].tolist() == list(range(32))


async def test_a_paused_master_holds_up_no_more_than_its_calls(plane: Begin, servers: MooncakeServers) -> None:
    """While it is stopped, calls end typed in their time; afterwards all that was acknowledged is there."""
    client = await filled(plane, servers)
    os.kill(servers.master.pid, signal.SIGSTOP)
    try:
        for _ in range(3):
            with pytest.raises(SILENT):
                await client.get_samples(IDS, "p", ["x"], timeout_s=1)
            with pytest.raises(SILENT):
                await client.put_samples(["new"], "p", {"x": torch.zeros(1)}, timeout_s=1)
        assert (await client.claim_meta("p", "train", ["x"], 4)).size == 4
    finally:
        os.kill(servers.master.pid, signal.SIGCONT)
    assert (await client.get_samples(IDS, "p", ["x"], timeout_s=60))["x"].tolist() == list(range(32))
    await client.put_samples(["new"], "p", {"x": torch.full((1,), 7.0)}, timeout_s=60)
    assert (await client.get_samples(["new"], "p", ["x"]))["x"].tolist() == [7.0]


async def test_rows_of_a_dead_unit_are_named(plane: Begin, servers: MooncakeServers) -> None:
    """Its segment is gone with it: its rows are listed as lost and named by a read, the others are read."""
    client = await filled(plane, servers)
    servers.kill(servers.endpoints.units[0])
    with pytest.raises(PartialReadError) as partial:
        await client.get_samples(IDS, "p", ["x"])
    assert len(partial.value.failed.sample_ids) == 16
    assert partial.value.rows["x"].tolist() == [int(one[1:]) for one in partial.value.ok.sample_ids]
    lost: set[str] = set()
    with anyio.fail_after(60):
        while lost != set(partial.value.failed.sample_ids):
            await anyio.sleep(0.05)
            lost = {key for group in await client.list_metadata("p") for key in group.lost_keys}
    await client.put_samples(["new"], "p", {"x": torch.zeros(1)})


async def test_one_tensor_put_many_times_at_once(plane: Begin, servers: MooncakeServers) -> None:
    """Large rows are sent from where they are; memory that another put sends already is copied. All come back."""
    client = plane(servers, {}, **CONFIG)
    await client.register_partition("p", ["x"], 256, ["train"])
    rows = torch.arange(4 << 17, dtype=torch.float32).view(4, 1 << 17)

    async def put(number: int) -> None:
        await client.put_samples([f"{number}-{at}" for at in range(4)], "p", {"x": rows})

    async with anyio.create_task_group() as group:
        for number in range(6):
            group.start_soon(put, number)
    for number in range(6):
        got = await client.get_samples([f"{number}-{at}" for at in range(4)], "p", ["x"])
        assert torch.equal(got["x"], rows)
    assert not servers.store._lent._regions
