"""Promise 4 with groups: only whole groups are claimed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest
import torch

from asyncdp import DataPlaneBadRequest

from ..rig import at_once, declare
from ..steps import SHORT_S, claim, not_ready, put

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Groups"]


class Groups(Contract):
    """Promise 4 with groups: only whole groups are claimed."""

    async def test_only_whole_groups_are_claimed(self, rig: Rig) -> None:
        """With grpo_group_size, a group is claimable once all of its rows are ready."""
        await declare(rig.client, grpo_group_size=2)
        await put(rig.client, "a0", "b0", group_id="g")
        await put(rig.client, "c0", group_id="h")
        assert await claim(rig.client, 3) == ["a0", "b0"]
        await put(rig.client, "c1", group_id="h", committed=False)
        assert await claim(rig.client, 3) == []
        await rig.client.put_samples(["c1"], "p", tags=[{"committed": True}])
        assert await claim(rig.client, 3) == ["c0", "c1"]

    async def test_a_group_is_not_claimed_while_a_row_of_it_lacks_a_field(self, rig: Rig) -> None:
        """A group needs all required fields of all of its rows."""
        await declare(rig.client, "x", "y", grpo_group_size=2)
        await put(rig.client, "a", "b", group_id="g")
        await rig.client.put_samples(["a"], "p", {"y": torch.zeros(1)})
        assert not (await rig.client.claim_meta("p", "train", ["x", "y"], 2, blocking=False)).size
        await rig.client.put_samples(["b"], "p", {"y": torch.zeros(1)})
        assert (await rig.client.claim_meta("p", "train", ["x", "y"], 2, blocking=False)).size == 2

    async def test_a_batch_rounds_down_to_whole_groups(self, rig: Rig) -> None:
        """Promise 5: a batch has at most batch_size rows and only whole groups; a blocking claim waits accordingly."""
        await declare(rig.client, grpo_group_size=2)
        for g in range(3):
            await put(rig.client, f"g{g}_g0", f"g{g}_g1")
        meta = await rig.client.claim_meta("p", "train", ["x"], 5, timeout_s=30)
        assert meta.sample_ids == ["g0_g0", "g0_g1", "g1_g0", "g1_g1"]
        err = await not_ready(lambda: rig.client.claim_meta("p", "train", ["x"], 4, timeout_s=SHORT_S))
        assert err.ready == 2
        assert await claim(rig.client, 3) == ["g2_g0", "g2_g1"]

    async def test_a_batch_below_one_group_is_a_bad_request(self, rig: Rig) -> None:
        """Promise 5: such a claim could never be satisfied."""
        await declare(rig.client, grpo_group_size=4)
        with anyio.fail_after(60), pytest.raises(DataPlaneBadRequest, match="batch_size"):
            await rig.client.claim_meta("p", "train", ["x"], 3)

    async def test_groups_are_claimed_in_the_order_in_which_they_became_whole(self, rig: Rig) -> None:
        """The group that is whole first is claimed first; concurrent claims never share or split a group."""
        await declare(rig.client, grpo_group_size=2)
        for i in range(12):
            await put(rig.client, f"g{i}_g0")
        for i in reversed(range(12)):
            await put(rig.client, f"g{i}_g1")
        got = await at_once(*(c.claim_meta("p", "train", ["x"], 4) for c in [rig.client, rig.mate] * 3))
        metas = [meta.sample_ids for meta in got]
        assert all(ids[0][:-1] == ids[1][:-1] and ids[2][:-1] == ids[3][:-1] for ids in metas)
        claimed = [name for ids in metas for name in ids]
        assert len(set(claimed)) == 24
        first = next(ids for ids in metas if "g11_g0" in ids)
        assert {"g10_g0", "g10_g1"} <= set(first)

    async def test_a_group_may_be_smaller_where_its_producer_says_so(self, rig: Rig) -> None:
        """With expected_num_keys a group is whole with fewer rows; a value above grpo_group_size is refused at put."""
        await declare(rig.client, grpo_group_size=3)
        await put(rig.client, "a", "b", group_id="g", expected_num_keys=2)
        assert await claim(rig.client, 3) == ["a", "b"]
        with pytest.raises(DataPlaneBadRequest, match="expected_num_keys"):
            await put(rig.client, "c", group_id="h", expected_num_keys=4)
        assert (await rig.client.describe("p")).size == 2

    async def test_a_failed_row_completes_no_group(self, rig: Rig) -> None:
        """U18: depth, is_complete and claims do not count failed rows, which no claim returns."""
        await declare(rig.client, grpo_group_size=2)
        await put(rig.client, "g_g0")
        await put(rig.client, "g_g1", status="failed")
        (group,) = await rig.mate.list_metadata("p")
        assert (group.keys, group.is_complete, await rig.mate.depth("p")) == (("g_g0", "g_g1"), False, 0)
        assert await claim(rig.client) == []
        await rig.client.put_samples(["g_g1"], "p", tags=[{"status": "fine"}])
        assert ((await rig.mate.list_metadata("p"))[0].is_complete, await rig.mate.depth("p")) == (True, 1)
        await rig.client.put_samples(["g_g1"], "p", tags=[{"status": "failed"}])
        assert ((await rig.mate.list_metadata("p"))[0].is_complete, await rig.mate.depth("p")) == (False, 0)
        assert await claim(rig.client) == []
        await rig.client.evict(["g_g1"], "p")
        await put(rig.client, "g_g1")
        assert await rig.mate.depth("p") == 1
        assert sorted(await claim(rig.client)) == ["g_g0", "g_g1"]

    @pytest.mark.parametrize("when", ["first", "last", "never"])
    async def test_a_group_may_be_whole_without_its_failed_row(self, rig: Rig, when: str) -> None:
        """U18: a group with enough other rows counts as whole, and a claim returns it without the failed row.

        This also holds without a group size, and with one that is declared after the rows were put.
        """
        await declare(rig.client, grpo_group_size=3 if when == "first" else None)
        await put(rig.client, "a", group_id="g", expected_num_keys=2, status="failed", committed=False)
        await put(rig.client, "b", group_id="g", expected_num_keys=2)
        assert await rig.mate.depth("p") == 0
        await put(rig.client, "c", group_id="g", expected_num_keys=2)
        if when == "last":
            await declare(rig.client, grpo_group_size=3)
        (group,) = await rig.mate.list_metadata("p")
        assert (group.keys, group.committed, group.is_complete) == (("a", "b", "c"), True, True)
        assert await rig.mate.depth("p") == 1
        assert await claim(rig.client) == ["b", "c"]
        assert await claim(rig.mate) == []
        await rig.client.pop(["b", "c"], "p")
        assert await rig.mate.depth("p") == 0

    async def test_a_failed_row_of_its_own_group_counts_nowhere(self, rig: Rig) -> None:
        """U18: this holds without a declared group size; after the row is removed, the rest is a whole group."""
        await declare(rig.client)
        await put(rig.client, "alone", status="failed")
        await put(rig.client, "g_g0")
        await put(rig.client, "g_g1", status="failed")
        assert await rig.mate.depth("p") == 0
        assert not any(group.is_complete for group in await rig.mate.list_metadata("p"))
        await rig.client.evict(["g_g1"], "p")
        assert await rig.mate.depth("p") == 1

    async def test_a_failed_row_moves_and_dies_without_a_trace(self, rig: Rig) -> None:
        """U18: after a tag moves it to another group, or it is cleared and put anew, the old group forgets it."""
        await declare(rig.client)
        await put(rig.client, "g_g0", "h_g0")
        await put(rig.client, "g_g1", status="failed")
        await declare(rig.client, grpo_group_size=2)  # rows that were put before count as well
        assert (await rig.mate.depth("p"), await claim(rig.client)) == (0, [])
        await rig.client.put_samples(["g_g1"], "p", tags=[{"group_id": "h"}])
        assert (await rig.mate.depth("p"), await claim(rig.client)) == (0, [])
        await rig.client.put_samples(["g_g1"], "p", tags=[{"status": "fine"}])
        assert sorted(await claim(rig.client)) == ["g_g1", "h_g0"]
        await put(rig.client, "g_g2", status="failed")
        await rig.client.clear_samples(["g_g2"], "p")
        await put(rig.client, "g_g2")
        assert sorted(await claim(rig.client)) == ["g_g0", "g_g2"]

    async def test_a_group_takes_no_more_rows_than_its_size(self, rig: Rig) -> None:
        """A fifth rollout of a group of four could never be trained on; it is refused at put without effect."""
        await declare(rig.client, grpo_group_size=2)
        await put(rig.client, "g_g0")
        with pytest.raises(DataPlaneBadRequest, match="'g'"):
            await put(rig.client, "g_g1", "g_g2")
        assert (await rig.client.describe("p")).size == 1
        await put(rig.client, "g_g1")
        await put(rig.client, "g_g1")  # putting the same row again does not add a row

    async def test_a_tag_moves_no_row_into_a_full_group(self, rig: Rig) -> None:
        """A group too large for any batch would block later claims; the put is refused without effect."""
        await declare(rig.client, grpo_group_size=2)
        await put(rig.client, "g_g0", "g_g1", "other_g0")
        with pytest.raises(DataPlaneBadRequest, match="'g'"):
            await rig.client.put_samples(["other_g0"], "p", tags=[{"group_id": "g"}])
        await put(rig.client, "other_g1")
        assert await claim(rig.client, 2) == ["g_g0", "g_g1"]
        assert await claim(rig.client, 2) == ["other_g0", "other_g1"]

    async def test_a_group_that_was_claimed_and_cleared_may_live_again(self, rig: Rig) -> None:
        """Rows that are put again under the same ids form a new group, which is claimable once."""
        await declare(rig.client, grpo_group_size=2)
        for _ in range(2):
            await put(rig.client, "g_g0", "g_g1")
            assert await claim(rig.mate, 2) == ["g_g0", "g_g1"]
            assert await claim(rig.mate, 2) == []
            await rig.client.clear_samples(["g_g0", "g_g1"], "p")

    async def test_released_rows_of_a_group_wait_until_it_is_whole_again(self, rig: Rig) -> None:
        """A released part of a group is not claimable alone."""
        rig.need("claim_release")
        await declare(rig.client, grpo_group_size=2)
        await put(rig.client, "g_g0", "g_g1")
        meta = await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.client.release_claim(meta.subset([0]))
        assert await claim(rig.mate) == []
        await rig.client.release_claim(meta.subset([1]))
        assert sorted(await claim(rig.mate)) == ["g_g0", "g_g1"]

    async def test_the_group_size_of_a_partition_is_fixed(self, rig: Rig) -> None:
        """A different size is refused; a size that was not declared before may be declared later."""
        await declare(rig.client)
        await put(rig.client, "g_g0")
        await declare(rig.mate, grpo_group_size=2)
        await declare(rig.mate)
        with pytest.raises(DataPlaneBadRequest, match="grpo_group_size"):
            await declare(rig.client, grpo_group_size=3)
        assert await claim(rig.client, 2) == []
        await put(rig.client, "g_g1")
        assert await claim(rig.client, 2) == ["g_g0", "g_g1"]

    async def test_a_group_size_below_a_group_that_is_there_is_refused(self, rig: Rig) -> None:
        """No batch of whole groups could contain the existing group."""
        await declare(rig.client)
        await put(rig.client, "g_g0", "g_g1", "g_g2")
        with pytest.raises(DataPlaneBadRequest, match="grpo_group_size"):
            await declare(rig.client, grpo_group_size=2)
        await declare(rig.client, grpo_group_size=3)
