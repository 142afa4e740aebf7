"""client.batches: claim and read in a loop, optionally ahead of the caller."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import pytest
import torch

from asyncdp import (
    ClaimNotReady,
    Client,
    DataPlaneBadRequest,
    DataPlaneTimeout,
    KVBatchMeta,
    MemoryTransport,
    PartialReadError,
    StaleSlotError,
    stack,
)

pytestmark = pytest.mark.anyio
IDS = [f"s{i}" for i in range(8)]


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    """A plane with eight samples for one task."""
    async with stack(MemoryTransport()) as client:
        await client.register_partition("p", ["x"], 8, ["train"])
        await client.put_samples(IDS, "p", {"x": torch.arange(8)})
        yield client


async def test_batches_come_in_order_until_the_caller_stops(client: Client) -> None:
    """Each sample comes once, first ready first, with its data."""
    seen = []
    async for meta, data in client.batches("p", "train", ["x"], 2):
        assert data["x"].tolist() == [int(i[1:]) for i in meta.sample_ids]
        seen += meta.sample_ids
        if len(seen) == 8:
            break
    assert seen == IDS


async def test_an_iterator_that_waits_too_long_says_what_it_waits_for(client: Client) -> None:
    """ClaimNotReady ends one step, not the iterator."""
    batches = client.batches("p", "train", ["x"], 8, timeout_s=1.0)
    await anext(batches)
    with pytest.raises(ClaimNotReady):
        await anext(batches)
    await client.put_samples([f"n{i}" for i in range(8)], "p", {"x": torch.arange(8)})
    meta, _ = await anext(batches)
    assert meta.size == 8


async def test_prefetch_reads_ahead_and_gives_back_what_nobody_got(client: Client) -> None:
    """Leaving early releases the claims that the caller did not see; nothing is claimed twice or lost."""
    async with client.batches("p", "train", ["x"], 2, prefetch=2) as batches:
        meta, _ = await anext(batches)
        with anyio.fail_after(60):
            while len(await client.list_claims("p", "train")) < 3:  # noqa: ASYNC110 - it claims ahead, without an event
                await anyio.sleep(0.01)
    [claim] = await client.list_claims("p", "train")
    assert claim.sample_ids == tuple(meta.sample_ids) == ("s0", "s1")
    rest = await client.claim_meta("p", "train", ["x"], 6)
    assert sorted(rest.sample_ids) == IDS[2:]


async def test_an_error_of_a_prefetched_batch_comes_in_its_turn(client: Client) -> None:
    """A batch that cannot be read raises; the next ones still come."""
    real = client.get_data
    calls = 0

    async def get_data(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise StaleSlotError("gone")
        return await real(*args, **kwargs)  # type: ignore[arg-type]

    client.get_data = get_data  # type: ignore[method-assign,assignment]
    async with client.batches("p", "train", ["x"], 2, prefetch=1) as batches:
        first, _ = await anext(batches)
        with pytest.raises(StaleSlotError):
            await anext(batches)
        third, _ = await anext(batches)
    assert (first.sample_ids, third.sample_ids) == (["s0", "s1"], ["s4", "s5"])


@pytest.fixture
async def rows_on_three_hosts() -> AsyncIterator[Client]:
    """A plane that has lost rows: the host of some is dead; two groups of two, and four rows by themselves."""
    async with stack(MemoryTransport(), max_attempts=1, max_rounds=1, outage_patience_s=0) as client:
        await client.register_partition("p", ["x"], 8, ["train"])
        for at, name in enumerate(IDS):
            tags = [{"group_id": f"g{at // 2}"}] if at < 4 else None
            await client.put_samples([name], "p", {"x": torch.tensor([at])}, tags)
        yield client


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_survivors_come_without_groups_that_are_not_whole(rows_on_three_hosts: Client, prefetch: int) -> None:
    """A row is gone, another one out of reach: their groups are left out; the claims of what exists are released."""
    client = rows_on_three_hosts
    real = client.get_data

    async def get_data(meta: KVBatchMeta, *args: object, **kwargs: object) -> object:
        lost = [at for at, name in enumerate(meta.sample_ids) if name in ("s1", "s5")]
        if not lost:
            return await real(meta, *args, **kwargs)  # type: ignore[arg-type]
        ok = [at for at in range(meta.size) if at not in lost]
        errors = {
            at: StaleSlotError("gone") if meta.sample_ids[at] == "s1" else DataPlaneTimeout("slow") for at in lost
        }
        rows = await real(meta.subset(ok))
        raise PartialReadError(rows=rows, ok=meta.subset(ok), failed=meta.subset(lost), errors=errors)

    client.get_data = get_data  # type: ignore[method-assign,assignment]
    async with client.batches("p", "train", ["x"], 8, survivors="drop", prefetch=prefetch) as batches:
        meta, data = await anext(batches)
        assert meta.sample_ids == ["s2", "s3", "s4", "s6", "s7"]
        assert data["x"].tolist() == [2, 3, 4, 6, 7]
    claimed = {one for claim in await client.list_claims("p", "train") for one in claim.sample_ids}
    assert claimed == {"s1", *meta.sample_ids}  # what is gone has nothing to be released
    with pytest.raises(PartialReadError) as raised:
        await anext(client.batches("p", "train", ["x"], 8, min_batch_size=1))
    assert raised.value.batch.sample_ids == ["s0", "s5"]  # type: ignore[attr-defined]


@pytest.mark.parametrize("prefetch", [0, 1])
async def test_a_batch_that_is_gone_is_passed_over(client: Client, prefetch: int) -> None:
    """With survivors="drop", what was evicted between claim and read costs nothing but the claim."""
    real = client.claim_meta
    evicted = []

    async def claim_meta(*args: object, **kwargs: object) -> KVBatchMeta:
        meta = await real(*args, **kwargs)  # type: ignore[arg-type]
        if not evicted:
            evicted.extend(meta.sample_ids)
            await client.evict(evicted, "p")
        return meta

    client.claim_meta = claim_meta  # type: ignore[method-assign,assignment]
    async with client.batches("p", "train", ["x"], 2, survivors="drop", prefetch=prefetch) as batches:
        meta, _ = await anext(batches)
    assert (evicted, meta.sample_ids) == (["s0", "s1"], ["s2", "s3"])


@pytest.mark.virtual_time(backend=["asyncio", "trio"])
@pytest.mark.parametrize("prefetch", [0, 2])
async def test_an_idle_iterator_ends_or_waits(prefetch: int) -> None:
    """As it is told: idle="end" stops the loop, for good; idle="wait" goes on until there is something."""
    async with stack(MemoryTransport()) as client:
        await client.register_partition("p", ["x"], 8, ["train"])
        await client.put_samples(IDS, "p", {"x": torch.arange(8)})
        seen = []
        async with client.batches("p", "train", ["x"], 4, idle="end", timeout_s=1.0, prefetch=prefetch) as batches:
            async for meta, _ in batches:
                seen += meta.sample_ids
            with pytest.raises(StopAsyncIteration):
                await anext(batches)
        assert seen == IDS
        waiting = client.batches("p", "train", ["x"], 4, idle="wait", timeout_s=1.0, prefetch=prefetch)
        async with anyio.create_task_group() as tasks, waiting as batches:
            tasks.start_soon(_later, client)
            meta, _ = await anext(batches)
        assert meta.sample_ids == ["n0", "n1", "n2", "n3"]


async def _later(client: Client) -> None:
    await anyio.sleep(10.0)
    await client.put_samples([f"n{i}" for i in range(4)], "p", {"x": torch.arange(4)})


async def test_waiting_a_short_time_for_samples_does_not_cut_reads_short(client: Client) -> None:
    """timeout_s=0 takes what is ready; the read has the client's own time."""
    async for meta, data in client.batches("p", "train", ["x"], 8, idle="end", timeout_s=0.0):
        assert data["x"].tolist() == list(range(meta.size))
        break
    else:
        pytest.fail("nothing came")


async def test_a_batch_whose_read_is_cancelled_is_given_back(client: Client) -> None:
    """Without a context, too: nobody else knows of its claim."""

    async def get_data(*args: object, **kwargs: object) -> object:
        return await anyio.sleep_forever()

    client.get_data = get_data  # type: ignore[method-assign,assignment]
    with anyio.move_on_after(0.1):
        await anext(client.batches("p", "train", ["x"], 2))
    assert await client.list_claims("p", "train") == []


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_cancel_of_the_task_while_batches_are_given_back_loses_no_claim(client: Client) -> None:
    """``task.cancel()``, which no scope holds back, during a release: that is done anew, then the cancel goes on."""
    release, begun = client.release_claim, anyio.Event()

    async def slow_once(*args: Any, **kwargs: Any) -> Any:
        if not begun.is_set():
            begun.set()
            await anyio.sleep_forever()
        return await release(*args, **kwargs)

    client.release_claim = slow_once  # type: ignore[method-assign]

    async def leave() -> None:
        async with client.batches("p", "train", ["x"], 2, prefetch=2) as batches:
            await anext(batches)
            with anyio.fail_after(60):
                while len(await client.list_claims("p", "train")) < 3:  # noqa: ASYNC110 - as above
                    await anyio.sleep(0.01)

    task = asyncio.create_task(leave())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [claim] = await client.list_claims("p", "train")
    assert claim.sample_ids == ("s0", "s1")


async def test_data_is_moved_to_a_device(client: Client) -> None:
    """Any that torch knows."""
    async for _, data in client.batches("p", "train", ["x"], 2, device="meta"):
        assert data["x"].device == torch.device("meta")
        break


@pytest.mark.parametrize("wrong", [{"survivors": "keep"}, {"idle": "sleep"}, {"prefetch": -1}])
async def test_a_wrong_choice_is_named(client: Client, wrong: dict[str, object]) -> None:
    """At once, before anything is claimed."""
    with pytest.raises(DataPlaneBadRequest, match=next(iter(wrong))):
        client.batches("p", "train", ["x"], 2, **wrong)  # type: ignore[arg-type]


async def test_prefetch_wants_to_be_entered(client: Client) -> None:
    """Tasks that read ahead must end somewhere, so a bare loop with prefetch says how to write it."""
    with pytest.raises(RuntimeError, match="async with"):
        await anext(client.batches("p", "train", ["x"], 2, prefetch=1))
