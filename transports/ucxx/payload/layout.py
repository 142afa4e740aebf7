"""The binary layout of a payload.

A payload is the content of one slot or of one message: n rows of some columns::

    prefix     32 B   magic, version, flags, head bytes, CRC-32 of the head, rows, whole length
    schema            msgpack: per column its name, kind, dtype and the sizes that all rows share
    lengths           int64 per row, for each column whose rows differ in length
    data              per column all rows contiguously, each column on a 64-byte boundary

All offsets are computed from schema, rows and lengths, so no value of a received payload is used as an address.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Final, Generic, ParamSpec, TypeVar

import msgspec
import numpy as np

from asyncdp.errors import CorruptPayload, DataPlaneBadRequest
from asyncdp.rows.offsets import offsets_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["ALIGN", "ITEM_BYTES", "MAX_HEAD_BYTES", "MAX_RANK", "ColumnMeta", "Layout", "bound", "read_layout"]

ALIGN: Final = 64
#: Largest schema of a payload in bytes, enough for a few thousand columns.
MAX_HEAD_BYTES: Final = 1 << 20
_PREFIX: Final = struct.Struct("<4sBBHIQQI")
PREFIX_BYTES: Final = 32
_MAGIC: Final = b"ADPP"
_VERSION: Final = 1
#: Most dimensions of a tensor, including that of the rows.
MAX_RANK: Final = 16
#: Most columns of a payload; a put may have as many fields.
_MAX_COLUMNS: Final = 4096
#: Bytes, estimated, that each of the caches here may take.
_CACHED_BYTES: Final = 8 << 20
#: Largest total length of ragged rows without bytes (a size of 0 in their shape), which no byte count bounds.
_MAX_EMPTY_STEPS: Final = 1 << 26

DENSE, RAGGED, OBJECTS = range(3)

#: Bytes per element of every supported dtype, by its name in torch. It is a literal because a slot host has no torch.
ITEM_BYTES: Final = {
    "bool": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
    "uint16": 2,
    "uint32": 4,
    "uint64": 8,
    "float4_e2m1fn_x2": 1,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}


class ColumnMeta(msgspec.Struct, array_like=True, frozen=True):
    """Describes one column, without its rows.

    Attributes:
        name: Name of the field.
        kind: 0 dense, 1 ragged, 2 objects.
        dtype: Name of the dtype in torch; empty for objects.
        shape: Shape of a row; for ragged columns without the dimension in which rows differ.
        dim, nested: As in :class:`~asyncdp.rows.block.Ragged`.
    """

    name: str
    kind: int
    dtype: str = ""
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=MAX_RANK)] = ()
    dim: int = 0
    nested: bool = False

    @property
    def unit(self) -> int:
        """Bytes of one row (dense), of one step along the ragged dimension, or of one byte (objects)."""
        return 1 if self.kind == OBJECTS else math.prod(self.shape) * ITEM_BYTES[self.dtype]


def _up(value: int) -> int:
    return -(-value // ALIGN) * ALIGN


@dataclass(slots=True)
class Layout:
    """The offsets and sizes of the parts of one payload.

    Attributes:
        n: Number of rows.
        metas: Descriptions of the columns.
        offsets: Per column the offsets of its rows, int64 ``(n + 1,)``, in steps of its unit; None for dense columns.
        schema: The encoded ``metas``.
        data_at: Per column the offset of its data, in bytes from the beginning of the payload.
        data_bytes: Per column the length of its data, in bytes.
        head_bytes: Length of prefix, schema and lengths in bytes: the offset of the first column's data.
        nbytes: Length of the whole payload, in bytes.
    """

    n: int
    metas: tuple[ColumnMeta, ...]
    offsets: tuple[npt.NDArray[np.int64] | None, ...]
    schema: bytes
    data_at: tuple[int, ...]
    data_bytes: tuple[int, ...]
    head_bytes: int
    nbytes: int
    _head: bytes | None = field(default=None, repr=False, compare=False)

    @classmethod
    def make(
        cls,
        n: int,
        metas: tuple[ColumnMeta, ...],
        offsets: Sequence[npt.NDArray[np.int64] | None],
        schema: bytes | None = None,
    ) -> Layout:
        """Compute the layout of ``n`` rows; ``schema`` is the encoded ``metas`` where it exists already."""
        if schema is None:
            schema = msgspec.msgpack.encode(metas)
        ragged = sum(column is not None for column in offsets)
        head = at = _up(_up(PREFIX_BYTES + len(schema)) + ragged * n * 8)
        places, sizes = [], []
        for meta, steps in zip(metas, offsets, strict=True):
            size = (n if steps is None else int(steps[-1])) * meta.unit
            places.append(at)
            sizes.append(size)
            at = _up(at + size)
        return cls(n, metas, tuple(offsets), schema, tuple(places), tuple(sizes), head, at)

    @property
    def kept_bytes(self) -> int:
        """Estimated memory of the layout, in bytes."""
        return _estimate(self) + sum(8 * (self.n + 1) for steps in self.offsets if steps is not None)

    def refuse_unreadable(self) -> None:
        """Refuse, before anything is written, a layout that :func:`read_layout` would refuse.

        Raises:
            DataPlaneBadRequest: The message says what is wrong, and in which column.
        """
        if len(self.schema) > MAX_HEAD_BYTES:
            msg = f"{len(self.metas)} fields are described in {len(self.schema)} bytes, {MAX_HEAD_BYTES} are the most"
            raise DataPlaneBadRequest(msg)
        try:
            _metas(self.schema)
        except (ValueError, msgspec.MsgspecError) as err:
            raise DataPlaneBadRequest(str(err)) from err
        for meta, offsets in zip(self.metas, self.offsets, strict=True):
            if offsets is not None and not meta.unit and offsets[-1] > _MAX_EMPTY_STEPS:
                msg = f"field {meta.name!r}: rows without bytes that are {offsets[-1]} long in all cannot be kept"
                raise DataPlaneBadRequest(msg, field=meta.name)

    def head(self) -> bytes:
        """Return prefix, schema and lengths, padded to ``head_bytes``."""
        if self._head is not None:
            return self._head
        parts = [self.schema, bytes(_up(PREFIX_BYTES + len(self.schema)) - PREFIX_BYTES - len(self.schema))]
        parts += [np.diff(steps).tobytes() for steps in self.offsets if steps is not None]
        body = b"".join(parts)
        body += bytes(self.head_bytes - PREFIX_BYTES - len(body))
        crc = zlib.crc32(body)
        head = _PREFIX.pack(_MAGIC, _VERSION, 0, 0, len(self.schema), self.n, self.nbytes, crc) + body
        if all(steps is None for steps in self.offsets):
            self._head = head
        return head

    def gaps(self) -> list[tuple[int, int]]:
        """Return (begin, end) of the padding after each column that has any."""
        ends = [at + size for at, size in zip(self.data_at, self.data_bytes, strict=True)]
        begins = [*self.data_at[1:], self.nbytes] if ends else []
        return [(end, begin) for end, begin in zip(ends, begins, strict=True) if end < begin]

    def column(self, name: str) -> int | None:
        """Return the position of a column, or None where there is none of this name."""
        return next((at for at, meta in enumerate(self.metas) if meta.name == name), None)


def bound(fields: Sequence[str], sizes: Sequence[int]) -> int:
    """Return an upper bound, in bytes, of a payload of these fields whose rows have ``sizes`` data bytes."""
    return bound_of(described(fields), len(fields), len(sizes), sum(sizes))


def described(fields: Sequence[str]) -> int:
    """Return an upper bound, in bytes, of the schema of these fields."""
    return sum(len(name.encode()) for name in fields) + len(fields) * (48 + 9 * MAX_RANK)


def bound_of(schema_bytes: int, fields: int, rows: int, data_bytes: int) -> int:
    """Return :func:`bound` of numbers of fields and rows, and of the bytes of schema and data."""
    return _up(_up(PREFIX_BYTES + 16 + schema_bytes) + 8 * rows * fields) + data_bytes + ALIGN * fields


P = ParamSpec("P")
V = TypeVar("V")


class _Cached(Generic[P, V]):
    """A function whose results are kept, up to ``_CACHED_BYTES``; then it begins anew. For any thread."""

    def __init__(self, make: Callable[P, V]) -> None:
        self.nbytes = 0
        self._make = make
        self._known: dict[object, V] = {}

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> V:
        known = self._known.get(args)
        if known is not None:
            return known
        made = self._make(*args, **kwargs)
        nbytes = sum(map(_estimate, (*args, made)))
        if self.nbytes + nbytes > _CACHED_BYTES:
            self._known, self.nbytes = {}, 0
        if nbytes <= _CACHED_BYTES:
            self._known[args] = made
            self.nbytes += nbytes
        return made


def _estimate(part: object) -> int:
    """Estimate the memory of an argument or a result of a cached function, in bytes."""
    if isinstance(part, Layout):
        return 2 * len(part.schema) + 100 * len(part.metas) + _estimate(part.metas)
    if isinstance(part, tuple):
        return sum(400 + 4 * (len(meta.name) + len(meta.dtype)) for meta in part)
    return len(part) if isinstance(part, bytes) else 100


@_Cached
def _metas(schema: bytes) -> tuple[ColumnMeta, ...]:
    """Decode and check the schema; cached, because the slots of a put share it."""
    if _announced(schema) > _MAX_COLUMNS:
        raise ValueError(f"{_announced(schema)} columns; one payload may have {_MAX_COLUMNS}")
    metas = msgspec.msgpack.decode(schema, type=tuple[ColumnMeta, ...])
    if len({meta.name for meta in metas}) != len(metas):
        raise ValueError("two columns have one name")
    for meta in metas:
        if meta.kind not in (DENSE, RAGGED, OBJECTS) or (meta.kind != OBJECTS and meta.dtype not in ITEM_BYTES):
            raise ValueError(f"column {meta.name!r} is of an unknown kind or dtype")
        # A size of 0 makes the number of bytes 0, but the other sizes still have to fit the strides of a tensor.
        steps = math.prod(max(size, 1) for size in meta.shape)
        if len(meta.shape) > MAX_RANK or any(size < 0 for size in meta.shape) or steps >= 1 << 40:
            raise ValueError(f"column {meta.name!r} has an invalid shape")
        if meta.kind == RAGGED and not 0 <= meta.dim <= len(meta.shape):
            raise ValueError(f"column {meta.name!r} has no dimension {meta.dim}, in which it is said to be ragged")
    return metas


def _announced(schema: bytes) -> int:
    """Return how many columns a schema announces, before it is decoded."""
    first = schema[0] if schema else 0
    if first & 0xF0 == 0x90:  # noqa: PLR2004 - msgpack's short arrays
        return first & 15
    if first in (0xDC, 0xDD):
        return int.from_bytes(schema[1 : 3 if first == 0xDC else 5], "big")  # noqa: PLR2004 - msgpack's other arrays
    raise ValueError("its schema is no list")


@_Cached
def schema_of(metas: tuple[ColumnMeta, ...]) -> int:
    """Return the ``Block.schema_hash`` of rows of these columns: names, kinds, dtypes and ranks, in order of name."""
    parts = []
    for meta in sorted(metas, key=lambda meta: meta.name):
        rank = len(meta.shape) + (meta.kind == RAGGED)
        parts.append(f"{meta.name}:object" if meta.kind == OBJECTS else f"{meta.name}:torch.{meta.dtype}:{rank}")
    return zlib.crc32("|".join(parts).encode())


@_Cached
def _dense(n: int, schema: bytes) -> Layout:
    """Return the layout of ``n`` rows of dense columns; cached, because the slots of a batch share it."""
    metas = _metas(schema)
    return Layout.make(n, metas, (None,) * len(metas), schema)


@_Cached
def dense_of(n: int, metas: tuple[ColumnMeta, ...]) -> Layout:
    """Return the layout of ``n`` rows of dense columns for a writer; an unreadable one is refused and not cached."""
    layout = Layout.make(n, metas, (None,) * len(metas))
    layout.refuse_unreadable()
    return layout


def read_layout(
    buffer: npt.NDArray[np.uint8], rows: int | None = None, *, columns: int | None = None, exact: bool = False
) -> Layout:
    """Read prefix, schema and lengths of a payload; every length is checked before it is used.

    Args:
        buffer: Bytes that begin with a payload.
        rows: Expected number of rows; None: unknown.
        columns: Expected number of columns; None: unknown.
        exact: Whether the payload has to end where the buffer ends.

    Raises:
        CorruptPayload: The bytes are no valid payload, or not one of this size.
    """
    try:
        return _read(buffer, rows, columns, exact=exact)
    except CorruptPayload:
        raise
    except (ValueError, msgspec.MsgspecError, struct.error, UnicodeDecodeError, RecursionError) as err:
        raise _corrupt(str(err)) from err


def _corrupt(why: str) -> CorruptPayload:
    return CorruptPayload(f"not a payload: {why}")


def _prefix(buffer: npt.NDArray[np.uint8], rows: int | None) -> tuple[int, int, int, int]:
    """Check the prefix; return schema bytes, number of rows, payload bytes and the CRC-32 of the head."""
    magic, version, flags, spare, schema_bytes, n, nbytes, crc = _PREFIX.unpack(buffer[:PREFIX_BYTES].tobytes())
    if magic != _MAGIC or version != _VERSION or flags or spare:
        raise _corrupt(f"magic {magic!r}, version {version}")
    size = len(buffer)
    if nbytes > size or schema_bytes > min(MAX_HEAD_BYTES, size - PREFIX_BYTES):
        raise _corrupt(f"it announces {nbytes} bytes, {schema_bytes} of schema, in {size}")
    if n >= 1 << 40 or (rows is not None and n != rows):
        raise _corrupt(f"{n} rows where {rows} were expected")
    return schema_bytes, n, nbytes, crc


def _offsets(lengths: npt.NDArray[np.int64], metas: Sequence[ColumnMeta], size: int) -> npt.NDArray[np.int64]:
    """Check the lengths of rows, of one column after the other, against the size of the payload; return the offsets."""
    lengths = lengths.reshape(len(metas), -1)
    sums = lengths.sum(axis=1, dtype=np.float64).tolist()
    negative = lengths.size > 0 and lengths.min() < 0
    for meta, total, column in zip(metas, sums, lengths, strict=True):
        most = size // meta.unit if meta.unit else _MAX_EMPTY_STEPS
        if total > most or (negative and column.min() < 0):
            raise _corrupt(f"lengths of column {meta.name!r} do not fit")
    return offsets_of(lengths)


def _read(buffer: npt.NDArray[np.uint8], rows: int | None, columns: int | None, *, exact: bool) -> Layout:
    size = len(buffer)
    if size < PREFIX_BYTES:
        raise _corrupt(f"{size} bytes are too few")
    schema_bytes, n, nbytes, crc = _prefix(buffer, rows)
    if exact and nbytes != size:
        raise _corrupt(f"it describes {nbytes} bytes, {size} were written")
    schema = buffer[PREFIX_BYTES : PREFIX_BYTES + schema_bytes].tobytes()
    if columns is not None and _announced(schema) != columns:
        raise _corrupt(f"{_announced(schema)} columns where {columns} were reserved")
    metas = _metas(schema)
    begin = _up(PREFIX_BYTES + schema_bytes)
    lengthy = [meta for meta in metas if meta.kind != DENSE]
    head = _up(begin + len(lengthy) * n * 8)
    if head > size:
        raise _corrupt(f"the lengths of {n} rows do not fit into {size} bytes")
    if zlib.crc32(buffer[PREFIX_BYTES:head].data) != crc:
        raise _corrupt("the checksum of its head does not match")
    if not lengthy:
        layout = _dense(n, schema)
    else:
        # Copied before the check, because another process may still change the shared memory.
        lengths = buffer[begin : begin + len(lengthy) * n * 8].view(np.int64).copy()
        found = iter(_offsets(lengths, lengthy, size))
        offsets = [None if meta.kind == DENSE else next(found) for meta in metas]
        layout = Layout.make(n, metas, offsets, schema)
    if layout.nbytes != nbytes:
        raise _corrupt(f"{nbytes} bytes where its columns need {layout.nbytes}")
    return layout


def spans(counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the consecutive (first, stop) ranges that have these lengths."""
    marks = [0]
    for count in counts:
        marks.append(marks[-1] + count)
    return list(pairwise(marks))
