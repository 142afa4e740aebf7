"""Promise 7: removing absent samples is no error, and removed samples are gone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import DataPlaneBadRequest, DataPlaneClearError, DataPlaneError, SampleNotFound

from ..faults import CLEAR, Fail, LoseReply, LoseRequest
from ..rig import declare
from ..same import check_same

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..rig import Rig
from ..base import Contract

__all__ = ["Clears"]

VERBS = ["clear_samples", "pop", "evict"]


async def put(client: Client, *ids: str) -> None:
    """Put ``x`` for these ids."""
    await client.put_samples(ids, "p", {"x": torch.ones(len(ids))})


async def ids_of(rig: Rig) -> set[str]:
    """Return the present ids."""
    return {key for group in await rig.client.list_metadata("p") for key in group.keys}


class Clears(Contract):
    """Promise 7: removing absent samples is no error, and removed samples are gone."""

    @pytest.mark.parametrize("verb", VERBS)
    async def test_what_is_removed_is_gone(self, rig: Rig, verb: str) -> None:
        """No client sees rows, tags, claims or groups of removed samples; other samples stay."""
        await declare(rig.client)
        await put(rig.client, *"abc")
        await getattr(rig.mate, verb)(["a", "c"], "p")
        assert await ids_of(rig) == {"b"}
        assert (await rig.client.describe("p")).size == 1
        with pytest.raises(SampleNotFound):
            await rig.client.get_samples(["a"], "p", ["x"])
        assert await rig.client.depth("p") == 1
        assert (await rig.client.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["b"]

    @pytest.mark.parametrize("verb", VERBS)
    async def test_what_is_not_there_is_no_error(self, rig: Rig, verb: str) -> None:
        """P9: no error for a repeated removal, a mix of known and unknown ids, an unknown partition, or tags only."""
        await declare(rig.client)
        await put(rig.client, "a")
        await rig.client.put_samples(["t"], "p", tags=[{"k": 1}])
        remove = getattr(rig.client, verb)
        await remove(["a", "nobody", "t", "a"], "p")
        assert await ids_of(rig) == set()
        await remove(["a"], "p")
        await remove(["a"], "nowhere")

    async def test_a_claimed_sample_is_gone_from_its_claim(self, rig: Rig) -> None:
        """list_claims lists only present samples."""
        await declare(rig.client)
        await put(rig.client, *"ab")
        await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.mate.clear_samples(["a"], "p")
        (info,) = await rig.client.list_claims("p", "train")
        assert info.sample_ids == ("b",)
        await rig.mate.clear_samples(["b"], "p")
        assert await rig.client.list_claims("p", "train") == []

    async def test_clearing_all_clears_what_this_owner_put(self, rig: Rig) -> None:
        """clear_samples(None) removes the samples that this owner put in the partition, and no others."""
        await declare(rig.client)
        await rig.client.register_partition("q", ["x"], 1, ["train"])
        await put(rig.client, *"abc")
        await put(rig.mate, *"d")
        await rig.client.put_samples(["a"], "q", {"x": torch.ones(1)})
        await rig.mate.clear_samples(["b"], "p")
        await rig.client.clear_samples(None, "p")
        assert await ids_of(rig) == {"d"}
        assert (await rig.client.describe("q")).size == 1

    async def test_clearing_all_of_nothing_warns(self, rig: Rig) -> None:
        """clear_samples(None) that finds nothing is likely a mistake and warns with RuntimeWarning."""
        await declare(rig.client)
        await put(rig.mate, "a")
        with pytest.warns(RuntimeWarning, match="found nothing"):
            await rig.client.clear_samples(None, "p")
        with pytest.warns(RuntimeWarning, match="found nothing"):
            await rig.client.clear_samples(None, "nowhere")
        assert await ids_of(rig) == {"a"}

    async def test_a_clear_gives_the_space_back(self, rig: Rig) -> None:
        """A plane with a capacity of two samples takes a hundred puts and clears."""
        client = await rig.open(storage_capacity=2)
        await declare(client)
        for i in range(100):
            await put(client, f"a{i}", f"b{i}")
            await client.clear_samples([f"a{i}", f"b{i}"], "p")
        assert (await client.describe("p")).size_bytes == 0

    @pytest.mark.parametrize("fault", [LoseRequest, LoseReply])
    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_clear_whose_answer_is_lost_is_sent_again(self, rig: Rig, fault: Any, verb: str) -> None:
        """Whether the request or the answer was lost, the rows are gone when the call returns."""
        lost = fault(CLEAR)
        client = await rig.attach(lost)
        await declare(client)
        await put(client, *"ab")
        await getattr(client, verb)(["a"], "p")
        assert lost.struck == 1
        assert await ids_of(rig) == {"b"}

    @pytest.mark.parametrize(("fault", "left"), [(LoseRequest, {"a", "b"}), (LoseReply, {"b"})])
    async def test_a_clear_that_is_never_answered_is_ambiguous(self, rig: Rig, fault: Any, left: set[str]) -> None:
        """The error is ambiguous; the next put on these ids first reconciles the outcome and then takes effect."""
        rig.need("mutation_dedup")
        lost = fault(CLEAR, times=99)
        client = await rig.attach(lost)
        await declare(client)
        await put(client, *"ab")
        with pytest.raises(DataPlaneError) as caught:
            await client.clear_samples(["a"], "p")
        assert caught.value.ambiguous
        assert caught.value.op == "clear_samples"
        assert await ids_of(rig) == left
        await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.zeros(1))

    async def test_a_clear_that_fails_keeps_the_rows(self, rig: Rig) -> None:
        """If the backend refuses, the error is not ambiguous and the rows are still present."""
        client = await rig.attach(Fail(CLEAR, make=lambda: DataPlaneClearError("no"), times=9))
        await declare(client)
        await put(client, "a")
        with pytest.raises(DataPlaneClearError) as caught:
            await client.clear_samples(["a"], "p")
        assert not caught.value.ambiguous
        assert await ids_of(rig) == {"a"}

    async def test_dropping_a_partition_drops_all_of_it(self, rig: Rig) -> None:
        """Samples, claims and tasks are gone, a second drop is no error, and a partition declared anew is empty."""
        await declare(rig.client)
        await put(rig.client, *"ab")
        await rig.client.claim_meta("p", "train", ["x"], 1)
        await rig.mate.drop_partition("p")
        await rig.mate.drop_partition("p")
        with pytest.raises(DataPlaneBadRequest, match="'p'"):
            await rig.client.get_samples(["a"], "p", ["x"])
        with pytest.raises(DataPlaneBadRequest, match="'p'"):
            await rig.client.depth("p")
        with pytest.raises(DataPlaneBadRequest, match="'p'"):
            await put(rig.client, "a")
        assert await rig.client.list_partitions() == []
        await declare(rig.client, tasks=("other",))
        info = await rig.client.describe("p")
        assert (info.size, info.size_bytes, info.consumer_tasks) == (0, 0, ("other",))

    async def test_live_bytes_are_accounted_for(self, rig: Rig) -> None:
        """The live bytes of the snapshot follow puts, replacing puts and every kind of removal."""
        await declare(rig.client)
        count = rig.client.snapshot
        await rig.client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 4)})
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1, 8)})
        assert (count()["bytes_outstanding"], count()["n_keys_outstanding"]) == (32 + 16, 2)
        await rig.client.pop(["a"], "p")
        await rig.client.evict(["b"], "p")
        assert (count()["bytes_outstanding"], count()["n_keys_outstanding"]) == (0, 0)
        assert {op: count()["ops"][op]["ok"] for op in ("pop", "evict")} == {"pop": 1, "evict": 1}
