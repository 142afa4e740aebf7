"""Rows in columnar form: what travels between the verbs and the storage.

A :class:`Block` holds n rows, one :class:`Column` per field. Three kinds of column carry everything a plane carries:

* :class:`Dense`: rows of one shape, one tensor ``(n, *shape)``;
* :class:`Ragged`: rows that differ in one dimension, one tensor of all their values and n + 1 offsets;
* :class:`Objects`: anything that is no tensor, each row encoded to bytes by the transport's codec.

No Python object is made per tensor row. :func:`assemble` puts the columns of many reads together with one allocation
per field, and none when everything came in one piece.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from asyncdp.errors import DataPlaneBadRequest

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
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
]

Rows = Sequence[int]


class ObjectCodec(Protocol):
    """Turns one non-tensor value into bytes and back, exactly; raises on what it cannot keep."""

    def dumps(self, value: Any) -> bytes:
        """Encode one value."""

    def loads(self, data: bytes) -> Any:
        """Decode what ``dumps`` made."""


def _frozen(values: torch.Tensor) -> tuple[bytes, torch.dtype, tuple[int, ...]]:
    """Return a tensor as bytes: torch's own pickles of float8 and unsigned tensors cannot be read again."""
    return bytes(_raw(values)), values.dtype, tuple(values.shape)


def _thawed(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the tensor that ``_frozen`` took apart."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).view(shape)


class _Pickler(pickle.Pickler):
    """Pickles what pickle does, and plain tensors of any dtype."""

    def reducer_override(self, value: Any) -> Any:
        """Take plain tensors apart ourselves."""
        if type(value) is not torch.Tensor or value.layout != torch.strided or value.device.type != "cpu":
            return NotImplemented
        if value.is_nested or value.is_quantized or value.requires_grad or value.is_conj() or value.is_neg():
            return NotImplemented
        return _thawed, _frozen(value)


class PickleCodec:
    """Keeps every picklable value exactly. Only for bytes that never leave this process."""

    def dumps(self, value: Any) -> bytes:
        """Encode one value."""
        out = io.BytesIO()
        _Pickler(out, protocol=5).dump(value)
        return out.getvalue()

    def loads(self, data: bytes) -> Any:
        """Decode what ``dumps`` made."""
        return pickle.loads(data)  # noqa: S301 - the bytes were made by this process


PICKLE = PickleCodec()


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """What a partition fixed about one field.

    Attributes:
        kind: ``"tensor"``, ``"object"``, ``"enum"``, or ``""`` while nothing was written.
        dtype: Of a tensor field.
        shape: Shape of one row; None stands for the dimension in which rows differ.
        nested: Whether a nested tensor was ever put: then it always comes back as torch.jagged.
        enum: Vocabulary of an enum field; values travel as indices into it.
    """

    kind: str = ""
    dtype: torch.dtype | None = None
    shape: tuple[int | None, ...] = ()
    nested: bool = False
    enum: tuple[str, ...] = ()

    @property
    def ragged_dim(self) -> int:
        """The dimension of a row in which rows differ (0 where none does yet)."""
        return self.shape.index(None) if None in self.shape else 0

    def merge(self, new: FieldSpec, name: str) -> FieldSpec:
        """Return the spec after a put of ``new``.

        Raises:
            DataPlaneBadRequest: Kind, dtype or rank differ, or rows would differ in two dimensions.
        """
        if self == new or not new.kind:
            return self
        if not self.kind:
            return replace(new, enum=self.enum)
        if self.kind != new.kind:
            msg = f"field {name!r} holds {self.describe()}, not {new.describe()}"
            raise DataPlaneBadRequest(msg, field=name)
        if self.kind != "tensor":
            return self
        if self.dtype != new.dtype or len(self.shape) != len(new.shape):
            what = "dtype" if self.dtype != new.dtype else "rank"
            msg = f"field {name!r} holds {self.describe()}; a put of {new.describe()} would change its {what}"
            raise DataPlaneBadRequest(msg, field=name)
        shape = tuple(a if a == b else None for a, b in zip(self.shape, new.shape, strict=True))
        if shape.count(None) > 1:
            msg = (
                f"field {name!r} holds {self.describe()}; with {new.describe()} its rows would differ in two dimensions"
            )
            raise DataPlaneBadRequest(msg, field=name)
        if new.nested and self.ragged_dim != new.ragged_dim and None in self.shape:
            msg = f"field {name!r} is ragged in dimension {self.ragged_dim}, the put in dimension {new.ragged_dim}"
            raise DataPlaneBadRequest(msg, field=name)
        return replace(self, shape=shape, nested=self.nested or new.nested)

    def describe(self) -> str:
        """Text of the type, such as ``float32[4, *]``."""
        if self.kind == "tensor":
            dims = ", ".join("*" if d is None else str(d) for d in self.shape)
            return f"{str(self.dtype).removeprefix('torch.')}[{dims}]"
        return f"enum({', '.join(self.enum)})" if self.kind == "enum" else self.kind


class Column:
    """One field of n rows."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Payload bytes of all rows."""
        raise NotImplementedError

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of each row, shape ``(n,)``."""
        raise NotImplementedError

    def spec(self) -> FieldSpec:
        """What this column would fix about its field."""
        raise NotImplementedError

    def take(self, rows: Rows) -> Column:
        """Return a copy of the rows at these positions, in that order."""
        raise NotImplementedError

    def content(self, rows: Rows) -> Iterator[Any]:
        """Yield buffers that together are the content of these rows, row by row, for checksums."""
        raise NotImplementedError


def _span(rows: Rows) -> tuple[int, int] | None:
    """Return (first, stop) where ``rows`` counts up by one, else None."""
    if not rows:
        return 0, 0
    first, count = rows[0], len(rows)
    if rows[-1] - first != count - 1:
        return None
    if isinstance(rows, range) or list(rows) == list(range(first, first + count)):
        return first, first + count
    return None


def _raw(values: torch.Tensor) -> Any:
    """View a contiguous tensor as a bytes-like object, whatever its dtype."""
    return values.contiguous().reshape(-1).view(torch.uint8).numpy() if values.numel() else b""


#: Torch moves these by index only as other dtypes of the same size.
_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def _picked(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows at ``at``, whatever the dtype."""
    moved = _MOVED_AS.get(values.dtype)
    return values[at] if moved is None else values.view(moved)[at].view(values.dtype)


def _scatter(out: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows to ``at``, whatever the dtype."""
    moved = _MOVED_AS.get(out.dtype)
    if moved is None:
        out[at] = values
    else:
        out.view(moved)[at] = values.view(moved)


class Dense(Column):
    """Rows of one shape: ``values`` is ``(n, *shape)``."""

    __slots__ = ("values",)

    def __init__(self, values: torch.Tensor) -> None:
        """Hold ``values`` without a copy."""
        self.values = values

    def __getstate__(self) -> tuple[Any, ...]:
        return _frozen(self.values)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.values = _thawed(*state)

    def fill(self, out: torch.Tensor) -> None:
        """Copy all rows into ``out``, ``(n, *shape)``; a transport whose rows lie elsewhere copies them from there."""
        out.copy_(self.values)

    def __len__(self) -> int:
        return self.values.shape[0]

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        n = len(self)
        return np.full(n, self.values.nbytes // n if n else 0, dtype=np.int64)

    def spec(self) -> FieldSpec:
        return FieldSpec("tensor", self.values.dtype, tuple(self.values.shape[1:]))

    def take(self, rows: Rows) -> Dense:
        span = _span(rows)
        if span is None:
            return Dense(_picked(self.values, torch.as_tensor(rows, dtype=torch.int64)))
        part = self.values if span == (0, len(self)) else self.values[span[0] : span[1]]
        return Dense(part.clone(memory_format=torch.contiguous_format))

    def content(self, rows: Rows) -> Iterator[Any]:
        span = _span(rows)
        yield _raw(self.values[span[0] : span[1]] if span is not None else self.take(rows).values)


class Ragged(Column):
    """Rows that differ in one dimension.

    Attributes:
        values: ``(sum of lengths, *rest)``; the dimension in which rows differ is moved to the front.
        offsets: int64 ``(n + 1,)``; row i is ``values[offsets[i]:offsets[i + 1]]``.
        dim: Which dimension of a row that is.
        nested: Whether it was put as a nested tensor.
    """

    __slots__ = ("dim", "nested", "offsets", "values")

    def __init__(
        self, values: torch.Tensor, offsets: npt.NDArray[np.int64], *, dim: int = 0, nested: bool = True
    ) -> None:
        """Hold ``values`` and ``offsets`` without a copy."""
        self.values = values
        self.offsets = offsets
        self.dim = dim
        self.nested = nested

    def __getstate__(self) -> tuple[Any, ...]:
        return _frozen(self.values), self.offsets, self.dim, self.nested

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        values, self.offsets, self.dim, self.nested = state
        self.values = _thawed(*values)

    def fill(self, out: torch.Tensor) -> None:
        """Copy all steps into ``out``, ``(sum of lengths, *rest)``; see :meth:`Dense.fill`."""
        out.copy_(self.values)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def nbytes(self) -> int:
        return self.values.nbytes

    def _unit(self) -> int:
        """Bytes of one step along the ragged dimension."""
        unit = self.values.element_size()
        for size in self.values.shape[1:]:
            unit *= size
        return unit

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        return np.diff(self.offsets) * self._unit()

    def spec(self) -> FieldSpec:
        shape: list[int | None] = list(self.values.shape[1:])
        shape.insert(self.dim, None)
        return FieldSpec("tensor", self.values.dtype, tuple(shape), nested=self.nested)

    def take(self, rows: Rows) -> Ragged:
        span = _span(rows)
        if span is not None:
            first, last = int(self.offsets[span[0]]), int(self.offsets[span[1]])
            part = self.values[first:last].clone(memory_format=torch.contiguous_format)
            return Ragged(part, self.offsets[span[0] : span[1] + 1] - first, dim=self.dim, nested=self.nested)
        at = np.asarray(rows, dtype=np.int64)
        offsets = _offsets((self.offsets[1:] - self.offsets[:-1])[at])
        source = _steps(self.offsets[at], offsets)
        return Ragged(_picked(self.values, torch.from_numpy(source)), offsets, dim=self.dim, nested=self.nested)

    def content(self, rows: Rows) -> Iterator[Any]:
        span = _span(rows)
        if span is None:
            yield _raw(self.take(rows).values)
        else:
            yield _raw(self.values[int(self.offsets[span[0]]) : int(self.offsets[span[1]])])


class Objects(Column):
    """Rows that are no tensors, each encoded to bytes."""

    __slots__ = ("items",)

    def __init__(self, items: list[bytes]) -> None:
        """Hold the encoded rows."""
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.items))

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        return np.fromiter(map(len, self.items), dtype=np.int64, count=len(self.items))

    def spec(self) -> FieldSpec:
        return FieldSpec("object")

    def take(self, rows: Rows) -> Objects:
        return Objects([self.items[i] for i in rows])

    def content(self, rows: Rows) -> Iterator[Any]:
        return (self.items[row] for row in rows)


def _offsets(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the n + 1 offsets of rows with these lengths."""
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def _steps(starts: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the index of each step when rows that start at ``starts`` are laid end to end by ``offsets``."""
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], np.diff(offsets))


# --- from a user's leaf to a column ---------------------------------------------------------------------------------


def _refuse(name: str, why: str) -> DataPlaneBadRequest:
    return DataPlaneBadRequest(f"field {name!r}: {why}", field=name)


#: Torch knows these by name only; it cannot copy them.
_SUB_BYTE = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


def _plain(name: str, leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor's values on the CPU, without grad and lazy bits; refuse what cannot be kept."""
    if leaf.layout not in (torch.strided, torch.jagged) or leaf.is_quantized or leaf.device.type == "meta":
        raise _refuse(name, f"a tensor of layout {leaf.layout} on {leaf.device} cannot be kept unchanged")
    if str(leaf.dtype) in _SUB_BYTE:
        raise _refuse(name, f"a tensor of {leaf.dtype} cannot be kept unchanged")
    if not leaf.is_nested and not leaf.ndim:
        raise _refuse(name, "a tensor without dimensions has no rows")
    leaf = leaf.detach() if leaf.is_nested else leaf.detach().resolve_conj().resolve_neg()
    return leaf if leaf.device.type == "cpu" else leaf.cpu()


def _nested_column(name: str, leaf: torch.Tensor, ragged_dim: int) -> Ragged:
    """Turn a nested tensor (jagged or strided layout) into a column, without a copy where it has no holes."""
    if leaf.layout != torch.jagged:
        rows = list(leaf.unbind())
        ranks = {row.ndim for row in rows}
        if len(ranks) > 1 or 0 in ranks:
            raise _refuse(name, f"rows of ranks {sorted(ranks)} cannot be kept as one ragged field")
        differing = {
            dim for row in rows for dim, (a, b) in enumerate(zip(row.shape, rows[0].shape, strict=True)) if a != b
        }
        if len(differing) > 1:
            raise _refuse(name, f"rows differ in dimensions {sorted(differing)}; one is the most")
        dim = min(differing, default=ragged_dim if ragged_dim < max(ranks, default=0) else 0)
        lengths = np.asarray([row.shape[dim] for row in rows], dtype=np.int64)
        if not rows:
            return Ragged(torch.empty(0, dtype=leaf.dtype), np.zeros(1, dtype=np.int64))
        return Ragged(torch.cat([row.movedim(dim, 0) for row in rows]), _offsets(lengths), dim=dim)
    jagged: Any = leaf  # its methods are not in torch's annotations
    dim = jagged._ragged_idx - 1  # noqa: SLF001 - the only way to learn it
    values = jagged.values().movedim(dim, 0)
    starts: npt.NDArray[np.int64] = jagged.offsets().cpu().numpy().astype(np.int64)
    sparse_lengths = jagged.lengths()
    lengths = np.diff(starts) if sparse_lengths is None else sparse_lengths.cpu().numpy().astype(np.int64)
    offsets = _offsets(lengths)
    begins = starts[: len(lengths)]
    if not np.array_equal(begins, offsets[:-1]) or offsets[-1] != values.shape[0]:
        values = _picked(values, torch.from_numpy(_steps(begins, offsets)))
    return Ragged(values, offsets, dim=dim)


def _object_rows(name: str, leaf: Any, n: int) -> list[Any]:
    """Spell out one Python object per row."""
    if isinstance(leaf, NonTensorData):
        data = leaf.data
        if isinstance(data, np.ndarray):
            if data.ndim == 0 or data.shape[0] != n:
                raise _refuse(name, f"array of shape {data.shape} for {n} rows")
            return list(data) if data.dtype == object else list(data.tolist())
        return [data] * n
    if isinstance(leaf, NonTensorStack):
        rows = leaf.tolist()
    elif isinstance(leaf, np.ndarray):
        rows = list(leaf)
    else:
        rows = list(leaf)
    return rows


def column_from_leaf(
    name: str, leaf: Any, n: int, codec: ObjectCodec, enum: Sequence[str] = (), ragged_dim: int = 0
) -> Column:
    """Turn one leaf of a user's TensorDict into a column of ``n`` rows; tensors are not copied unless they must be.

    ``ragged_dim`` is the dimension in which the field's rows differ, for nested rows that do not tell by themselves.

    Raises:
        DataPlaneBadRequest: The leaf cannot be carried unchanged; the message names the field.
    """
    column: Column
    if isinstance(leaf, torch.Tensor):
        leaf = _plain(name, leaf)
        column = _nested_column(name, leaf, ragged_dim) if leaf.is_nested else Dense(leaf)
    elif isinstance(leaf, (NonTensorData, NonTensorStack, list, np.ndarray)):
        values = _object_rows(name, leaf, n)
        if enum:
            return _encode_enum(name, values, enum)
        try:
            column = Objects([codec.dumps(value) for value in values])
        except Exception as err:
            raise DataPlaneBadRequest(f"field {name!r}: {err}", field=name, cause=err) from err
    else:
        kind = "a nested TensorDict" if isinstance(leaf, TensorDictBase) else f"a {type(leaf).__name__}"
        raise _refuse(name, f"{kind} cannot be kept; put its leaves as fields of their own")
    if enum:
        raise _refuse(name, "has an enum vocabulary and takes strings")
    if len(column) != n:
        raise _refuse(name, f"has {len(column)} rows for {n} samples")
    return column


def _encode_enum(name: str, values: Sequence[Any], enum: Sequence[str]) -> Dense:
    """Turn strings into the smallest unsigned ints that hold the vocabulary."""
    index = {text: i for i, text in enumerate(enum)}
    try:
        codes = [index[value] for value in values]
    except (KeyError, TypeError) as err:
        bad = next(v for v in values if not isinstance(v, str) or v not in index)
        raise _refuse(name, f"{bad!r} is not in its vocabulary {list(enum)}") from err
    dtype = torch.uint8 if len(enum) <= 1 << 8 else torch.int32
    return Dense(torch.tensor(codes, dtype=dtype))


# --- blocks ---------------------------------------------------------------------------------------------------------


def raw_leaf(fields: Mapping[str, Any] | TensorDictBase, name: str) -> Any:
    """Return one leaf as it is stored: a TensorDict's ``get`` would turn non-tensor leaves into lists."""
    if isinstance(fields, TensorDictBase):
        return fields._get_str(name, None)  # type: ignore[no-untyped-call]  # noqa: SLF001 - no public way
    return fields[name]


def field_names(fields: Mapping[str, Any] | TensorDictBase | None) -> tuple[str, ...]:
    """Return the names of a user's fields; none where there are no fields."""
    return () if fields is None else tuple(str(name) for name in fields.keys())  # noqa: SIM118 - a TensorDict iterates rows


@dataclass(slots=True)
class Block:
    """``n`` rows of some fields, in columns; ``specs`` says how leaves look to the user, ``codec`` decodes objects."""

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
        """Turn a user's fields into columns; tensors are shared with the user until somebody copies them.

        Raises:
            DataPlaneBadRequest: A leaf cannot be carried, or does not fit the spec that the partition fixed.
        """
        specs = {} if specs is None else specs
        columns: dict[str, Column] = {}
        for name in field_names(fields):
            leaf = raw_leaf(fields, name)
            known = specs.get(name)
            enum = known.enum if known is not None else ()
            dim = known.ragged_dim if known is not None else 0
            column = columns[name] = column_from_leaf(name, leaf, n, codec, enum, dim)
            if known is not None and known.kind and not enum:
                known.merge(column.spec(), name)
        return cls(n, columns, specs, codec)

    @property
    def nbytes(self) -> int:
        """Payload bytes of all rows."""
        return sum(column.nbytes for column in self.columns.values())

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        """Payload bytes of each row, shape ``(n,)``."""
        total = np.zeros(self.n, dtype=np.int64)
        for column in self.columns.values():
            total += column.row_nbytes()
        return total

    def take(self, rows: Rows, fields: Iterable[str] | None = None) -> Block:
        """Return a copy of some rows and fields."""
        names = self.columns if fields is None else fields
        return Block(len(rows), {f: self.columns[f].take(rows) for f in names}, self.specs, self.codec)

    def observed(self) -> dict[str, FieldSpec]:
        """What these columns would fix about their fields."""
        out = {}
        for name, column in self.columns.items():
            known = self.specs.get(name)
            out[name] = FieldSpec("enum", enum=known.enum) if known is not None and known.enum else column.spec()
        return out

    def schema_hash(self) -> int:
        """Hash of names, kinds, dtypes and the sizes that rows share; the same in every process."""
        return schema_hash(self.columns)

    def checksum(self, rows: Rows) -> int:
        """CRC-32 over the content of these rows, field by field (IEEE 802.3 polynomial, by zlib)."""
        crc = 0
        for name in sorted(self.columns):
            for piece in self.columns[name].content(rows):
                crc = zlib.crc32(piece, crc)
        return crc

    def to_tensordict(self) -> TensorDict:
        """Make the user's view: dense where rows have one shape, jagged where not or where the field is nested."""
        leaves = {name: _leaf(column, self.specs.get(name), self.codec) for name, column in self.columns.items()}
        return TensorDict(leaves, batch_size=[self.n])


def schema_hash(columns: Mapping[str, Column]) -> int:
    """Hash of names, kinds, dtypes and row ranks; the same in every process and for any choice of rows."""
    parts = []
    for name in sorted(columns):
        column = columns[name]
        if isinstance(column, Objects):
            parts.append(f"{name}:object")
        else:
            values: torch.Tensor = column.values  # type: ignore[attr-defined]
            rank = values.ndim if isinstance(column, Ragged) else values.ndim - 1
            parts.append(f"{name}:{values.dtype}:{rank}")
    return zlib.crc32("|".join(parts).encode())


def _jagged(column: Ragged) -> torch.Tensor:
    """Make the nested tensor of a ragged column, without a copy."""
    offsets = torch.from_numpy(column.offsets)
    values = column.values if column.dim == 0 else column.values.movedim(0, column.dim).contiguous()
    lengths = np.diff(column.offsets)
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, offsets, jagged_dim=column.dim + 1, min_seqlen=low, max_seqlen=high
    )
    return nested


def _ragged_from(column: Column, dim: int) -> Ragged:
    """See any tensor column as a ragged one."""
    if isinstance(column, Ragged):
        return column
    assert isinstance(column, Dense)  # noqa: S101 - objects were sorted out by the caller
    values = column.values.movedim(dim + 1, 1)
    n, length = values.shape[:2]
    flat = values.reshape(n * length, *values.shape[2:])
    return Ragged(flat, np.arange(n + 1, dtype=np.int64) * length, dim=dim, nested=False)


def _leaf(column: Column, spec: FieldSpec | None, codec: ObjectCodec) -> Any:
    """Make the user's leaf of one column."""
    if isinstance(column, Objects):
        return _stack([codec.loads(item) for item in column.items])
    if isinstance(column, Dense):
        if spec is None or not (spec.nested or spec.enum):
            return column.values
        if spec.enum:
            return _stack([spec.enum[code] for code in column.values.tolist()])
        return _jagged(_ragged_from(column, spec.ragged_dim))
    assert isinstance(column, Ragged)  # noqa: S101
    nested = column.nested if spec is None else spec.nested
    lengths = np.diff(column.offsets)
    if nested or len(lengths) == 0 or (lengths != lengths[0]).any():
        return _jagged(column)
    n, length = len(lengths), int(lengths[0])
    dense = column.values.view(n, length, *column.values.shape[1:])
    return dense if column.dim == 0 else dense.movedim(1, column.dim + 1).contiguous()


def _stack(values: list[Any]) -> NonTensorStack:
    return NonTensorStack(*[NonTensorData(value) for value in values])


# --- putting reads together -----------------------------------------------------------------------------------------

Piece = tuple[Column, Rows]


def _in_place(pieces: Sequence[tuple[Dense, Rows]], n: int) -> torch.Tensor | None:
    """Return the tensor of which the pieces are parts that lie where they belong, if they do: nothing is to copy then.

    A transport that knows all of a read beforehand has its parts arrive in one buffer.
    """
    first = pieces[0][0].values
    storage, per_row, covered = first.untyped_storage().data_ptr(), first[:1].nbytes, 0
    begins: int | None = None
    for column, rows in pieces:
        span, values = _span(rows), column.values
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
    # Only the codes of a vocabulary that has grown differ in dtype.
    dtype = first.dtype if len({c.values.dtype for c, _ in pieces}) == 1 else torch.int32
    out = first.new_empty((n, *first.shape[1:]), dtype=dtype)
    for column, rows in pieces:
        span = _span(rows)
        if span is None:
            _scatter(out, torch.as_tensor(rows, dtype=torch.int64), column.values)
        else:
            column.fill(out[span[0] : span[1]])
    return Dense(out)


def _join_ragged(pieces: Sequence[tuple[Ragged, Rows]], n: int) -> Ragged:
    lengths = np.zeros(n, dtype=np.int64)
    for column, rows in pieces:
        lengths[np.asarray(rows, dtype=np.int64)] = np.diff(column.offsets)
    offsets = _offsets(lengths)
    first = pieces[0][0]
    rest = next((c.values.shape[1:] for c, _ in pieces if len(c)), first.values.shape[1:])
    out = first.values.new_empty((int(offsets[-1]), *rest))
    for column, rows in pieces:
        span = _span(rows)
        if span is None:
            at = torch.from_numpy(_steps(offsets[np.asarray(rows, dtype=np.int64)], column.offsets))
            _scatter(out, at, column.values)
        else:
            column.fill(out[int(offsets[span[0]]) : int(offsets[span[1]])])
    return Ragged(out, offsets, dim=first.dim, nested=any(c.nested for c, _ in pieces))


def join(pieces: Sequence[Piece], n: int, spec: FieldSpec | None) -> Column:
    """Put the pieces of one field together; their row positions cover 0..n-1 once. One allocation."""
    if len(pieces) == 1 and _span(pieces[0][1]) == (0, n):
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
    return _join_ragged([(_ragged_from(c, dim), rows) for c, rows in pieces], n)


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
    """Put blocks together whose rows, by position, cover each of ``fields`` for rows 0..n-1 exactly once.

    Args:
        reads: Blocks, each with the positions its rows take in the result.
        n: Rows of the result.
        fields: Fields of the result, in order.
        specs: How the partition defines them.
        codec: Decodes objects when the user's view is made.
    """
    pieces: dict[str, list[Piece]] = {name: [] for name in fields}
    for block, rows in reads:
        for name, column in block.columns.items():
            pieces[name].append((column, rows))
    return Block(n, {name: join(pieces[name], n, specs.get(name)) for name in fields}, specs, codec)
