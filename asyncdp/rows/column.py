"""One field of n rows: :class:`Dense`, :class:`Ragged` or :class:`Objects`.

No Python object is made per tensor row.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .field_spec import FieldSpec
from .objects import frozen, raw_bytes, thawed
from .offsets import offsets_of, steps_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Column", "Dense", "Objects", "Ragged", "Rows", "schema_hash"]

Rows = Sequence[int]


class Column:
    """One field of n rows; base class of the three kinds of column."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return the number of rows."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Payload bytes of all rows."""
        raise NotImplementedError

    def row_nbytes(self) -> npt.NDArray[np.int64]:
        """Return the payload bytes of each row, shape ``(n,)``."""
        raise NotImplementedError

    def spec(self) -> FieldSpec:
        """Return the spec that a put of this column would fix for its field."""
        raise NotImplementedError

    def take(self, rows: Rows) -> Column:
        """Return a copy of the rows at these positions, in that order."""
        raise NotImplementedError

    def content(self, rows: Rows) -> Iterator[Any]:
        """Yield buffers with the content of these rows, row by row, for checksums."""
        raise NotImplementedError


def span_of(rows: Rows) -> tuple[int, int] | None:
    """Return (first, stop) if ``rows`` are consecutive ascending positions, else None."""
    if not rows:
        return 0, 0
    first, count = rows[0], len(rows)
    if rows[-1] - first != count - 1:
        return None
    if isinstance(rows, range) or list(rows) == list(range(first, first + count)):
        return first, first + count
    return None


#: Dtypes that torch cannot index, and the dtypes of the same size as which they are viewed for that.
_MOVED_AS = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}


def picked(values: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
    """Return a copy of the rows at the indices ``at``, for any dtype."""
    moved = _MOVED_AS.get(values.dtype)
    return values[at] if moved is None else values.view(moved)[at].view(values.dtype)


def scatter(out: torch.Tensor, at: torch.Tensor, values: torch.Tensor) -> None:
    """Write rows of ``values`` to the indices ``at`` of ``out``, for any dtype."""
    moved = _MOVED_AS.get(out.dtype)
    if moved is None:
        out[at] = values
    else:
        out.view(moved)[at] = values.view(moved)


class Dense(Column):
    """Rows of one shape.

    Attributes:
        values: Tensor of shape ``(n, *shape)``.
        nested: Whether the rows were put as a nested tensor or a list of tensors. Their field is then ragged, in a
            dimension that cannot be seen from these rows, since they have one shape.
    """

    __slots__ = ("nested", "values")

    def __init__(self, values: torch.Tensor, *, nested: bool = False) -> None:
        """Hold ``values`` without a copy."""
        self.values = values
        self.nested = nested

    def __getstate__(self) -> tuple[Any, ...]:
        return frozen(self.values)

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.values = thawed(*state)
        self.nested = False  # on the reading side the field's spec decides

    def fill(self, out: torch.Tensor) -> None:
        """Copy all rows into ``out`` of shape ``(n, *shape)``; transports override it for rows stored elsewhere."""
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
        return FieldSpec("tensor", self.values.dtype, tuple(self.values.shape[1:]), nested=self.nested)

    def take(self, rows: Rows) -> Dense:
        span = span_of(rows)
        if span is None:
            return Dense(picked(self.values, torch.as_tensor(rows, dtype=torch.int64)))
        part = self.values if span == (0, len(self)) else self.values[span[0] : span[1]]
        return Dense(part.clone(memory_format=torch.contiguous_format))

    def content(self, rows: Rows) -> Iterator[Any]:
        span = span_of(rows)
        yield raw_bytes(self.values[span[0] : span[1]] if span is not None else self.take(rows).values)


class Ragged(Column):
    """Rows that differ in one dimension.

    Attributes:
        values: Tensor of shape ``(sum of lengths, *rest)``; the dimension in which rows differ is moved to the front.
        offsets: int64 array of shape ``(n + 1,)``; row i is ``values[offsets[i]:offsets[i + 1]]``.
        dim: The dimension of a row in which rows differ.
        nested: Whether the rows were put as a nested tensor.
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
        return frozen(self.values), self.offsets, self.dim, self.nested

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        values, self.offsets, self.dim, self.nested = state
        self.values = thawed(*values)

    def fill(self, out: torch.Tensor) -> None:
        """Copy all values into ``out`` of shape ``(sum of lengths, *rest)``; see :meth:`Dense.fill`."""
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
        span = span_of(rows)
        if span is not None:
            first, last = int(self.offsets[span[0]]), int(self.offsets[span[1]])
            part = self.values[first:last].clone(memory_format=torch.contiguous_format)
            return Ragged(part, self.offsets[span[0] : span[1] + 1] - first, dim=self.dim, nested=self.nested)
        at = np.asarray(rows, dtype=np.int64)
        offsets = offsets_of((self.offsets[1:] - self.offsets[:-1])[at])
        source = steps_of(self.offsets[at], offsets)
        return Ragged(picked(self.values, torch.from_numpy(source)), offsets, dim=self.dim, nested=self.nested)

    def content(self, rows: Rows) -> Iterator[Any]:
        span = span_of(rows)
        if span is None:
            yield raw_bytes(self.take(rows).values)
        else:
            yield raw_bytes(self.values[int(self.offsets[span[0]]) : int(self.offsets[span[1]])])


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


def schema_hash(columns: Mapping[str, Column]) -> int:
    """Return a hash of names, kinds, dtypes and row ranks; the same in every process and for any subset of rows."""
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


def ragged_view(column: Column, dim: int) -> Ragged:
    """Return a tensor column as a ragged one."""
    if isinstance(column, Ragged):
        return column
    assert isinstance(column, Dense)  # noqa: S101 - the caller passes no Objects
    values = column.values.movedim(dim + 1, 1)
    n, length = values.shape[:2]
    flat = values.reshape(n * length, *values.shape[2:])
    return Ragged(flat, np.arange(n + 1, dtype=np.int64) * length, dim=dim, nested=False)
