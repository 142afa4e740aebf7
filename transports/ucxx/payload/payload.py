"""Payloads: bytes that hold rows, without interpretation of the values, because slot hosts have no torch.

``blocks.py`` converts blocks of rows to payloads and back.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdp.process.copying import copy_by_two

from .layout import Layout, read_layout, schema_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["PIECE_BYTES", "SUMMED_AT_ONCE", "Payload", "copy_pieces", "messages_of"]

#: Largest single copy in bytes: 3-5 ms. Larger copies are also slower per byte (measured: 256 MB 3.1, 16 MB 5 GB/s).
PIECE_BYTES: Final = 16 << 20
#: Least bytes of a copy that a second thread helps with.
HELPED_BYTES: Final = 64 << 20
#: Most bytes whose checksum is computed on an event loop (2 GB/s); beyond that a thread does it.
SUMMED_AT_ONCE: Final = 1 << 20


def copy_pieces(out: Bytes, data: Bytes, piece_bytes: int | None = None) -> Iterator[int]:
    """Copy bytes as a generator, in pieces (None: of ``PIECE_BYTES``); yield the length of each piece."""
    piece_bytes = piece_bytes or PIECE_BYTES
    copy = copy_by_two if len(data) >= HELPED_BYTES else np.copyto
    for begin in range(0, len(data), piece_bytes):
        end = min(begin + piece_bytes, len(data))
        copy(out[begin:end], data[begin:end])
        yield end - begin


def messages_of(
    segments: Iterable[Bytes], lengths: Iterable[int], take: Callable[[int], Bytes], copied: int
) -> Iterator[Bytes | None]:
    """Return the bytes of segments as messages of these lengths, as a generator; the lengths add up to theirs.

    A message that lies in one segment as a whole is a view of it. Others are copied, into arrays that ``take``
    returns; None is yielded after each ``copied`` bytes of a segment.
    """
    whole, message, at = 0, None, 0
    left = iter(lengths)
    for segment in segments:
        begin = 0
        while begin < len(segment):
            if not at:
                whole = next(left)
                if len(segment) - begin >= whole and segment.flags.writeable:
                    yield segment[begin : begin + whole]
                    begin += whole
                    continue
                message = take(whole)
            assert message is not None  # noqa: S101 - it was begun
            step = min(whole - at, len(segment) - begin, copied)
            message[at : at + step] = segment[begin : begin + step]
            begin, at = begin + step, at + step
            if at == whole:
                yield message
                message, at = None, 0
            elif step == copied:
                yield None


class Payload:
    """Bytes that hold rows, with their layout.

    Attributes:
        layout: Offsets and sizes of the parts.
        data: The bytes, uint8, of length ``layout.nbytes``.
    """

    __slots__ = ("data", "layout")

    def __init__(self, layout: Layout, data: Bytes) -> None:
        """Keep layout and data, without a copy."""
        self.layout = layout
        self.data = data[: layout.nbytes]

    @classmethod
    def read(cls, data: Bytes, rows: int | None = None, *, columns: int | None = None, exact: bool = False) -> Payload:
        """Return bytes as a payload, without a copy.

        Args:
            data: Bytes that begin with the payload.
            rows: Expected number of rows; None: unknown.
            columns: Expected number of columns; None: unknown.
            exact: Whether the payload has to end where ``data`` ends.

        Raises:
            CorruptPayload: The bytes are no valid payload, or not one of this size.
        """
        return cls(read_layout(data, rows, columns=columns, exact=exact), data)

    def schema(self, fields: Sequence[str] | None = None) -> int:
        """Return the ``Block.schema_hash`` of these fields; None: of all."""
        metas = self.layout.metas
        return schema_of(metas if fields is None else tuple(meta for meta in metas if meta.name in fields))

    def bytes_of(self, at: int) -> Bytes:
        """Return the data bytes of the column at this position."""
        begin = self.layout.data_at[at]
        return self.data[begin : begin + self.layout.data_bytes[at]]

    def row_bytes(self, fields: Sequence[str] | None = None) -> npt.NDArray[np.int64]:
        """Return the data bytes of each row in these fields (None: in all), shape ``(n,)``."""
        total = np.zeros(self.layout.n, np.int64)
        for meta, offsets in zip(self.layout.metas, self.layout.offsets, strict=True):
            if fields is None or meta.name in fields:
                total += meta.unit if offsets is None else np.diff(offsets) * meta.unit
        return total

    def checksum(self, first: int = 0, stop: int | None = None) -> int:
        """Return the ``Block.checksum`` of rows ``first`` to ``stop``; None: to the end."""
        stop = self.layout.n if stop is None else stop
        crc = 0
        order: Any = sorted(range(len(self.layout.metas)), key=lambda at: self.layout.metas[at].name)
        for at in order:
            offsets, unit = self.layout.offsets[at], self.layout.metas[at].unit
            begin, end = (first, stop) if offsets is None else (int(offsets[first]), int(offsets[stop]))
            crc = zlib.crc32(self.bytes_of(at)[begin * unit : end * unit].data, crc)
        return crc
