"""Promise 1 for values that are not plain tensors: they are returned unchanged, or refused by name."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict

from asyncdp import DataPlaneBadRequest, DataPlaneReadError, PartialReadError

from ..base import Contract
from ..rig import Rig, declare, table
from ..same import check_same, jagged, rows_of
from ..steps import THREE, back

__all__ = ["Objects"]

ODD_TENSORS: dict[str, Callable[[], torch.Tensor]] = {
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


OBJECTS: list[Any] = [
    *("text", "", "\N{SNOWMAN}", None, b"\x00\xff", 1 << 100, -5, 2.5, True),
    *({"k": [1, {"z": None}]}, [1, "a", [2]], (1, "a", (2,)), [], (), {}, float("inf"), "0"),
]


def read_only(array: Any) -> Any:
    """Make an array read-only."""
    array.flags.writeable = False
    return array


ARRAYS: dict[str, Callable[[], Any]] = {
    "float32": lambda: np.arange(3, dtype=np.float32),
    "int16 of width 2": lambda: np.arange(6, dtype=np.int16).reshape(3, 2),
    "bool": lambda: np.array([True, False, True]),
    "uint64": lambda: np.array([0, 1, 2**64 - 1], dtype=np.uint64),
    "strided": lambda: np.arange(12.0).reshape(3, 4)[:, ::2],
    "read-only": lambda: read_only(np.arange(3.0)),
    "big-endian": lambda: np.arange(3, dtype=">i4"),
    "reversed": lambda: np.arange(3.0)[::-1],
}


def lazy(*rows: Any, **more: Any) -> Any:
    """Return a lazy stack of TensorDicts of one row."""
    return LazyStackedTensorDict(*(TensorDict({"x": row, **more}, batch_size=[]) for row in rows))


LAZY: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "equal": (lambda: lazy(torch.ones(2), torch.zeros(2)), lambda: torch.tensor([[1.0, 1.0], [0.0, 0.0]])),
    "ragged": (lambda: lazy(torch.ones(2), torch.zeros(3)), lambda: jagged(torch.ones(2), torch.zeros(3))),
    "text": (lambda: lazy("u", None), lambda: ["u", None]),
}


ODD_STACKS: dict[str, Callable[[], Any]] = {
    "a leaf missing": lambda: LazyStackedTensorDict(
        TensorDict({"y": torch.ones(1), "x": torch.ones(1)}, []), TensorDict({"y": torch.ones(1)}, [])
    ),
    "two dimensions": lambda: lazy(torch.ones(2, 3), torch.ones(3, 2)),
    "ranks": lambda: lazy(torch.ones(2), torch.ones(2, 1)),
    "dtypes": lambda: lazy(torch.ones(2), torch.ones(2, dtype=torch.int64)),
    "kinds": lambda: lazy(torch.ones(2), "text"),
    "nested": lambda: lazy(TensorDict({"z": torch.ones(1)}, []), TensorDict({"z": torch.ones(1)}, [])),
}


REFUSED: dict[str, Callable[[], Any]] = {
    "nested TensorDict": lambda: TensorDict({"y": torch.zeros(3)}, batch_size=[3]),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "sparse csr": lambda: torch.eye(3).to_sparse_csr(),
    "without dimensions": lambda: torch.tensor(1.0),
    "sub-byte": lambda: torch.zeros(3, dtype=torch.uint4),  # type: ignore[attr-defined] # torch does not tell its stubs
    "meta": lambda: torch.zeros(3, device="meta"),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(3), 0.1, 0, torch.qint8),
}


#: {description: (rows, expected rows; None: refused by name)}
LISTS: dict[str, tuple[Callable[[], list[Any]], Callable[[], Any] | None]] = {
    "tensors": (lambda: [torch.ones(1), torch.zeros(3)], lambda: jagged(torch.ones(1), torch.zeros(3))),
    "equal tensors": (lambda: [torch.ones(2), torch.zeros(2)], lambda: jagged(torch.ones(2), torch.zeros(2))),
    "tensors with grad": (lambda: [torch.ones(2, requires_grad=True)] * 2, lambda: jagged(*[torch.ones(2)] * 2)),
    "arrays": (
        lambda: [np.ones(1, "i2"), np.zeros(2, "i2")],
        lambda: jagged(*(t.short() for t in (torch.ones(1), torch.zeros(2)))),
    ),
    "a tensor, an array": (
        lambda: [torch.ones(1).double(), np.zeros(2)],
        lambda: jagged(torch.ones(1).double(), torch.zeros(2).double()),
    ),
    "floats": (lambda: [1.5, 2.5], lambda: torch.tensor([1.5, 2.5])),
    "ints": (lambda: [1, 1 << 40], lambda: torch.tensor([1, 1 << 40])),
    "bools": (lambda: [True, False], lambda: torch.tensor([True, False])),
    "an int, a float": (lambda: [1, 2.5], lambda: torch.tensor([1.0, 2.5])),
    "numpy scalars": (lambda: [np.float64(0.1), np.float64(2)], lambda: torch.tensor([0.1, 2], dtype=torch.float64)),
    "tensors without dimensions": (lambda: [torch.tensor(3), torch.tensor(4)], lambda: torch.tensor([3, 4])),
    "text": (lambda: ["u", "v"], lambda: ["u", "v"]),
    "None": (lambda: [None, None], lambda: [None, None]),
    "lists of numbers": (lambda: [[1, 2], [3, 4]], lambda: [[1, 2], [3, 4]]),
    "a number, None": (lambda: [1.5, None], lambda: [1.5, None]),
    "a tensor, None": (lambda: [torch.ones(1), None], None),
    "a tensor, a number": (lambda: [torch.ones(1), 1.0], None),
    "a bool, an int": (lambda: [True, 2], None),
    "dtypes": (lambda: [torch.ones(1), torch.ones(1, dtype=torch.int64)], None),
    "ranks": (lambda: [torch.ones(1), torch.ones(1, 1)], None),
    "two dimensions": (lambda: [torch.ones(1, 2), torch.ones(2, 1)], None),
    "a sparse tensor": (lambda: [torch.ones(2), torch.ones(2).to_sparse()], None),
    "an int too large": (lambda: [1, 1 << 70], None),
    "too few": (lambda: [1.5], None),
    "none at all": (lambda: [], None),  # noqa: PIE807 - a list of rows as the others
}


class Objects(Contract):
    """Promise 1 for values that are not plain tensors: they are returned unchanged, or refused by name."""

    @pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
    @pytest.mark.parametrize("name", ODD_TENSORS)
    async def test_any_view_comes_back_as_its_values(self, rig: Rig, name: str) -> None:
        """R6: strided, transposed, expanded, read-only or differentiable inputs are stored like contiguous copies."""
        leaf = ODD_TENSORS[name]()
        wanted = leaf.detach().resolve_conj().resolve_neg().contiguous()
        check_same(await back(rig, leaf), wanted)

    @pytest.mark.parametrize("value", OBJECTS, ids=repr)
    async def test_a_value_that_is_no_tensor_comes_back_as_it_was(self, rig: Rig, value: Any) -> None:
        """R7: strings, dicts, lists, tuples, None, bytes, big ints and others keep value and type."""
        leaf = NonTensorStack(*(NonTensorData(v) for v in ("other", value, None)))
        check_same(await back(rig, leaf), ["other", value, None])

    async def test_a_value_that_cannot_be_kept_is_refused_by_name(self, rig: Rig) -> None:
        """R7: a value that no backend can store raises DataPlaneBadRequest at put, and nothing is put."""
        await declare(rig.client, "x", "odd")
        leaf = NonTensorStack(NonTensorData(1), NonTensorData(lambda: None))
        with pytest.raises(DataPlaneBadRequest, match="'odd'") as caught:
            await rig.client.put_samples(["a", "b"], "p", table(2, x=torch.zeros(2), odd=leaf))
        assert caught.value.field == "odd"
        assert (await rig.client.describe("p")).size == 0

    async def test_sets_come_back_as_sets_or_are_refused(self, rig: Rig) -> None:
        """R7: sets are never returned as lists."""
        leaf = NonTensorStack(NonTensorData({1, 2}), NonTensorData(set()))
        try:
            got = await back(rig, leaf, ["a", "b"])
        except DataPlaneBadRequest as err:
            assert err.field == "x"  # noqa: PT017 - either is right
        else:
            check_same(got, [{1, 2}, set()])

    async def test_equal_strings_stay_one_per_row(self, rig: Rig) -> None:
        """R7: N equal strings are returned as N rows, also for N = 1."""
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
    async def test_objects_may_be_given_in_any_of_the_usual_ways(self, rig: Rig, make: Any) -> None:
        """R7: a list, an object array and a stack give the same column."""
        values = [{"a": 1}, None, "text"]
        check_same(await back(rig, make(values)), values)

    @pytest.mark.parametrize("name", ARRAYS)
    async def test_an_array_of_numbers_is_a_tensor(self, rig: Rig, name: str) -> None:
        """R7: as in a TensorDict, it is a tensor with the array's dtype, shape and values."""
        array = ARRAYS[name]()
        wanted = torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("=")))
        check_same(await back(rig, array), wanted)

    async def test_an_array_of_text_is_text(self, rig: Rig) -> None:
        """R7: each row of the array is a str or bytes."""
        check_same(await back(rig, np.array(["u", "vv", ""])), ["u", "vv", ""])

    @pytest.mark.parametrize("array", [np.zeros(3, dtype="datetime64[ns]"), np.array(1.0)], ids=["dates", "no rows"])
    async def test_an_array_that_cannot_be_kept_is_refused(self, rig: Rig, array: Any) -> None:
        """R7: it is refused by name and never converted."""
        with pytest.raises(DataPlaneBadRequest, match="'x'"):
            await back(rig, array)

    async def test_a_list_is_what_its_rows_are(self, rig: Rig) -> None:
        """U13: tensors become ragged, numbers dense, other values objects; a mixture is refused by name."""
        for at, (name, (rows, wanted)) in enumerate(LISTS.items()):
            field = f"f{at}"
            await declare(rig.client, field)
            if wanted is None:
                with pytest.raises(DataPlaneBadRequest, match=f"'{field}'") as caught:
                    await rig.client.put_samples(["odd", "odder"], "p", {field: rows()})
                assert caught.value.field == field, name
                continue
            await rig.client.put_samples(["a", "b"], "p", {field: rows()})
            check_same((await rig.mate.get_samples(["a", "b"], "p", [field])).get(field), wanted())
        assert (await rig.client.describe("p")).size == 2

    async def test_numbers_in_a_list_take_the_dtype_of_their_field(self, rig: Rig) -> None:
        """U13: numbers are converted to the field's dtype if they fit; a field of objects takes them as objects."""
        await declare(rig.client, "half", "small", "any")
        first = {
            "half": torch.zeros(1, dtype=torch.float16),
            "small": torch.zeros(1, dtype=torch.int8),
            "any": ["text"],
        }
        await rig.client.put_samples(["a"], "p", first)
        await rig.client.put_samples(["b"], "p", {"half": [1], "small": [-3], "any": [1.5]})
        got = await rig.mate.get_samples(["a", "b"], "p", ["half", "small", "any"])
        check_same(got["half"], torch.tensor([0, 1], dtype=torch.float16))
        check_same(got["small"], torch.tensor([0, -3], dtype=torch.int8))
        check_same(got.get("any"), ["text", 1.5])
        for field, value in (("small", 1.5), ("small", 300), ("half", 2049), ("half", True), ("small", True)):
            with pytest.raises(DataPlaneBadRequest, match=f"'{field}'"):
                await rig.client.put_samples(["c"], "p", {field: [value]})

    @pytest.mark.parametrize("dtype", [object, str], ids=["objects", "text"])
    async def test_an_array_that_took_its_rows_apart_is_refused(self, rig: Rig, dtype: Any) -> None:
        """U13: numpy turns equally long lists into two dimensions; the error suggests an alternative that works."""
        array = np.array([["u", "v"], ["w", "x"]], dtype=dtype)
        with pytest.raises(DataPlaneBadRequest, match=r"'x'.*array\.tolist\(\)"):
            await back(rig, array, ["a", "b"])
        check_same(await back(rig, array.tolist(), ["a", "b"]), [["u", "v"], ["w", "x"]])
        one_each = np.empty(2, dtype=object)
        one_each[:] = [[1, 2], [3, 4]]
        await rig.client.put_samples(["a", "b"], "p", {"lists": one_each})
        check_same((await rig.client.get_samples(["a", "b"], "p", ["lists"])).get("lists"), [[1, 2], [3, 4]])

    @pytest.mark.parametrize("name", LAZY)
    async def test_a_lazy_stack_of_rows_is_taken(self, rig: Rig, name: str) -> None:
        """R8: rows of a lazy stack are returned as rows, ragged if their shapes differ."""
        given, wanted = LAZY[name]
        await declare(rig.client)
        await rig.client.put_samples(["a", "b"], "p", given())
        check_same((await rig.client.get_samples(["a", "b"], "p", ["x"])).get("x"), wanted())

    async def test_rows_of_a_lazy_stack_may_differ_in_any_one_dimension(self, rig: Rig) -> None:
        """R8: rows of shapes (2, 1) and (2, 3) keep their shapes."""
        rows = [torch.rand(2, 1), torch.rand(2, 3)]
        await declare(rig.client)
        await rig.client.put_samples(["a", "b"], "p", lazy(*rows))
        for one, other in zip(rows_of((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"]), rows, strict=True):
            check_same(one, other)

    @pytest.mark.parametrize("name", ODD_STACKS)
    async def test_a_lazy_stack_whose_rows_do_not_go_together_is_refused(self, rig: Rig, name: str) -> None:
        """R8: it raises DataPlaneBadRequest with the name of the leaf; a leaf that one row lacks is never dropped."""
        await declare(rig.client)
        with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
            await rig.client.put_samples(["a", "b"], "p", ODD_STACKS[name]())
        assert caught.value.field == "x"
        assert (await rig.client.describe("p")).size == 0

    async def test_a_tensordict_keeps_its_non_tensor_leaves(self, rig: Rig) -> None:
        """R11: tensors, strings and dicts of one TensorDict are all returned, through every layer."""
        await declare(rig.client, "x", "text", "info")
        texts, infos = ["u", "v", "w"], [{"n": 1}, {}, None]
        data = table(
            x=torch.rand(3, 2),
            text=NonTensorStack(*(NonTensorData(t) for t in texts)),
            info=NonTensorStack(*(NonTensorData(i) for i in infos)),
        )
        await rig.client.put_samples(THREE, "p", data)
        got = await rig.client.get_samples(["c", "a"], "p", ["info", "x", "text"])
        check_same(got["x"], data["x"][[2, 0]])
        check_same(got.get("text"), ["w", "u"])
        check_same(got.get("info"), [None, {"n": 1}])
        assert list(got.keys()) == ["info", "x", "text"]

    async def test_one_value_for_the_whole_batch_is_one_per_row(self, rig: Rig) -> None:
        """R8: NonTensorData of a batch is treated like a stack of it."""
        await declare(rig.client)
        await rig.client.put_samples(THREE, "p", TensorDict({"x": "all"}, batch_size=[3]))
        assert rows_of((await rig.client.get_samples(["b", "a"], "p", ["x"])).get("x")) == ["all", "all"]

    @pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
    @pytest.mark.parametrize("name", REFUSED)
    async def test_what_cannot_be_carried_is_refused_at_put(self, rig: Rig, name: str) -> None:
        """R8: a value is kept unchanged, or raises DataPlaneBadRequest by name and nothing is put."""
        await declare(rig.client)
        with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
            await rig.client.put_samples(THREE, "p", {"x": REFUSED[name]()})
        assert caught.value.field == "x"
        assert caught.value.op == "put_samples"
        assert (await rig.client.describe("p")).size == 0

    async def test_enum_fields_come_back_as_their_words(self, rig: Rig) -> None:
        """Fields with a vocabulary are transferred as small ints and returned as strings, in any order."""
        await declare(rig.client, enums={"x": ["stop", "length", "abort"]})
        await rig.client.put_samples(THREE, "p", {"x": ["abort", "stop", "abort"]})
        assert rows_of((await rig.mate.get_samples(["b", "a", "c"], "p", ["x"])).get("x")) == ["stop", "abort", "abort"]
        with pytest.raises(DataPlaneBadRequest, match=r"'x'.*'other'") as caught:
            await rig.client.put_samples(["d"], "p", {"x": ["other"]})
        assert caught.value.field == "x"
        assert (await rig.client.describe("p")).size == 3

    async def test_a_vocabulary_grows_without_changing_what_is_stored(self, rig: Rig) -> None:
        """Words that were added later, even beyond 256, can be read together with older ones."""
        words = [f"w{i}" for i in range(300)]
        await declare(rig.client, enums={"x": words[:3]})
        await rig.client.put_samples(["a", "b"], "p", {"x": ["w0", "w2"]})
        await declare(rig.client, enums={"x": words[1:]})
        await rig.client.put_samples(["c"], "p", {"x": ["w299"]})
        got = await rig.client.get_samples(["a", "b", "c"], "p", ["x"])
        assert rows_of(got.get("x")) == ["w0", "w2", "w299"]

    @pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint16, torch.bfloat16], ids=str)
    async def test_tensors_inside_of_objects_come_back_or_are_refused(self, rig: Rig, dtype: torch.dtype) -> None:
        """R7: a dict with a tensor, even of a dtype that torch cannot unpickle, is kept or refused at put."""
        inside = torch.arange(4, dtype=torch.uint8).view(dtype)
        try:
            got = await back(rig, [{"t": inside}, None, [inside, 1]])
        except DataPlaneBadRequest as err:
            assert err.field == "x"  # noqa: PT017 - either is right
            return
        first, _, third = rows_of(got)
        check_same(first["t"], inside)
        check_same(third[0], inside)

    async def test_an_object_whose_class_is_not_here_is_a_typed_error(
        self, rig: Rig, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A reader without the class gets an error of that row that names the field; all else can be read."""
        elsewhere = ModuleType("asyncdp_only_elsewhere")
        kind = type("Kind", (), {"__module__": elsewhere.__name__})
        elsewhere.Kind = kind  # type: ignore[attr-defined]
        await declare(rig.client)
        with monkeypatch.context() as there:
            there.setitem(sys.modules, elsewhere.__name__, elsewhere)
            try:
                await rig.client.put_samples(["a", "b"], "p", {"x": [kind(), "text"], "y": torch.ones(2)})
            except DataPlaneBadRequest as err:
                assert err.field == "x"  # noqa: PT017 - either is right
                return
        with pytest.raises(PartialReadError, match="asyncdp_only_elsewhere") as caught:
            await rig.mate.get_samples(["a", "b"], "p", ["x", "y"])
        assert {row: (type(err), err.field) for row, err in caught.value.errors.items()} == {
            0: (DataPlaneReadError, "x")
        }
        assert rows_of(caught.value.rows["x"]) == ["text"]
        assert (await rig.mate.get_samples(["a"], "p", ["y"]))["y"].tolist() == [1.0]
