"""Reads in shared memory, at once after the look-up, or before the directory has answered.

The meta of rows that were claimed or put says where they lay; the directory then only says whether they do still.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import Layer, default_layers, stack
from asyncdp.calls import CallContext, handles
from asyncdp.calls.slots import ReadResult, ReadSlots
from asyncdp.errors import CorruptPayload, DataPlaneBadRequest, DataPlaneError, SampleNotFound, StaleSlotError
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client.lane import Lane
from asyncdp.transports.ucxx.directory.requests import locating
from asyncdp.transports.ucxx.directory.server.link import MOST_AT_ONCE
from tests.ucxx.seen_plane import IDS, Seen, seen_plane

if TYPE_CHECKING:
    from asyncdp import KVBatchMeta
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio


@pytest.fixture
async def seen(
    server: EmbeddedServer, namespace: str, connect: Callable[..., Directory], monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Seen]:
    """Give a plane, and in it a partition of which two rows of ``x`` were put; no row is too few to be read at once."""
    monkeypatch.setattr(locating, "SMALL", 0)
    async with seen_plane(server, namespace, connect) as made:
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
    assert seen.asked == {"unmoved": 2}, "nor are the hosts listed anew"
    there = pickle.loads(pickle.dumps(meta))
    async with seen.other() as other:
        for _ in range(2):
            assert (await other.get_data(there))["x"].tolist() == [[0.0] * 3] * 2
    borrowed = await seen.client.get_data(meta, borrow=True)
    assert borrowed["x"].tolist() == [[0.0] * 3] * 2
    bare = hinted(meta, None, None)
    assert (bare.handles == meta.handles, bare.handles != meta.handles) == (True, False)
    assert len({*(bare.handles or ()), *(meta.handles or ())}) == 2
    assert "hint" not in repr(meta.handles)


async def test_of_few_rows_the_request_is_joined_with_others(
    server: EmbeddedServer, namespace: str, connect: Callable[..., Directory]
) -> None:
    """Up to 32 rows are looked up; more are read at once."""
    async with seen_plane(server, namespace, connect) as seen:
        ids = [f"s{at}" for at in range(33)]
        await seen.client.register_partition("q", ["x"], 64, ["t"])
        meta = await seen.client.put_samples(ids, "q", {"x": torch.arange(33)})
        assert (await seen.client.get_data(meta.drop(["s32"])))["x"].tolist() == list(range(32))
        assert (seen.asked["locate"], seen.asked["unmoved"]) == (1, 0)
        assert (await seen.client.get_data(meta))["x"].tolist() == list(range(33))
        assert (seen.asked["locate"], seen.asked["unmoved"]) == (1, 1)


@pytest.mark.parametrize("sees", [True, False])
async def test_a_layer_may_ask_for_every_read(
    server: EmbeddedServer, namespace: str, connect: Callable[..., Directory], *, sees: bool
) -> None:
    """By default a layer of one's own, as those that inject faults, gets each read of slots; else none is sent."""

    class Counting(Layer):
        sees_reads = sees
        reads = 0

        @handles(ReadSlots)
        async def read(self, call: ReadSlots, ctx: CallContext) -> ReadResult:
            Counting.reads += 1
            return await self.inner.execute(call, ctx)

    assert Layer.sees_reads
    async with (
        seen_plane(server, namespace, connect) as seen,
        stack(UCXXTransport(seen.config, bootstrap=False), [*default_layers(), Counting]) as client,
    ):
        await client.get_samples(IDS, "p", ["x"])  # before it the client knows no host
        before = Counting.reads
        for borrow in (False, True):
            got = await client.get_samples(IDS, "p", ["x"], borrow=borrow)
            assert got["x"].tolist() == [[0.0] * 3] * 2
        assert Counting.reads - before == 2 * sees


async def test_what_cannot_be_read_at_once_is_read_as_ever(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slot that is stale by then is looked up again, one that has an error is read by ReadSlots, which says why."""
    await seen.client.get_samples(IDS, "p", ["x"])
    read = Lane.read
    errors: list[DataPlaneError] = []

    async def fails(self: Lane, refs: Any, **options: Any) -> Any:
        if not errors:
            return await read(self, refs, **options)
        return ReadResult((), dict.fromkeys(range(len(refs)), errors.pop()))

    monkeypatch.setattr(Lane, "read", fails)
    for problem in (StaleSlotError("it moved"), CorruptPayload("damaged")):
        errors.append(problem)
        assert (await seen.client.get_samples(IDS, "p", ["x"]))["x"].tolist() == [[0.0] * 3] * 2
        assert not errors


async def test_what_a_cut_off_call_has_removed_is_gone_for_all(seen: Seen) -> None:
    """Its host was not told, and would serve the rows still."""
    meta = await claimed(seen)
    await seen.client.get_data(meta)
    await seen.cut(seen.client.clear_samples, ["a"], "p")
    async with seen.other() as other:
        with pytest.raises(SampleNotFound):
            await other.get_samples(["a"], "p", ["x"])
        for client in (other, seen.client):
            with pytest.raises(DataPlaneError) as caught:
                await client.get_data(meta)
            assert isinstance(caught.value.errors[0], StaleSlotError)
    await seen.cut(seen.client.put_samples, ["b"], "p", {"x": torch.full((1, 3), 7.0)})
    assert (await seen.client.get_data(meta.drop(["a"])))["x"].tolist() == [[7.0] * 3]


async def test_handles_of_other_rows_are_no_hints(seen: Seen) -> None:
    """Whose ids and handles do not belong together gets an error, never the other row."""
    meta = await claimed(seen)
    await seen.client.get_data(meta)
    with pytest.raises(StaleSlotError):
        await seen.client.get_data(replace(meta, sample_ids=IDS[::-1]))


async def test_metas_of_several_claims(seen: Seen) -> None:
    """They are read at once where nothing moved in between; else they are looked up."""
    client = seen.client
    later = await client.put_samples(["c", "d"], "p", {"x": torch.full((2, 3), 2.0)})
    for moved in (False, True):
        first = await client.put_samples(IDS, "p", {"x": torch.ones(2, 3)}) if moved else await claimed(seen)
        both = replace(first, task_name=None).concat(later)
        seen.asked.clear()
        assert (await client.get_data(both, ["x"]))["x"][:, 0].tolist() == [float(moved)] * 2 + [2.0] * 2
        assert seen.asked["locate"] == moved


async def test_nothing_is_copied_in_vain_where_rows_move(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """After rows had moved, a read waits for the directory's answer; after it found them, the next one does not."""
    old = await claimed(seen)
    await seen.client.get_data(old)
    new = await seen.client.put_samples(IDS, "p", {"x": torch.ones(2, 3)})
    asked: list[bool] = []
    read, unmoved = Lane.read, seen.transport._directory.unmoved

    @asynccontextmanager
    async def watched(*args: Any) -> AsyncIterator[Any]:
        async with unmoved(*args) as answer:

            async def told() -> bool:
                asked.append(True)
                return await answer()

            asked.clear()
            yield told

    copies: list[int] = []

    async def counted(self: Lane, *args: Any, **options: Any) -> Any:
        copies.append(len(asked))
        return await read(self, *args, **options)

    monkeypatch.setattr(seen.transport._directory, "unmoved", watched)
    monkeypatch.setattr(Lane, "read", counted)
    for meta, when in ((old, [0, 1]), (old, [1]), (new, [1]), (new, [0]), (old, [0, 1])):
        copies.clear()
        assert (await seen.client.get_data(meta))["x"].tolist() == [[1.0] * 3] * 2
        assert copies == when, "how often the directory had answered when rows were copied"


async def test_a_read_that_is_cancelled_keeps_no_connection(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answer of the directory is never taken for that of the next request."""
    meta = await claimed(seen)
    await seen.client.get_data(meta)
    link: Any = seen.transport._directory._link
    before = len(link._transports)
    with monkeypatch.context() as patch:
        patch.setattr(Lane, "read", lambda *_, **__: anyio.sleep_forever())
        with anyio.move_on_after(0.2) as scope:
            await seen.client.get_data(meta)
        assert scope.cancelled_caught
        assert len(link._transports) == before - 1
        assert not link._idle
    assert (await seen.client.get_data(meta))["x"].tolist() == [[0.0] * 3] * 2


async def test_reads_at_once_leave_connections_for_others(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a few keep one until their copy has ended."""
    meta = await claimed(seen)
    await seen.client.get_data(meta)
    read, going, go = Lane.read, 0, anyio.Event()
    link: Any = seen.transport._directory._link
    before = len(link._transports) - len(link._idle)

    async def waits(self: Lane, *args: Any, **options: Any) -> Any:
        nonlocal going
        going += 1
        await go.wait()
        return await read(self, *args, **options)

    monkeypatch.setattr(Lane, "read", waits)
    async with anyio.create_task_group() as group:
        for _ in range(40):
            group.start_soon(seen.client.get_data, meta)
        with anyio.fail_after(20):
            while going < 40:  # noqa: ASYNC110 - counted in a patched method
                await anyio.sleep(0.01)
        assert len(link._transports) - len(link._idle) == before + MOST_AT_ONCE
        go.set()


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


async def test_a_put_of_tags_leaves_what_a_meta_says(seen: Seen) -> None:
    """Where its rows lie, since it moves nothing; handles are made anew only where the put says it better."""
    meta = await claimed(seen)
    tagged = await seen.client.put_samples(meta, "p", None, [{"seen": 1}] * 2)
    assert all(new is old for new, old in zip(tagged.handles, meta.handles or (), strict=True))
    assert (await seen.client.get_data(tagged, ["x"]))["x"].tolist() == [[0.0] * 3] * 2
    assert seen.asked["locate"] == 0


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


async def test_damaged_hints_are_worth_nothing(seen: Seen) -> None:
    """What is no hint is ignored; damaged ones lead to a row or to a typed error."""
    meta = await claimed(seen)
    rng = random.Random(1)
    good = [handle and handle.hint for handle in meta.handles or ()]
    name, mark, cells = good[0]
    for strange in (None, b"", "text", 7, ("a",), (), good[1], (name, mark, cells[:-9]), (name, b"", cells),
                    (name, mark, None), (name, b"no " + mark, cells), (name, mark + b"1", cells)):  # fmt: skip
        assert (await seen.client.get_data(hinted(meta, strange, good[1])))["x"].tolist() == [[0.0] * 3] * 2
    for _ in range(60):
        damaged = bytearray(cells)
        for _ in range(rng.randint(1, 3)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        broken = hinted(meta, (name, mark, bytes(damaged)), good[1])
        try:
            got = await seen.client.get_data(broken, timeout_s=0.2)
        except DataPlaneError:
            continue
        assert got["x"].shape == (2, 3)


async def test_what_a_server_has_lost_is_gone(
    namespace: str, connect: Callable[..., Directory], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was restarted with older data: a meta of what came after that means no row that is put anew under its id."""
    from asyncdp.transports.ucxx.directory import EmbeddedServer

    monkeypatch.setattr(locating, "SMALL", 0)
    server = EmbeddedServer()
    await server.start()
    data = server.folder / "appendonlydir"
    older = data.with_name("older")
    try:
        async with seen_plane(server, namespace, partial(connect, server.url)) as seen:
            kept = await claimed(seen)
            shutil.copytree(data, older)
            lost = await seen.client.put_samples(["c", "d"], "p", {"x": torch.ones(2, 3)})
            server.kill()
            shutil.rmtree(data)
            older.rename(data)
            await server.start()
            async with seen.other() as other:
                await other.get_samples(["a"], "p", ["x"])
                for meta in (lost, hinted(lost, None, None)):
                    for client in (seen.client, other):
                        with pytest.raises(StaleSlotError):
                            await client.get_data(meta)
                await other.put_samples(["c", "d"], "p", {"x": torch.full((2, 3), 2.0)})
                for meta in (lost, hinted(lost, None, None)):
                    for client in (seen.client, other):
                        with pytest.raises(StaleSlotError):
                            await client.get_data(meta)
            assert (await seen.client.get_data(kept))["x"].tolist() == [[0.0] * 3] * 2
    finally:
        await server.stop()
