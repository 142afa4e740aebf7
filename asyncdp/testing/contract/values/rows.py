"""Promise 1: rows are returned in the requested order, with dtype, shape and values unchanged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneBadRequest

from ..base import Contract
from ..faults import PUT, Hold
from ..rig import Rig, at_once, declare, table
from ..same import check_same, jagged, rows_of
from ..steps import THREE, back

__all__ = ["Rows"]

DTYPES = [
    *(torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.bool, torch.int8, torch.uint8, torch.uint16, torch.int32, torch.uint32, torch.int64, torch.uint64),
    *(torch.complex64, torch.complex32, torch.complex128),
]


class Rows(Contract):
    """Promise 1: rows are returned in the requested order, with dtype, shape and values unchanged."""

    async def test_a_dense_field_comes_back_dense(self, rig: Rig) -> None:
        """R1: a field of shape (N, 4) is returned as (N, 4), not nested."""
        leaf = torch.arange(12.0).view(3, 4)
        check_same(await back(rig, leaf), leaf)

    async def test_a_column_and_a_column_of_width_one_stay_apart(self, rig: Rig) -> None:
        """R2: fields of shapes (N,) and (N, 1) with the same numbers keep their shapes."""
        await declare(rig.client, "flat", "wide")
        flat = torch.arange(3)
        await rig.client.put_samples(THREE, "p", table(flat=flat, wide=flat[:, None]))
        got = await rig.client.get_samples(THREE, "p", ["flat", "wide"])
        check_same(got["flat"], flat)
        check_same(got["wide"], flat[:, None])
        assert got.batch_size == torch.Size([3])

    @pytest.mark.parametrize("lengths", [(1, 5, 2), (3,), (0, 5, 0), (0, 0, 0), (2, 2, 2)], ids=str)
    @pytest.mark.parametrize("rest", [(), (2,)], ids=["flat", "wide"])
    async def test_ragged_rows_keep_their_lengths(
        self, rig: Rig, lengths: tuple[int, ...], rest: tuple[int, ...]
    ) -> None:
        """R3, R4: ragged rows are returned jagged, also a single row, empty rows, and rows of equal length."""
        leaf = jagged(*(torch.rand(n, *rest) for n in lengths))
        check_same(await back(rig, leaf, THREE[: len(lengths)]), leaf)

    @pytest.mark.parametrize("lengths", [(1, 5, 2), (3,), (2, 2, 2)], ids=str)
    async def test_a_nested_tensor_in_strided_layout_comes_back_jagged(
        self, rig: Rig, lengths: tuple[int, ...]
    ) -> None:
        """R3: the strided layout, which is torch's default, is accepted as well."""
        rows = [torch.rand(n, 2) for n in lengths]
        check_same(await back(rig, torch.nested.nested_tensor(rows), THREE[: len(lengths)]), jagged(*rows))

    async def test_rows_may_differ_in_another_dimension_than_the_first(self, rig: Rig) -> None:
        """R3: rows of shapes (2, 1), (2, 4) and (2, 3) keep their shapes, also when read one by one."""
        rows = [torch.rand(2, n) for n in (1, 4, 3)]
        leaf = torch.nested.nested_tensor(rows)
        got = await back(rig, leaf)
        for one, other in zip(rows_of(got), rows, strict=True):
            check_same(one, other)
        (alone,) = rows_of((await rig.client.get_samples(["b"], "p", ["x"]))["x"])
        check_same(alone, rows[1])

    async def test_a_single_nested_row_fits_a_field_that_is_ragged_elsewhere(self, rig: Rig) -> None:
        """R3: a single row does not determine which dimension is ragged; the field does."""
        await declare(rig.client)
        rows = torch.nested.nested_tensor([torch.rand(2, 1), torch.rand(2, 3)])
        await rig.client.put_samples(["a", "b"], "p", {"x": rows})
        row = torch.rand(2, 5)
        await rig.client.put_samples(["c"], "p", {"x": torch.nested.nested_tensor([row])})
        got = (await rig.client.get_samples(THREE, "p", ["x"]))["x"]
        check_same(rows_of(got)[2], row)

    @pytest.mark.parametrize("per_put", [1, 2], ids=["one by one", "in batches of one length"])
    @pytest.mark.parametrize("shape", [(4, None), (None, 4), (2, None, 3), (2, 3, None)], ids=str)
    async def test_equal_nested_rows_do_not_fix_which_dimension_is_ragged(
        self, rig: Rig, shape: tuple[int | None, ...], per_put: int
    ) -> None:
        """U10: nested batches of equal rows and of a later other length are accepted and can be read together."""
        await declare(rig.client)
        rows, ids = [], []
        for length in (5, 2, 0, 7):
            batch = [torch.rand([length if size is None else size for size in shape]) for _ in range(per_put)]
            names = [f"s{length}-{at}" for at in range(per_put)]
            await rig.client.put_samples(names, "p", {"x": torch.nested.as_nested_tensor(batch)})
            rows += batch
            ids += names
        got = (await rig.mate.get_samples(ids[::-1], "p", ["x"]))["x"]
        assert got.layout == torch.jagged
        for one, other in zip(rows_of(got), rows[::-1], strict=True):
            check_same(one, other)
        part = (await rig.mate.get_samples(ids[:per_put], "p", ["x"]))["x"]
        assert part.layout == torch.jagged
        for one, other in zip(rows_of(part), rows, strict=False):
            check_same(one, other)
        dims = ", ".join("*" if size is None else str(size) for size in shape)
        assert (await rig.client.describe("p")).fields["x"] == f"float32[{dims}]"
        odd = torch.rand([9 if size is None else size + 1 for size in shape])
        with pytest.raises(DataPlaneBadRequest, match=r"'x'.*two dimensions"):
            await rig.client.put_samples(["odd"], "p", {"x": torch.nested.as_nested_tensor([odd])})

    async def test_jagged_batches_of_equal_rows_do_not_fix_which_dimension_is_ragged(self, rig: Rig) -> None:
        """U10: the jagged layout always marks the first dimension as ragged, which does not bind equal rows."""
        await declare(rig.client)
        rows = [torch.rand(4, 5), torch.rand(4, 5), torch.rand(4, 2)]
        await rig.client.put_samples(["a", "b"], "p", {"x": jagged(*rows[:2])})
        await rig.client.put_samples(["c"], "p", {"x": jagged(rows[2])})
        for one, other in zip(rows_of((await rig.mate.get_samples(THREE, "p", ["x"]))["x"]), rows, strict=True):
            check_same(one, other)

    async def test_a_jagged_tensor_with_holes_comes_back_whole(self, rig: Rig) -> None:
        """R3: values that belong to no row are not stored."""
        values = torch.arange(10.0)
        leaf = torch.nested.nested_tensor_from_jagged(
            values, torch.tensor([0, 4, 6, 10]), lengths=torch.tensor([2, 0, 3])
        )
        check_same(await back(rig, leaf), jagged(values[0:2], values[4:4], values[6:9]))

    async def test_dense_puts_of_other_lengths_are_jagged_only_across(self, rig: Rig) -> None:
        """R4b: after dense puts of different lengths, reads of one shape are dense, and reads of several are jagged."""
        await declare(rig.client)
        short, long = torch.rand(2, 3), torch.rand(2, 5)
        await rig.client.put_samples(["a", "b"], "p", {"x": short})
        await rig.client.put_samples(["c", "d"], "p", {"x": long})
        check_same((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"], short)
        check_same((await rig.client.get_samples(["d", "c"], "p", ["x"]))["x"], long.flip(0))
        across = (await rig.client.get_samples(["c", "a"], "p", ["x"]))["x"]
        check_same(across, jagged(long[0], short[0]))

    async def test_once_nested_always_jagged(self, rig: Rig) -> None:
        """R4: a field that was once put as a nested tensor is always returned jagged, even for its dense puts."""
        await declare(rig.client)
        dense = torch.rand(2, 3)
        await rig.client.put_samples(["a", "b"], "p", {"x": dense})
        await rig.client.put_samples(["c"], "p", {"x": jagged(torch.rand(2))})
        check_same((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"], jagged(*dense))

    @pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
    async def test_every_dtype_comes_back_bit_for_bit(self, rig: Rig, dtype: torch.dtype) -> None:
        """R5: this holds for all bit patterns of all dtypes, dense and ragged, in any order, over several puts."""
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
    async def test_rows_without_elements_keep_their_shape(self, rig: Rig, shape: tuple[int, ...]) -> None:
        """R5: a field of shape (N, 0) is returned as (N, 0)."""
        leaf = torch.empty(shape)
        check_same(await back(rig, leaf), leaf)

    async def test_a_second_batch_dimension_belongs_to_the_rows(self, rig: Rig) -> None:
        """A TensorDict of batch size (N, T) has N rows of shape (T, ...)."""
        await declare(rig.client)
        leaf = torch.rand(3, 2, 4)
        await rig.client.put_samples(THREE, "p", TensorDict({"x": leaf}, batch_size=[3, 2]))
        check_same((await rig.client.get_samples(THREE, "p", ["x"]))["x"], leaf)

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
    async def test_a_field_keeps_the_type_of_its_first_put(self, rig: Rig, first: Any, second: Any) -> None:
        """R9: a put of another dtype, rank or kind raises DataPlaneBadRequest; nothing is cast or changed."""
        await declare(rig.client, "x", "y")
        await rig.client.put_samples(["a"], "p", {"x": first()})
        with pytest.raises(DataPlaneBadRequest, match="'x'") as caught:
            await rig.mate.put_samples(["b"], "p", {"y": torch.zeros(1), "x": second()})
        assert caught.value.field == "x"
        assert (await rig.client.describe("p")).size == 1
        check_same((await rig.client.get_samples(["a"], "p", ["x"])).get("x"), first())

    async def test_two_first_puts_at_once_do_not_mix_types(self, rig: Rig) -> None:
        """R9: of two concurrent first puts, the one that is published first fixes the type."""
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

    async def test_changing_a_fetched_tensor_changes_no_stored_row(self, rig: Rig) -> None:
        """R10: the caller may change fetched tensors, and tensors after their put, without affecting the plane."""
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

    async def test_many_and_odd_ids(self, rig: Rig) -> None:
        """R12: ids may be unicode, have spaces or 1 KB, and duplicates in a get are returned at each position."""
        await declare(rig.client)
        ids = ["\N{SNOWMAN} \N{DIGIT ONE}", " ", "a b\n", "x" * 1024, "a/b:c*[]", "\x00", "g1_g0"]
        leaf = torch.arange(len(ids))
        await rig.client.put_samples(ids, "p", {"x": leaf})
        check_same((await rig.client.get_samples(ids[::-1], "p", ["x"]))["x"], leaf.flip(0))
        twice = [ids[3], ids[0], ids[3], ids[3]]
        check_same((await rig.client.get_samples(twice, "p", ["x"]))["x"], torch.tensor([3, 0, 3, 3]))

    async def test_ten_thousand_ids_in_one_call(self, rig: Rig) -> None:
        """R12: one put and one get may have 10,001 rows."""
        await declare(rig.client)
        ids = [f"s{i}" for i in range(10_001)]
        await rig.client.put_samples(ids, "p", {"x": torch.arange(10_001)})
        got = await rig.client.get_samples(ids[::-1], "p", ["x"])
        check_same(got["x"], torch.arange(10_001).flip(0))

    async def test_rows_of_many_puts_come_in_the_order_asked(self, rig: Rig) -> None:
        """Rows from several puts, fields and hosts are returned in the requested order."""
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
