"""Rows in columnar form, in which they are passed between the verbs and the storage.

A :class:`Block` holds n rows, with one :class:`Column` per field. There are three kinds of column:

* :class:`Dense`: rows of one shape, as one tensor ``(n, *shape)``;
* :class:`Ragged`: rows that differ in one dimension, as one tensor of all their values and n + 1 offsets;
* :class:`Objects`: rows that are no tensors, each encoded to bytes by the transport's codec.

No Python object is made per tensor row. :func:`assemble` joins the columns of many reads with one allocation per field,
or none if all rows came in one piece.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from asyncdp.errors import DataPlaneError, DataPlaneReadError, PartialReadError

from .column import (
    Column,
    Dense,
    Objects,
    Ragged,
    Rows,
    ragged_view,
    scatter,
    schema_hash,
    span_of,
)
from .field_spec import FieldSpec
from .objects import PICKLE, ObjectCodec, PickleCodec
from .offsets import offsets_of, steps_of
from .pack import column_from_leaf, field_names, leaf_of, raw_leaf

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "PICKLE",
    "Block",
    "Column",
    "Dense",
    "FieldSpec",
    "ObjectCodec",
    "Objects",
    "PickleCodec",
    "Ragged",
    "assemble",
    "field_names",
    "raw_leaf",
    "schema_hash",
]


@dataclass(slots=True)
class Block:
    """Rows of some fields in columnar form.

    Attributes:
        n: Number of rows.
        columns: One column of ``n`` rows per field.
        specs: Specs of the fields, by which columns are converted to the user's leaves.
        codec: Encodes and decodes objects.
    """

    n: int
    columns: dict[str, Column]
    specs: Mapping[str, FieldSpec] = field(default_factory=dict)
    codec: ObjectCodec = PICKLE

    @classmethod
    def from_fields(
        cls,
        fields: Mapping[str, Any] | TensorDictBase,
        n: int,
        specs: Mapping[str, FieldSpec] | None = None,
        codec: ObjectCodec = PICKLE,
    ) -> Block:
        """Make a block of a user's fields; tensors share memory with the user's as far as possible.

        Raises:
            DataPlaneBadRequest: A leaf cannot be stored unchanged, or does not fit the spec that the partition fixed.
        """
        specs = {} if specs is None else specs
        columns: dict[str, Column] = {}
        for name in field_names(fields):
            leaf = raw_leaf(fields, name)
            known = specs.get(name)
            column = columns[name] = column_from_leaf(name, leaf, n, codec, known)
            if known is not None and known.kind and not known.enum:
                known.merge(column.spec(), name)
        return cls(n, columns, specs, codec)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all rows."""
        total = 0
        for column in self.columns.values():
            total += column.nbytes
        return total

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        """Return the payload bytes of each row, shape ``(n,)``."""
        total = np.zeros(self.n, dtype=np.int64)
        for column in self.columns.values():
            total += column.row_nbytes()
        return total

    def take(self, rows: Rows, fields: Iterable[str] | None = None) -> Block:
        """Return a copy of some rows and fields."""
        names = self.columns if fields is None else fields
        return Block(len(rows), {f: self.columns[f].take(rows) for f in names}, self.specs, self.codec)

    def observed(self) -> dict[str, FieldSpec]:
        """Return the specs that a put of these columns would fix for their fields."""
        out = {}
        for name, column in self.columns.items():
            known = self.specs.get(name)
            out[name] = FieldSpec("enum", enum=known.enum) if known is not None and known.enum else column.spec()
        return out

    def schema_hash(self) -> int:
        """Return a hash of names, kinds, dtypes and row ranks, see :func:`schema_hash`; the same in every process."""
        return schema_hash(self.columns)

    def checksum(self, rows: Rows) -> int:
        """Return the CRC-32 over the content of these rows, field by field (IEEE 802.3 polynomial, by zlib)."""
        crc = 0
        for name in sorted(self.columns):
            for piece in self.columns[name].content(rows):
                crc = zlib.crc32(piece, crc)
        return crc

    def spelled_out(self) -> Block:
        """Return the same rows with the words of enum fields instead of their indices in the vocabulary."""
        columns = dict(self.columns)
        for name, column in self.columns.items():
            enum = self.specs[name].enum if name in self.specs else ()
            if enum and isinstance(column, Dense):
                columns[name] = Objects([self.codec.dumps(enum[code]) for code in column.values.tolist()])
        return Block(self.n, columns, {n: s for n, s in self.specs.items() if not s.enum}, self.codec)

    def to_tensordict(self) -> TensorDict:
        """Return the rows as the user gets them: dense if they have one shape, jagged if not or if the field is nested.

        Raises:
            DataPlaneReadError: An object cannot be decoded in this process; the field is named.
        """
        return TensorDict({name: self._leaf(name, column) for name, column in self.columns.items()}, [self.n])

    def _leaf(self, name: str, column: Column) -> Any:
        try:
            return leaf_of(column, self.specs.get(name), self.codec)
        except Exception as err:
            if not isinstance(column, Objects):
                raise
            raise _undecodable(name, err) from err

    def undecodable(self) -> dict[int, DataPlaneError]:
        """Return an error for each row of which an object cannot be decoded in this process; the field is named."""
        errors: dict[int, DataPlaneError] = {}
        for name, column in self.columns.items():
            for row, item in enumerate(column.items if isinstance(column, Objects) else ()):
                try:
                    self.codec.loads(item)
                except Exception as err:  # noqa: BLE001 - the other rows are read
                    errors.setdefault(row, _undecodable(name, err))
        return errors


def _undecodable(name: str, err: Exception) -> DataPlaneError:
    """Return the error of an object of a field."""
    if isinstance(err, DataPlaneError):
        err.field = err.field or name
        return err
    # The bytes are as they were put; usually the object's class cannot be imported here.
    msg = f"an object of field {name!r} cannot be decoded in this process: {type(err).__name__}: {err}"
    return DataPlaneReadError(msg, field=name, cause=err)


#: The tree of errors imports nothing of asyncdp; pickled, this one holds its rows in columnar form.
PartialReadError.columnar = Block.from_fields

Piece = tuple[Column, Rows]


def _in_place(pieces: Sequence[tuple[Dense, Rows]], n: int) -> torch.Tensor | None:
    """Return the whole as a view if the pieces lie in one tensor in their final order, which saves the copy; else None.

    This is so if a transport, which knows the sizes of a read beforehand, receives all its parts into one buffer.
    """
    first = pieces[0][0].values
    storage, per_row, covered = first.untyped_storage().data_ptr(), first[:1].nbytes, 0
    begins: int | None = None
    for column, rows in pieces:
        span, values = span_of(rows), column.values
        if span is None or values.dtype != first.dtype or not values.is_contiguous():
            return None
        begin = values.data_ptr() - span[0] * per_row
        if values.untyped_storage().data_ptr() != storage or begin != (begin if begins is None else begins):
            return None
        begins = begin
        covered += len(values)
    if begins is None or covered != n or not per_row:
        return None
    offset = (begins - storage) // first.element_size()
    return first.as_strided((n, *first.shape[1:]), first.new_empty((1, *first.shape[1:])).stride(), offset)


def _join_dense(pieces: Sequence[tuple[Dense, Rows]], n: int) -> Dense:
    whole = _in_place(pieces, n)
    if whole is not None:
        return Dense(whole)
    first = pieces[0][0].values
    # Pieces differ in dtype only if they are the indices of a vocabulary that has grown.
    dtype = first.dtype if len({c.values.dtype for c, _ in pieces}) == 1 else torch.int32
    out = first.new_empty((n, *first.shape[1:]), dtype=dtype)
    for column, rows in pieces:
        span = span_of(rows)
        if span is None:
            scatter(out, torch.as_tensor(rows, dtype=torch.int64), column.values)
        else:
            column.fill(out[span[0] : span[1]])
    return Dense(out)


def _join_ragged(pieces: Sequence[tuple[Ragged, Rows]], n: int) -> Ragged:
    lengths = np.zeros(n, dtype=np.int64)
    for column, rows in pieces:
        lengths[np.asarray(rows, dtype=np.int64)] = np.diff(column.offsets)
    offsets = offsets_of(lengths)
    first = pieces[0][0]
    rest = next((c.values.shape[1:] for c, _ in pieces if len(c)), first.values.shape[1:])
    out = first.values.new_empty((int(offsets[-1]), *rest))
    for column, rows in pieces:
        span = span_of(rows)
        if span is None:
            at = torch.from_numpy(steps_of(offsets[np.asarray(rows, dtype=np.int64)], column.offsets))
            scatter(out, at, column.values)
        else:
            column.fill(out[int(offsets[span[0]]) : int(offsets[span[1]])])
    return Ragged(out, offsets, dim=first.dim, nested=any(c.nested for c, _ in pieces))


def join(pieces: Sequence[Piece], n: int, spec: FieldSpec | None) -> Column:
    """Join the pieces of one field, whose row positions cover 0..n-1 once, with one allocation."""
    if len(pieces) == 1 and span_of(pieces[0][1]) == (0, n):
        return pieces[0][0]
    head = pieces[0][0]
    if isinstance(head, Objects):
        items: list[bytes] = [b""] * n
        for column, rows in pieces:
            for row, item in zip(rows, column.items, strict=True):  # type: ignore[attr-defined]
                items[row] = item
        return Objects(items)
    shapes = {tuple(c.values.shape[1:]) for c, _ in pieces if isinstance(c, Dense)}
    if len(shapes) <= 1 and all(isinstance(c, Dense) for c, _ in pieces):
        return _join_dense(pieces, n)  # type: ignore[arg-type]
    dim = next((c.dim for c, _ in pieces if isinstance(c, Ragged) and len(c)), None)
    if dim is None:
        dim = spec.ragged_dim if spec is not None else _differing(shapes)
    return _join_ragged([(ragged_view(c, dim), rows) for c, rows in pieces], n)


def _differing(shapes: Iterable[tuple[int, ...]]) -> int:
    rows = list(shapes)
    return next((d for d in range(len(rows[0])) if len({row[d] for row in rows}) > 1), 0)


def assemble(
    reads: Iterable[tuple[Block, Rows]],
    n: int,
    fields: Sequence[str],
    specs: Mapping[str, FieldSpec],
    codec: ObjectCodec,
) -> Block:
    """Join blocks whose rows cover each of ``fields`` exactly once for each of the positions 0..n-1.

    Args:
        reads: Blocks, each with the positions of its rows in the result.
        n: Number of rows of the result.
        fields: Fields of the result, in order.
        specs: Specs of the fields, as the partition has fixed them.
        codec: Decodes objects when the result is converted to a TensorDict.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in fields}
    for block, rows in reads:
        for name, column in block.columns.items():
            pieces[name].append((column, rows))
    return Block(n, {name: join(pieces[name], n, specs.get(name)) for name in fields}, specs, codec)
