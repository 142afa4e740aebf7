"""Conversion of blocks of rows to payloads and back; for clients, since it needs torch.

Packing copies each tensor once, in pieces, so that it never blocks an event loop for long. Viewing a payload as a block
copies no tensor. No Python object is created per tensor row.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from asyncdp.errors import DataPlaneBadRequest, DataPlaneReadError
from asyncdp.rows.block import PICKLE, Block, Column, Dense, Objects, Ragged
from asyncdp.rows.offsets import offsets_of

from . import payload as payloads
from .layout import (
    DENSE,
    ITEM_BYTES,
    MAX_RANK,
    OBJECTS,
    RAGGED,
    ColumnMeta,
    Layout,
    dense_of,
    spans,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from asyncdp.rows.block import ObjectCodec

    from .payload import Payload

    Bytes = npt.NDArray[np.uint8]

__all__ = ["block_of", "layout_of", "layouts_of", "pack", "packed", "rows_of", "segments_of"]


def layout_of(block: Block) -> Layout:
    """Return the layout of the payload that holds a block.

    Raises:
        DataPlaneBadRequest: A column cannot be stored unchanged; the message names the field.
    """
    metas = tuple(_meta_of(name, column) for name, column in block.columns.items())
    offsets: list[npt.NDArray[np.int64] | None] = []
    for column in block.columns.values():
        if isinstance(column, Ragged):
            offsets.append(column.offsets)
        elif isinstance(column, Objects):
            offsets.append(offsets_of(column.row_nbytes()))
        else:
            offsets.append(None)
    if all(steps is None for steps in offsets):
        return dense_of(block.n, metas)
    layout = Layout.make(block.n, metas, offsets)
    layout.refuse_unreadable()
    return layout


def layouts_of(block: Block, counts: Sequence[int]) -> list[Layout]:
    """Return the layouts of the payloads that hold so many rows of a block each, one after the other.

    Raises:
        DataPlaneBadRequest: As :func:`layout_of`.
    """
    if all(isinstance(column, Dense) for column in block.columns.values()):
        known = {count: layout_of(rows_of(block, 0, count)) for count in set(counts)}
        return [known[count] for count in counts]
    return [layout_of(rows_of(block, first, stop)) for first, stop in spans(counts)]


def _meta_of(name: str, column: Column) -> ColumnMeta:
    """Return the description of a column."""
    if isinstance(column, Objects):
        return ColumnMeta(name, OBJECTS)
    if not isinstance(column, (Dense, Ragged)):
        raise TypeError(f"a column of type {type(column).__name__} cannot be sent")
    dtype = str(column.values.dtype).removeprefix("torch.")
    if dtype not in ITEM_BYTES or column.values.ndim > MAX_RANK:
        msg = f"field {name!r}: a tensor of {dtype} with {column.values.ndim} dimensions cannot be kept unchanged"
        raise DataPlaneBadRequest(msg, field=name)
    shape = tuple(column.values.shape[1:])
    if isinstance(column, Dense):
        return ColumnMeta(name, DENSE, dtype, shape)
    return ColumnMeta(name, RAGGED, dtype, shape, column.dim, column.nested)


def _dtype_of(meta: ColumnMeta) -> torch.dtype:
    """Return the torch dtype that a column's description names."""
    dtype = getattr(torch, meta.dtype, None)
    if not isinstance(dtype, torch.dtype):
        msg = f"field {meta.name!r} is of {meta.dtype}, which torch {torch.__version__} of this process does not have"
        raise DataPlaneReadError(msg, field=meta.name)
    return dtype


def pack(block: Block, layout: Layout, out: Bytes) -> Iterator[int]:
    """Write a block into ``out`` as a generator, which yields the number of bytes copied after each piece.

    ``out`` has at least ``layout.nbytes`` bytes. Strided, expanded and read-only tensors are supported.
    """
    head = layout.head()
    out[: len(head)] = np.frombuffer(head, np.uint8)
    for begin, end in layout.gaps():
        out[begin:end] = 0
    for column, meta, at, size in zip(
        block.columns.values(), layout.metas, layout.data_at, layout.data_bytes, strict=True
    ):
        if isinstance(column, (Dense, Ragged)) and 0 < size <= payloads.PIECE_BYTES and column.values.is_contiguous():
            out[at : at + size] = _flat(column.values)  # the common case, and fast for small slots
            yield size
        elif size:
            yield from _copy(column, meta, out[at : at + size])


def segments_of(block: Block, layout: Layout) -> Iterator[Bytes]:
    """Return the bytes of a block's payload, in order, in pieces as they lie; only strided tensors are copied."""
    yield np.frombuffer(layout.head(), np.uint8)
    gaps = dict(layout.gaps())
    for column, at, size in zip(block.columns.values(), layout.data_at, layout.data_bytes, strict=True):
        if size:
            yield from _segments(column, size)
        if at + size in gaps:
            yield np.zeros(gaps[at + size] - at - size, np.uint8)


def _segments(column: Column, size: int) -> Iterator[Bytes]:
    """Return the bytes of the rows of one column."""
    if isinstance(column, Objects):
        yield np.frombuffer(b"".join(column.items), np.uint8)
        return
    assert isinstance(column, (Dense, Ragged))  # noqa: S101 - the layout was made from it
    values = column.values
    if values.is_contiguous():
        yield _flat(values)
        return
    steps = values.shape[0]
    step = max(1, payloads.PIECE_BYTES * steps // size)
    for begin in range(0, steps, step):
        yield _flat(values[begin : begin + step].contiguous())


def rows_of(block: Block, first: int, stop: int) -> Block:
    """Return rows ``first`` to ``stop`` of a block as a block of their own; no tensor is copied."""
    if first == 0 and stop == block.n:
        return block
    columns: dict[str, Column] = {}
    for name, column in block.columns.items():
        if isinstance(column, Dense):
            columns[name] = Dense(column.values[first:stop])
        elif isinstance(column, Ragged):
            begin, end = int(column.offsets[first]), int(column.offsets[stop])
            offsets = column.offsets[first : stop + 1] - begin
            columns[name] = Ragged(column.values[begin:end], offsets, dim=column.dim, nested=column.nested)
        else:
            columns[name] = column.take(range(first, stop))
    return Block(stop - first, columns, block.specs, block.codec)


def packed(block: Block) -> Bytes:
    """Return the bytes of a payload that holds a block."""
    layout = layout_of(block)
    out = np.empty(layout.nbytes, np.uint8)
    for _ in pack(block, layout, out):
        pass
    return out


def _copy(column: Column, meta: ColumnMeta, out: Bytes) -> Iterator[int]:
    """Copy the rows of one column into ``out``, in pieces."""
    if isinstance(column, Objects):
        data = np.frombuffer(b"".join(column.items), np.uint8)
    else:
        assert isinstance(column, (Dense, Ragged))  # noqa: S101 - the layout was made from it
        values = column.values
        if not values.is_contiguous():
            yield from _copy_strided(values, meta, out)
            return
        data = _flat(values)
    yield from payloads.copy_pieces(out, data)


def _flat(values: torch.Tensor) -> Bytes:
    """View a contiguous tensor as bytes; without ``reshape`` where possible, which would take twice as long."""
    # A contiguous tensor may have any stride in dimensions of one element, and then it cannot be viewed as bytes.
    flat = values if values.stride(-1) == 1 else values.reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(-1)


def _copy_strided(values: torch.Tensor, meta: ColumnMeta, out: Bytes) -> Iterator[int]:
    """Copy a tensor that is not contiguous into ``out``, in pieces."""
    target = torch.from_numpy(out).view(_dtype_of(meta)).view(values.shape)
    row = out.nbytes // values.shape[0]
    step = max(1, payloads.PIECE_BYTES // row)
    for begin in range(0, values.shape[0], step):
        part = values[begin : begin + step]
        target[begin : begin + step].copy_(part)
        yield part.shape[0] * row


def block_of(
    payload: Payload, codec: ObjectCodec = PICKLE, *, fields: Sequence[str] | None = None, rows: range | None = None
) -> Block:
    """Return a block whose tensors share the payload's bytes.

    Args:
        payload: The payload.
        codec: Decodes values that are no tensors.
        fields: Names of the columns to take; None: all.
        rows: Rows to take, consecutive; None: all.

    Raises:
        DataPlaneReadError: A field has a dtype that this torch does not have; the message names the field.
    """
    rows = range(payload.layout.n) if rows is None else rows
    numbers = {meta.name: at for at, meta in enumerate(payload.layout.metas)}
    columns = {name: _column(payload, numbers[name], rows) for name in (numbers if fields is None else fields)}
    return Block(len(rows), columns, codec=codec)


def _column(payload: Payload, at: int, rows: range) -> Column:
    meta, n, offsets = payload.layout.metas[at], len(rows), payload.layout.offsets[at]
    data = payload.bytes_of(at)
    if n != payload.layout.n:
        first, stop = rows.start, rows.stop
        if offsets is not None:
            offsets = offsets[first : stop + 1]
            first, stop = int(offsets[0]), int(offsets[-1])
            offsets = offsets - first
        data = data[first * meta.unit : stop * meta.unit]
    if meta.kind == OBJECTS:
        assert offsets is not None  # noqa: S101 - not dense
        raw, marks = data.tobytes(), offsets.tolist()
        return Objects([raw[marks[row] : marks[row + 1]] for row in range(n)])
    steps = n if offsets is None else int(offsets[-1])
    shape, dtype = (steps, *meta.shape), _dtype_of(meta)
    values = torch.from_numpy(data).view(dtype).view(shape) if data.nbytes else torch.empty(shape, dtype=dtype)
    if meta.kind == DENSE:
        return Dense(values)
    assert offsets is not None  # noqa: S101 - not dense
    return Ragged(values, offsets, dim=meta.dim, nested=meta.nested)
