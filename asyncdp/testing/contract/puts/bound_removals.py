"""Promise 3a: a removal by a meta or a group removes only the lives that it names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import (
    ClaimLost,
    DataPlaneBadRequest,
    StaleSlotError,
)

from ..rig import declare
from ..steps import claim, claimed_by, put
from .bound_steps import REMOVALS, BoundBase, claimed, group_of, there

if TYPE_CHECKING:
    from ..rig import Rig

__all__ = ["BoundRemovals"]


class BoundRemovals(BoundBase):
    """Promise 3a: a removal by a meta or a group removes only the lives that it names."""

    @pytest.mark.parametrize("removal", REMOVALS)
    @pytest.mark.parametrize("by", ["put", "claim", "group"])
    async def test_a_removal_that_comes_late_spares_the_next_life(self, rig: Rig, by: str, removal: str) -> None:
        """U27: rows that were removed and put anew survive a removal by a meta or group of their former life."""
        rig.need("claim_release")
        await declare(rig.client)
        keys: Any = await put(rig.client, "a", "b", "c", group_id="g")
        if by == "claim":
            keys = await rig.client.claim_meta("p", "train", ["x"], 3)
        elif by == "group":
            keys = await group_of(rig)
            assert len(keys.handles) == 3
        await rig.mate.evict(["a", "b"], "p")
        await put(rig.mate, "a", "b", group_id="g", again=1)
        await getattr(rig.client, removal)(keys, "p")
        assert set(await there(rig)) == {"a", "b"}
        await getattr(rig.client, removal)(keys, "p")
        assert {tags["again"] for tags in (await group_of(rig)).tags} == {1}
        assert await claim(rig.client) == ["a", "b"]
        fresh = await group_of(rig)
        await getattr(rig.client, removal)(fresh, "p")
        assert await there(rig) == {}

    async def test_a_removal_counts_what_it_removed(self, rig: Rig) -> None:
        """The live bytes still count a row that a bound removal spared, and no longer the rows that it removed."""
        await declare(rig.client)
        count = rig.client.snapshot
        first = await rig.client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 4)})
        await rig.mate.evict(["a"], "p")
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1, 8)})
        await rig.client.pop(first, "p")
        assert (count()["bytes_outstanding"], count()["n_keys_outstanding"]) == (32, 1)
        await rig.client.put_samples(first, "p", {"x": torch.zeros(2, 4)}, stale="skip")
        assert (count()["bytes_outstanding"], count()["n_keys_outstanding"]) == (32, 1)

    async def test_a_pop_by_a_claim_of_a_former_life_is_no_loss(self, rig: Rig) -> None:
        """The row is gone already, and another client's claim of its next life does not cause ClaimLost."""
        meta = await claimed(rig, "a")
        await rig.client.evict(["a"], "p")
        await put(rig.client, "a")
        other = await rig.client.claim_meta("p", "score", ["x"], 1)
        await rig.mate.pop(meta, "p")
        assert await claimed_by(rig.client, "score") == {"a": "owner"}
        await rig.client.pop(other, "p")

    async def test_a_pop_by_group_minds_the_claim_that_was_lost(self, rig: Rig) -> None:
        """C9: a group names no claims, but the claims that this client holds are checked as well."""
        rig.need("claim_release")
        await claimed(rig, "a")
        (group,) = await rig.mate.list_metadata("p")
        await rig.client.release_claims("p", "mate")
        with pytest.raises(ClaimLost):
            await rig.mate.pop(group, "p")
        await rig.client.pop(group, "p")
        assert await there(rig) == {}

    async def test_claims_of_a_spared_row_are_remembered(self, rig: Rig) -> None:
        """A bound removal of a former life does not drop this client's claim of the next life."""
        rig.need("claim_release")
        first = await claimed(rig, "a", by=rig.client)
        await rig.mate.evict(["a"], "p")
        await put(rig.mate, "a")
        await rig.client.claim_meta("p", "score", ["x"], 1)
        await rig.client.evict(first, "p")
        await rig.mate.release_claims("p", "owner")
        with pytest.raises(ClaimLost):
            await rig.client.pop(["a"], "p")
        assert set(await there(rig)) == {"a"}

    async def test_metas_of_two_lives_joined_remove_the_one_that_lives(self, rig: Rig) -> None:
        """Each row of a joined meta keeps its own life, even if an id occurs twice."""
        await declare(rig.client)
        old = await put(rig.client, *"ab")
        await rig.client.evict(["a"], "p")
        new = await put(rig.client, "a")
        await rig.client.pop(old.subset([0]).concat(old.subset([0])), "p")
        assert set(await there(rig)) == {"a", "b"}
        await rig.client.pop(old.concat(new), "p")
        assert await there(rig) == {}

    async def test_some_keys_of_a_group_are_removed_by_its_meta(self, rig: Rig) -> None:
        """group.meta(keys) is bound like the group; a key that the group does not have is refused by name."""
        await declare(rig.client)
        await put(rig.client, *"abc", group_id="g")
        group = await group_of(rig)
        some = group.meta(["a", "c"])
        assert (some.sample_ids, some.tags[1]["group_id"]) == (["a", "c"], "g")
        await rig.mate.evict(["c"], "p")
        await put(rig.mate, "c")
        await rig.client.evict(some, "p")
        assert set(await there(rig)) == {"b", "c"}
        with pytest.raises(DataPlaneBadRequest, match="'z'"):
            group.meta(["z"])

    async def test_a_group_can_be_put_by(self, rig: Rig) -> None:
        """A controller that tags listed rows does not recreate removed ones."""
        await declare(rig.client)
        await put(rig.client, *"ab", group_id="g")
        group = await group_of(rig)
        await rig.mate.put_samples(group.meta(), "p", tags=[{"score": 1}] * 2)
        await rig.client.evict(["a"], "p")
        with pytest.raises(StaleSlotError):
            await rig.mate.put_samples(group.meta(), "p", tags=[{"score": 2}] * 2)
        assert await there(rig) == {"b": {"x", "score"}}
