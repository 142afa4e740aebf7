"""Encodes rows as values for a storage unit, and decodes them.

A storage unit stores one value per field and key. Small rows are sent as bytes, which TransferQueue's codec passes on
in one piece for all rows (a tensor per row costs it about 15 us each way). Large rows are sent as tensors, whose memory
it does not copy, and which do not keep the memory of the other rows of their put alive.

The *form* of a column is the description that is needed to decode the bytes: ``("d", dtype, shape)`` for rows of one
shape, ``("r", dtype, dim, rest, nested)`` for rows that differ in one dimension, which is moved to the front, and
``("o",)`` for encoded objects. The directory stores it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from asyncdp.errors import CorruptPayload
from asyncdp.rows.block import Block, Column, Dense, FieldSpec, Objects, PickleCodec, Ragged

__all__ = [
    "SMALL_ROW_BYTES",
    "Keys",
    "RowCodec",
    "Target",
    "decode",
    "encode",
    "form_of",
    "sizes_of",
    "spec_from_wire",
    "spec_to_wire",
]

#: Maximum size in bytes of a row that is sent as bytes. Measured: above it, two more copies cost more than a ZMQ frame
#: for each row.
SMALL_ROW_BYTES = 32 << 10
#: Mean size in bytes of a row from which the rows of a read are copied one by one, straight into their place.
ROW_BY_ROW_BYTES = 1 << 10

Form = tuple[Any, ...]
#: A function that returns a given number of bytes of uninitialised memory, as one row of a dtype.
Allocate = Callable[[int, torch.dtype], torch.Tensor]


class RowCodec(PickleCodec):
    """Pickles objects. This adds no security risk, since TransferQueue itself unpickles everything that it receives."""


# --- forms and specs ------------------------------------------------------------------------------------------------


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def form_of(column: Column) -> Form:
    """Return the form of a column."""
    if isinstance(column, Dense):
        return ("d", _dtype_name(column.values.dtype), tuple(column.values.shape[1:]))
    if isinstance(column, Ragged):
        return ("r", _dtype_name(column.values.dtype), column.dim, tuple(column.values.shape[1:]), column.nested)
    return ("o",)


def sizes_of(column: Column) -> int | list[int]:
    """Return the payload bytes of each row, or one number if they are all equal."""
    if isinstance(column, Dense):
        return column.nbytes // len(column) if len(column) else 0
    sizes: list[int] = column.row_nbytes().tolist()
    return sizes


def spec_to_wire(spec: FieldSpec) -> tuple[Any, ...]:
    """Convert a spec to the plain tuple that the directory stores."""
    dtype = "" if spec.dtype is None else _dtype_name(spec.dtype)
    return (spec.kind, dtype, tuple(spec.shape), spec.nested, tuple(spec.enum))


def spec_from_wire(wire: Sequence[Any]) -> FieldSpec:
    """Convert a tuple of :func:`spec_to_wire` back to a spec."""
    kind, dtype, shape, nested, enum = wire
    return FieldSpec(kind, _dtype(dtype) if dtype else None, tuple(shape), nested, tuple(enum))


# --- to a storage unit ----------------------------------------------------------------------------------------------


def encode(block: Block, start: int, stop: int) -> dict[str, list[Any]]:
    """Return one value per row and field for rows ``start`` to ``stop``; large rows share memory with the block."""
    return {name: _values(column, start, stop) for name, column in block.columns.items()}


def _values(column: Column, start: int, stop: int) -> list[Any]:
    if isinstance(column, Objects):
        return column.items[start:stop]
    if isinstance(column, Dense):
        rows = column.values[start:stop]
        size = rows.nbytes // len(rows)
        if not 0 < size <= SMALL_ROW_BYTES:
            return [row if row.is_contiguous() else row.contiguous() for row in rows.unbind(0)]
        raw = _bytes_of(rows)
        return [raw[at : at + size] for at in range(0, len(raw), size)]
    assert isinstance(column, Ragged)  # noqa: S101 - there are three kinds
    ends = column.offsets[start : stop + 1].tolist()
    unit = column.values.element_size() * math.prod(column.values.shape[1:])
    longest = max((b - a for a, b in itertools.pairwise(ends)), default=0)
    if unit == 0 or longest * unit > SMALL_ROW_BYTES:
        rows = column.values.contiguous()
        return [rows[a:b] for a, b in itertools.pairwise(ends)]
    raw = _bytes_of(column.values[ends[0] : ends[-1]])
    first = ends[0]
    return [raw[(a - first) * unit : (b - first) * unit] for a, b in itertools.pairwise(ends)]


def _bytes_of(values: torch.Tensor) -> memoryview:
    if not values.numel():
        return memoryview(b"")
    raw: Any = values.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(raw)


# --- from a storage unit --------------------------------------------------------------------------------------------


class Target:
    """The result buffers of a read, one per field, into which the rows of each unit are copied in place.

    Args:
        n: Number of rows of the whole read.
        allocate: Allocates the buffers.
    """

    __slots__ = ("_allocate", "_buffers", "n")

    def __init__(self, n: int, allocate: Allocate) -> None:
        """Start without buffers."""
        self.n = n
        self._allocate = allocate
        self._buffers: dict[str, torch.Tensor] = {}

    def part(self, name: str, dtype: torch.dtype, shape: tuple[int, ...], rows: Sequence[int]) -> torch.Tensor | None:
        """Return a view for consecutive rows; None if the rows are not consecutive or the field's parts differ."""
        if not rows or rows[-1] - rows[0] != len(rows) - 1 or list(rows) != list(range(rows[0], rows[-1] + 1)):
            return None
        whole = self._buffers.get(name)
        if whole is None:
            whole = self._buffers[name] = _rows(self._allocate, (self.n, *shape), dtype)
        if whole.dtype != dtype or tuple(whole.shape[1:]) != shape:
            return None
        return whole[rows[0] : rows[-1] + 1]


class Keys(list[int]):
    """Storage keys of the rows of a ref, with the target buffers for these rows."""

    __slots__ = ("target",)

    def __init__(self, keys: Sequence[int], target: Target) -> None:
        """Store the keys and the target."""
        super().__init__(keys)
        self.target = target


def _rows(allocate: Allocate, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return allocate(math.prod(shape) * dtype.itemsize, dtype).view(shape)


def decode(
    values: Mapping[str, Sequence[Any]],
    forms: Mapping[str, Form],
    n: int,
    allocate: Allocate,
    target: Target | None = None,
    rows: Sequence[int] = (),
) -> Block:
    """Decode the values that a storage unit returned into columns of ``n`` rows.

    Args:
        values: Values by field, in the order of the rows.
        forms: Form of each field.
        n: Number of rows.
        allocate: Allocates memory for the columns.
        target: Buffers of the whole read; None: the columns get memory of their own.
        rows: Positions of these rows in the target.

    Raises:
        CorruptPayload: The number of rows, or of bytes, does not match the form.
    """
    columns = {}
    for name, form in forms.items():
        out = None
        if target is not None and form[0] == "d":
            out = target.part(name, _dtype(form[1]), form[2], rows)
        columns[name] = _column(name, values[name], form, n, out, allocate)
    return Block(n, columns)


def _column(
    name: str, values: Sequence[Any], form: Form, n: int, out: torch.Tensor | None, allocate: Allocate
) -> Column:
    if len(values) != n:
        raise CorruptPayload(f"{len(values)} rows of field {name!r} came for {n}", field=name)
    kind = form[0]
    if kind == "o":
        return Objects([bytes(value) for value in values])
    dtype = _dtype(form[1])
    if kind == "d":
        return Dense(_dense(name, values, dtype, form[2], out, allocate))
    dim, rest, nested = form[2:5]
    unit = dtype.itemsize * math.prod(rest)
    lengths = np.fromiter(
        (value.shape[0] if isinstance(value, torch.Tensor) else len(value) // unit for value in values), np.int64, n
    )
    offsets = np.zeros(n + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    total = int(offsets[-1])
    if any(isinstance(value, torch.Tensor) for value in values):
        flat = _rows(allocate, (total, *rest), dtype)
        for begin, length, value in zip(offsets.tolist(), lengths.tolist(), values, strict=False):
            if value.dtype != dtype or tuple(value.shape[1:]) != rest:
                raise CorruptPayload(f"a row of field {name!r} is {value.dtype} {tuple(value.shape)}", field=name)
            flat[begin : begin + length] = value
    else:
        flat = _from_bytes(name, values, dtype, total * unit, None, allocate).view(total, *rest)
    return Ragged(flat, offsets, dim=dim, nested=nested)


def _dense(
    name: str,
    values: Sequence[Any],
    dtype: torch.dtype,
    shape: tuple[int, ...],
    out: torch.Tensor | None,
    allocate: Allocate,
) -> torch.Tensor:
    n = len(values)
    if any(isinstance(value, torch.Tensor) for value in values):
        if any(value.dtype != dtype or tuple(value.shape) != shape for value in values):
            raise CorruptPayload(f"rows of field {name!r} are not {dtype} of shape {shape}", field=name)
        place = _rows(allocate, (n, *shape), dtype) if out is None else out
        for at, value in enumerate(values):
            place[at] = value
        return place
    size = dtype.itemsize * math.prod(shape)
    return _from_bytes(name, values, dtype, n * size, out, allocate).view(n, *shape)


def _from_bytes(
    name: str, values: Sequence[Any], dtype: torch.dtype, expected: int, out: torch.Tensor | None, allocate: Allocate
) -> torch.Tensor:
    """Return the bytes of rows one after another, in ``out`` if it is given."""
    came = sum(map(len, values))
    if came != expected:
        raise CorruptPayload(f"{came} bytes of field {name!r} came where {expected} were put", field=name)
    if not expected:
        return torch.empty(0, dtype=dtype) if out is None else out
    if expected < ROW_BY_ROW_BYTES * len(values):
        joined = torch.frombuffer(bytearray().join(values), dtype=dtype)
        return joined if out is None else out.copy_(joined.view_as(out))
    place = allocate(expected, dtype) if out is None else out
    into: Any = place.view(-1).view(torch.uint8).numpy()
    view, at = memoryview(into), 0
    for value in values:
        view[at : at + len(value)] = value
        at += len(value)
    return place
