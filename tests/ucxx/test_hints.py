"""Reads of rows that were claimed or put: the meta says where they lie, so that the directory is not asked again."""

from __future__ import annotations

import os
import pickle
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import stack
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, SampleNotFound, StaleSlotError
from asyncdp.testing.contract.rig import BASE
from asyncdp.transports.ucxx import UCXXTransport
from tests.ucxx.seen_plane import IDS, Seen, seen_plane

if TYPE_CHECKING:
    from asyncdp import KVBatchMeta
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def seen(server: EmbeddedServer, namespace: str, connect: Callable[..., Directory]) -> AsyncIterator[Seen]:
    """Give a plane, and in it a partition of which two rows of ``x`` were put."""
    ucxx = {"namespace": namespace, "devices": "lo", "directory": {"read_by_meta": True}}
    async with seen_plane(server, namespace, connect, ucxx=ucxx) as made:
        yield made


async def claimed(seen: Seen, *fields: str) -> KVBatchMeta:
    """Claim the two rows."""
    meta: KVBatchMeta = await seen.client.claim_meta("p", "t", list(fields or ("x",)), 2)
    assert meta.sample_ids == IDS
    return meta


def hinted(meta: KVBatchMeta, *hints: Any) -> KVBatchMeta:
    """Return the meta with these hints."""
    handles = [handle and handle._replace(hint=hint) for handle, hint in zip(meta.handles or (), hints, strict=True)]
    return replace(meta, handles=handles)


async def test_a_claimed_batch_is_read_without_a_look_up(seen: Seen) -> None:
    """Also by who got the meta from another process, once he knows the types of the partition."""
    meta = await claimed(seen)
    await seen.client.get_data(meta)
    seen.asked.clear()
    seen.transport._directory.forget_hosts()
    assert (await seen.client.get_data(meta))["x"].tolist() == [[0.0] * 3] * 2
    assert (await seen.client.get_data(meta.drop(["a"])))["x"].tolist() == [[0.0] * 3]
    assert not seen.asked, "nor are the hosts listed anew"
    there = pickle.loads(pickle.dumps(meta))
    async with seen.other() as other:
        for _ in range(2):
            assert (await other.get_data(there))["x"].tolist() == [[0.0] * 3] * 2
    bare = hinted(meta, None, None)
    assert (bare.handles == meta.handles, bare.handles != meta.handles) == (True, False)
    assert len({*(bare.handles or ()), *(meta.handles or ())}) == 2
    assert "hint" not in repr(meta.handles)


async def test_by_default_the_directory_is_asked(
    server: EmbeddedServer, namespace: str, connect: Callable[..., Directory]
) -> None:
    """Rows that a cut off call has removed are gone for all at once, and metas stay small."""
    async with seen_plane(server, namespace, connect) as seen:
        meta = await claimed(seen)
        assert [handle and handle.hint for handle in meta.handles or ()] == [None, None]
        written = await seen.client.put_samples(["c"], "p", {"x": torch.ones(1, 3)})
        assert [handle and handle.hint for handle in written.handles or ()] == [None]
        await seen.client.get_data(meta)
        assert seen.asked["locate"] == 1
        await seen.cut(seen.client.clear_samples, ["a"], "p")
        async with seen.other() as other:
            with pytest.raises(SampleNotFound):
                await other.get_samples(["a"], "p", ["x"])
            with pytest.raises(StaleSlotError):
                await other.get_data(meta.drop(["b"]))


async def test_the_meta_of_a_put_says_where_its_rows_lie(seen: Seen) -> None:
    """Of new rows, of some that exist, and of a field that rows get; what a put did not write is looked up."""
    client = seen.client
    meta = await client.put_samples(["b", "c"], "p", {"x": torch.full((2, 3), 2.0)})
    there = pickle.loads(pickle.dumps(meta))
    assert (await client.get_data(there))["x"].tolist() == [[2.0] * 3] * 2
    scored = await client.put_samples(meta, "p", {"y": torch.tensor([4, 5])})
    assert (await client.get_data(scored))["y"].tolist() == [4, 5]
    assert seen.asked["locate"] == 0
    assert (await client.get_data(scored, ["x", "y"]))["x"].tolist() == [[2.0] * 3] * 2
    assert seen.asked["locate"] == 1
    bare = await client.put_samples(["b"], "p", None, [{"seen": 1}])
    assert (await client.get_data(bare, ["x"]))["x"].tolist() == [[2.0] * 3]


async def test_what_was_put_after_the_claim_is_read(seen: Seen) -> None:
    """A field that was replaced or added since is looked up."""
    meta = await claimed(seen)
    async with seen.other() as other:
        await other.put_samples(["b"], "p", {"x": torch.full((1, 3), 7.0)})
    assert (await seen.client.get_data(meta))["x"].tolist() == [[0.0] * 3, [7.0] * 3]
    assert seen.asked["locate"] == 1
    await seen.client.put_samples(meta, "p", {"y": torch.tensor([4, 5])})
    assert (await seen.client.get_data(meta, ["y", "x"]))["y"].tolist() == [4, 5]


async def test_a_vocabulary_that_grew(seen: Seen) -> None:
    """Codes are read by the newest vocabulary, whether it grew after the claim or before another client's."""
    async with seen.other() as other:
        await other.register_partition("e", ["w"], 8, ["t", "u"], enums={"w": ["no"]})
        await other.put_samples(IDS, "e", {"w": ["no", "no"]})
        meta = await seen.client.claim_meta("e", "t", ["w"], 2)
        await other.register_partition("e", ["w"], 8, ["t"], enums={"w": ["no", "yes"]})
        await other.put_samples(["a"], "e", {"w": ["yes"]})
        theirs = await other.claim_meta("e", "u", ["w"], 2)
    seen.asked.clear()
    assert list((await seen.client.get_data(theirs))["w"]) == ["yes", "no"]
    assert seen.asked["locate"], "the types that it knew were older than those of the claim"
    assert list((await seen.client.get_data(meta))["w"]) == ["yes", "no"]


async def test_rows_that_are_gone_are_stale(seen: Seen) -> None:
    """Cleared, put anew, or dropped with their partition, whose fields have other numbers now."""
    await seen.client.put_samples(IDS, "p", {"y": torch.tensor([4, 5])})
    meta = await claimed(seen, "x", "y")
    async with seen.other() as other:
        await other.clear_samples(["a"], "p")
        with pytest.raises(DataPlaneError) as caught:
            await seen.client.get_data(meta)
        assert isinstance(caught.value.errors[0], StaleSlotError)  # type: ignore[attr-defined]
        await other.put_samples(["a"], "p", {"x": torch.ones(1, 3), "y": torch.tensor([6])})
        with pytest.raises(StaleSlotError, match="'a'"):
            await seen.client.get_data(meta.drop(["b"]))
        await other.drop_partition("p")
        with pytest.raises(DataPlaneBadRequest, match="'p'"):
            await seen.client.get_data(meta)
        await other.register_partition("p", ["y", "x"], 8, ["t"])
        await other.put_samples(IDS, "p", {"y": torch.tensor([8, 9]), "x": torch.ones(2, 3)})
    with pytest.raises(StaleSlotError):
        await seen.client.get_data(meta)


async def test_hosts_are_listed_anew_before_one_may_count_as_dead(seen: Seen) -> None:
    """By the time of its last heartbeat: whoever removes rows tells no host that counts as dead."""
    meta = await claimed(seen)
    directory, began = seen.transport._directory, time.monotonic()
    await seen.client.get_data(meta)
    seen.asked.clear()
    directory._link.now = lambda: began + 2.0
    await seen.client.get_data(meta)
    assert not seen.asked
    directory._link.now = lambda: began + directory._settings.host_timeout_s
    await seen.client.get_data(meta)
    assert seen.asked == {"hosts": 1}


async def test_rows_that_were_cleared_are_gone_from_a_host_that_was_not_told() -> None:
    """It is paused, and counts as dead: nobody reads there what was cleared, not even when it goes on."""
    own = {
        "host": {"arena_bytes": 1 << 20, "ucx": False, "beat_s": 0.2},
        "directory": {"host_timeout_s": 1.5, "read_by_meta": True},
    }
    owner = UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "num_storage_units": 1, "ucxx": own})
    reader: Any = stack(UCXXTransport(owner.attach_config(), bootstrap=False))
    async with reader, stack(owner) as other:
        await reader.register_partition("p", ["x"], 8, ["t"])
        await reader.put_samples(IDS, "p", {"x": torch.zeros(2, 3)})
        meta = await reader.claim_meta("p", "t", ["x"], 2)
        assert (await reader.get_data(meta))["x"].tolist() == [[0.0] * 3] * 2
        assert owner.plane is not None
        os.kill(owner.plane.pids[0], signal.SIGSTOP)
        try:
            await other.clear_samples(["a"], "p", timeout_s=60)  # waits until the host counts as dead
            await other.clear_samples(["b"], "p", timeout_s=60)
            with pytest.raises(StaleSlotError):
                await reader.get_data(meta)
        finally:
            os.kill(owner.plane.pids[0], signal.SIGCONT)
        with anyio.fail_after(60):
            while not (await reader.list_hosts())[0].alive:  # noqa: ASYNC110 - in another process
                await anyio.sleep(0.05)
        with pytest.raises(StaleSlotError):
            await reader.get_data(meta.drop(["a"]))


async def test_damaged_hints_are_worth_nothing(seen: Seen) -> None:
    """What is no hint is ignored; damaged ones lead to a row or to a typed error."""
    meta = await claimed(seen)
    rng = random.Random(1)
    good = [handle and handle.hint for handle in meta.handles or ()]
    for strange in (None, b"", b"?", "text", 7, ("a",), good[0][:-9], good[0].partition(b" ")[0]):
        assert (await seen.client.get_data(hinted(meta, good[0], strange)))["x"].tolist() == [[0.0] * 3] * 2
    for _ in range(60):
        damaged = bytearray(rng.choice(good))
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            got = await seen.client.get_data(hinted(meta, good[0], bytes(damaged)), timeout_s=0.2)
        except DataPlaneError:
            continue
        assert got["x"].shape == (2, 3)
