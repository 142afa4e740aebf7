"""Payloads: a block of rows packed into bytes, and bytes seen as a block again.

Packing copies each tensor once, piece by piece, so that an event loop is never held up for long; seeing a payload as a
block copies no tensor at all. No Python object is made per tensor row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from asyncdp.block import PICKLE, Block, Column, Dense, Objects, Ragged
from asyncdp.transports.ucxx.layout import DENSE, OBJECTS, ColumnMeta, Layout, read_layout, schema_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncdp.block import ObjectCodec

    Bytes = npt.NDArray[np.uint8]

__all__ = ["PIECE_BYTES", "Payload", "pack", "packed", "rows_of"]

#: One copy at the most, in bytes: 3-5 ms. Larger copies are also slower per byte (measured: 256 MB 3.1, 16 MB 5 GB/s).
PIECE_BYTES: Final = 16 << 20


def pack(block: Block, layout: Layout, out: Bytes) -> Iterator[int]:
    """Write a block into ``out``; a generator that yields after each piece how many bytes it copied.

    ``out`` holds at least ``layout.nbytes``. Strided, expanded and read-only tensors are right too.
    """
    head = layout.head()
    out[: len(head)] = np.frombuffer(head, np.uint8)
    for begin, end in layout.gaps():
        out[begin:end] = 0
    for column, meta, at, size in zip(
        block.columns.values(), layout.metas, layout.data_at, layout.data_bytes, strict=True
    ):
        if isinstance(column, (Dense, Ragged)) and 0 < size <= PIECE_BYTES and column.values.is_contiguous():
            out[at : at + size] = _flat(column.values)  # most are like this, and a slot may hold little
            yield size
        elif size:
            yield from _copy(column, meta, out[at : at + size])


def rows_of(block: Block, first: int, stop: int) -> Block:
    """See some rows of a block as a block of its own; no tensor is copied."""
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
    """Return a block as a payload of its own."""
    layout = Layout.of(block)
    out = np.empty(layout.nbytes, np.uint8)
    for _ in pack(block, layout, out):
        pass
    return out


def _copy(column: Column, meta: ColumnMeta, out: Bytes) -> Iterator[int]:
    """Copy the rows of one column."""
    if isinstance(column, Objects):
        data = np.frombuffer(b"".join(column.items), np.uint8)
    else:
        assert isinstance(column, (Dense, Ragged))  # noqa: S101 - the layout was made from it
        values = column.values
        if not values.is_contiguous():
            yield from _copy_strided(values, meta, out)
            return
        data = _flat(values)
    yield from copy_pieces(out, data)


def _flat(values: torch.Tensor) -> Bytes:
    """See a contiguous tensor as bytes. Flattening it first takes twice as long, where views will do."""
    # In dimensions of one element a contiguous tensor may have any stride, and no view as bytes.
    flat = values if values.stride(-1) == 1 else values.reshape(-1)
    return flat.view(torch.uint8).numpy().reshape(-1)


def copy_pieces(out: Bytes, data: Bytes) -> Iterator[int]:
    """Copy bytes, a piece at a time."""
    for begin in range(0, len(data), PIECE_BYTES):
        end = min(begin + PIECE_BYTES, len(data))
        out[begin:end] = data[begin:end]
        yield end - begin


def _copy_strided(values: torch.Tensor, meta: ColumnMeta, out: Bytes) -> Iterator[int]:
    """Copy a tensor whose elements do not lie in order."""
    target = torch.from_numpy(out).view(meta.torch_dtype).view(values.shape)
    row = out.nbytes // values.shape[0]
    step = max(1, PIECE_BYTES // row)
    for begin in range(0, values.shape[0], step):
        part = values[begin : begin + step]
        target[begin : begin + step].copy_(part)
        yield part.shape[0] * row


class Payload:
    """Bytes that hold rows, and where each part lies in them.

    Attributes:
        layout: See there.
        data: The bytes, uint8, ``layout.nbytes`` of them.
    """

    __slots__ = ("data", "layout")

    def __init__(self, layout: Layout, data: Bytes) -> None:
        """Hold both without a copy."""
        self.layout = layout
        self.data = data[: layout.nbytes]

    @classmethod
    def read(cls, data: Bytes, rows: int | None = None) -> Payload:
        """See bytes as a payload; ``rows`` is how many rows it has to have, where known.

        Raises:
            CorruptPayload: They are none.
        """
        return cls(read_layout(data, rows), data)

    def schema(self, fields: Sequence[str] | None = None) -> int:
        """What ``Block.schema_hash`` gives for these fields."""
        metas = self.layout.metas
        return schema_of(metas if fields is None else tuple(meta for meta in metas if meta.name in fields))

    def block(self, codec: ObjectCodec = PICKLE) -> Block:
        """See the payload as a block whose tensors share its bytes."""
        columns = {meta.name: self._column(at) for at, meta in enumerate(self.layout.metas)}
        return Block(self.layout.n, columns, codec=codec)

    def bytes_of(self, at: int) -> Bytes:
        """Return the data of one column."""
        begin = self.layout.data_at[at]
        return self.data[begin : begin + self.layout.data_bytes[at]]

    def _column(self, at: int) -> Column:
        meta, n, offsets = self.layout.metas[at], self.layout.n, self.layout.offsets[at]
        data = self.bytes_of(at)
        if meta.kind == OBJECTS:
            assert offsets is not None  # noqa: S101 - not dense
            raw, marks = data.tobytes(), offsets.tolist()
            return Objects([raw[marks[row] : marks[row + 1]] for row in range(n)])
        steps = n if offsets is None else int(offsets[-1])
        shape = (steps, *meta.shape)
        if data.nbytes:
            values = torch.from_numpy(data).view(meta.torch_dtype).view(shape)
        else:
            values = torch.empty(shape, dtype=meta.torch_dtype)
        if meta.kind == DENSE:
            return Dense(values)
        assert offsets is not None  # noqa: S101 - not dense
        return Ragged(values, offsets, dim=meta.dim, nested=meta.nested)

    def row_bytes(self, fields: Sequence[str] | None = None) -> npt.NDArray[np.int64]:
        """Data bytes of each row, shape ``(n,)``."""
        total = np.zeros(self.layout.n, np.int64)
        for meta, offsets in zip(self.layout.metas, self.layout.offsets, strict=True):
            if fields is None or meta.name in fields:
                total += meta.unit if offsets is None else np.diff(offsets) * meta.unit
        return total

    def checksum(self, first: int = 0, stop: int | None = None) -> int:
        """What ``Block.checksum`` gives for rows ``first`` to ``stop``."""
        stop = self.layout.n if stop is None else stop
        crc = 0
        order: Any = sorted(range(len(self.layout.metas)), key=lambda at: self.layout.metas[at].name)
        for at in order:
            offsets, unit = self.layout.offsets[at], self.layout.metas[at].unit
            begin, end = (first, stop) if offsets is None else (int(offsets[first]), int(offsets[stop]))
            crc = zlib.crc32(self.bytes_of(at)[begin * unit : end * unit].data, crc)
        return crc
