"""Payloads: bytes that hold rows, without regard to what the rows are: a slot host, which serves them, has no torch.

``blocks.py`` makes payloads of rows, and rows of payloads.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .layout import Layout, read_layout, schema_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["PIECE_BYTES", "Payload", "copy_pieces"]

#: One copy at the most, in bytes: 3-5 ms. Larger copies are also slower per byte (measured: 256 MB 3.1, 16 MB 5 GB/s).
PIECE_BYTES: Final = 16 << 20


def copy_pieces(out: Bytes, data: Bytes) -> Iterator[int]:
    """Copy bytes, a piece at a time."""
    for begin in range(0, len(data), PIECE_BYTES):
        end = min(begin + PIECE_BYTES, len(data))
        out[begin:end] = data[begin:end]
        yield end - begin


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

    def bytes_of(self, at: int) -> Bytes:
        """Return the data of one column."""
        begin = self.layout.data_at[at]
        return self.data[begin : begin + self.layout.data_bytes[at]]

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
