"""client.batches: claim and read in a loop, optionally ahead of the caller."""

from collections.abc import AsyncIterator

import anyio
import pytest
import torch

from asyncdp import ClaimNotReady, Client, MemoryTransport, StaleSlotError, stack

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
        await anyio.sleep(0.05)  # let it claim ahead
        assert len(await client.list_claims("p", "train")) >= 3
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


async def test_prefetch_wants_to_be_entered(client: Client) -> None:
    """Tasks that read ahead must end somewhere, so a bare loop with prefetch says how to write it."""
    with pytest.raises(RuntimeError, match="async with"):
        await anext(client.batches("p", "train", ["x"], 2, prefetch=1))
