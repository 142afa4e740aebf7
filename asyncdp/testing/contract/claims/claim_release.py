"""Promise 5: claims are final unless they are released or their lease expires, and their owner is checked."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    ClaimLost,
    DataPlaneBadRequest,
)

from ..rig import declare, until
from ..steps import claim, claimed_by, put

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["ClaimRelease"]


class ClaimRelease(Contract):
    """Promise 5: claims are final unless they are released or their lease expires, and their owner is checked."""

    async def test_claims_are_listed_by_owner(self, rig: Rig) -> None:
        """C8: list_claims returns owner, samples and time; without a lease the claims never expire."""
        await declare(rig.client)
        await put(rig.client, *"abc")
        await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.mate.claim_meta("p", "train", ["x"], 1)
        one, two = await rig.mate.list_claims("p", "train")
        assert (one.owner, one.sample_ids, one.task_name, one.expires_at) == ("owner", ("a", "b"), "train", None)
        assert (two.owner, two.sample_ids) == ("mate", ("c",))
        assert one.claim_id != two.claim_id
        assert one.claimed_at <= two.claimed_at

    async def test_claims_of_a_dead_consumer_are_released_by_owner(self, rig: Rig) -> None:
        """C8: release_claims releases the claims of this owner only."""
        rig.need("claim_release")
        await declare(rig.client, tasks=("train", "log"))
        await put(rig.client, *"abc")
        meta = await rig.mate.claim_meta("p", "train", ["x"], 2)
        await rig.mate.claim_meta("p", "log", ["x"], 1)
        await rig.client.claim_meta("p", "train", ["x"], 1)
        await rig.client.release_claims("p", "mate")
        assert await claimed_by(rig.client) == {"c": "owner"}
        assert await claimed_by(rig.client, "log") == {}
        assert await claim(rig.client) == ["a", "b"]
        with pytest.raises(ClaimLost):
            await rig.mate.release_claim(meta)
        await rig.client.release_claims("p", "nobody")
        await rig.client.release_claims("nowhere", "mate")

    async def test_a_released_claim_is_claimable_again(self, rig: Rig) -> None:
        """release_claim releases all rows of a meta or a part of them, if named twice too; their claim is then lost."""
        rig.need("claim_release")
        await declare(rig.client)
        await put(rig.client, *"abc")
        meta = await rig.client.claim_meta("p", "train", ["x"], 3)
        await rig.client.release_claim(meta.subset([1]))
        assert await claim(rig.mate) == ["b"]
        with pytest.raises(ClaimLost, match="'b'") as caught:
            await rig.client.release_claim(meta)
        assert caught.value.sample_ids == ("b",)
        assert set(await claimed_by(rig.client)) == {"a", "b", "c"}, "all or none of it"
        await rig.client.release_claim(meta.subset([0, 0, 2]))
        assert await claim(rig.mate) == ["a", "c"]

    async def test_a_meta_without_a_claim_cannot_be_released(self, rig: Rig) -> None:
        """Releasing a meta that a put returned, or one made by hand, raises DataPlaneBadRequest."""
        rig.need("claim_release")
        await declare(rig.client)
        meta = await put(rig.client, "a")
        meta.task_name = "train"
        with pytest.raises(DataPlaneBadRequest, match="'a'"):
            await rig.client.release_claim(meta)

    @pytest.mark.parametrize("by", ["ids", "meta"])
    async def test_pop_checks_that_the_claim_is_still_ones_own(self, rig: Rig, by: str) -> None:
        """Promise 5: a pop of rows that another client has claimed since raises ClaimLost and removes no row."""
        rig.need("claim_release")
        await declare(rig.client)
        await put(rig.client, *"ab")
        meta = await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.mate.release_claims("p", "owner")
        await rig.mate.claim_meta("p", "train", ["x"], 1)
        with pytest.raises(ClaimLost, match="'a'"):
            await rig.client.pop(rig.rows_of(meta) if by == "meta" else meta.sample_ids, "p")
        assert (await rig.client.describe("p")).size == 2
        await rig.mate.pop(["a"], "p")
        await rig.client.evict(["b"], "p")
        assert (await rig.client.describe("p")).size == 0

    async def test_pop_of_ids_that_were_never_claimed_goes_unchecked(self, rig: Rig) -> None:
        """A controller can pop samples that other clients claimed and trained on."""
        await declare(rig.client)
        await put(rig.client, *"ab")
        await rig.client.claim_meta("p", "train", ["x"], 1)
        await rig.mate.pop(["a", "b"], "p")
        assert (await rig.client.describe("p")).size == 0

    async def test_a_popped_sample_may_be_popped_again(self, rig: Rig) -> None:
        """Promise 7: popping samples that this claim or an evict removed raises no ClaimLost."""
        await declare(rig.client)
        await put(rig.client, *"ab")
        meta = await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.mate.evict(["b"], "p")
        await rig.client.pop(rig.rows_of(meta), "p")
        await rig.client.pop(rig.rows_of(meta), "p")
        assert await rig.client.list_claims("p", "train") == []

    async def test_a_consumer_that_outlives_its_lease_has_lost_its_claim(self, rig: Rig) -> None:
        """C9: after another client claimed the samples, the first one's release and pop are refused without effect."""
        rig.need("claim_release")
        for lease_s in (0.1, 1.0, 10.0):  # a busy machine may list the claims after the end of a short lease
            client = await rig.open(claim_lease_s=lease_s, owner="slow")
            mate = await rig.attach(to=client, owner="fast")
            await declare(client)
            await put(client, "a", "b")
            meta = await client.claim_meta("p", "train", ["x"], 2)
            if infos := await mate.list_claims("p", "train"):
                break
        else:
            pytest.fail("not answered in time")
        (info,) = infos
        assert info.expires_at is not None
        assert info.expires_at == pytest.approx(info.claimed_at + lease_s)
        with anyio.fail_after(60):  # the end of the lease wakes a waiting claim
            again = await mate.claim_meta("p", "train", ["x"], 2)
        assert again.sample_ids == ["a", "b"]
        with pytest.raises(ClaimLost):
            await client.release_claim(meta)
        for keys in (rig.rows_of(meta), ["a"]):
            with pytest.raises(ClaimLost):
                await client.pop(keys, "p")
        assert await claimed_by(mate) == {"a": "fast", "b": "fast"}
        await mate.pop(rig.rows_of(again), "p")

    async def test_closing_while_a_claim_waits_gives_up_nothing(self, rig: Rig) -> None:
        """The claims of a client stay after an orderly close; list_claims still lists them."""
        client = await rig.attach(owner="gone")
        await declare(rig.client)
        await put(rig.client, "a")
        await client.claim_meta("p", "train", ["x"], 1)
        await client.close()
        assert await claimed_by(rig.client) == {"a": "gone"}

    async def test_batches_iterates_over_claims_with_their_data(self, rig: Rig) -> None:
        """batches() yields metas with data, optionally prefetched; leaving the loop releases batches not yielded."""
        await declare(rig.client)
        await put(rig.client, *"abcdef")
        seen = []
        async with rig.client.batches("p", "train", ["x"], 2, prefetch=2, timeout_s=5) as batches:
            async for meta, data in batches:
                seen += meta.sample_ids
                assert data.batch_size == torch.Size([2])
                await until(lambda: len(batches._ready) == 2)  # a claim in flight would be reconciled only later
                break
        assert seen == ["a", "b"]
        rig.need("claim_release")
        assert set(await claimed_by(rig.client)) == {"a", "b"}
        async for meta, _ in rig.client.batches("p", "train", ["x"], 2, timeout_s=5):
            seen += meta.sample_ids
            if len(seen) == 6:
                break
        assert sorted(seen) == list("abcdef")
