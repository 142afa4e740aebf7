from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorData, NonTensorStack, TensorDict

from asyncdp.batching.padding import (
    materialize,
    pack_jagged_fields,
    pack_per_token_field,
    response_from_nested,
    stack_or_nest,
    to_nested_by_length,
)
from asyncdp.errors import DataPlaneBadRequest

if TYPE_CHECKING:
    from collections.abc import Callable

DTYPES = [
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int64,
    torch.complex64,
    torch.complex128,
]


def numbers(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Values that differ from row to row and from token to token."""
    count = int(np.prod(shape))
    return (torch.arange(count) % 7 + 1).to(dtype).reshape(shape)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, shape and dtype included, also for the dtypes that torch cannot compare."""
    if left.dtype != right.dtype or left.shape != right.shape or left.is_conj() or right.is_conj():
        return False
    bits = [side.clone(memory_format=torch.contiguous_format).flatten() for side in (left, right)]
    return not left.numel() or torch.equal(*(side.view(torch.uint8) for side in bits))


def jagged(*rows: list[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Make a nested tensor of these rows."""
    tensors = [torch.tensor(row, dtype=dtype) for row in rows]
    nested: torch.Tensor = torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    return nested


def rows_of(nested: torch.Tensor) -> list[Any]:
    """Spell out a nested tensor."""
    assert nested.layout == torch.jagged
    return [row.tolist() for row in nested.unbind()]


@st.composite
def padded_batches(draw: st.DrawFn) -> tuple[torch.Tensor, list[int]]:
    """Draw a padded tensor of any dtype and rank, and lengths within it."""
    n, width = draw(st.integers(0, 6)), draw(st.integers(0, 7))
    rest = draw(st.sampled_from([(), (3,), (2, 2), (0,)]))
    dtype = draw(st.sampled_from(DTYPES))
    lengths = draw(st.lists(st.integers(0, width), min_size=n, max_size=n))
    return numbers((n, width, *rest), dtype), lengths


# --- to_nested_by_length, pack_per_token_field ----------------------------------------------------------------------


@given(padded_batches())
def test_padding_is_dropped(batch: tuple[torch.Tensor, list[int]]) -> None:
    """Row i of the nested tensor is the first lengths[i] tokens of row i, bit for bit, whatever dtype and rank."""
    padded, lengths = batch
    nested = to_nested_by_length(padded, lengths)
    assert nested.layout == torch.jagged
    assert nested.dtype == padded.dtype
    assert nested.size(0) == len(lengths)
    for row, source, length in zip(nested.unbind(), padded, lengths, strict=True):
        assert same(row, source[:length])


@given(padded_batches())
def test_padded_round_trip(batch: tuple[torch.Tensor, list[int]]) -> None:
    """Pack, then materialize: the tokens are back in place, the rest is padding, nothing else changed."""
    padded, lengths = batch
    td = pack_jagged_fields({"x": padded}, lengths=torch.tensor(lengths, dtype=torch.int64), token_aligned_fields={"x"})
    assert td.batch_size == (len(lengths),)
    back = materialize(td, pad_value_dict={"x": 1}, pad_to_seqlen=padded.shape[1])["x"]
    expected = padded.clone()
    for i, length in enumerate(lengths):
        for at in range(length, padded.shape[1]):
            expected[i, at] = torch.ones((), dtype=torch.float32).to(padded.dtype)
    assert same(back, expected)


@pytest.mark.parametrize(
    "view",
    [
        lambda t: t[:, ::2],
        lambda t: t.transpose(0, 1)[:4],
        lambda t: t[:, :1].expand(8, 8),
        lambda t: t.flip(1),
        lambda t: torch.complex(t.double(), t.double()).conj(),
        lambda t: t.float().requires_grad_(),
    ],
    ids=["strided", "transposed", "expanded", "flipped", "conjugated", "requires_grad"],
)
def test_odd_inputs_equal_their_contiguous_copy(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Strided, transposed, expanded, conjugated and requires_grad inputs give what their plain copy gives, no grad."""
    odd = view(torch.arange(64).reshape(8, 8))[:4]
    plain = odd.detach().clone(memory_format=torch.contiguous_format).resolve_conj()
    for lengths in ([odd.shape[1]] * 4, [1, 0, odd.shape[1], 2]):
        got = pack_jagged_fields({"x": odd, "y": odd}, lengths=torch.tensor(lengths), token_aligned_fields={"x"})
        assert rows_of(got["x"]) == rows_of(to_nested_by_length(plain, lengths))
        assert same(got["y"], plain)
        assert got["y"].is_contiguous()
        assert not got["x"].requires_grad
        assert not got["y"].requires_grad


def test_lengths_of_any_integer_kind() -> None:
    """Lengths may be a list, an array, or a tensor of any integer dtype."""
    padded = torch.arange(6).reshape(2, 3)
    for lengths in ([1, 3], np.array([1, 3], dtype=np.int16), torch.tensor([1, 3], dtype=torch.uint8)):
        assert rows_of(to_nested_by_length(padded, lengths)) == [[0], [3, 4, 5]]


@pytest.mark.parametrize(
    ("padded", "lengths", "named"),
    [
        (torch.zeros(5), [5], "padded"),
        (torch.zeros(3, 4), [1, 2], "lengths"),
        (torch.zeros(2, 4), [[1], [2]], "lengths"),
        (torch.zeros(2, 4), [1.0, 2.0], "lengths"),
        (torch.zeros(2, 4), [True, False], "lengths"),
        (torch.zeros(2, 4), [-1, 2], "lengths"),
        (torch.zeros(2, 4), [1, 5], "padded"),
        (torch.zeros(2, 4, device="meta"), [1, 2], "padded"),
        (torch.zeros(2, 4).to_sparse(), [1, 2], "padded"),
        ([[1, 2]], [1], "padded"),
    ],
)
def test_bad_lengths_and_shapes_are_named(padded: object, lengths: object, named: str) -> None:
    """What does not fit is refused, and the error names it; a length beyond the width is never cut in silence."""
    with pytest.raises(DataPlaneBadRequest, match=named) as caught:
        to_nested_by_length(padded, lengths)
    assert caught.value.field == named
    assert caught.value.op == "to_nested_by_length"


def test_per_token_field_drops_what_is_beyond_each_length() -> None:
    """A field padded wider than the longest row (sequence parallelism) is cut to each row's length."""
    assert rows_of(pack_per_token_field(torch.arange(16).reshape(2, 8), torch.tensor([3, 5]))) == [
        [0, 1, 2],
        [8, 9, 10, 11, 12],
    ]


@pytest.mark.parametrize("shape", [(2,), (2, 4), (3, 8), (0, 3)])
def test_per_token_field_that_cannot_be_one_stays(shape: tuple[int, ...]) -> None:
    """1D, too narrow, or of another number of rows: the field keeps its shape."""
    val = torch.ones(shape, requires_grad=True)
    got = pack_per_token_field(val, torch.tensor([3, 5]))
    assert same(got, val.detach())
    assert not got.requires_grad


def test_per_token_field_of_no_rows_stays() -> None:
    """An empty batch keeps its rectangular shape."""
    assert pack_per_token_field(torch.zeros(0, 7), torch.tensor([], dtype=torch.int64)).shape == (0, 7)


# --- stack_or_nest --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_one_shape_are_stacked(dtype: torch.dtype) -> None:
    """Equal shapes give a dense tensor; scalars give (N,), single values (N, 1)."""
    assert same(stack_or_nest(list(numbers((3, 2), dtype))), numbers((3, 2), dtype))
    assert stack_or_nest([torch.zeros(()), torch.ones(())]).shape == (2,)
    assert stack_or_nest([torch.zeros(1), torch.ones(1)]).shape == (2, 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ragged_rows_are_nested(dtype: torch.dtype) -> None:
    """Rows of other lengths, zero among them, give a jagged tensor of the same dtype."""
    rows = [numbers((2, 3), dtype), numbers((0, 3), dtype), numbers((1, 3), dtype)]
    nested = stack_or_nest(rows)
    assert nested.layout == torch.jagged
    assert all(same(got, row) for got, row in zip(nested.unbind(), rows, strict=True))


def test_no_rows_stack_to_an_empty_tensor() -> None:
    """No rows give torch.empty(0)."""
    assert stack_or_nest([]).shape == (0,)


@pytest.mark.parametrize(
    "rows",
    [
        [torch.zeros(2), torch.zeros(2, dtype=torch.float64)],
        [torch.zeros(2), torch.zeros(2, 2)],
        [torch.zeros(2, 3), torch.zeros(2, 4)],
        [torch.zeros(2), jagged([1], [2, 3])],
        [torch.zeros(2), [1, 2]],
    ],
)
def test_rows_that_make_no_field_are_refused(rows: list[Any]) -> None:
    """Mixed dtypes would be promoted, other trailing sizes cannot be nested: refused, by the field's name."""
    with pytest.raises(DataPlaneBadRequest, match="'logits'"):
        stack_or_nest(rows, field="logits")


# --- pack_jagged_fields ---------------------------------------------------------------------------------------------


def test_only_named_fields_become_jagged() -> None:
    """Token-aligned fields are packed; (N,), (N, 1) and images keep their shapes, in the order given."""
    fields = {
        "ids": torch.arange(8).reshape(2, 4),
        "reward": torch.ones(2),
        "column": torch.ones(2, 1),
        "image": torch.ones(2, 3, 5, 5),
    }
    td = pack_jagged_fields(fields, lengths=torch.tensor([2, 4]), token_aligned_fields=["ids", "reward"])
    assert list(td.keys()) == list(fields)
    assert rows_of(td["ids"]) == [[0, 1], [4, 5, 6, 7]]
    assert {name: tuple(td[name].shape) for name in ("reward", "column", "image")} == {
        "reward": (2,),
        "column": (2, 1),
        "image": (2, 3, 5, 5),
    }


def test_no_lengths_keep_everything_rectangular() -> None:
    """Without lengths nothing becomes jagged, and the batch size is read off the fields."""
    td = pack_jagged_fields({"ids": torch.zeros(3, 4)}, lengths=None, token_aligned_fields={"ids"})
    assert td.batch_size == (3,)
    assert td["ids"].shape == (3, 4)


def test_nested_fields_pass() -> None:
    """What is nested already stays nested, also where its rows are equally long, and loses its grad."""
    values = torch.arange(4.0).requires_grad_()
    nested = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 2, 4]))
    td = pack_jagged_fields({"x": nested}, lengths=torch.tensor([1, 1]), token_aligned_fields={"x"})
    assert rows_of(td["x"]) == [[0.0, 1.0], [2.0, 3.0]]
    assert not td["x"].requires_grad


def test_empty_batch_round_trip() -> None:
    """A batch of no rows packs and materializes, tensors and objects alike."""
    fields = {"ids": torch.zeros(0, 4, dtype=torch.int32), "text": [], "reward": torch.zeros(0)}
    td = pack_jagged_fields(fields, lengths=torch.tensor([], dtype=torch.int64), token_aligned_fields={"ids"})
    assert td.batch_size == (0,)
    back = materialize(td)
    assert {name: column.shape for name, column in back.items()} == {"ids": (0, 4), "text": (0,), "reward": (0,)}
    assert back["ids"].dtype == torch.int32
    assert pack_jagged_fields({}, lengths=None).batch_size == (0,)


VALUES = ["a", "a", None, {"k": [1]}, ("t", 1), {1, 2}, b"\x00x", 10**30, [1, 2], [3, 4]]


def as_array(values: list[Any]) -> np.ndarray[Any, Any]:
    """Make an object array without numpy looking into its values."""
    return np.fromiter(values, dtype=object, count=len(values))


@pytest.mark.parametrize("make", [list, as_array, lambda v: NonTensorStack(*map(NonTensorData, v))])
def test_objects_round_trip(make: Callable[[list[object]], object]) -> None:
    """Lists, object arrays and stacks of any value come back as an object array of the same values and types."""
    td = pack_jagged_fields({"o": make(VALUES)}, lengths=torch.tensor([1] * len(VALUES)))
    back = materialize(td)["o"]
    assert back.dtype == object
    assert back.shape == (len(VALUES),)
    assert list(back) == VALUES
    assert [type(value) for value in back] == [type(value) for value in VALUES]


def test_lists_of_one_length_are_no_matrix() -> None:
    """Rows that are lists of equal length stay one list per row."""
    back = materialize(pack_jagged_fields({"o": [[1, 2], [3, 4]]}, lengths=None))["o"]
    assert back.shape == (2,)
    assert list(back) == [[1, 2], [3, 4]]


def test_one_value_for_the_batch_becomes_one_per_row() -> None:
    """A NonTensorData without batch size stands for every row."""
    td = pack_jagged_fields({"v": NonTensorData("v1"), "x": torch.zeros(3)}, lengths=None)
    assert list(materialize(td)["v"]) == ["v1"] * 3


def test_object_array_put_whole_is_one_value_per_row() -> None:
    """An object array that a TensorDict wrapped as one value, as NeMo-RL writes it, is unwrapped."""
    td = TensorDict({"o": as_array(["a", {"b": 1}])}, batch_size=[2])
    assert list(materialize(td)["o"]) == ["a", {"b": 1}]


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(12, dtype=np.float64).reshape(2, 6)[:, ::-2],
        np.broadcast_to(np.float32(2.0), (2, 3)),
        np.frombuffer(b"\x01\x02", dtype=np.uint8),
        np.array([True, False]),
    ],
    ids=["uint16", "big-endian", "reversed", "broadcast", "read-only", "bool"],
)
def test_arrays_of_numbers_become_tensors(array: np.ndarray[Any, Any]) -> None:
    """Numeric arrays become tensors of the same dtype and values, whatever their strides and byte order."""
    got = pack_jagged_fields({"x": array}, lengths=None)["x"]
    assert got.tolist() == array.tolist()
    assert got.numpy().dtype == array.dtype.newbyteorder("=")


def test_arrays_of_strings_and_lists_of_tensors() -> None:
    """String arrays become strings; a list of tensors becomes a dense or jagged tensor."""
    td = pack_jagged_fields(
        {"s": np.array(["a", "bc"]), "d": [torch.zeros(2)] * 2, "j": (torch.zeros(1), torch.zeros(3))}, lengths=None
    )
    assert list(materialize(td)["s"]) == ["a", "bc"]
    assert td["d"].shape == (2, 2)
    assert rows_of(td["j"]) == [[0.0], [0.0] * 3]


@pytest.mark.parametrize(
    "column",
    [
        torch.zeros(3),
        torch.zeros(()),
        torch.zeros(2, 2).to_sparse(),
        torch.zeros(2, device="meta"),
        TensorDict({"y": torch.zeros(2)}, batch_size=[2]),
        np.array(["2020-01-01", "2020-01-02"], dtype="datetime64[D]"),
        np.array(1.0),
        "ab",
        None,
        3,
        ["a"],
        [torch.zeros(2), torch.zeros(2, 2)],
        jagged([1], [2], [3]),
    ],
    ids=lambda column: type(column).__name__,
)
def test_columns_that_cannot_be_kept_are_named(column: object) -> None:
    """A column of another size or kind is refused before anything is packed, and the error names the field."""
    with pytest.raises(DataPlaneBadRequest, match="'culprit'") as caught:
        pack_jagged_fields({"fine": torch.zeros(2), "culprit": column}, lengths=torch.tensor([1, 1]))
    assert caught.value.field == "culprit"


def test_names_must_be_names() -> None:
    """A field named by no str, and a lone str for a collection of names, are refused."""
    with pytest.raises(DataPlaneBadRequest, match="named by a str"):
        pack_jagged_fields({1: torch.zeros(2)}, lengths=None)  # type: ignore[dict-item]
    with pytest.raises(DataPlaneBadRequest, match="token_aligned_fields"):
        pack_jagged_fields({"ids": torch.zeros(2, 2)}, lengths=torch.tensor([1, 1]), token_aligned_fields="ids")


# --- response_from_nested -------------------------------------------------------------------------------------------


def test_response_is_shifted_left_by_one() -> None:
    """The response of a row is what was computed one position before each of its tokens."""
    full = jagged([1, 2, 3, 4, 5], [11, 12, 13], [21])
    mask = jagged([1, 1, 1], [1, 1], [])
    assert rows_of(response_from_nested(full, mask)) == [[2, 3, 4], [11, 12], []]


@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), max_size=6),
    st.sampled_from(DTYPES),
    st.sampled_from([(), (2,)]),
)
def test_response_slices(rows: list[tuple[int, int]], dtype: torch.dtype, rest: tuple[int, ...]) -> None:
    """For any prompts and responses, any dtype and trailing shape, each row is its slice [L - R - 1 : L - 1]."""
    lengths = torch.tensor([p + r for p, r in rows], dtype=torch.int64)
    wanted = torch.tensor([r for _, r in rows], dtype=torch.int64)
    full = to_nested_by_length(numbers((len(rows), 10, *rest), dtype), lengths)
    mask = to_nested_by_length(torch.ones(len(rows), 5), wanted)
    got = response_from_nested(full, mask)
    assert got.dtype == dtype
    for out, source, (prompt, response) in zip(got.unbind(), full.unbind(), rows, strict=True):
        length = prompt + response
        assert same(out, source[length - response - 1 : length - 1])


@pytest.mark.parametrize(
    ("full", "mask", "named"),
    [
        (jagged([1, 2], [1]), jagged([1, 1], []), "response_mask"),
        (jagged([1, 2]), jagged([1], [1]), "response_mask"),
        (torch.zeros(2, 2), jagged([1], [1]), "full"),
        (jagged([1, 2]), torch.ones(1, 1), "response_mask"),
        (jagged([[1, 2]], [[3, 4]]).transpose(1, 2), jagged([1], [1]), "full"),
    ],
)
def test_responses_that_are_not_there_are_refused(full: torch.Tensor, mask: torch.Tensor, named: str) -> None:
    """A response as long as its row would begin in the row before: refused, never read across rows."""
    with pytest.raises(DataPlaneBadRequest, match=named) as caught:
        response_from_nested(full, mask)
    assert caught.value.field == named


# --- materialize ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        ({}, 3),
        ({"pad_to_seqlen": 2}, 3),
        ({"pad_to_seqlen": 5}, 5),
        ({"pad_to_multiple": 4}, 4),
        ({"pad_to_seqlen": 5, "pad_to_multiple": 4}, 8),
    ],
)
def test_width_of_padding(arguments: dict[str, int], width: int) -> None:
    """The width is the longest row, or what is asked for, rounded up to the multiple; nothing is ever cut."""
    td = TensorDict({"ids": jagged([1], [1, 2, 3]), "mask": jagged([1], [1, 1, 1])}, batch_size=[2])
    back = materialize(td, pad_value_dict={"ids": 9, "absent": 1}, **arguments)  # type: ignore[arg-type]
    assert back["ids"].tolist() == [[1] + [9] * (width - 1), [1, 2, 3] + [9] * (width - 3)]
    assert back["mask"].tolist() == [[1] + [0] * (width - 1), [1, 1, 1] + [0] * (width - 3)]


def test_only_token_aligned_rectangles_are_widened() -> None:
    """A rectangular token-aligned field gets the common width; images, and (N, 1) of any name, keep their shape."""
    fields = {
        "input_ids": torch.ones(2, 3),
        "advantages": torch.ones(2, 1),
        "reward": torch.ones(2, 2),
        "image": torch.ones(2, 3, 2, 2),
    }
    td = TensorDict(fields, batch_size=[2])
    back = materialize(td, pad_to_seqlen=4, pad_value_dict={"input_ids": 7})
    assert back["input_ids"].tolist() == [[1, 1, 1, 7]] * 2
    assert back["advantages"].shape == (2, 1)
    assert back["reward"].shape == (2, 2)
    assert back["image"].shape == (2, 3, 2, 2)
    assert materialize(td, pad_to_seqlen=4, token_aligned_fields={"reward"})["reward"].shape == (2, 4)
    assert materialize(td, pad_to_seqlen=4, token_aligned_fields=None)["input_ids"].shape == (2, 3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rectangles_of_any_dtype_are_widened(dtype: torch.dtype) -> None:
    """Widening a rectangle keeps dtype and values."""
    td = TensorDict({"input_ids": numbers((2, 3, 2), dtype)}, batch_size=[2])
    back = materialize(td, pad_to_seqlen=5)["input_ids"]
    assert back.shape == (2, 5, 2)
    assert same(back[:, :3], numbers((2, 3, 2), dtype))
    assert same(back[:, 3:], torch.zeros(2, 2, 2, dtype=dtype))


def test_what_has_the_right_shape_is_not_copied() -> None:
    """Rectangles, and nested tensors of equally long rows, cost no allocation."""
    dense, nested = torch.ones(2, 3), jagged([1, 2], [3, 4])
    back = materialize(TensorDict({"x": dense, "y": nested}, batch_size=[2]))
    assert back["x"].data_ptr() == dense.data_ptr()
    assert back["y"].data_ptr() == nested.values().data_ptr()  # type: ignore[no-untyped-call]


def test_jagged_layout_changes_nothing() -> None:
    """With layout='jagged' nested tensors stay nested and nothing is widened."""
    td = TensorDict({"x": jagged([1], [2, 3]), "input_ids": torch.ones(2, 3)}, batch_size=[2])
    back = materialize(td, layout="jagged", pad_to_seqlen=9)
    assert rows_of(back["x"]) == [[1], [2, 3]]
    assert back["input_ids"].shape == (2, 3)


def test_gaps_between_rows_are_no_values() -> None:
    """A nested tensor whose values hold more than its rows (torch.nested.narrow) is padded by its rows alone."""
    base = torch.arange(24).reshape(3, 8)
    narrow = torch.nested.narrow(base, 1, torch.tensor([0, 2, 3]), torch.tensor([2, 0, 5]), layout=torch.jagged)
    assert materialize({"x": narrow})["x"].tolist() == [[0, 1, 0, 0, 0], [0] * 5, [19, 20, 21, 22, 23]]


@pytest.mark.parametrize(
    ("offsets", "lengths", "rows"),
    [
        ([0, 1, 3], None, [[0, 0], [1, 2]]),
        ([1, 2, 4], None, [[1, 0], [2, 3]]),
        ([0, 1, 4], [3, 1], [[0, 1, 2], [1, 0, 0]]),
    ],
    ids=["after", "before", "overlapping"],
)
def test_offsets_decide_what_a_row_is(offsets: list[int], lengths: list[int] | None, rows: list[list[int]]) -> None:
    """Values before, after or shared by the rows are read as offsets and lengths say."""
    nested = torch.nested.nested_tensor_from_jagged(
        torch.arange(4), torch.tensor(offsets), None if lengths is None else torch.tensor(lengths)
    )
    assert materialize({"x": nested})["x"].tolist() == rows


def test_rows_ragged_in_another_dimension() -> None:
    """Rows of shape (D, length) are padded in the dimension in which they differ."""
    rows = [torch.arange(6).reshape(2, 3), torch.arange(2).reshape(2, 1)]
    nested = torch.nested.as_nested_tensor([row.T.contiguous() for row in rows], layout=torch.jagged).transpose(1, 2)
    back = materialize({"x": nested})["x"]
    assert back.tolist() == [[[0, 1, 2], [3, 4, 5]], [[0, 0, 0], [1, 0, 0]]]


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.uint8, -1),
        (torch.uint8, 256),
        (torch.int64, 0.5),
        (torch.int64, float("inf")),
        (torch.bool, 2),
        (torch.float16, 1e9),
        (torch.float8_e4m3fn, float("inf")),
        (torch.float8_e4m3fn, 1e9),
        (torch.float32, None),
        (torch.int64, None),
        (torch.int64, "0"),
    ],
)
def test_padding_value_that_the_dtype_cannot_hold(dtype: torch.dtype, pad: object) -> None:
    """A padding value that would wrap, be cut or saturate is refused, by the field's name."""
    # torch.full itself is silent where it makes one element only.
    for rows in (jagged([1], [1, 1], dtype=dtype), jagged([], dtype=dtype)):
        with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
            materialize({"x": rows}, pad_value_dict={"x": pad}, pad_to_seqlen=1)
        assert caught.value.field == "x"


@pytest.mark.parametrize(
    ("dtype", "pad"),
    [
        (torch.uint64, 2**63 + 1),
        (torch.int8, -128.0),
        (torch.bool, True),
        (torch.bfloat16, 0.5),
        (torch.float32, float("-inf")),
        (torch.float8_e5m2, float("inf")),
        (torch.float32, float("nan")),
        (torch.float8_e4m3fn, float("nan")),
        (torch.complex64, 2.0),
    ],
)
def test_padding_value_that_the_dtype_holds(dtype: torch.dtype, pad: float) -> None:
    """Values that the dtype holds are written exactly, infinities and nan among them."""
    got = materialize({"x": jagged([], [1], dtype=dtype)}, pad_value_dict={"x": pad})["x"]
    assert same(got[0], torch.full((1,), pad, dtype=dtype))


def test_padding_rounds_as_the_dtype_does() -> None:
    """A value between two that the dtype holds is rounded, as a float is everywhere."""
    got = materialize({"x": jagged([], [1], dtype=torch.bfloat16)}, pad_value_dict={"x": 0.1})["x"]
    assert got[0].item() == pytest.approx(0.1, rel=0.01)


@pytest.mark.parametrize(
    ("fields", "arguments", "named"),
    [
        ({"x": torch.zeros(2)}, {"layout": "ragged"}, "layout"),
        ({"x": torch.zeros(2)}, {"pad_to_seqlen": -1}, "pad_to_seqlen"),
        ({"x": torch.zeros(2)}, {"pad_to_multiple": 0}, "pad_to_multiple"),
        ({"x": torch.zeros(2)}, {"token_aligned_fields": "x"}, "token_aligned_fields"),
        ({"x": TensorDict({}, batch_size=[2])}, {}, "x"),
        ({"x": "text"}, {}, "x"),
    ],
)
def test_bad_requests_are_named(fields: dict[str, Any], arguments: dict[str, Any], named: str) -> None:
    """An unknown layout, a width that is none, or a leaf that is no column is refused by name."""
    with pytest.raises(DataPlaneBadRequest, match=named):
        materialize(fields, **arguments)
