"""Rows on their way to a storage unit and back, without one: every form, small and large, whole and in parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import NonTensorData, NonTensorStack

from asyncdp.errors import CorruptPayload
from asyncdp.rows.block import Block
from asyncdp.transports.transfer_queue import rows
from asyncdp.transports.transfer_queue.rows import RowCodec, Target, decode, encode, form_of


def ALLOCATE(size: int, dtype: torch.dtype) -> torch.Tensor:  # noqa: N802
    """Memory of no pool."""
    return torch.empty(size // dtype.itemsize, dtype=dtype)


BIG = rows.SMALL_ROW_BYTES // 4 + 1
LEAVES: dict[str, Any] = {
    "scalars": torch.arange(5),
    "column": torch.arange(5.0).view(5, 1),
    "bf16": torch.rand(5, 3).to(torch.bfloat16),
    "fp8": torch.rand(5, 3).to(torch.float8_e4m3fn),
    "bool": torch.tensor([True, False, True, True, False]),
    "complex": torch.rand(5, 2, dtype=torch.complex64),
    "empty": torch.zeros(5, 0),
    "strided": torch.rand(4, 5, 3).transpose(0, 1),
    "large": torch.rand(5, BIG),
    "large strided": torch.rand(BIG, 5).T,
    "ragged": torch.nested.as_nested_tensor([torch.rand(n) for n in (1, 0, 5, 2, 3)], layout=torch.jagged),
    "large ragged": torch.nested.as_nested_tensor([torch.rand(n, 9) for n in (1, 0, BIG, 2, 3)], layout=torch.jagged),
    "ragged, no width": torch.nested.as_nested_tensor([torch.rand(n, 0) for n in (1, 0, 5, 2, 3)], layout=torch.jagged),
    "a kilobyte": torch.rand(5, 300),
    "ragged kilobytes": torch.nested.as_nested_tensor(
        [torch.rand(n, 2) for n in (900, 0, 500, 1, 700)], layout=torch.jagged
    ),
    "objects": NonTensorStack(*[NonTensorData(v) for v in ((1, 2), {3}, None, b"b", {"k": 1 << 80})]),
}


def over_the_wire(values: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Do to values what TransferQueue's codec does."""
    from transfer_queue.utils.serial_utils import decode as tq_decode
    from transfer_queue.utils.serial_utils import encode as tq_encode

    return tq_decode([bytearray(frame) for frame in tq_encode(values)])


@pytest.mark.parametrize("name", LEAVES)
@pytest.mark.parametrize(("start", "stop"), [(0, 5), (1, 4), (2, 3)])
def test_rows_come_back_as_they_went(name: str, start: int, stop: int) -> None:
    """Promise 1, by the bit: what is decoded encodes to the same columns."""
    block = Block.from_fields({name: LEAVES[name]}, 5, codec=RowCodec())
    forms = {name: form_of(block.columns[name])}
    got = decode(over_the_wire(encode(block, start, stop)), forms, stop - start, ALLOCATE)
    want = block.take(range(start, stop))
    assert got.schema_hash() == want.schema_hash()
    assert got.checksum(range(got.n)) == want.checksum(range(got.n))
    assert got.row_nbytes().tolist() == want.row_nbytes().tolist()


def test_fetched_rows_are_the_readers_own() -> None:
    """R10: memory that can be written, and belongs to nobody else."""
    block = Block.from_fields({"x": torch.zeros(2, 3), "y": torch.zeros(2, BIG)}, 2)
    forms = {name: form_of(column) for name, column in block.columns.items()}
    wire = over_the_wire(encode(block, 0, 2))
    got, again = decode(wire, forms, 2, ALLOCATE), decode(wire, forms, 2, ALLOCATE)
    for column in got.columns.values():
        column.values += 1  # type: ignore[attr-defined]
    assert not any(column.values.any() for column in again.columns.values())  # type: ignore[attr-defined]


def test_parts_of_one_read_arrive_in_one_buffer() -> None:
    """Each unit's part is copied once, to where it belongs; parts of another shape go elsewhere."""
    block = Block.from_fields({"x": torch.arange(12.0).view(6, 2)}, 6)
    forms = {"x": form_of(block.columns["x"])}
    target = Target(6, ALLOCATE)
    second = decode(encode(block, 2, 6), forms, 4, ALLOCATE, target, range(2, 6))
    first = decode(encode(block, 0, 2), forms, 2, ALLOCATE, target, [0, 1])
    assert first.columns["x"].values.untyped_storage().data_ptr() == (  # type: ignore[attr-defined]
        second.columns["x"].values.untyped_storage().data_ptr()  # type: ignore[attr-defined]
    )
    assert target.part("x", torch.float32, (3,), [0, 1]) is None
    assert target.part("x", torch.float32, (2,), [0, 2]) is None


@pytest.mark.parametrize(
    "spoilt",
    [[b"12345678"], [b"1234", b"1234567"], [torch.zeros(3), torch.zeros(2)], [torch.zeros(2).double(), torch.zeros(2)]],
)
def test_what_does_not_match_its_form_is_corrupt(spoilt: list[Any]) -> None:
    """P3: fewer rows, fewer bytes, another shape, another dtype."""
    with pytest.raises(CorruptPayload):
        decode({"x": spoilt}, {"x": ("d", "float32", (2,))}, 2, ALLOCATE)


def test_small_rows_are_copied_straight_into_their_place() -> None:
    """Bytes of rows of a kilobyte and of a few bytes go into the buffer of the whole read."""
    for width in (2, 300):
        block = Block.from_fields({"x": torch.rand(6, width)}, 6)
        forms, target = {"x": form_of(block.columns["x"])}, Target(6, ALLOCATE)
        parts = [decode(encode(block, a, b), forms, b - a, ALLOCATE, target, range(a, b)) for a, b in ((2, 6), (0, 2))]
        whole = target.part("x", torch.float32, (width,), range(6))
        assert whole is not None
        assert torch.equal(whole, block.columns["x"].values)  # type: ignore[attr-defined]
        second = parts[0].columns["x"].values  # type: ignore[attr-defined]
        assert second.data_ptr() == whole[2:].data_ptr()
