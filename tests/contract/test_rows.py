"""Promise 1: rows come back in the order asked, with dtype, shape and values unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from asyncdp import DataPlaneBadRequest
from tests.contract.faults import PUT, Hold
from tests.contract.rig import Rig, at_once, declare, table
from tests.contract.same import check_same, jagged, rows_of

pytestmark = [
    pytest.mark.anyio,
    # torch says so of every nested tensor in strided layout.
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning"),
]

IDS = ["a", "b", "c"]


async def back(rig: Rig, leaf: Any, ids: list[str] = IDS) -> Any:
    """Put one field and get it."""
    await declare(rig.client)
    await rig.client.put_samples(ids, "p", {"x": leaf})
    return (await rig.mate.get_samples(ids, "p", ["x"]))["x"]


async def test_a_dense_field_comes_back_dense(rig: Rig) -> None:
    """R1: (N, 4) comes back as (N, 4), not nested."""
    leaf = torch.arange(12.0).view(3, 4)
    check_same(await back(rig, leaf), leaf)


async def test_a_column_and_a_column_of_width_one_stay_apart(rig: Rig) -> None:
    """R2: (N,) and (N, 1) of the same numbers come back as each was."""
    await declare(rig.client, "flat", "wide")
    flat = torch.arange(3)
    await rig.client.put_samples(IDS, "p", table(flat=flat, wide=flat[:, None]))
    got = await rig.client.get_samples(IDS, "p", ["flat", "wide"])
    check_same(got["flat"], flat)
    check_same(got["wide"], flat[:, None])
    assert got.batch_size == torch.Size([3])


@pytest.mark.parametrize("lengths", [(1, 5, 2), (3,), (0, 5, 0), (0, 0, 0), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("rest", [(), (2,)], ids=["flat", "wide"])
async def test_ragged_rows_keep_their_lengths(rig: Rig, lengths: tuple[int, ...], rest: tuple[int, ...]) -> None:
    """R3, R4: ragged rows, a single one, empty ones, rows that happen to be equally long, all come back jagged."""
    leaf = jagged(*(torch.rand(n, *rest) for n in lengths))
    check_same(await back(rig, leaf, IDS[: len(lengths)]), leaf)


@pytest.mark.parametrize("lengths", [(1, 5, 2), (3,), (2, 2, 2)], ids=str)
async def test_a_nested_tensor_in_strided_layout_comes_back_jagged(rig: Rig, lengths: tuple[int, ...]) -> None:
    """R3: the layout that torch makes by default is taken as well."""
    rows = [torch.rand(n, 2) for n in lengths]
    check_same(await back(rig, torch.nested.nested_tensor(rows), IDS[: len(lengths)]), jagged(*rows))


async def test_rows_may_differ_in_another_dimension_than_the_first(rig: Rig) -> None:
    """R3: rows (2, 1), (2, 4), (2, 3) come back as they were, one by one as well."""
    rows = [torch.rand(2, n) for n in (1, 4, 3)]
    leaf = torch.nested.nested_tensor(rows)
    got = await back(rig, leaf)
    for one, other in zip(rows_of(got), rows, strict=True):
        check_same(one, other)
    (alone,) = rows_of((await rig.client.get_samples(["b"], "p", ["x"]))["x"])
    check_same(alone, rows[1])


async def test_a_single_nested_row_fits_a_field_that_is_ragged_elsewhere(rig: Rig) -> None:
    """R3: one row alone does not tell in which dimension rows differ; the field does."""
    await declare(rig.client)
    rows = torch.nested.nested_tensor([torch.rand(2, 1), torch.rand(2, 3)])
    await rig.client.put_samples(["a", "b"], "p", {"x": rows})
    row = torch.rand(2, 5)
    await rig.client.put_samples(["c"], "p", {"x": torch.nested.nested_tensor([row])})
    got = (await rig.client.get_samples(IDS, "p", ["x"]))["x"]
    check_same(rows_of(got)[2], row)


async def test_a_jagged_tensor_with_holes_comes_back_whole(rig: Rig) -> None:
    """R3: values that no row refers to do not get in between."""
    values = torch.arange(10.0)
    leaf = torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, 4, 6, 10]), lengths=torch.tensor([2, 0, 3]))
    check_same(await back(rig, leaf), jagged(values[0:2], values[4:4], values[6:9]))


async def test_dense_puts_of_other_lengths_are_jagged_only_across(rig: Rig) -> None:
    """R4b: put dense twice with other lengths, a field is dense within one shape and jagged across."""
    await declare(rig.client)
    short, long = torch.rand(2, 3), torch.rand(2, 5)
    await rig.client.put_samples(["a", "b"], "p", {"x": short})
    await rig.client.put_samples(["c", "d"], "p", {"x": long})
    check_same((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"], short)
    check_same((await rig.client.get_samples(["d", "c"], "p", ["x"]))["x"], long.flip(0))
    across = (await rig.client.get_samples(["c", "a"], "p", ["x"]))["x"]
    check_same(across, jagged(long[0], short[0]))


async def test_once_nested_always_jagged(rig: Rig) -> None:
    """R4: a field that was ever put as a nested tensor comes back jagged, dense puts of it included."""
    await declare(rig.client)
    dense = torch.rand(2, 3)
    await rig.client.put_samples(["a", "b"], "p", {"x": dense})
    await rig.client.put_samples(["c"], "p", {"x": jagged(torch.rand(2))})
    check_same((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"], jagged(*dense))


DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.int8, torch.uint8, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.complex64, torch.complex32, torch.complex128),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
async def test_every_dtype_comes_back_bit_for_bit(rig: Rig, dtype: torch.dtype) -> None:
    """R5: any bits of any dtype, dense and ragged, in any order, over several puts."""
    await declare(rig.client, "dense", "ragged")
    size = torch.empty(0, dtype=dtype).element_size()
    bits = torch.arange(5 * 3 * size, dtype=torch.uint8) * 37
    dense = bits.view(5, 3 * size).view(dtype) if dtype != torch.bool else (bits.view(5, 3) % 2).bool()
    rows = [dense[i, : i % 4] for i in range(5)]
    ids = list("abcde")
    for part in (slice(0, 3), slice(3, 5)):
        values = torch.cat([r.view(torch.uint8) for r in rows[part]]).view(dtype)
        offsets = torch.tensor([0, *np.cumsum([len(r) for r in rows[part]])])
        ragged = torch.nested.nested_tensor_from_jagged(values, offsets)
        await rig.client.put_samples(ids[part], "p", table(dense=dense[part], ragged=ragged))
    order = [3, 0, 4, 2, 2, 1]
    got = await rig.client.get_samples([ids[i] for i in order], "p", ["dense", "ragged"])
    check_same(got["dense"], torch.stack([dense[i].view(torch.uint8) for i in order]).view(dtype))
    for one, i in zip(rows_of(got["ragged"]), order, strict=True):
        check_same(one, rows[i])


@pytest.mark.parametrize("shape", [(3, 0), (3, 0, 2), (3, 2, 0)], ids=str)
async def test_rows_without_elements_keep_their_shape(rig: Rig, shape: tuple[int, ...]) -> None:
    """R5: (N, 0) is (N, 0)."""
    leaf = torch.empty(shape)
    check_same(await back(rig, leaf), leaf)


ODD_TENSORS = {
    "strided": lambda: torch.arange(24.0).view(3, 8)[:, ::2],
    "transposed": lambda: torch.arange(12.0).view(4, 3).T,
    "expanded": lambda: torch.arange(3.0)[:, None].expand(3, 4),
    "part of a batch": lambda: torch.arange(40.0).view(10, 4)[4:7],
    "flipped": lambda: torch.arange(12.0).view(3, 4).flip(0).flip(1),
    "read-only": lambda: torch.from_numpy(np.broadcast_to(np.arange(4.0), (3, 4))),
    "requires grad": lambda: torch.rand(3, 4, requires_grad=True) * 2,
    "leaf that requires grad": lambda: torch.rand(3, 4, requires_grad=True),
    "conjugated": lambda: torch.view_as_complex(torch.rand(3, 4, 2)).conj(),
    "negated view": lambda: torch.view_as_complex(torch.rand(3, 4, 2)).conj().imag,
}


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("name", ODD_TENSORS)
async def test_any_view_comes_back_as_its_values(rig: Rig, name: str) -> None:
    """R6: strided, transposed, expanded, read-only, differentiable inputs equal their contiguous copies."""
    leaf = ODD_TENSORS[name]()
    wanted = leaf.detach().resolve_conj().resolve_neg().contiguous()
    check_same(await back(rig, leaf), wanted)


OBJECTS: list[Any] = [
    *("text", "", "\N{SNOWMAN}", None, b"\x00\xff", 1 << 100, -5, 2.5, True),
    *({"k": [1, {"z": None}]}, [1, "a", [2]], (1, "a", (2,)), [], (), {}, float("inf"), "0"),
]


@pytest.mark.parametrize("value", OBJECTS, ids=repr)
async def test_a_value_that_is_no_tensor_comes_back_as_it_was(rig: Rig, value: Any) -> None:
    """R7: strings, dicts, lists, tuples, None, bytes, big ints keep value and type, among others."""
    leaf = NonTensorStack(*(NonTensorData(v) for v in ("other", value, None)))
    check_same(await back(rig, leaf), ["other", value, None])


async def test_a_value_that_cannot_be_kept_is_refused_by_name(rig: Rig) -> None:
    """R7: what no backend can carry is DataPlaneBadRequest at put, and nothing is put."""
    await declare(rig.client, "x", "odd")
    leaf = NonTensorStack(NonTensorData(1), NonTensorData(lambda: None))
    with pytest.raises(DataPlaneBadRequest, match="'odd'") as caught:
        await rig.client.put_samples(["a", "b"], "p", table(2, x=torch.zeros(2), odd=leaf))
    assert caught.value.field == "odd"
    assert (await rig.client.describe("p")).size == 0


async def test_sets_come_back_as_sets_or_are_refused(rig: Rig) -> None:
    """R7: never as lists."""
    leaf = NonTensorStack(NonTensorData({1, 2}), NonTensorData(set()))
    try:
        got = await back(rig, leaf, ["a", "b"])
    except DataPlaneBadRequest as err:
        assert err.field == "x"  # noqa: PT017 - either is right
    else:
        check_same(got, [{1, 2}, set()])


async def test_equal_strings_stay_one_per_row(rig: Rig) -> None:
    """R7: N equal strings come back as N rows, in batches of one as well."""
    got = await back(rig, NonTensorStack(*[NonTensorData("same")] * 3))
    assert rows_of(got) == ["same"] * 3
    one = await rig.client.get_samples(["b"], "p", ["x"])
    assert rows_of(one["x"]) == ["same"]
    assert one.batch_size == torch.Size([1])


@pytest.mark.parametrize(
    "make",
    [
        lambda v: v,
        lambda v: np.array(v, dtype=object),
        lambda v: TensorDict({"x": NonTensorStack(*v)}, batch_size=[3]).get("x"),
    ],
    ids=["list", "object array", "stack"],
)
async def test_objects_may_be_given_in_any_of_the_usual_ways(rig: Rig, make: Any) -> None:
    """R7: a list, an object array and a stack are the same column."""
    values = [{"a": 1}, None, "text"]
    check_same(await back(rig, make(values)), values)


def read_only(array: Any) -> Any:
    """Forbid writing."""
    array.flags.writeable = False
    return array


ARRAYS = {
    "float32": lambda: np.arange(3, dtype=np.float32),
    "int16 of width 2": lambda: np.arange(6, dtype=np.int16).reshape(3, 2),
    "bool": lambda: np.array([True, False, True]),
    "uint64": lambda: np.array([0, 1, 2**64 - 1], dtype=np.uint64),
    "strided": lambda: np.arange(12.0).reshape(3, 4)[:, ::2],
    "read-only": lambda: read_only(np.arange(3.0)),
    "big-endian": lambda: np.arange(3, dtype=">i4"),
}


@pytest.mark.parametrize("name", ARRAYS)
async def test_an_array_of_numbers_is_a_tensor(rig: Rig, name: str) -> None:
    """R7: as in a TensorDict; dtype, shape and values are the array's."""
    array = ARRAYS[name]()
    wanted = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
    check_same(await back(rig, array), wanted)


async def test_an_array_of_text_is_text(rig: Rig) -> None:
    """R7: str and bytes, one per row."""
    check_same(await back(rig, np.array(["u", "vv", ""])), ["u", "vv", ""])


@pytest.mark.parametrize("array", [np.zeros(3, dtype="datetime64[ns]"), np.array(1.0)], ids=["dates", "no rows"])
async def test_an_array_that_cannot_be_kept_is_refused(rig: Rig, array: Any) -> None:
    """R7: by name, and never turned into something else."""
    with pytest.raises(DataPlaneBadRequest, match="'x'"):
        await back(rig, array)


def lazy(*rows: Any, **more: Any) -> Any:
    """Stack TensorDicts of one row lazily."""
    return LazyStackedTensorDict(*(TensorDict({"x": row, **more}, batch_size=[]) for row in rows))


LAZY = {
    "equal": (lambda: lazy(torch.ones(2), torch.zeros(2)), lambda: torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
    "ragged": (lambda: lazy(torch.ones(2), torch.zeros(3)), lambda: jagged(torch.ones(2), torch.zeros(3))),
    "text": (lambda: lazy("u", None), lambda: ["u", None]),
}


@pytest.mark.parametrize("name", LAZY)
async def test_a_lazy_stack_of_rows_is_taken(rig: Rig, name: str) -> None:
    """R8: rows that were stacked lazily come back as rows, ragged where they differ."""
    given, wanted = LAZY[name]
    await declare(rig.client)
    await rig.client.put_samples(["a", "b"], "p", given())
    check_same((await rig.client.get_samples(["a", "b"], "p", ["x"])).get("x"), wanted())


async def test_rows_of_a_lazy_stack_may_differ_in_any_one_dimension(rig: Rig) -> None:
    """R8: (2, 1) and (2, 3) come back as they were."""
    rows = [torch.rand(2, 1), torch.rand(2, 3)]
    await declare(rig.client)
    await rig.client.put_samples(["a", "b"], "p", lazy(*rows))
    for one, other in zip(rows_of((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"]), rows, strict=True):
        check_same(one, other)


ODD_STACKS = {
    "a leaf missing": lambda: LazyStackedTensorDict(
        TensorDict({"y": torch.ones(1), "x": torch.ones(1)}, []), TensorDict({"y": torch.ones(1)}, [])
    ),
    "two dimensions": lambda: lazy(torch.ones(2, 3), torch.ones(3, 2)),
    "ranks": lambda: lazy(torch.ones(2), torch.ones(2, 1)),
    "dtypes": lambda: lazy(torch.ones(2), torch.ones(2, dtype=torch.int64)),
    "kinds": lambda: lazy(torch.ones(2), "text"),
    "nested": lambda: lazy(TensorDict({"z": torch.ones(1)}, []), TensorDict({"z": torch.ones(1)}, [])),
}


@pytest.mark.parametrize("name", ODD_STACKS)
async def test_a_lazy_stack_whose_rows_do_not_go_together_is_refused(rig: Rig, name: str) -> None:
    """R8: DataPlaneBadRequest by name; a leaf that one row lacks is never left out."""
    await declare(rig.client)
    with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
        await rig.client.put_samples(["a", "b"], "p", ODD_STACKS[name]())
    assert caught.value.field == "x"
    assert (await rig.client.describe("p")).size == 0


async def test_a_second_batch_dimension_belongs_to_the_rows(rig: Rig) -> None:
    """A TensorDict of batch size (N, T) is N rows of (T, ...)."""
    await declare(rig.client)
    leaf = torch.rand(3, 2, 4)
    await rig.client.put_samples(IDS, "p", TensorDict({"x": leaf}, batch_size=[3, 2]))
    check_same((await rig.client.get_samples(IDS, "p", ["x"]))["x"], leaf)


async def test_a_tensordict_keeps_its_non_tensor_leaves(rig: Rig) -> None:
    """R11: tensors, strings and dicts of one TensorDict all come back, through every layer."""
    await declare(rig.client, "x", "text", "info")
    texts, infos = ["u", "v", "w"], [{"n": 1}, {}, None]
    data = table(
        x=torch.rand(3, 2),
        text=NonTensorStack(*(NonTensorData(t) for t in texts)),
        info=NonTensorStack(*(NonTensorData(i) for i in infos)),
    )
    await rig.client.put_samples(IDS, "p", data)
    got = await rig.client.get_samples(["c", "a"], "p", ["info", "x", "text"])
    check_same(got["x"], data["x"][[2, 0]])
    check_same(got.get("text"), ["w", "u"])
    check_same(got.get("info"), [None, {"n": 1}])
    assert list(got.keys()) == ["info", "x", "text"]


async def test_one_value_for_the_whole_batch_is_one_per_row(rig: Rig) -> None:
    """R8: NonTensorData of a batch works like a stack of it."""
    await declare(rig.client)
    await rig.client.put_samples(IDS, "p", TensorDict({"x": "all"}, batch_size=[3]))
    assert rows_of((await rig.client.get_samples(["b", "a"], "p", ["x"])).get("x")) == ["all", "all"]


REFUSED = {
    "nested TensorDict": lambda: TensorDict({"y": torch.zeros(3)}, batch_size=[3]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "without dimensions": lambda: torch.tensor(1.0),
    "sub-byte": lambda: torch.zeros(3, dtype=torch.uint4),
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("name", REFUSED)
async def test_what_cannot_be_carried_is_refused_at_put(rig: Rig, name: str) -> None:
    """R8: it works unchanged, or is DataPlaneBadRequest by name, and nothing of it is there."""
    await declare(rig.client)
    with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
        await rig.client.put_samples(IDS, "p", {"x": REFUSED[name]()})
    assert caught.value.field == "x"
    assert caught.value.op == "put_samples"
    assert (await rig.client.describe("p")).size == 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda: torch.zeros(1, dtype=torch.int64), lambda: torch.zeros(1, dtype=torch.int32)),
        (lambda: torch.zeros(1, 2), lambda: torch.zeros(1, 2, dtype=torch.float64)),
        (lambda: torch.zeros(1), lambda: torch.zeros(1, 1)),
        (lambda: torch.zeros(1, 2), lambda: ["text"]),
        (lambda: ["text"], lambda: torch.zeros(1, 2)),
        (lambda: torch.zeros(1, 2, 3), lambda: torch.zeros(1, 3, 2)),
        (lambda: jagged(torch.zeros(2)), lambda: jagged(torch.zeros(2, dtype=torch.int32))),
    ],
    ids=["int width", "float width", "rank", "object", "tensor", "two dimensions", "ragged"],
)
async def test_a_field_keeps_the_type_of_its_first_put(rig: Rig, first: Any, second: Any) -> None:
    """R9: a second put of another dtype, rank or kind is DataPlaneBadRequest; nothing is cast and nothing changed."""
    await declare(rig.client, "x", "y")
    await rig.client.put_samples(["a"], "p", {"x": first()})
    with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
        await rig.mate.put_samples(["b"], "p", {"y": torch.zeros(1), "x": second()})
    assert caught.value.field == "x"
    assert (await rig.client.describe("p")).size == 1
    check_same((await rig.client.get_samples(["a"], "p", ["x"])).get("x"), first())


async def test_two_first_puts_at_once_do_not_mix_types(rig: Rig) -> None:
    """R9: whoever comes first decides, also where neither knew of the other."""
    await declare(rig.client)
    hold = Hold(PUT)
    slow = await rig.attach(hold)

    async def fast() -> None:
        await hold.holds()
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1, dtype=torch.int64)})
        hold.go.set()

    late, _ = await at_once(slow.put_samples(["b"], "p", {"x": torch.zeros(1)}), fast())
    assert isinstance(late, DataPlaneBadRequest)
    assert late.field == "x"
    assert (await rig.client.describe("p")).size == 1


async def test_changing_a_fetched_tensor_changes_no_stored_row(rig: Rig) -> None:
    """R10: what was fetched is the caller's; so is what was put."""
    await declare(rig.client, "x", "r", "o")
    dense, ragged, value = torch.ones(2, 3), jagged(torch.ones(2), torch.ones(1)), {"k": [1]}
    wanted = dense.clone()
    await rig.client.put_samples(["a", "b"], "p", {"x": dense, "r": ragged, "o": [value, value]})
    dense.zero_()
    ragged.values().zero_()
    value["k"].append(2)
    for _ in range(2):
        got = await rig.client.get_samples(["a", "b"], "p", ["x", "r", "o"])
        check_same(got["x"], wanted)
        check_same(got["r"], jagged(torch.ones(2), torch.ones(1)))
        assert rows_of(got.get("o")) == [{"k": [1]}] * 2
        got["x"].zero_()
        got["r"].values().zero_()
        rows_of(got.get("o"))[0]["k"].append(3)


async def test_enum_fields_come_back_as_their_words(rig: Rig) -> None:
    """Fields with a vocabulary travel as small ints and come back as strings, in any order."""
    await declare(rig.client, enums={"x": ["stop", "length", "abort"]})
    await rig.client.put_samples(IDS, "p", {"x": ["abort", "stop", "abort"]})
    assert rows_of((await rig.mate.get_samples(["b", "a", "c"], "p", ["x"])).get("x")) == ["stop", "abort", "abort"]
    with pytest.raises(DataPlaneBadRequest, match=r"'x'.*'other'") as caught:
        await rig.client.put_samples(["d"], "p", {"x": ["other"]})
    assert caught.value.field == "x"
    assert (await rig.client.describe("p")).size == 3


async def test_a_vocabulary_grows_without_changing_what_is_stored(rig: Rig) -> None:
    """Words that were added later, beyond 256 as well, are read together with the old ones."""
    words = [f"w{i}" for i in range(300)]
    await declare(rig.client, enums={"x": words[:3]})
    await rig.client.put_samples(["a", "b"], "p", {"x": ["w0", "w2"]})
    await declare(rig.client, enums={"x": words[1:]})
    await rig.client.put_samples(["c"], "p", {"x": ["w299"]})
    got = await rig.client.get_samples(["a", "b", "c"], "p", ["x"])
    assert rows_of(got.get("x")) == ["w0", "w2", "w299"]


async def test_many_and_odd_ids(rig: Rig) -> None:
    """R12: unicode, spaces, 1 KB long; and duplicates in a get fill each place."""
    await declare(rig.client)
    ids = ["\N{SNOWMAN} \N{DIGIT ONE}", " ", "a b\n", "x" * 1024, "a/b:c*[]", "\x00", "g1_g0"]
    leaf = torch.arange(len(ids))
    await rig.client.put_samples(ids, "p", {"x": leaf})
    check_same((await rig.client.get_samples(ids[::-1], "p", ["x"]))["x"], leaf.flip(0))
    twice = [ids[3], ids[0], ids[3], ids[3]]
    check_same((await rig.client.get_samples(twice, "p", ["x"]))["x"], torch.tensor([3, 0, 3, 3]))


async def test_ten_thousand_ids_in_one_call(rig: Rig) -> None:
    """R12: 10,001 rows in one put and one get."""
    await declare(rig.client)
    ids = [f"s{i}" for i in range(10_001)]
    await rig.client.put_samples(ids, "p", {"x": torch.arange(10_001)})
    got = await rig.client.get_samples(ids[::-1], "p", ["x"])
    check_same(got["x"], torch.arange(10_001).flip(0))


async def test_rows_of_many_puts_come_in_the_order_asked(rig: Rig) -> None:
    """Rows that lie apart, over several puts, fields and hosts, are put together in the order asked."""
    await declare(rig.client, "x", "r", "t")
    lengths = [3, 0, 1, 4, 2, 2, 5, 1]
    for i, n in enumerate(lengths):
        data = table(x=torch.full((1, 2), i), r=jagged(torch.full((n,), float(i))))
        await rig.client.put_samples([f"s{i}"], "p", data)
    for i in range(0, len(lengths), 2):
        await rig.mate.put_samples([f"s{i}", f"s{i + 1}"], "p", {"t": [f"t{i}", f"t{i + 1}"]})
    order = [5, 1, 7, 0, 3, 3, 6]
    got = await rig.client.get_samples([f"s{i}" for i in order], "p", ["t", "r", "x"])
    check_same(got["x"], torch.tensor(order)[:, None].expand(-1, 2).contiguous())
    check_same(got["r"], jagged(*(torch.full((lengths[i],), float(i)) for i in order)))
    assert rows_of(got.get("t")) == [f"t{i}" for i in order]


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bfloat16], ids=str)
async def test_tensors_inside_of_objects_come_back_or_are_refused(rig: Rig, dtype: torch.dtype) -> None:
    """R7: a dict that holds a tensor, of a dtype that torch cannot unpickle as well, is kept or refused at put."""
    inside = torch.arange(4, dtype=torch.uint8).view(dtype)
    try:
        got = await back(rig, [{"t": inside}, None, [inside, 1]])
    except DataPlaneBadRequest as err:
        assert err.field == "x"  # noqa: PT017 - either is right
        return
    first, _, third = rows_of(got)
    check_same(first["t"], inside)
    check_same(third[0], inside)
