"""Promise 2: a read never returns fewer rows or columns than requested."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

import asyncdp
from asyncdp import (
    DataPlaneBadRequest,
    KVBatchMeta,
    PartialReadError,
    SampleNotFound,
)

from ..rig import declare, table
from ..same import check_same
from ..steps import fill

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Reads"]


class Reads(Contract):
    """Promise 2: a read never returns fewer rows or columns than requested."""

    async def test_borrowed_rows_stay_as_they_were_read(self, rig: Rig) -> None:
        """R13: also where nothing is copied; what is written to them is seen by nobody else."""
        await declare(rig.client)
        await rig.client.put_samples(["a", "b"], "p", {"x": torch.tensor([1, 2])})
        first = await rig.client.get_samples(["a", "b"], "p", ["x"], borrow=True)
        first["x"][0] = 50
        second = await rig.client.get_samples(["a", "b"], "p", ["x"], borrow=True)
        await rig.client.clear_samples(["a", "b"], "p")
        for turn in range(8):
            await rig.client.put_samples(["a", "b"], "p", {"x": torch.tensor([70 + turn, 80])})
            await rig.client.clear_samples(["a", "b"], "p")
        check_same(first["x"], torch.tensor([50, 2]))
        check_same(second["x"], torch.tensor([1, 2]))
        with asyncdp.borrowed(first):
            pass

    async def test_an_unknown_id_alone_is_not_found(self, rig: Rig) -> None:
        """P1: the read raises SampleNotFound, a KeyError, with the id; it is not retryable and blames no port."""
        await fill(rig)
        with pytest.raises(SampleNotFound, match="'nobody'") as caught:
            await rig.client.get_samples(["nobody"], "p", ["x"])
        err = caught.value
        assert isinstance(err, KeyError)
        assert err.sample_ids == ("nobody",)
        assert (err.op, err.partition_id) == ("get_samples", "p")
        assert (err.retryable, err.blames_port, err.ambiguous) == (False, False, False)

    async def test_many_unknown_ids_are_all_named(self, rig: Rig) -> None:
        """P1: if no row is found, the error has the number of ids and the ids."""
        await fill(rig)
        with pytest.raises(SampleNotFound, match=r"none of 3 rows.*'n1'.*'n2'") as caught:
            await rig.client.get_samples(["n1", "n2", "n3"], "p", ["x"])
        assert caught.value.sample_ids == ("n1", "n2", "n3")

    async def test_one_unknown_id_of_three_keeps_the_other_rows(self, rig: Rig) -> None:
        """P1: PartialReadError has the found rows in order, both metas, and an error for each missing position."""
        await fill(rig)
        with pytest.raises(PartialReadError) as caught:
            await rig.client.get_samples(["s3", "nobody", "s1"], "p", ["x"])
        err = caught.value
        check_same(err.rows["x"], torch.tensor([3, 1]))
        assert err.rows.batch_size == torch.Size([2])
        assert (err.ok.sample_ids, err.failed.sample_ids) == (["s3", "s1"], ["nobody"])
        assert (err.ok.partition_id, err.ok.fields) == ("p", ["x"])
        assert list(err.errors) == [1]
        assert isinstance(err.errors[1], SampleNotFound)
        assert err.sample_ids == ("nobody",)
        assert "nobody" in str(err)
        assert not err.retryable
        check_same((await rig.client.get_data(err.ok))["x"], torch.tensor([3, 1]))

    async def test_a_field_that_only_some_have_is_missing_for_the_others(self, rig: Rig) -> None:
        """P1: the error names the rows without the field and has the others; no column is dropped."""
        await fill(rig, y=1)
        await rig.client.put_samples(["s0", "s2"], "p", {"y": torch.ones(2)})
        with pytest.raises(PartialReadError) as caught:
            await rig.client.get_samples(["s0", "s1", "s2"], "p", ["x", "y"])
        err = caught.value
        assert sorted(err.rows.keys()) == ["x", "y"]
        check_same(err.rows["x"], torch.tensor([0, 2]))
        missing = err.errors[1]
        assert isinstance(missing, SampleNotFound)
        assert missing.field == "y"
        assert "'y'" in str(missing)

    @pytest.mark.parametrize("name", ["y", "mistyped"], ids=["declared", "unknown"])
    async def test_a_field_that_nobody_has_is_not_found(self, rig: Rig, name: str) -> None:
        """P1: the field may still be produced, so the read raises SampleNotFound and returns no empty TensorDict."""
        await fill(rig, y=1)
        with pytest.raises(SampleNotFound, match=f"'{name}'"):
            await rig.client.get_samples(["s0", "s1"], "p", [name])
        with pytest.raises(SampleNotFound):
            await rig.client.get_samples(["s0"], "p", ["x", name])

    async def test_a_sample_of_tags_only_has_no_fields(self, rig: Rig) -> None:
        """A sample with tags only exists, but reads of its fields raise SampleNotFound."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", tags=[{"k": 1}])
        with pytest.raises(SampleNotFound, match="'x'"):
            await rig.client.get_samples(["a"], "p", ["x"])

    async def test_get_data_reads_the_fields_it_is_told(self, rig: Rig) -> None:
        """It reads select_fields, else meta.fields, and without either raises DataPlaneBadRequest."""
        await declare(rig.client, "x", "y")
        await rig.client.put_samples(["a"], "p", table(x=torch.zeros(1), y=torch.ones(1)))
        meta = KVBatchMeta("p", sample_ids=["a"])
        assert list((await rig.client.get_data(meta, ["y"])).keys()) == ["y"]
        assert list((await rig.client.get_data(meta.only_fields(["x"]))).keys()) == ["x"]
        assert list((await rig.client.get_data(meta.only_fields(["x"]), ["y"])).keys()) == ["y"]
        with pytest.raises(DataPlaneBadRequest, match="select_fields"):
            await rig.client.get_data(meta)

    async def test_metas_of_different_origin_are_read_together(self, rig: Rig) -> None:
        """A meta that joins those of a put, of a claim and one made by hand reads all of its rows."""
        await declare(rig.client)
        first = await rig.client.put_samples(["a"], "p", {"x": torch.tensor([0])})
        await rig.client.put_samples(["b", "c"], "p", {"x": torch.tensor([1, 2])})
        claimed = (await rig.client.claim_meta("p", "train", ["x"], 3)).subset([1])
        by_hand = KVBatchMeta("p", sample_ids=["c"], fields=["x"])
        check_same((await rig.mate.get_data(by_hand.concat(first, claimed)))["x"], torch.tensor([2, 0, 1]))
