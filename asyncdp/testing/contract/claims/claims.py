"""Promise 4: each task gets each sample once, when all required fields are present."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any

import pytest
import torch

from ..rig import at_once, declare, table
from ..same import check_same
from ..steps import claim, put

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Claims"]


class Claims(Contract):
    """Promise 4: each task gets each sample once, when all required fields are present."""

    async def test_a_claim_tells_what_was_claimed(self, rig: Rig) -> None:
        """The meta has partition, task, ids, fields, tags and lengths, and reads its data, also after pickling."""
        await declare(rig.client, "x", "y")
        await rig.client.put_samples(
            ["a", "b"],
            "p",
            table(x=torch.arange(2), y=torch.ones(2)),
            [{"input_lengths": 4}, {"input_lengths": 7, "k": "v"}],
        )
        meta = await rig.mate.claim_meta("p", "train", ["x"], 2)
        assert (meta.partition_id, meta.task_name, meta.sample_ids, meta.fields) == ("p", "train", ["a", "b"], ["x"])
        assert meta.sequence_lengths == [4, 7]
        assert meta.tags is not None
        assert meta.tags[1]["k"] == "v"
        again = pickle.loads(pickle.dumps(meta))
        assert again == meta
        check_same((await rig.client.get_data(again))["x"], torch.arange(2))

    async def test_a_claim_right_after_a_put_has_the_tags(self, rig: Rig) -> None:
        """P6: in fifty trials, no claim returns a sample without its tags."""
        await declare(rig.client)
        for i in range(25):
            claimed, _ = await at_once(
                rig.mate.claim_meta("p", "train", ["x"], 2, timeout_s=30),
                rig.client.put_samples([f"a{i}", f"b{i}"], "p", {"x": torch.zeros(2)}, [{"i": i}, {"i": i}]),
            )
            assert [tags.get("i") for tags in claimed.tags] == [i, i]

    async def test_a_sample_is_claimable_once_all_required_fields_are_there(self, rig: Rig) -> None:
        """Fields may come from different puts and clients, and each task waits for its own required fields."""
        await declare(rig.client, "x", "y", tasks=("one", "both"))
        await put(rig.client, "a", "b")
        assert await claim(rig.client, 9, "both", "x", "y") == []
        assert await claim(rig.client, 9, "one", "x") == ["a", "b"]
        await rig.mate.put_samples(["b"], "p", {"y": torch.zeros(1)})
        assert await claim(rig.client, 9, "both", "x", "y") == ["b"]
        await rig.mate.put_samples(["a"], "p", {"y": torch.zeros(1)})
        assert await claim(rig.mate, 9, "both", "y", "x") == ["a"]

    @pytest.mark.parametrize("tags", [{"committed": False}, {"status": "failed"}], ids=str)
    async def test_uncommitted_and_failed_samples_are_skipped(self, rig: Rig, tags: dict[str, Any]) -> None:
        """After a put of tags commits them, they are claimable."""
        await declare(rig.client)
        await put(rig.client, "a", **tags)
        await put(rig.client, "b")
        assert await claim(rig.mate) == ["b"]
        await rig.client.put_samples(["a"], "p", tags=[{"committed": True, "status": "ok"}])
        assert await claim(rig.mate) == ["a"]

    async def test_what_was_ready_first_is_claimed_first(self, rig: Rig) -> None:
        """The order is that in which samples became ready, not that of puts; a released sample is first again."""
        await declare(rig.client, "x", "y")
        for name in "abc":
            await put(rig.client, name)
        for name in "cab":
            await rig.client.put_samples([name], "p", {"y": torch.zeros(1)})
        first = await rig.client.claim_meta("p", "train", ["x", "y"], 2, blocking=False)
        assert first.sample_ids == ["c", "a"]
        rig.need("claim_release")
        await rig.client.release_claim(first)
        assert await claim(rig.mate, 3, "train", "x", "y") == ["c", "a", "b"]

    async def test_rows_of_one_put_are_claimed_in_their_order(self, rig: Rig) -> None:
        """Within one put, samples are claimed in the order of the ids."""
        await declare(rig.client)
        await put(rig.client, "d", "b", "c", "a")
        assert await claim(rig.client, 3) == ["d", "b", "c"]
        assert await claim(rig.client, 3) == ["a"]

    async def test_each_task_gets_each_sample_once(self, rig: Rig) -> None:
        """Tasks claim independently, and a claimed sample that is put again does not become claimable again."""
        await declare(rig.client, tasks=("train", "log"))
        await put(rig.client, "a", "b")
        assert await claim(rig.client) == ["a", "b"]
        assert await claim(rig.mate) == []
        assert await claim(rig.mate, 1, "log") == ["a"]
        await put(rig.client, "a", "b", again=True)  # C10
        await rig.client.put_samples(["a"], "p", {"new": torch.zeros(1)})
        assert await claim(rig.client) == []
        assert await claim(rig.client, 9, "log") == ["b"]

    async def test_a_sample_put_again_while_it_waits_is_claimed_once(self, rig: Rig) -> None:
        """A sample that is replaced before it is claimed is still claimed only once."""
        await declare(rig.client)
        for _ in range(3):
            await put(rig.client, "a")
        assert await claim(rig.client) == ["a"]
        assert await claim(rig.client) == []

    async def test_cleared_and_put_anew_a_sample_is_claimable_again(self, rig: Rig) -> None:
        """C10: another life of an id is a different sample."""
        await declare(rig.client)
        await put(rig.client, "a")
        assert await claim(rig.client) == ["a"]
        await rig.mate.clear_samples(["a"], "p")
        await put(rig.mate, "a")
        assert await claim(rig.client) == ["a"]

    async def test_a_cleared_sample_is_not_claimed(self, rig: Rig) -> None:
        """A sample that was cleared while it was ready is not claimable any more."""
        await declare(rig.client)
        await put(rig.client, "a", "b")
        await rig.client.clear_samples(["a"], "p")
        assert await claim(rig.client) == ["b"]
