"""Promise 3a while others put and remove the same ids, and requests are lost or repeated."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneError,
    StaleSlotError,
)

from ..faults import CLEAR, PUT, Hold, LoseReply, LoseRequest, Straggle
from ..rig import at_once, declare
from ..same import check_same
from ..steps import put
from .bound_steps import REMOVALS, BoundBase, by_meta, claimed, there

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..rig import Rig

__all__ = ["BoundRaces"]


class BoundRaces(BoundBase):
    """Promise 3a while others put and remove the same ids, and requests are lost or repeated."""

    @pytest.mark.parametrize("again", [False, True], ids=["gone", "lives again"])
    @pytest.mark.parametrize("stale", ["raise", "skip"])
    async def test_lives_are_decided_at_the_publish(self, rig: Rig, stale: Any, *, again: bool) -> None:
        """A row that is removed while the payload is in transit counts as removed before the put."""
        hold = Hold(PUT)
        client = await rig.attach(hold)
        meta = await claimed(rig, *"ab")

        async def remove() -> None:
            await hold.holds()
            await rig.client.evict(["a"], "p")
            if again:
                await put(rig.client, "a")
            hold.go.set()

        got, _ = await at_once(client.put_samples(meta, "p", {"y": torch.ones(2)}, stale=stale), remove())
        if stale == "raise":
            assert isinstance(got, StaleSlotError)
        else:
            assert got.sample_ids == ["b"]
        written = {"x"} if stale == "raise" else {"x", "y"}
        assert await there(rig) == {"b": written} | ({"a": {"x"}} if again else {})
        assert not rig.leftovers()

    @pytest.mark.parametrize("fault", [LoseReply, LoseRequest])
    @pytest.mark.parametrize("only", ["existing", "new"])
    async def test_a_put_that_is_sent_again_does_not_take_its_own_rows_for_others(
        self, rig: Rig, only: Any, fault: Any
    ) -> None:
        """If its answer is lost, the repeated put succeeds, happens once, and reports the same rows as created."""
        rig.need("mutation_dedup")
        lost = fault(PUT)
        client = await rig.attach(lost)
        meta = await claimed(rig, *"ab")
        ids = meta if only == "existing" else ["c", "d"]
        done = await client.put_samples(ids, "p", {"y": torch.ones(2)}, only=only)
        assert (lost.struck, done.created) == (1, [only == "new"] * 2)

    async def test_who_survived_is_decided_once(self, rig: Rig) -> None:
        """A put with stale="skip" that is sent again after one of its rows was removed gets its first answer."""
        rig.need("mutation_dedup")

        async def meanwhile() -> None:
            await rig.client.evict(["b"], "p")
            await put(rig.client, "b", "d")

        lost = LoseReply(PUT, meanwhile=meanwhile)
        client = await rig.attach(lost)
        meta = await claimed(rig, *"abcd", by=client)
        await rig.client.evict(["a", "d"], "p")
        done = await client.put_samples(meta, "p", {"y": torch.arange(4.0)}, stale="skip")
        assert len(lost.seen) == 2
        assert done.sample_ids == ["b", "c"]
        assert await there(rig) == {"b": {"x"}, "c": {"x", "y"}, "d": {"x"}}

    async def test_a_put_that_left_all_out_stays_empty(self, rig: Rig) -> None:
        """A put that left out all rows writes nothing when it is sent again after the ids were put anew."""
        rig.need("mutation_dedup")
        lost = LoseReply(PUT, meanwhile=lambda: put(rig.mate, "a", "b"))
        client = await rig.attach(lost)
        await declare(client, "x", "y")
        done = await client.put_samples(["a", "b"], "p", {"y": torch.ones(2)}, only="existing", stale="skip")
        assert (len(lost.seen), done.size) == (2, 0)
        assert await there(rig) == {"a": {"x"}, "b": {"x"}}
        assert not rig.leftovers()

    async def test_a_bound_put_that_is_sent_again_revives_nothing(self, rig: Rig) -> None:
        """P14: a bound put that is sent again after its rows were removed gets its first answer and creates no row."""
        rig.need("mutation_dedup")
        lost = LoseReply(PUT, meanwhile=lambda: rig.client.evict(["a"], "p"))
        client = await rig.attach(lost)
        meta = await claimed(rig, *"ab", by=client)
        assert (await by_meta(client, meta)).sample_ids == ["a", "b"]
        assert await there(rig) == {"b": {"x", "y"}}

    @pytest.mark.parametrize("only", ["meta", "existing", "new"])
    async def test_an_abandoned_bound_put_does_not_come_back(self, rig: Rig, only: Any) -> None:
        """P15: a cancelled put that arrives after another mutation of the ids is refused, in any state of the rows."""
        rig.need("mutation_dedup")
        late = Straggle(PUT)
        client = await rig.attach(late)
        meta = await claimed(rig, *"ab", by=client)
        if only == "meta":
            await late.cut(by_meta(client, meta))
        else:
            ids = ["a", "b"] if only == "existing" else ["c", "d"]
            await late.cut(client.put_samples(ids, "p", {"y": torch.ones(2)}, only=only))
        await client.clear_samples(["a", "c"], "p")
        await client.put_samples(["b"], "p", tags=[{"score": 1}])
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert await there(rig) == {"b": {"x", "score"}}
        assert not rig.leftovers()

    async def test_a_bound_put_that_was_cancelled_after_it_happened_is_found(self, rig: Rig) -> None:
        """Promise 3: the next put reconciles it; the rows that it left out occupy no space."""
        rig.need("mutation_dedup")
        hold = Hold(PUT, after=True)
        client = await rig.attach(hold)
        meta = await claimed(rig, *"ab", by=client)
        await rig.client.evict(["a"], "p")
        await hold.cut(client.put_samples(meta, "p", {"y": torch.zeros(2)}, stale="skip"))
        done = await client.put_samples(meta, "p", {"y": torch.ones(2)}, stale="skip")
        assert done.sample_ids == ["b"]
        check_same((await rig.client.get_samples(["b"], "p", ["y"]))["y"], torch.ones(1))
        assert not rig.leftovers()

    async def test_a_bound_put_that_is_never_answered_is_ambiguous(self, rig: Rig) -> None:
        """P5: the error is ambiguous; the next put on these ids reconciles the outcome and takes effect."""
        lost = LoseReply(PUT, times=99)
        client = await rig.attach(lost)
        meta = await claimed(rig, *"ab", by=client)
        with pytest.raises(DataPlaneError) as caught:
            await by_meta(client, meta, 1.0)
        assert caught.value.ambiguous
        lost.times = 0
        await by_meta(client, meta, 2.0)
        check_same((await rig.client.get_samples(["a", "b"], "p", ["y"]))["y"], torch.full((2,), 2.0))

    @pytest.mark.parametrize("removal", REMOVALS)
    async def test_a_bound_removal_that_is_sent_again_spares_a_newer_row(self, rig: Rig, removal: str) -> None:
        """P13: it is recognised by its op_id, or by the life if the backend has forgotten the op_id."""
        lost = LoseReply(CLEAR, meanwhile=lambda: put(rig.mate, "a"))
        client = await rig.attach(lost)
        await declare(client)
        meta = await put(client, "a", "b")
        await getattr(client, removal)(meta, "p")
        assert set(await there(rig)) == {"a"}

    async def test_scorers_and_removers_at_once_revive_nothing(self, rig: Rig) -> None:
        """U1 under concurrency: every remaining row has the field that its producer put, whatever was scored."""
        await declare(rig.client, "x", "y", tasks=("score",))
        rounds = 12

        async def produce(client: Client, name: str) -> None:
            for at in range(rounds):
                await put(client, f"{name}{at % 3}")
                await anyio.lowlevel.checkpoint()
                if at % 2:
                    groups = await client.list_metadata("p")
                    for group in groups[:2]:
                        await client.evict(group, "p")

        async def score(client: Client) -> None:
            for _ in range(2 * rounds):
                meta = await client.claim_meta("p", "score", ["x"], 3, blocking=False)
                await anyio.lowlevel.checkpoint()
                if meta.size:
                    done = await client.put_samples(meta, "p", {"y": torch.ones(meta.size)}, stale="skip")
                    assert set(done.sample_ids) <= set(meta.sample_ids)

        got = await at_once(produce(rig.client, "a"), produce(rig.mate, "b"), score(rig.client), score(rig.mate))
        assert got == [None] * 4
        assert all("x" in fields for fields in (await there(rig)).values())

    async def test_a_handle_travels_with_its_row(self, rig: Rig) -> None:
        """subset, slice, drop, concat, with_fields, only_fields and pickling keep each row's own life."""
        meta = await claimed(rig, *"abcd")
        await rig.client.evict(["b"], "p")
        await put(rig.client, "b")
        whole = pickle.loads(pickle.dumps(meta.slice(2, 4).concat(meta.subset([1, 0]))))
        whole = whole.with_fields(["y"]).only_fields(["y"])
        assert whole.sample_ids == ["c", "d", "b", "a"]
        done = await rig.mate.put_samples(whole, "p", {"y": torch.arange(4.0)}, stale="skip")
        assert done.sample_ids == ["c", "d", "a"]
        rest = whole.drop(["c"])
        assert rest is not None
        await rig.mate.pop(rest, "p")
        assert set(await there(rig)) == {"b", "c"}
