"""Converts users' leaves to columns and back."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from asyncdp.errors import DataPlaneBadRequest

from .column import Column, Dense, Objects, Ragged, ragged_view
from .offsets import offsets_of
from .tensors import from_array, jagged, packed, plain

if TYPE_CHECKING:
    from .field_spec import FieldSpec
    from .objects import ObjectCodec

__all__ = ["column_from_leaf", "field_names", "leaf_of", "object_stack", "raw_leaf", "unstacked"]


def raw_leaf(fields: Mapping[str, Any] | TensorDictBase, name: str) -> Any:
    """Return one leaf as the TensorDict stores it; its ``get`` would convert non-tensor leaves to lists."""
    if isinstance(fields, TensorDictBase):
        return fields._get_str(name, None)  # type: ignore[no-untyped-call]  # noqa: SLF001 - no public way
    return fields[name]


def field_names(fields: Mapping[str, Any] | TensorDictBase | None) -> tuple[str, ...]:
    """Return the names of a user's fields; ``()`` for None."""
    return () if fields is None else tuple(str(name) for name in fields.keys())  # noqa: SIM118 - a TensorDict iterates rows


def _refuse(name: str, why: str) -> DataPlaneBadRequest:
    return DataPlaneBadRequest(f"field {name!r}: {why}", field=name)


#: Dtypes that torch defines but cannot copy.
_SUB_BYTE = frozenset(f"torch.{sign}int{bits}" for sign in ("", "u") for bits in range(1, 8))


def _plain(name: str, leaf: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the CPU, without grad and lazy conjugation; refuse one that cannot be stored unchanged."""
    found = plain(leaf)
    if found is None:
        raise _refuse(name, f"a tensor of layout {leaf.layout} on {leaf.device} cannot be kept unchanged")
    if str(leaf.dtype) in _SUB_BYTE:
        raise _refuse(name, f"a tensor of {leaf.dtype} cannot be kept unchanged")
    if not leaf.is_nested and not leaf.ndim:
        raise _refuse(name, "a tensor without dimensions has no rows")
    return found if found.device.type == "cpu" else found.cpu()


def _nested_column(name: str, leaf: torch.Tensor) -> Dense | Ragged:
    """Convert a nested tensor (jagged or strided layout) to a column, without a copy if it has no gaps between rows.

    Rows of one shape become a Dense column with ``nested`` set, since they do not show in which dimension other rows of
    the field differ.
    """
    if leaf.layout != torch.jagged:
        return _ragged_column(name, list(leaf.unbind()), leaf.dtype)
    values, offsets, dim = packed(leaf)
    lengths = np.diff(offsets)
    # The first dimension is only torch's default for rows of one shape; any other was chosen by the user and is kept.
    if dim == 0 and len(lengths) and (lengths == lengths[0]).all():
        return Dense(values.reshape(len(lengths), int(lengths[0]), *values.shape[1:]), nested=True)
    return Ragged(values, offsets, dim=dim)


def _ragged_column(name: str, rows: list[torch.Tensor], dtype: torch.dtype) -> Dense | Ragged:
    """Convert tensors of one dtype, one per row, to a column of a ragged field."""
    if not rows:
        return Ragged(torch.empty(0, dtype=dtype), np.zeros(1, dtype=np.int64))
    ranks = {row.ndim for row in rows}
    if len(ranks) > 1 or 0 in ranks:
        raise _refuse(name, f"rows of ranks {sorted(ranks)} cannot be kept as one ragged field")
    differing = {dim for row in rows for dim, (a, b) in enumerate(zip(row.shape, rows[0].shape, strict=True)) if a != b}
    if len(differing) > 1:
        raise _refuse(name, f"rows differ in dimensions {sorted(differing)}; one is the most")
    if not differing:
        return Dense(torch.stack(rows), nested=True)
    (dim,) = differing
    lengths = np.asarray([row.shape[dim] for row in rows], dtype=np.int64)
    return Ragged(torch.cat([row.movedim(dim, 0) for row in rows]), offsets_of(lengths), dim=dim)


def _from_array(name: str, array: np.ndarray[Any, Any]) -> torch.Tensor | list[Any]:
    """Convert an array: numbers to a tensor, as a TensorDict does; text and objects to a list."""
    if not array.ndim:
        raise _refuse(name, "an array without dimensions has no rows")
    if array.dtype.kind in "OUS":
        if array.ndim > 1:  # numpy has made a matrix of rows of equal length
            what = "objects" if array.dtype.kind == "O" else "text"
            why = (
                f"an array of {what} of shape {array.shape} has no rows of its own; give a list of them: array.tolist()"
            )
            raise _refuse(name, why)
        return list(array.tolist())
    try:
        return from_array(array)
    except (TypeError, ValueError) as err:
        raise _refuse(name, f"an array of {array.dtype} cannot be kept unchanged") from err


_PYTHON_NUMBERS = frozenset((bool, int, float, complex))
_AS_OBJECTS = "to keep them as objects, give tensordict.NonTensorStack(*rows)"


def _is_row(value: Any) -> bool:
    """Return whether a list item can be a row of a tensor field: it is a tensor or an array of numbers."""
    return isinstance(value, torch.Tensor) or (isinstance(value, np.ndarray) and value.dtype.kind in "biufc")


def _is_number(value: Any) -> bool:
    """Return whether a list item is one number, of Python, numpy or torch."""
    if type(value) in _PYTHON_NUMBERS:
        return True
    if isinstance(value, np.generic):
        return value.dtype.kind in "biufc"
    return _is_row(value) and not (isinstance(value, torch.Tensor) and value.is_nested) and not value.ndim


def _from_list(name: str, rows: list[Any]) -> torch.Tensor | list[torch.Tensor] | list[Any] | None:
    """Convert a list according to its items.

    Returns:
        For a ragged field, a list of tensors of one dtype, one per row; for a dense one, a tensor ``(n,)`` or a list of
        Python numbers; None if the items are objects.
    """
    numbers = sum(map(_is_number, rows))
    tensors = sum(map(_is_row, rows))
    if numbers == len(rows):
        if all(type(row) in _PYTHON_NUMBERS for row in rows):
            return rows
        if any(type(row) in _PYTHON_NUMBERS for row in rows):
            return [row if type(row) in _PYTHON_NUMBERS else row.item() for row in rows]
    elif tensors < len(rows):
        if tensors:
            raise _refuse(name, f"some of its rows are tensors or arrays of numbers, some are not; {_AS_OBJECTS}")
        return None
    made = (
        [_plain(name, torch.as_tensor(row)) for row in rows]
        if numbers < len(rows)
        else [torch.as_tensor(row).detach() for row in rows]
    )
    dtypes = sorted({str(row.dtype) for row in made})
    if len(dtypes) > 1:
        raise _refuse(name, f"its rows are of {', '.join(dtypes)}; give them one dtype, or {_AS_OBJECTS}")
    if numbers == len(rows):
        return torch.stack(made).cpu()
    if any(row.is_nested for row in made):
        raise _refuse(name, "its rows are nested tensors; a row is one tensor")
    return made


def _from_numbers(name: str, rows: list[Any], known: FieldSpec | None) -> torch.Tensor:
    """Make a tensor ``(n,)`` of Python numbers, in the field's dtype if that is of their kind, else torch's default."""
    kinds = {type(row) for row in rows}
    if bool in kinds and len(kinds) > 1:
        raise _refuse(name, f"some of its rows are bools, some are other numbers; {_AS_OBJECTS}")
    field_dtype = known.dtype if known is not None else None
    dtype = torch.int64 if kinds == {int} else None
    if field_dtype is not None and bool not in kinds:
        wide = field_dtype.is_complex or (complex not in kinds and field_dtype.is_floating_point)
        if wide or (kinds == {int} and field_dtype != torch.bool):
            dtype = field_dtype
    try:
        made = torch.tensor(rows, dtype=dtype)
    except (OverflowError, RuntimeError, TypeError, ValueError) as err:
        raise _refuse(name, f"its numbers do not fit into {dtype}; {_AS_OBJECTS}") from err
    if kinds == {int} and made.tolist() != rows:
        raise _refuse(name, f"its numbers do not fit into {dtype} unchanged; {_AS_OBJECTS}")
    return made


def _list_column(name: str, rows: list[Any], known: FieldSpec | None) -> Dense | Ragged | None:
    """Make a column of a list of tensors or numbers; return None if the list or its field holds objects."""
    if not rows or (known is not None and (known.enum or known.kind == "object")):
        return None
    found = _from_list(name, rows)
    if found is None or isinstance(found, torch.Tensor):
        return None if found is None else Dense(found)
    if isinstance(found[0], torch.Tensor):
        return _ragged_column(name, found, found[0].dtype)
    return Dense(_from_numbers(name, found, known))


def _object_rows(leaf: Any, n: int) -> list[Any]:
    """Return one Python object per row."""
    if isinstance(leaf, NonTensorData):
        return [leaf.data] * n
    return list(leaf.tolist() if isinstance(leaf, NonTensorStack) else leaf)


def unstacked(fields: LazyStackedTensorDict) -> TensorDict:
    """Return a lazy stack as one TensorDict; a leaf whose rows differ in one dimension becomes a nested tensor.

    Raises:
        DataPlaneBadRequest: Not every row has the same leaves, or rows of one leaf cannot be joined.
    """
    rows = fields.unbind(0)
    names = set(rows[0].keys())
    for row in rows:
        if odd := names.symmetric_difference(row.keys()):
            raise _refuse(str(min(odd, key=str)), "not every row of the stack has it")
    leaves = {name: _stacked_leaf(name, [raw_leaf(row, name) for row in rows]) for name in rows[0].keys()}  # noqa: SIM118
    return TensorDict(leaves, batch_size=[len(rows)])


def _stacked_leaf(name: str, rows: list[Any]) -> Any:
    """Join the rows of one leaf."""
    if all(isinstance(row, (NonTensorData, NonTensorStack)) for row in rows):
        return object_stack([row.tolist() for row in rows])
    if not all(isinstance(row, torch.Tensor) for row in rows):
        nested = next((row for row in rows if not isinstance(row, (torch.Tensor, NonTensorData, NonTensorStack))), None)
        raise _refuse(name, "some of its rows are tensors, some are objects" if nested is None else _no_field(nested))
    if len({(row.dtype, row.ndim, row.is_nested) for row in rows}) > 1 or rows[0].is_nested:
        raise _refuse(name, "its rows differ in dtype or rank, or are nested")
    differing = {dim for row in rows for dim in range(row.ndim) if row.shape[dim] != rows[0].shape[dim]}
    if not differing:
        return torch.stack(rows)
    if len(differing) > 1:
        raise _refuse(name, f"rows differ in dimensions {sorted(differing)}; one is the most")
    (dim,) = differing
    return jagged(torch.cat(rows, dim), offsets_of(np.asarray([row.shape[dim] for row in rows], dtype=np.int64)), dim)


def _no_field(leaf: Any) -> str:
    """Return the message that says why a leaf cannot be a column, and what can be one."""
    if isinstance(leaf, (TensorDictBase, Mapping)):
        kind = "nested TensorDict" if isinstance(leaf, TensorDictBase) else type(leaf).__name__
        return f"a {kind} cannot be kept as one field; put its leaves as fields of their own"
    kind = "None" if leaf is None else f"of type {type(leaf).__name__}"
    return f"a field is a tensor or array of one row per sample, or a list of one object per sample; this is {kind}"


def column_from_leaf(name: str, leaf: Any, n: int, codec: ObjectCodec, known: FieldSpec | None = None) -> Column:
    """Convert one leaf of a user's fields to a column of ``n`` rows; tensors are copied only if they have to be.

    A list of tensors, or of arrays of numbers, is converted like a nested tensor, a list of numbers like a tensor; any
    other list holds objects. ``known`` is the spec that the partition has fixed for the field, if any.

    Raises:
        DataPlaneBadRequest: The leaf cannot be stored unchanged; the message names the field.
    """
    enum = () if known is None else known.enum
    column: Column | None = _list_column(name, leaf, known) if type(leaf) is list else None
    if isinstance(leaf, NonTensorData) and isinstance(leaf.data, np.ndarray):
        leaf = leaf.data
    if isinstance(leaf, np.ndarray):
        leaf = _from_array(name, leaf)
    if column is not None:
        pass
    elif isinstance(leaf, torch.Tensor):
        leaf = _plain(name, leaf)
        column = _nested_column(name, leaf) if leaf.is_nested else Dense(leaf)
    elif isinstance(leaf, (NonTensorData, NonTensorStack, list)):
        values = _object_rows(leaf, n)
        if enum:
            return _encode_enum(name, values, enum)
        try:
            column = Objects([codec.dumps(value) for value in values])
        except Exception as err:
            raise DataPlaneBadRequest(f"field {name!r}: {err}", field=name, cause=err) from err
    else:
        raise _refuse(name, _no_field(leaf))
    if enum:
        raise _refuse(name, "has an enum vocabulary and takes strings")
    if len(column) != n:
        raise _refuse(name, f"has {len(column)} rows for {n} samples")
    return column


def _encode_enum(name: str, values: Sequence[Any], enum: Sequence[str]) -> Dense:
    """Convert strings to indices into the vocabulary, as uint8 if that is large enough, else int32."""
    index = {text: i for i, text in enumerate(enum)}
    try:
        codes = [index[value] for value in values]
    except (KeyError, TypeError) as err:
        bad = next(v for v in values if not isinstance(v, str) or v not in index)
        raise _refuse(name, f"{bad!r} is not in its vocabulary {list(enum)}") from err
    dtype = torch.uint8 if len(enum) <= 1 << 8 else torch.int32
    return Dense(torch.tensor(codes, dtype=dtype))


def _nested_leaf(column: Ragged) -> torch.Tensor:
    """Make the nested tensor of a ragged column, without a copy if rows differ in their first dimension."""
    values = column.values if column.dim == 0 else column.values.movedim(0, column.dim).contiguous()
    return jagged(values, column.offsets, column.dim)


def leaf_of(column: Column, spec: FieldSpec | None, codec: ObjectCodec) -> Any:
    """Make the user's leaf of one column."""
    if isinstance(column, Objects):
        return object_stack([codec.loads(item) for item in column.items])
    if isinstance(column, Dense):
        if spec is None or not (spec.nested or spec.enum):
            return column.values
        if spec.enum:
            return object_stack([spec.enum[code] for code in column.values.tolist()])
        return _nested_leaf(ragged_view(column, spec.ragged_dim))
    assert isinstance(column, Ragged)  # noqa: S101
    nested = column.nested if spec is None else spec.nested
    lengths = np.diff(column.offsets)
    if nested or len(lengths) == 0 or (lengths != lengths[0]).any():
        return _nested_leaf(column)
    n, length = len(lengths), int(lengths[0])
    dense = column.values.view(n, length, *column.values.shape[1:])
    return dense if column.dim == 0 else dense.movedim(1, column.dim + 1).contiguous()


def object_stack(values: Iterable[Any]) -> NonTensorStack:
    """Return one object per row as the leaf of a TensorDict."""
    return NonTensorStack(*[NonTensorData(value) for value in values])
