from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdp.batching.sharding import ELEM_COUNTS_PER_GB, MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, shard_meta_for_dp
from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import KVBatchMeta, RowHandle

ALGORITHMS = ["concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"]
ORDERS = ["packer", "largest_first"]
PACK: dict[str, Any] = {"max_tokens_per_microbatch": 16}


def batch(lengths: list[int], **extra: object) -> KVBatchMeta:
    """Make a meta of these lengths, with everything that a row can carry."""
    rows = range(len(lengths))
    return KVBatchMeta(
        partition_id="train",
        task_name="update",
        sample_ids=[f"s{i}" for i in rows],
        fields=["input_ids"],
        sequence_lengths=list(lengths),
        extra_info=dict(extra),
        tags=[{"row": i} for i in rows],
        handles=[RowHandle(incarnation=i) for i in rows],
    )


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw lengths of a batch, a number of ranks and a chunk size that divide it."""
    ranks, share, chunks = draw(st.integers(1, 5)), draw(st.integers(1, 6)), draw(st.integers(1, 3))
    count = ranks * share * chunks
    return draw(st.lists(st.integers(0, 100), min_size=count, max_size=count)), ranks, ranks * share


def check_rows(meta: KVBatchMeta, shards: list[KVBatchMeta], unsorted: list[int] | None) -> None:
    """Every row is in exactly one shard, whole, and unsorted_indices leads back."""
    together = shards[0].concat(shards[1:])
    assert sorted(together.sample_ids) == sorted(meta.sample_ids)
    back = together if unsorted is None else together.subset(unsorted)
    assert back.sample_ids == meta.sample_ids
    assert back.sequence_lengths == meta.sequence_lengths
    assert back.tags == meta.tags
    assert back.handles == meta.handles
    for shard in shards:
        assert (shard.partition_id, shard.task_name, shard.fields) == ("train", "update", ["input_ids"])


def chunk_of(sample_id: str, size: int) -> int:
    """Tell which chunk a row belongs to."""
    return int(sample_id[1:]) // size


def spread(loads: list[int]) -> int:
    """Tell by how much the lightest is less than the heaviest."""
    return max(loads) - min(loads)


# --- without a plan of microbatches ---------------------------------------------------------------------------------


@given(splits())
def test_rows_are_split_once_and_come_back(drawn: tuple[list[int], int, int]) -> None:
    """Each row goes to one rank with its length, tag and handle; every rank gets as many, chunk by chunk."""
    lengths, ranks, size = drawn
    meta = batch(lengths)
    shards, unsorted = shard_meta_for_dp(meta, dp_world=ranks, batch_size=size)
    check_rows(meta, shards, unsorted)
    for shard in shards:
        chunks = [chunk_of(sample_id, size) for sample_id in shard.sample_ids]
        assert chunks == sorted(chunks)
        assert all(chunks.count(chunk) == size // ranks for chunk in set(chunks))
        assert MICRO_BATCH_INDICES not in shard.extra_info


@given(splits())
def test_balance_bound(drawn: tuple[list[int], int, int]) -> None:
    """In each chunk, ranks differ by at most the longest row less the shortest, and are no worse than in order."""
    lengths, ranks, size = drawn
    shards, _ = shard_meta_for_dp(batch(lengths), dp_world=ranks, batch_size=size)
    share = size // ranks
    for chunk in range(len(lengths) // size):
        loads = [sum((shard.sequence_lengths or [])[chunk * share : (chunk + 1) * share]) for shard in shards]
        rows = lengths[chunk * size : (chunk + 1) * size]
        assert spread(loads) <= max(rows) - min(rows)
        assert max(loads) <= max(sum(rows[at : at + share]) for at in range(0, size, share))


def test_long_tail_is_balanced_closely() -> None:
    """Lengths as rollouts have them: the heaviest of 8 ranks is within 0.1 % of the mean, in order it is not."""
    rng = random.Random(7)
    lengths = [min(8192, int(rng.lognormvariate(6.5, 1.0))) for _ in range(1024)]
    shards, _ = shard_meta_for_dp(batch(lengths), dp_world=8)
    mean = sum(lengths) / 8
    assert max(sum(shard.sequence_lengths or []) for shard in shards) < 1.001 * mean
    assert max(sum(lengths[at : at + 128]) for at in range(0, 1024, 128)) > 1.05 * mean


def test_equal_lengths_stay_in_order() -> None:
    """Where nothing is gained, nothing is moved: contiguous shares, and None instead of indices."""
    shards, unsorted = shard_meta_for_dp(batch([5] * 6), dp_world=3)
    assert [shard.sample_ids for shard in shards] == [["s0", "s1"], ["s2", "s3"], ["s4", "s5"]]
    assert unsorted is None


def test_chunks_stay_steps() -> None:
    """With a batch_size each rank has its share of the first step first, as NeMo-RL's example has it."""
    shards, unsorted = shard_meta_for_dp(batch([1] * 8), dp_world=2, batch_size=4)
    assert [shard.sample_ids for shard in shards] == [["s0", "s1", "s4", "s5"], ["s2", "s3", "s6", "s7"]]
    assert unsorted == [0, 1, 4, 5, 2, 3, 6, 7]


def test_metas_are_independent() -> None:
    """What is done to one shard's tags and extra_info shows in no other, nor in the batch."""
    meta = batch([1, 2, 3, 4], kept=1)
    shards, _ = shard_meta_for_dp(meta, dp_world=2, dynamic_batching_args={"max_tokens_per_microbatch": 8})
    assert [shard.extra_info["kept"] for shard in shards] == [1, 1]
    (shards[0].tags or [])[0]["row"] = 99
    shards[0].extra_info[MICRO_BATCH_INDICES][0].clear()
    assert shards[1].extra_info[MICRO_BATCH_INDICES] == [[[0, 2]]]
    assert meta.tags == [{"row": i} for i in range(4)]
    assert meta.extra_info == {"kept": 1}


def test_stamps_of_an_earlier_split_go() -> None:
    """A shard that is split again does not keep a plan that is not its own."""
    once, _ = shard_meta_for_dp(batch([4] * 8), dp_world=2, sequence_packing_args={"max_tokens_per_microbatch": 8})
    again, _ = shard_meta_for_dp(once[0], dp_world=2)
    assert again[0].extra_info == {}
    dynamic, _ = shard_meta_for_dp(once[0], dp_world=2, dynamic_batching_args={"max_tokens_per_microbatch": 8})
    assert set(dynamic[0].extra_info) == {MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS}


# --- dynamic batching -----------------------------------------------------------------------------------------------


def test_dynamic_microbatches() -> None:
    """Shortest first, dealt out in turn; a microbatch is closed when rows x width would exceed the bound."""
    meta = batch([9, 1, 7, 2, 8, 3, 5, 4])
    args = {
        "max_tokens_per_microbatch": 16,
        "sequence_length_round": 4,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    shards, unsorted = shard_meta_for_dp(meta, dp_world=2, dynamic_batching_args=args)
    check_rows(meta, shards, unsorted)
    assert [shard.sequence_lengths for shard in shards] == [[1, 3, 5, 8], [2, 4, 7, 9]]
    for shard in shards:
        assert shard.extra_info == {
            MICRO_BATCH_INDICES: [[[0, 2], [2, 3], [3, 4]]],
            MICRO_BATCH_LENGTHS: [[4, 8, 12]],
        }


def check_spans(spans: list[list[int]], rows: int) -> None:
    """Microbatches follow each other and cover the rows."""
    assert [spans[0][0], spans[-1][1]] == [0, rows]
    assert all(left[1] == right[0] for left, right in pairwise(spans))
    assert all(start < end for start, end in spans)


@given(splits(), st.integers(1, 16), st.integers(100, 400))
def test_dynamic_plan_fits_every_rank(drawn: tuple[list[int], int, int], multiple: int, bound: int) -> None:
    """All ranks share one plan; no row is wider than its microbatch, no microbatch exceeds the bound."""
    lengths, ranks, size = drawn
    meta = batch(lengths)
    args = {"max_tokens_per_microbatch": bound, "sequence_length_round": multiple}
    shards, unsorted = shard_meta_for_dp(meta, dp_world=ranks, batch_size=size, dynamic_batching_args=args)
    check_rows(meta, shards, unsorted)
    share = size // ranks
    for shard in shards:
        assert shard.extra_info == shards[0].extra_info
        plan = zip(shard.extra_info[MICRO_BATCH_INDICES], shard.extra_info[MICRO_BATCH_LENGTHS], strict=True)
        for chunk, (spans, widths) in enumerate(plan):
            check_spans(spans, share)
            mine = (shard.sequence_lengths or [])[chunk * share : (chunk + 1) * share]
            for (start, end), width in zip(spans, widths, strict=True):
                assert max(mine[start:end]) <= width
                assert (end - start) * width <= bound
                assert width % multiple == 0 or width == bound
        assert {chunk_of(sample_id, size) for sample_id in shard.sample_ids} == set(range(len(lengths) // size))


# --- sequence packing -----------------------------------------------------------------------------------------------


@given(splits(), st.integers(1, 16), st.integers(112, 400), st.sampled_from(ALGORITHMS), st.sampled_from(ORDERS))
def test_packed_plan(drawn: tuple[list[int], int, int], multiple: int, bound: int, algorithm: str, order: str) -> None:
    """Ranks get as many microbatches, within the bound and stamped with their padded tokens; balance is bounded."""
    lengths, ranks, size = drawn
    meta = batch(lengths)
    args = {
        "max_tokens_per_microbatch": bound,
        "sequence_length_pad_multiple": multiple,
        "algorithm": algorithm,
        "microbatch_order": order,
        "input_key": "input_ids",
        "input_lengths_key": "input_lengths",
    }
    shards, unsorted = shard_meta_for_dp(meta, dp_world=ranks, batch_size=size, sequence_packing_args=args)
    check_rows(meta, shards, unsorted)
    for chunk in range(len(lengths) // size):
        tokens: list[list[int]] = []
        for shard in shards:
            counts = shard.extra_info[ELEM_COUNTS_PER_GB]
            assert sum(counts) == shard.size
            first = sum(counts[:chunk])
            rows = shard.subset(range(first, first + counts[chunk]))
            assert {chunk_of(sample_id, size) for sample_id in rows.sample_ids} == {chunk}
            spans = shard.extra_info[MICRO_BATCH_INDICES][chunk]
            check_spans(spans, rows.size)
            padded = [-(-length // multiple) * multiple for length in rows.sequence_lengths or []]
            tokens.append([sum(padded[start:end]) for start, end in spans])
            assert tokens[-1] == shard.extra_info[MICRO_BATCH_LENGTHS][chunk]
            assert order == "packer" or tokens[-1] == sorted(tokens[-1], reverse=True)
        every = [count for rank in tokens for count in rank]
        assert max(every) <= bound
        assert len({len(rank) for rank in tokens}) == 1
        assert spread([sum(rank) for rank in tokens]) <= spread(every)


@pytest.mark.parametrize(
    ("algorithm", "bins"),
    [
        ("concatenative", [[0], [1, 2], [3, 4], [5]]),
        ("first_fit_decreasing", [[0, 5], [3, 4], [1, 2]]),
        ("modified_first_fit_decreasing", [[0, 5], [3, 4], [1, 2]]),
    ],
)
def test_packing_algorithms(algorithm: str, bins: list[list[int]]) -> None:
    """Each algorithm packs as its name says."""
    meta = batch([9, 4, 5, 7, 3, 1])
    args = {"max_tokens_per_microbatch": 10, "algorithm": algorithm}
    (shard,), _ = shard_meta_for_dp(meta, dp_world=1, sequence_packing_args=args)
    rows = [int(sample_id[1:]) for sample_id in shard.sample_ids]
    assert [sorted(rows[a:b]) for a, b in shard.extra_info[MICRO_BATCH_INDICES][0]] == bins


def test_mffd_beats_ffd_where_it_was_made_to() -> None:
    """Small rows in pairs beside large ones: MFFD needs fewer microbatches than FFD (Johnson and Garey's pattern)."""
    lengths = [51] * 6 + [27] * 6 + [26] * 6 + [23] * 12
    counts = {}
    for algorithm in ("first_fit_decreasing", "modified_first_fit_decreasing"):
        args = {"max_tokens_per_microbatch": 100, "algorithm": algorithm}
        (shard,), _ = shard_meta_for_dp(batch(lengths), dp_world=1, sequence_packing_args=args)
        counts[algorithm] = len(shard.extra_info[MICRO_BATCH_LENGTHS][0])
    assert counts["modified_first_fit_decreasing"] < counts["first_fit_decreasing"]


def test_algorithm_by_any_case_and_by_enum() -> None:
    """The name may be in upper case, or the value of an enum, as NeMo-RL's configs have it."""

    class Algorithm:
        value = "concatenative"

    plans = []
    for algorithm in ("CONCATENATIVE", Algorithm()):
        args = {"max_tokens_per_microbatch": 10, "algorithm": algorithm}
        plans.append(shard_meta_for_dp(batch([9, 1, 5, 5]), dp_world=1, sequence_packing_args=args))
    assert plans[0] == plans[1]


def test_shuffle_is_reproducible() -> None:
    """The shuffle is that of the rng given, and without one the same for equal batches."""
    lengths = list(range(1, 33))
    args = {"max_tokens_per_microbatch": 64, "algorithm": "first_fit_shuffle"}

    def split(rng: random.Random | None) -> list[str]:
        return shard_meta_for_dp(batch(lengths), dp_world=1, sequence_packing_args=args, rng=rng)[0][0].sample_ids

    assert split(None) == split(None)
    assert split(random.Random(1)) == split(random.Random(1))
    assert split(random.Random(1)) != split(random.Random(2))


def test_one_bin_is_split_for_all_ranks() -> None:
    """Where all fits one microbatch, the heaviest are halved until each rank has one."""
    shards, _ = shard_meta_for_dp(
        batch([4, 3, 2, 1]), dp_world=2, sequence_packing_args={"max_tokens_per_microbatch": 100}
    )
    assert [shard.extra_info[MICRO_BATCH_LENGTHS] for shard in shards] == [[[5]], [[5]]]


# --- misuse ---------------------------------------------------------------------------------------------------------


def pack(args: dict[str, Any]) -> dict[str, Any]:
    """Ask two ranks to pack."""
    return {"dp_world": 2, "sequence_packing_args": args}


def dynamic(args: dict[str, Any]) -> dict[str, Any]:
    """Ask two ranks to batch dynamically."""
    return {"dp_world": 2, "dynamic_batching_args": args}


@pytest.mark.parametrize(
    ("lengths", "arguments", "named"),
    [
        ([], {"dp_world": 1}, "meta"),
        ([1] * 5, {"dp_world": 2}, "dp_world"),
        ([1] * 4, {"dp_world": 3}, "dp_world"),
        ([1] * 4, {"dp_world": 8}, "dp_world"),
        ([1] * 4, {"dp_world": 0}, "dp_world"),
        ([1] * 4, {"dp_world": True}, "dp_world"),
        ([1] * 4, {"dp_world": 2.0}, "dp_world"),
        ([1] * 4, {"dp_world": 2, "batch_size": 3}, "batch_size"),
        ([1] * 4, {"dp_world": 2, "batch_size": 0}, "batch_size"),
        ([1] * 6, {"dp_world": 2, "batch_size": 3}, "dp_world"),
        ([1, -1], {"dp_world": 2}, "sequence_lengths"),
        ([1, 1], {**pack(PACK), **dynamic(PACK)}, "dynamic_batching_args"),
        ([1, 1], pack({}), "max_tokens_per_microbatch"),
        ([1, 1], dynamic({}), "max_tokens_per_microbatch"),
        ([1, 17], pack(PACK), "max_tokens_per_microbatch"),
        ([1, 17], dynamic(PACK), "max_tokens_per_microbatch"),
        ([1, 1], pack({**PACK, "algorithm": "best"}), "algorithm"),
        ([1, 1], pack({**PACK, "microbatch_order": "x"}), "microbatch_order"),
        ([1, 1], pack({**PACK, "microbatch_ordr": "x"}), "sequence_packing_args"),
        ([1, 1], dynamic({**PACK, "algorithm": "x"}), "dynamic_batching_args"),
        ([1, 1], dynamic({**PACK, "sequence_length_round": 0}), "sequence_length_round"),
    ],
)
def test_misuse_is_named(lengths: list[int], arguments: dict[str, Any], named: str) -> None:
    """What cannot be split as asked is DataPlaneBadRequest, which is a ValueError, and names the culprit."""
    with pytest.raises(DataPlaneBadRequest, match=named) as caught:
        shard_meta_for_dp(batch(lengths), **arguments)
    assert caught.value.field == named
    assert isinstance(caught.value, ValueError)


def test_lengths_are_needed() -> None:
    """A meta without sequence_lengths cannot be balanced, and the error says where they come from."""
    meta = KVBatchMeta("train", sample_ids=["a", "b"])
    with pytest.raises(DataPlaneBadRequest, match="input_lengths"):
        shard_meta_for_dp(meta, dp_world=2)


def test_the_row_that_does_not_fit_is_named() -> None:
    """A row longer than a microbatch is named by its id, not cut."""
    with pytest.raises(DataPlaneBadRequest, match=r"17 tokens of sample 's1'"):
        shard_meta_for_dp(batch([1, 17]), dp_world=2, dynamic_batching_args=PACK)
