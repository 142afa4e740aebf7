"""Splits a batch over data-parallel ranks by its metadata alone: no I/O, no tensors, no new ids.

:func:`shard_meta_for_dp` has the name, the arguments and the contract of NeMo-RL's (``nemo_rl/data_plane/preshard.py``
over ``BatchedDataDict.shard_by_batch_size``): every rank gets the same number of rows or, if they are packed, of
microbatches, so that all ranks take part in the same collectives. In addition, ranks are balanced by length even
without packing, packed microbatches are distributed by weight and not in turn, rows keep their tags and handles, and a
row that fits into no microbatch is an error instead of being cut by its consumer.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_right
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, SupportsIndex

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import KVBatchMeta

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["ELEM_COUNTS_PER_GB", "MICRO_BATCH_INDICES", "MICRO_BATCH_LENGTHS", "shard_meta_for_dp"]

# Keys of extra_info that NeMo-RL's workers read.
MICRO_BATCH_INDICES: Final = "micro_batch_indices"
MICRO_BATCH_LENGTHS: Final = "micro_batch_lengths"
ELEM_COUNTS_PER_GB: Final = "elem_counts_per_gb"

_OP: Final = "shard_meta_for_dp"
# input_key and input_lengths_key, which name columns, are accepted and ignored, since the meta has the lengths.
_PACKING_KEYS: Final = frozenset(
    {
        "algorithm",
        "input_key",
        "input_lengths_key",
        "max_tokens_per_microbatch",
        "microbatch_order",
        "sequence_length_pad_multiple",
    }
)
_DYNAMIC_KEYS: Final = frozenset(
    {"input_key", "input_lengths_key", "max_tokens_per_microbatch", "sequence_length_round"}
)


@dataclass(slots=True)
class _RankPlan:
    """The rows of the batch that one rank gets, in its order, and the microbatches of each chunk."""

    rows: list[int] = field(default_factory=list)
    indices: list[list[list[int]]] = field(default_factory=list)
    lengths: list[list[int]] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def add(self, microbatches: Iterable[tuple[Sequence[int], int]]) -> None:
        """Append one chunk, given as (rows, length) of each microbatch."""
        indices, lengths, end = [], [], 0
        for rows, length in microbatches:
            self.rows.extend(rows)
            indices.append([end, end + len(rows)])
            lengths.append(length)
            end += len(rows)
        self.indices.append(indices)
        self.lengths.append(lengths)
        self.counts.append(end)


def shard_meta_for_dp(
    meta: KVBatchMeta,
    *,
    dp_world: int,
    batch_size: int | None = None,
    sequence_packing_args: Mapping[str, Any] | None = None,
    dynamic_batching_args: Mapping[str, Any] | None = None,
    rng: random.Random | None = None,
) -> tuple[list[KVBatchMeta], list[int] | None]:
    """Split the rows of a batch over ``dp_world`` ranks, with nearly equal numbers of tokens and equal ones of rows.

    Packed batches have equal numbers of microbatches instead of rows. The batch is cut into chunks of ``batch_size``
    rows, one per optimizer step, and each chunk is split separately: a rank gets its share of the first chunk, then
    that of the second. Within a chunk, the numbers of tokens of two ranks differ at most by as much as the longest and
    the shortest row (packed: microbatch). Without packing or dynamic batching, rows stay in order if that is as
    balanced.

    Args:
        meta: Meta of the batch, with ``sequence_lengths``.
        dp_world: Number of ranks.
        batch_size: Rows per chunk over all ranks (the global batch size); None: one chunk.
        sequence_packing_args: Pack rows end to end into microbatches. ``max_tokens_per_microbatch``; ``algorithm``:
            ``"modified_first_fit_decreasing"`` (default), ``"first_fit_decreasing"``, ``"first_fit_shuffle"`` or
            ``"concatenative"``; ``sequence_length_pad_multiple`` (1): the length of each row is rounded up to it;
            ``microbatch_order``: ``"packer"`` (default, as they were made) or ``"largest_first"``.
        dynamic_batching_args: Put rows of similar length into padded microbatches, with the same shapes on every rank.
            ``max_tokens_per_microbatch`` limits rows x width; ``sequence_length_round`` (1): the width is rounded up to
            a multiple of it, but not beyond the limit.
        rng: Random source of ``first_fit_shuffle``; None: ``random.Random(0)``, so that equal batches are split alike.

    Returns:
        One meta per rank, and ``unsorted_indices``: if ``rows`` are the results of all ranks in rank order,
        ``[rows[i] for i in unsorted_indices]`` is in the order of ``meta.sample_ids``. None if ``rows`` is already.

        With packing or dynamic batching, the ``extra_info`` of each rank gets, with one entry per chunk,
        ``micro_batch_indices`` (``[start, end]`` of each microbatch, counted within the rank's share of the chunk) and
        ``micro_batch_lengths`` (packing: its padded tokens; dynamic: its width); packing adds ``elem_counts_per_gb``
        (the rank's number of rows).

    Raises:
        DataPlaneBadRequest: The batch is empty or has no lengths, ``batch_size`` does not divide the batch, or
            ``dp_world`` the chunk, args are unknown or missing or of both kinds, or a row is longer than a microbatch.
    """
    meta = KVBatchMeta.of(meta)
    lengths = _lengths(meta)
    chunk = meta.size if batch_size is None else _count("batch_size", batch_size)
    if meta.size % chunk:
        raise _refuse("batch_size", f"{chunk} does not divide the {meta.size} rows of the batch")
    if chunk % _count("dp_world", dp_world):
        raise _refuse("dp_world", f"{dp_world} ranks do not divide {chunk} rows evenly")
    chunks = [range(start, start + chunk) for start in range(0, meta.size, chunk)]
    plans = [_RankPlan() for _ in range(dp_world)]
    if sequence_packing_args is not None and dynamic_batching_args is not None:
        raise _refuse("dynamic_batching_args", "excludes sequence_packing_args; give one of them")
    if sequence_packing_args is not None:
        _plan_packed(plans, chunks, lengths, meta.sample_ids, sequence_packing_args, rng or random.Random(0))  # noqa: S311
    elif dynamic_batching_args is not None:
        _plan_dynamic(plans, chunks, lengths, meta.sample_ids, dynamic_batching_args)
    else:
        _plan_balanced(plans, chunks, lengths)
    stamps = [MICRO_BATCH_INDICES, MICRO_BATCH_LENGTHS, ELEM_COUNTS_PER_GB]
    shards = []
    for plan in plans:
        shard = meta.subset(plan.rows)
        # Drop the microbatches of an earlier split.
        shard.extra_info = {key: value for key, value in meta.extra_info.items() if key not in stamps}
        if sequence_packing_args is not None or dynamic_batching_args is not None:
            shard.extra_info |= {MICRO_BATCH_INDICES: plan.indices, MICRO_BATCH_LENGTHS: plan.lengths}
        if sequence_packing_args is not None:
            shard.extra_info[ELEM_COUNTS_PER_GB] = plan.counts
        shards.append(shard)
    order = [row for plan in plans for row in plan.rows]
    if order == list(range(meta.size)):
        return shards, None
    return shards, sorted(range(meta.size), key=order.__getitem__)


def _plan_balanced(plans: Sequence[_RankPlan], chunks: Sequence[range], lengths: Sequence[int]) -> None:
    """Balance the tokens of the ranks; keep rows in order if that is as balanced."""
    for chunk in chunks:
        share = len(chunk) // len(plans)
        in_order = [list(chunk[at : at + share]) for at in range(0, len(chunk), share)]
        balanced = [[chunk[i] for i in part] for part in _balance([lengths[row] for row in chunk], len(plans))]
        (heaviest, spread), (least, narrowest) = _loads(in_order, lengths), _loads(balanced, lengths)
        for plan, part in zip(plans, in_order if heaviest <= least and spread <= narrowest else balanced, strict=True):
            plan.rows.extend(part)


def _plan_dynamic(
    plans: Sequence[_RankPlan],
    chunks: Sequence[range],
    lengths: Sequence[int],
    sample_ids: Sequence[str],
    args: Mapping[str, Any],
) -> None:
    """Assign rows to ranks in turn, shortest first; begin a microbatch when rows x width would exceed the limit.

    The rows assigned in one turn have the same position on every rank, so microbatches that are computed from the
    longest row of each turn fit all ranks.
    """
    _known("dynamic_batching_args", args, _DYNAMIC_KEYS)
    bound = _count("max_tokens_per_microbatch", args.get("max_tokens_per_microbatch"))
    multiple = _count("sequence_length_round", args.get("sequence_length_round", 1))
    ranks = len(plans)
    for chunk in chunks:
        by_length = sorted(chunk, key=lengths.__getitem__)
        _fits(by_length, lengths, bound, sample_ids)
        widths = [min(_round_up(lengths[row], multiple), bound) for row in by_length[ranks - 1 :: ranks]]
        starts = [0]
        for at, width in enumerate(widths):
            if (at - starts[-1] + 1) * width > bound:
                starts.append(at)
        spans = list(zip(starts, [*starts[1:], len(widths)], strict=True))
        for rank, plan in enumerate(plans):
            mine = by_length[rank::ranks]
            plan.add((mine[start:end], widths[end - 1]) for start, end in spans)


def _plan_packed(
    plans: Sequence[_RankPlan],
    chunks: Sequence[range],
    lengths: Sequence[int],
    sample_ids: Sequence[str],
    args: Mapping[str, Any],
    rng: random.Random,
) -> None:
    """Pack each chunk, split microbatches until their number is a multiple of the ranks, distribute them by weight."""
    _known("sequence_packing_args", args, _PACKING_KEYS)
    bound = _count("max_tokens_per_microbatch", args.get("max_tokens_per_microbatch"))
    multiple = _count("sequence_length_pad_multiple", args.get("sequence_length_pad_multiple", 1))
    order = args.get("microbatch_order")
    if order not in (None, "packer", "largest_first"):
        raise _refuse("microbatch_order", f"is 'packer' or 'largest_first', not {order!r}")
    padded = [_round_up(length, multiple) for length in lengths]
    for chunk in chunks:
        _fits(chunk, padded, bound, sample_ids)
        sizes = [padded[row] for row in chunk]
        bins = _pack(sizes, bound, args.get("algorithm", "modified_first_fit_decreasing"), rng)
        _split_to_multiple(bins, sizes, len(plans))
        loads = [sum(sizes[i] for i in rows) for rows in bins]
        for plan, part in zip(plans, _balance(loads, len(plans)), strict=True):
            if order == "largest_first":
                part.sort(key=loads.__getitem__, reverse=True)
            plan.add(([chunk[i] for i in bins[k]], loads[k]) for k in part)


# --- balance --------------------------------------------------------------------------------------------------------


def _balance(weights: Sequence[int], parts: int) -> list[list[int]]:
    """Split items into ``parts`` of equal count and nearly equal weight.

    Karmarkar-Karp differencing under equal counts (the balanced largest-first differencing method: Michiels, Korst,
    Aarts and van Leeuwen, "Performance ratios for the differencing method applied to the balanced number partitioning
    problem", STACS 2003). Items are sorted by weight into groups of ``parts``, each a partial split. The two partial
    splits with the greatest imbalance are merged, heavy parts with light ones, until one is left. A merge never has a
    greater imbalance than both had before, so that of the result is at most the heaviest item less the lightest.

    Args:
        weights: Weight of each item; their number is a multiple of ``parts``.
        parts: Number of parts.

    Returns:
        Positions of the items of each part, ascending; the parts are in the order of their first items.
    """
    by_weight = sorted(range(len(weights)), key=weights.__getitem__, reverse=True)
    splits: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for at in range(0, len(by_weight), parts):
        group = [(weights[i], [i]) for i in by_weight[at : at + parts]]
        splits.append((group[-1][0] - group[0][0], at, group))
    heapq.heapify(splits)
    while len(splits) > 1:
        _, at, one = heapq.heappop(splits)
        _, _, two = heapq.heappop(splits)
        merged = []
        for (heavy, items), (light, others) in zip(one, reversed(two), strict=True):
            longer, shorter = (items, others) if len(items) >= len(others) else (others, items)
            longer.extend(shorter)
            merged.append((heavy + light, longer))
        merged.sort(key=lambda part: part[0], reverse=True)
        heapq.heappush(splits, (merged[-1][0] - merged[0][0], at, merged))
    return sorted(sorted(items) for _, items in splits[0][2])


def _loads(parts: Iterable[Iterable[int]], weights: Sequence[int]) -> tuple[int, int]:
    """Return the weight of the heaviest part, and its difference to that of the lightest."""
    loads = [sum(weights[i] for i in part) for part in parts]
    return max(loads), max(loads) - min(loads)


def _split_to_multiple(bins: list[list[int]], sizes: Sequence[int], multiple: int) -> None:
    """Halve the heaviest bins, in place, until their number is a multiple of ``multiple``, for which rows suffice."""
    heap = [(-sum(sizes[i] for i in rows), at) for at, rows in enumerate(bins) if len(rows) > 1]
    heapq.heapify(heap)
    for _ in range(-len(bins) % multiple):
        _, at = heapq.heappop(heap)
        halves: list[list[int]] = [[], []]
        loads = [0, 0]
        for i in sorted(bins[at], key=sizes.__getitem__, reverse=True):
            lighter = min((0, 1), key=lambda half: (loads[half], len(halves[half])))
            halves[lighter].append(i)
            loads[lighter] += sizes[i]
        bins[at] = halves[0]
        bins.append(halves[1])
        for place, half, load in zip((at, len(bins) - 1), halves, loads, strict=True):
            if len(half) > 1:
                heapq.heappush(heap, (-load, place))


# --- packers: make bins of positions from sizes, none of which is above the bound -------------------------------------


def _pack(sizes: Sequence[int], bound: int, algorithm: object, rng: random.Random) -> list[list[int]]:
    """Pack by the algorithm of that name, in any case, or by a member of NeMo-RL's enum of algorithms."""
    rows = list(range(len(sizes)))
    match str(getattr(algorithm, "value", algorithm)).lower():
        case "modified_first_fit_decreasing":
            return _modified_first_fit_decreasing(sizes, bound)
        case "first_fit_decreasing":
            return _first_fit(sorted(rows, key=sizes.__getitem__, reverse=True), sizes, bound)
        case "first_fit_shuffle":
            rng.shuffle(rows)
            return _first_fit(rows, sizes, bound)
        case "concatenative":
            return _concatenate(sizes, bound)
    known = "concatenative, first_fit_decreasing, first_fit_shuffle, modified_first_fit_decreasing"
    raise _refuse("algorithm", f"{algorithm!r} is not one of {known}")


def _concatenate(sizes: Sequence[int], bound: int) -> list[list[int]]:
    """Fill one bin after the other, in order."""
    bins: list[list[int]] = [[]]
    room = bound
    for i, size in enumerate(sizes):
        if size > room:
            bins.append([])
            room = bound
        bins[-1].append(i)
        room -= size
    return bins


def _first_fit(order: Sequence[int], sizes: Sequence[int], bound: int) -> list[list[int]]:
    """Put each row into the first bin with room for it, found in O(log n) by a tree of the largest free room."""
    leaves = 1 << max(len(order) - 1, 0).bit_length()
    room = [bound] * (2 * leaves)
    bins: list[list[int]] = [[] for _ in range(leaves)]
    for i in order:
        node = 1
        while node < leaves:
            node *= 2
            if room[node] < sizes[i]:
                node += 1
        bins[node - leaves].append(i)
        room[node] -= sizes[i]
        while node > 1:
            node //= 2
            room[node] = max(room[2 * node], room[2 * node + 1])
    return [rows for rows in bins if rows]


def _modified_first_fit_decreasing(sizes: Sequence[int], bound: int) -> list[list[int]]:
    """Pack by modified first-fit decreasing, which uses at most 71/60 of the optimal number of bins, plus a constant.

    Johnson and Garey, "A 71/60 theorem for bin packing", Journal of Complexity 1 (1985). Each row above half the bound
    gets a bin. Forwards over the bins, add the largest row above a third of the bound that fits. Backwards over bins
    without one, add the smallest row above a sixth, and the largest such row that fits beside it. Forwards again, add
    whatever fits, largest first. Pack the remaining rows by first fit.
    """
    rows = sorted((size, i) for i, size in enumerate(sizes))
    sixth, third, half = (bisect_right(rows, bound // part, key=lambda row: row[0]) for part in (6, 3, 2))
    small, medium = rows[sixth:third], rows[third:half]
    bins = [[i] for _, i in reversed(rows[half:])]
    room = [bound - sizes[rows[0]] for rows in bins]

    def place(at: int, source: list[tuple[int, int]], which: int) -> None:
        size, i = source.pop(which)
        bins[at].append(i)
        room[at] -= size

    def largest(source: list[tuple[int, int]], at: int) -> int:
        return bisect_right(source, room[at], key=lambda row: row[0]) - 1

    for at in range(len(bins)):
        if (which := largest(medium, at)) >= 0:
            place(at, medium, which)
    for at in reversed(range(len(bins))):
        if len(bins[at]) == 1 and len(small) > 1 and small[0][0] + small[1][0] <= room[at]:
            place(at, small, 0)
            place(at, small, largest(small, at))
    rest = sorted([*rows[:sixth], *small, *medium])
    for at in range(len(bins)):
        while (which := largest(rest, at)) >= 0:
            place(at, rest, which)
    return bins + _first_fit([i for _, i in reversed(rest)], sizes, bound)


# --- checks ---------------------------------------------------------------------------------------------------------


def _lengths(meta: KVBatchMeta) -> list[int]:
    """Return the lengths of a batch that can be split."""
    if not meta.size:
        raise _refuse("meta", "has no rows to split")
    if meta.sequence_lengths is None:
        raise _refuse("sequence_lengths", "are missing; they come from the tag input_lengths")
    for sample_id, length in zip(meta.sample_ids, meta.sequence_lengths, strict=True):
        if length < 0:
            raise _refuse("sequence_lengths", f"sample {sample_id!r} has {length} tokens")
    return meta.sequence_lengths


def _fits(rows: Iterable[int], sizes: Sequence[int], bound: int, sample_ids: Sequence[str]) -> None:
    for row in rows:
        if sizes[row] > bound:
            why = f"{bound} is less than the {sizes[row]} tokens of sample {sample_ids[row]!r}"
            raise _refuse("max_tokens_per_microbatch", why)


def _known(name: str, args: Mapping[str, Any], keys: frozenset[str]) -> None:
    unknown = sorted(set(args) - keys)
    if unknown:
        raise _refuse(name, f"has unknown keys {unknown}; known are {sorted(keys)}")


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, SupportsIndex) or value.__index__() < 1:
        raise _refuse(name, f"is a whole number from 1 on, not {value!r}")
    return value.__index__()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _refuse(name: str, why: str) -> DataPlaneBadRequest:
    return DataPlaneBadRequest(f"{name!r}: {why}", op=_OP, field=name)
