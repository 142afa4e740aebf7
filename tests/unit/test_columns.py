from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from asyncdp.batching.columns import kv_first_write, read_columns, write_columns
from asyncdp.batching.padding import materialize
from asyncdp.batching.sharding import shard_meta_for_dp
from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import KVBatchMeta, RowHandle
from asyncdp.rows.block import Block, FieldSpec

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from tensordict import TensorDict

pytestmark = pytest.mark.anyio


class Rows:
    """A client with the four verbs that columns use; keeps one Block per field and notes each call."""

    def __init__(self, *, handles: bool = True) -> None:
        self.ids: list[str] = []
        self.fields: dict[str, Block] = {}
        self.specs: dict[str, FieldSpec] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.handles = handles

    async def put_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta,
        partition_id: str,
        fields: TensorDict | None = None,
        tags: list[dict[str, Any]] | None = None,
        **options: float,
    ) -> KVBatchMeta:
        """Keep the fields of rows that are all new, or all there."""
        self.calls.append(("put_samples", options))
        if isinstance(sample_ids, KVBatchMeta):
            sample_ids = sample_ids.sample_ids
        assert isinstance(sample_ids, list)
        assert fields is not None
        block = Block.from_fields(fields, len(sample_ids))
        self.ids = self.ids or sample_ids
        for name, column in block.columns.items():
            self.specs[name] = column.spec()
            self.fields[name] = Block(block.n, {name: column}, self.specs)
        for sample_id, row in zip(sample_ids, tags or [], strict=bool(tags)):
            self.tags.setdefault(sample_id, {"created_at": 1.0}).update(row)
        return KVBatchMeta(
            partition_id,
            None,
            sample_ids,
            list(block.columns),
            tags=[dict(self.tags[i]) for i in sample_ids] if tags is not None else None,
            handles=[RowHandle(1) for _ in sample_ids] if self.handles else None,
        )

    async def get_samples(
        self, sample_ids: Sequence[str], partition_id: str, select_fields: Sequence[str], **options: float
    ) -> TensorDict:
        """Read rows by id."""
        self.calls.append(("get_samples", options))
        at = [self.ids.index(sample_id) for sample_id in sample_ids]
        columns = {name: self.fields[name].columns[name].take(at) for name in select_fields}
        return Block(len(at), columns, self.specs).to_tensordict()

    async def get_data(self, meta: KVBatchMeta, select_fields: Sequence[str], **options: float) -> TensorDict:
        """Read rows of a meta."""
        rows = await self.get_samples(meta.sample_ids, meta.partition_id, select_fields)
        self.calls[-1] = ("get_data", options)
        return rows


def run(step: Coroutine[Any, Any, Any]) -> Any:
    """Run a step that never waits, without a loop."""
    try:
        step.send(None)
    except StopIteration as done:
        return done.value
    raise AssertionError("the step waited")


def rollout() -> dict[str, Any]:
    """Three rows of 2, 4 and 0 tokens, padded to 5, with everything a rollout has."""
    return {
        "input_ids": torch.arange(15).reshape(3, 5),
        "input_lengths": torch.tensor([2, 4, 0], dtype=torch.int32),
        "generation_logprobs": torch.ones(3, 5, dtype=torch.bfloat16),
        "sample_mask": torch.ones(3),
        "reward": torch.ones(3, 1),
        "pixel_values": torch.ones(3, 3, 4, 4, dtype=torch.float16),
        "text": ["a", "b", "c"],
        "message_log": np.fromiter([[{"role": "user"}]] * 3, dtype=object, count=3),
        "token_mask": torch.ones(3, 5, dtype=torch.bool, requires_grad=False),
    }


IDS = ["p_g0", "p_g1", "p_g2"]


async def first_write(client: Rows, **options: Any) -> KVBatchMeta:
    """Write the rollout."""
    return await kv_first_write(rollout(), sample_ids=IDS, dp_client=client, partition_id="train", **options)


# --- kv_first_write -------------------------------------------------------------------------------------------------


async def test_first_write_names_what_it_wrote() -> None:
    """One put of every column; the meta has ids, fields, lengths, task, extra_info, tags and the rows' handles."""
    client = Rows()
    meta = await first_write(
        client, extra_info={"step": 3}, task_name="grpo", pad_to_multiple=8, tags=[{"v": i} for i in range(3)]
    )
    assert [name for name, _ in client.calls] == ["put_samples"]
    assert (meta.partition_id, meta.task_name, meta.sample_ids) == ("train", "grpo", IDS)
    assert meta.fields == list(rollout())
    assert meta.sequence_lengths == [2, 4, 0]
    assert meta.extra_info == {"step": 3, "pad_to_multiple": 8}
    assert meta.handles == [RowHandle(1)] * 3
    assert meta.tags == [{"created_at": 1.0, "input_lengths": n, "v": i} for i, n in enumerate([2, 4, 0])]


async def test_first_write_defaults() -> None:
    """Without options: task 'train', no extra_info, and still the tag from which a claim learns the lengths."""
    client = Rows()
    meta = await first_write(client)
    assert (meta.task_name, meta.extra_info) == ("train", {})
    assert [row["input_lengths"] for row in client.tags.values()] == [2, 4, 0]


async def test_first_write_keeps_the_callers_objects() -> None:
    """The caller's tags and extra_info are not changed, and his own input_lengths tag stands."""
    tags, extra = [{"input_lengths": 7}, {}, {}], {"step": 1}
    meta = await first_write(Rows(), tags=tags, extra_info=extra, pad_to_multiple=2)
    assert tags == [{"input_lengths": 7}, {}, {}]
    assert extra == {"step": 1}
    assert [row["input_lengths"] for row in meta.tags or []] == [7, 4, 0]


async def test_first_write_of_nothing_is_nothing() -> None:
    """An empty batch is no error: an empty meta, as for put_samples."""
    empty = {"input_ids": torch.zeros(0, 4), "input_lengths": torch.zeros(0, dtype=torch.int64), "text": []}
    meta = await kv_first_write(empty, sample_ids=[], dp_client=Rows(), partition_id="train")
    assert (meta.size, meta.sequence_lengths, meta.fields) == (0, [], list(empty))


@pytest.mark.parametrize(
    ("change", "options", "named"),
    [
        ({"input_lengths": None}, {}, "input_lengths"),
        ({"input_lengths": torch.ones(3)}, {}, "input_lengths"),
        ({"input_lengths": torch.ones(3, 1, dtype=torch.int64)}, {}, "input_lengths"),
        ({"input_lengths": ["2", "4", "0"]}, {}, "input_lengths"),
        ({"input_lengths": torch.tensor([2, 4])}, {}, "input_ids"),
        ({"reward": torch.ones(2)}, {}, "reward"),
        ({"junk": object()}, {}, "junk"),
        ({}, {"sample_ids": ["a"]}, "sample_ids"),
        ({}, {"sample_ids": "abc"}, "sample_ids"),
        ({}, {"tags": [{}]}, "tags"),
        ({}, {"pad_to_multiple": 0}, "pad_to_multiple"),
        ({}, {"token_aligned_fields": "input_ids"}, "token_aligned_fields"),
    ],
)
async def test_first_write_refuses_by_name(change: dict[str, Any], options: dict[str, Any], named: str) -> None:
    """What does not fit is refused by name, and nothing is put."""
    client = Rows()
    arguments: dict[str, Any] = {"sample_ids": IDS, "dp_client": client, "partition_id": "train", **options}
    with pytest.raises(DataPlaneBadRequest, match=named) as caught:
        await kv_first_write({**rollout(), **change}, **arguments)
    assert caught.value.field == named
    assert client.calls == []


async def test_first_write_needs_lengths() -> None:
    """Without input_lengths no row would know what of it is padding."""
    with pytest.raises(DataPlaneBadRequest, match="input_lengths") as caught:
        await kv_first_write({"x": torch.ones(1)}, sample_ids=["a"], dp_client=Rows(), partition_id="p")
    assert (caught.value.op, caught.value.partition_id) == ("kv_first_write", "p")


# --- read_columns ---------------------------------------------------------------------------------------------------


async def test_what_was_written_comes_back() -> None:
    """Every column comes back with its dtype and shape; where token-aligned ones were padded, padding is back."""
    client, sent = Rows(), rollout()
    meta = await first_write(client)
    got = await read_columns(client, meta, list(sent), pad_value_dict={"input_ids": -1})
    assert got["input_ids"].tolist() == [[0, 1, -1, -1], [5, 6, 7, 8], [-1] * 4]
    assert got["generation_logprobs"].tolist() == [[1, 1, 0, 0], [1] * 4, [0] * 4]
    assert got["token_mask"].dtype == torch.bool
    for name in ("input_lengths", "sample_mask", "reward", "pixel_values"):
        assert got[name].dtype == sent[name].dtype
        assert torch.equal(got[name], sent[name])
    assert list(got["text"]) == ["a", "b", "c"]
    assert list(got["message_log"]) == [[{"role": "user"}]] * 3


async def test_width_is_what_the_meta_says() -> None:
    """A stamped global width is that of every rank; else the longest row is rounded up to pad_to_multiple."""
    client = Rows()
    meta = await first_write(client, pad_to_multiple=3)
    assert (await read_columns(client, meta, ["input_ids"]))["input_ids"].shape == (3, 6)
    meta.extra_info["global_forward_pad_seqlen"] = 7
    shards, _ = shard_meta_for_dp(meta, dp_world=3)
    for shard in shards:
        got = await read_columns(client, shard, ["input_ids", "reward", "pixel_values"])
        assert got["input_ids"].shape == (1, 7)
        assert got["reward"].shape == (1, 1)
        assert got["pixel_values"].shape == (1, 3, 4, 4)


async def test_jagged_layout_is_passed_on() -> None:
    """layout='jagged' gives the rows as they are stored."""
    client = Rows()
    got = await read_columns(client, await first_write(client), ["input_ids"], layout="jagged")
    assert [row.tolist() for row in got["input_ids"].unbind()] == [[0, 1], [5, 6, 7, 8], []]


@pytest.mark.parametrize(("handles", "verb"), [(True, "get_data"), (False, "get_samples")])
async def test_handles_decide_the_verb(*, handles: bool, verb: str) -> None:
    """A meta that knows which life of a row it means reads by get_data, else by id; a timeout goes along if given."""
    client = Rows(handles=handles)
    meta = await first_write(client, timeout_s=3.0)
    await read_columns(client, meta, ["reward"])
    await read_columns(client, meta, ["reward"], timeout_s=2.0)
    await write_columns(client, meta, {"reward": torch.zeros(3)}, timeout_s=1.0)
    assert client.calls == [
        ("put_samples", {"timeout_s": 3.0}),
        (verb, {}),
        (verb, {"timeout_s": 2.0}),
        ("put_samples", {"timeout_s": 1.0}),
    ]


async def test_no_fields_are_no_request() -> None:
    """Reading and writing no fields asks nobody."""
    client = Rows()
    meta = KVBatchMeta("train", sample_ids=IDS)
    assert await read_columns(client, meta, []) == {}
    await write_columns(client, meta, {})
    assert client.calls == []


async def test_read_refuses_by_name() -> None:
    """A lone string is no list of fields, and a stamp that is no width is named."""
    client = Rows()
    meta = await first_write(client)
    with pytest.raises(DataPlaneBadRequest, match="select_fields"):
        await read_columns(client, meta, "input_ids")
    for key, value in (("global_forward_pad_seqlen", "9"), ("global_forward_pad_seqlen", -1), ("pad_to_multiple", 0)):
        meta.extra_info = {key: value}
        with pytest.raises(DataPlaneBadRequest, match=key):
            await read_columns(client, meta, ["input_ids"])


# --- write_columns --------------------------------------------------------------------------------------------------


async def test_write_back_takes_the_rows_lengths() -> None:
    """A token-aligned result, padded wider than the rows, lands with the row lengths of the first write."""
    client = Rows()
    meta = await first_write(client)
    await write_columns(
        client, meta, {"prev_logprobs": torch.arange(24.0).reshape(3, 8).requires_grad_(), "score": torch.ones(3, 8)}
    )
    got = await read_columns(client, meta, ["prev_logprobs", "score"], layout="jagged")
    assert [row.tolist() for row in got["prev_logprobs"].unbind()] == [[0, 1], [8, 9, 10, 11], []]
    assert got["score"].shape == (3, 8)


async def test_token_aligned_fields_are_the_callers_choice() -> None:
    """Another set of token-aligned fields is packed, and only that."""
    client = Rows()
    meta = await first_write(client, token_aligned_fields={"token_mask"})
    got = await read_columns(client, meta, ["token_mask", "input_ids"], layout="jagged")
    assert got["token_mask"].is_nested
    assert got["input_ids"].shape == (3, 5)


async def test_write_without_lengths_is_rectangular() -> None:
    """A meta without sequence_lengths writes every column as it is."""
    client = Rows()
    await write_columns(client, KVBatchMeta("train", sample_ids=IDS), {"prev_logprobs": torch.ones(3, 8)})
    assert client.specs["prev_logprobs"].shape == (8,)


@pytest.mark.parametrize("lengths", [None, [1, 1, 1]])
async def test_write_of_other_rows_is_refused(lengths: list[int] | None) -> None:
    """A column of another number of rows than the meta is refused by name, and nothing is put."""
    client = Rows()
    meta = KVBatchMeta("train", sample_ids=IDS, sequence_lengths=lengths)
    with pytest.raises(DataPlaneBadRequest, match="'score'"):
        await write_columns(client, meta, {"score": torch.ones(2)})
    assert client.calls == []


# --- all of it ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=1, max_size=4), st.integers(1, 3), st.integers(1, 4))
def test_write_split_read_and_put_back_in_order(shares: list[int], ranks: int, multiple: int) -> None:
    """Written, split over ranks, read by each, joined by unsorted_indices: the batch as it was."""
    lengths = [length for length in shares for _ in range(ranks)]
    n, width = len(lengths), 9
    sent = {
        "input_ids": torch.arange(n * width).reshape(n, width),
        "input_lengths": torch.tensor(lengths),
        "name": [f"row {i}" for i in range(n)],
    }
    client = Rows()
    write = kv_first_write(
        sent,
        sample_ids=[str(i) for i in range(n)],
        dp_client=client,
        partition_id="p",
        extra_info={"global_forward_pad_seqlen": width},
        pad_to_multiple=multiple,
    )
    meta = run(write)
    shards, unsorted = shard_meta_for_dp(meta, dp_world=ranks)
    parts = [run(read_columns(client, shard, list(sent))) for shard in shards]
    order = range(n) if unsorted is None else unsorted
    ids = torch.cat([part["input_ids"] for part in parts])[list(order)]
    names = [name for part in parts for name in part["name"]]
    assert [names[i] for i in order] == sent["name"]
    for row, source, length in zip(ids, sent["input_ids"], lengths, strict=True):
        assert row.tolist() == source[:length].tolist() + [0] * (width - length)
    assert materialize(run(client.get_samples(["0"], "p", ["name"])))["name"][0] == "row 0"
