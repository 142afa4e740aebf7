"""KVBatchMeta as users change it."""

import pytest
import torch

from asyncdp import DataPlaneBadRequest, KVBatchMeta


def test_columns_are_written_into_the_tags_of_their_rows() -> None:
    """Lists and tensors; other tags stay, and a meta without tags gets some."""
    meta = KVBatchMeta("p", sample_ids=["a", "b"], tags=[{"k": 1, "old": "x"}, {}])
    meta.stamp_tags({"k": [2, 3], "reward": torch.tensor([0.5, 1.5])})
    assert meta.tags == [{"k": 2, "old": "x", "reward": 0.5}, {"k": 3, "reward": 1.5}]
    bare = KVBatchMeta("p", sample_ids=["a"])
    bare.stamp_tags({"k": (1,)})
    assert bare.tags == [{"k": 1}]


def test_a_column_of_another_length_is_refused() -> None:
    """By name, before any column is written."""
    meta = KVBatchMeta("p", sample_ids=["a", "b"])
    with pytest.raises(DataPlaneBadRequest, match="tag 'short' has 1 values for 2 rows") as caught:
        meta.stamp_tags({"k": [1, 2], "short": [1]})
    assert caught.value.field == "short"
    assert meta.tags is None
