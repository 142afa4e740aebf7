"""Converts between a trainer's padded columns and the rows that a data plane stores, without I/O.

:func:`pack_jagged_fields` removes padding before a put: a padded ``(N, S, ...)`` tensor becomes a ``torch.jagged``
nested tensor of the tokens of each row. :func:`materialize` adds padding after a read. Dtypes never change. Each
conversion of a field takes one allocation, or none if nothing has to move, so results may share memory with their
input.

Names and meaning are those of NeMo-RL (``nemo_rl/data_plane/codec.py``), on plain dicts. Values that NeMo-RL would
silently cut, pad or drop raise :class:`~asyncdp.errors.DataPlaneBadRequest`, which names the field.
"""

from __future__ import annotations

import cmath
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict, TensorDictBase

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.column import picked
from asyncdp.rows.offsets import offsets_of, steps_of
from asyncdp.rows.pack import object_stack
from asyncdp.rows.tensors import from_array, jagged, packed, plain

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy.typing as npt

__all__ = [
    "TOKEN_ALIGNED_FIELDS",
    "Layout",
    "materialize",
    "pack_jagged_fields",
    "pack_per_token_field",
    "response_from_nested",
    "row_lengths",
    "stack_or_nest",
    "to_nested_by_length",
]

Layout: TypeAlias = Literal["padded", "jagged"]
Leaf: TypeAlias = Any  # a tensor, a jagged one (torch types neither its offsets nor its values), or a non-tensor leaf
Lengths: TypeAlias = "torch.Tensor | Sequence[int] | npt.NDArray[np.integer[Any]]"

# Fields that NeMo-RL's column_io treats as having one value per token; a 1D field among them is left unchanged.
TOKEN_ALIGNED_FIELDS: Final = frozenset(
    {
        "advantages",
        "generation_logprobs",
        "input_ids",
        "prev_logprobs",
        "reference_policy_logprobs",
        "routed_experts",
        "sample_mask",
        "token_mask",
    }
)

_INTEGER_OF_SIZE: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def to_nested_by_length(padded: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Drop the right padding of ``padded``.

    Args:
        padded: Shape ``(N, S, ...)``.
        lengths: Integers of shape ``(N,)``, each within ``[0, S]``.

    Returns:
        A ``torch.jagged`` nested tensor, detached; row i is ``padded[i, :lengths[i]]``.

    Raises:
        DataPlaneBadRequest: ``padded`` has no dimension to shorten, or the lengths do not fit it.
    """
    op = "to_nested_by_length"
    padded = _plain(padded, op, "padded")
    if padded.is_nested or padded.ndim < 2:  # noqa: PLR2004 - rows and tokens
        raise _refuse(op, "padded", f"takes a tensor of shape (N, S, ...), not {_describe(padded)}")
    return _nest(padded, row_lengths(lengths, padded.shape[0], op=op), op, "padded")


def stack_or_nest(tensors: Sequence[torch.Tensor], *, field: str = "tensors") -> torch.Tensor:
    """Join rows into one tensor: dense where they have one shape, else ``torch.jagged``.

    Args:
        tensors: One tensor per row. They may differ in their first dimension only.
        field: Name of the field, for errors.

    Returns:
        A tensor of shape ``(N, ...)``, detached; ``torch.empty(0)`` if there are no rows.

    Raises:
        DataPlaneBadRequest: Rows differ in dtype, device, or a dimension other than the first.
    """
    op = "stack_or_nest"
    if not tensors:
        return torch.empty(0)
    rows = [_plain(row, op, field) for row in tensors]
    first = rows[0]
    for at, row in enumerate(rows):
        if row.is_nested:
            raise _refuse(op, field, f"row {at} is a nested tensor itself")
        if row.dtype != first.dtype or row.device != first.device:
            raise _refuse(op, field, f"row {at} is {_describe(row)}, row 0 is {_describe(first)}")
        if row.ndim != first.ndim or row.shape[1:] != first.shape[1:]:
            raise _refuse(op, field, f"row {at} is {_describe(row)}, row 0 is {_describe(first)}: not one ragged field")
    if all(row.shape == first.shape for row in rows):
        return torch.stack(rows)
    return jagged(torch.cat(rows), offsets_of(np.asarray([row.shape[0] for row in rows], dtype=np.int64)))


def pack_per_token_field(val: torch.Tensor, lengths: Lengths) -> torch.Tensor:
    """Pack a field that is known to hold one value per token, whatever its padded width is.

    A forward pass may round its sequence dimension up (sequence parallelism), so ``val`` may be wider than the longest
    row; values beyond a row's length are dropped.

    Args:
        val: Shape ``(N, S, ...)``.
        lengths: Integers of shape ``(N,)``.

    Returns:
        A ``torch.jagged`` nested tensor; or ``val`` itself, detached and contiguous, if it cannot hold a value per
        token: it is nested already, 1D, has another number of rows, or is narrower than the longest row.
    """
    op = "pack_per_token_field"
    return _pack_per_token(_plain(val, op, "val"), row_lengths(lengths, op=op), op, "val")


def pack_jagged_fields(
    fields: Mapping[str, Any],
    *,
    lengths: Lengths | None,
    token_aligned_fields: Collection[str] | None = None,
) -> TensorDict:
    """Turn columns into the TensorDict that ``put_samples`` takes.

    Args:
        fields: ``{name: column}``, each column of N rows: a tensor; an array of numbers (converted to a tensor), of
            strings or of objects; a list with one value per row (tensors are joined by :func:`stack_or_nest`); or a
            ``NonTensorStack`` or ``NonTensorData``.
        lengths: Tokens per row, shape ``(N,)``; None keeps every field rectangular.
        token_aligned_fields: Names of the fields that :func:`pack_per_token_field` packs; others keep their shape.

    Returns:
        A TensorDict of batch size ``(N,)`` with the fields in the same order; tensors are detached.

    Raises:
        DataPlaneBadRequest: A column cannot be stored unchanged, or has another number of rows.
    """
    op = "pack_jagged_fields"
    aligned = _names(token_aligned_fields, op)
    valid = None if lengths is None else row_lengths(lengths, op=op)
    n = None if valid is None else len(valid)
    packed: dict[str, Any] = {}
    for name, column in fields.items():
        if not isinstance(name, str):
            raise _refuse(op, str(name), f"a field is named by a str, not by {name!r}")
        leaf = _leaf(column, op, name)
        rows = _rows(leaf)
        n = rows if n is None else n
        if rows not in (n, None):
            raise _refuse(op, name, f"has {rows} rows, the batch has {n}")
        if isinstance(leaf, torch.Tensor):
            leaf = _pack_per_token(leaf, valid, op, name) if valid is not None and name in aligned else _dense(leaf)
        packed[name] = leaf
    return TensorDict(packed, batch_size=[n or 0])


def response_from_nested(full: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Cut the responses out of per-token outputs over (prompt + response), shifted left by one token.

    The output of a model at position i is for token i + 1. So in a row of L tokens, of which the last R are the
    response, the outputs of the response are the slice ``[L - R - 1 : L - 1]``.

    Args:
        full: A ``torch.jagged`` tensor, N rows of L tokens.
        response_mask: A ``torch.jagged`` tensor, N rows of R tokens; only its lengths are used.

    Returns:
        A ``torch.jagged`` tensor, N rows of R tokens, detached, in the dtype of ``full``.

    Raises:
        DataPlaneBadRequest: An argument is not jagged, the numbers of rows differ, or a response has no token before
            it.
    """
    op = "response_from_nested"
    values, offsets, dim = packed(_nested(full, op, "full"))
    length = np.diff(offsets)
    wanted = np.diff(packed(_nested(response_mask, op, "response_mask"))[1])
    if dim:
        raise _refuse(op, "full", f"its rows must differ in their first dimension, not in dimension {dim}")
    if len(wanted) != len(length):
        raise _refuse(op, "response_mask", f"has {len(wanted)} rows for {len(length)} rows of full")
    short = np.flatnonzero((wanted > 0) & (wanted >= length)).tolist()
    if short:
        at = short[0]
        why = f"row {at} wants {int(wanted[at])} response tokens of {int(length[at])}; one must come before them"
        raise _refuse(op, "response_mask", why)
    ends = offsets_of(wanted)
    steps = steps_of(offsets[1:] - wanted - 1, ends)
    return jagged(picked(values, torch.from_numpy(steps).to(values.device)), ends)


def materialize(
    td: TensorDictBase | Mapping[str, Any],
    layout: Layout = "padded",
    pad_value_dict: Mapping[str, float] | None = None,
    pad_to_seqlen: int = 0,
    *,
    pad_to_multiple: int = 1,
    token_aligned_fields: Collection[str] | None = TOKEN_ALIGNED_FIELDS,
) -> dict[str, Any]:
    """Convert the result of a read to the columns that a trainer uses.

    Args:
        td: Fields of N rows, as ``get_samples`` and ``get_data`` return them.
        layout: ``"padded"``: nested tensors become rectangular. ``"jagged"``: every tensor stays as it is.
        pad_value_dict: ``{field: padding value}``; 0 for other fields. Fields that are not in ``td`` are ignored.
        pad_to_seqlen: Smallest width of padded fields, in tokens. Nothing is ever cut.
        pad_to_multiple: The width is rounded up to a multiple of this many tokens.
        token_aligned_fields: Names of rectangular fields ``(N, S, ...)`` that are padded to the width too. Others, such
            as ``(N, 3, H, W)`` images, keep their shape, and so does ``(N, 1)``, one value per row, under any name.

    Returns:
        ``{field: column}``. Padded tensors have the shape ``(N, width, ...)``, with the width of the longest row or a
        greater one as requested above. Non-tensor fields are object arrays of shape ``(N,)``.

    Raises:
        DataPlaneBadRequest: The layout is unknown, a leaf has another kind, or a dtype cannot hold the padding value.
    """
    op = "materialize"
    if layout not in ("padded", "jagged"):
        raise _refuse(op, "layout", f"is 'padded' or 'jagged', not {layout!r}")
    if pad_to_seqlen < 0 or pad_to_multiple < 1:
        raise _refuse(op, "pad_to_seqlen, pad_to_multiple", f"cannot be {pad_to_seqlen}, {pad_to_multiple}")
    pads = pad_value_dict or {}
    aligned = _names(token_aligned_fields, op)
    columns: dict[str, Any] = {}
    for name, leaf in td.items():
        if not isinstance(leaf, torch.Tensor):
            columns[name] = _objects(leaf, op, name)
        elif layout == "jagged" or not (leaf.is_nested or (name in aligned and leaf.ndim > 1 and leaf.shape[1] != 1)):
            columns[name] = leaf
        else:
            columns[name] = _pad(leaf, pads.get(name, 0), pad_to_seqlen, pad_to_multiple, op, name)
    return columns


# --- lengths and jagged tensors -------------------------------------------------------------------------------------


def row_lengths(lengths: Lengths, rows: int | None = None, *, op: str, field: str = "lengths") -> torch.Tensor:
    """Check row lengths of shape ``(rows,)``, and return them as int64 on the CPU, so that they are copied only once.

    Raises:
        DataPlaneBadRequest: The lengths have another shape, are no integers, or negative; names ``op`` and ``field``.
    """
    try:
        given = torch.as_tensor(lengths).detach().cpu()
    except (TypeError, ValueError, RuntimeError) as err:
        raise _refuse(op, field, f"takes integers of shape (N,), not {_describe(lengths)}") from err
    if given.ndim != 1 or (rows is not None and given.shape[0] != rows):
        wanted = f"({'N' if rows is None else rows},)"
        raise _refuse(op, field, f"{field} shape {tuple(given.shape)} is not {wanted}")
    if given.numel() and (given.is_floating_point() or given.is_complex() or given.dtype == torch.bool):
        raise _refuse(op, field, f"takes integers, not {given.dtype}")
    found = given.to(torch.int64)
    negative = torch.nonzero(found < 0).flatten().tolist()
    if negative:
        raise _refuse(op, field, f"row {negative[0]} has length {int(found[negative[0]])}")
    return found


def _nest(padded: torch.Tensor, lengths: torch.Tensor, op: str, field: str) -> torch.Tensor:
    """Make a nested tensor of the first ``lengths[i]`` steps of each row i."""
    n, width = padded.shape[:2]
    if n and int(lengths.max()) > width:
        at = int(lengths.argmax())
        raise _refuse(op, field, f"row {at} has {int(lengths[at])} tokens, the tensor is {width} wide")
    if bool((lengths == width).all()):
        values = padded.reshape(n * width, *padded.shape[2:])
    else:
        values = torch.as_tensor(_bits(padded)[_filled(lengths, width, padded.device)]).view(padded.dtype)
    return jagged(values, offsets_of(lengths.numpy()))


def _nested(tensor: object, op: str, field: str) -> torch.Tensor:
    """Check that a tensor is nested, of layout ``torch.jagged``, and return it detached."""
    nested = _plain(tensor, op, field)
    if nested.layout != torch.jagged:
        raise _refuse(op, field, f"takes a nested tensor of layout torch.jagged, not {_describe(nested)}")
    return nested


def _filled(lengths: torch.Tensor, width: int, device: torch.device) -> Leaf:
    """Return the mask ``(N, width)`` of the values that are no padding, in a form that can index :func:`_bits`."""
    mask = torch.arange(width) < lengths[:, None]
    return mask.numpy() if device.type == "cpu" else mask.to(device)


def _bits(tensor: torch.Tensor) -> Leaf:
    """View elements as numpy integers of the same size, since torch cannot mask every dtype (uint16) and is slower.

    Measured with torch 2.13 on a CPU, 512 x 4096 int64: reading by a mask takes torch 17 ms and numpy 1.1 ms; writing
    by a mask 9.6 ms and 1.3 ms; torch.nested.to_padded_tensor takes 4.3 s.
    """
    view = tensor.view(_INTEGER_OF_SIZE.get(tensor.element_size(), tensor.dtype))
    return view.numpy() if view.device.type == "cpu" else view


# --- columns to leaves ----------------------------------------------------------------------------------------------


def _leaf(column: object, op: str, field: str) -> Leaf:
    """Convert one column to a tensor or a non-tensor leaf."""
    if isinstance(column, torch.Tensor):
        return _plain(column, op, field)
    if isinstance(column, (NonTensorStack, NonTensorData)):
        return column
    if isinstance(column, np.ndarray) and column.ndim and column.dtype.kind not in "OSU":
        try:
            return from_array(column)
        except (TypeError, ValueError) as err:
            raise _refuse(op, field, f"an array of {column.dtype} has no tensor: {err}") from err
    if isinstance(column, (list, tuple)) or (isinstance(column, np.ndarray) and column.ndim):
        values = list(column) if not isinstance(column, np.ndarray) or column.dtype == object else column.tolist()
        if values and all(isinstance(value, torch.Tensor) for value in values):
            return stack_or_nest(values, field=field)
        return object_stack(values)
    kind = "a nested TensorDict" if isinstance(column, TensorDictBase) else f"a {type(column).__name__}"
    raise _refuse(op, field, f"{kind} is no column; give a tensor, an array or a list with one value per row")


def _rows(leaf: Leaf) -> int | None:
    """Return the number of rows of a leaf; None for one value that applies to every row."""
    if isinstance(leaf, torch.Tensor):
        return leaf.size(0) if leaf.ndim else -1
    return int(leaf.batch_size[0]) if leaf.batch_size else None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.is_nested else tensor.contiguous()


def _pack_per_token(val: torch.Tensor, lengths: torch.Tensor, op: str, field: str) -> torch.Tensor:
    # An empty batch has no longest row, and is left unchanged.
    if val.is_nested or val.ndim < 2 or len(lengths) == 0 or val.shape[0] != len(lengths):  # noqa: PLR2004
        return _dense(val)
    return _dense(val) if int(lengths.max()) > val.shape[1] else _nest(val, lengths, op, field)


# --- leaves to columns ----------------------------------------------------------------------------------------------


def _objects(leaf: Leaf, op: str, field: str) -> npt.NDArray[np.object_]:
    """Return one object per row, as an array."""
    if isinstance(leaf, NonTensorData):
        # The data is one value for all rows, unless it is an object array, which a TensorDict wraps as a whole.
        whole = isinstance(leaf.data, np.ndarray) and leaf.data.shape == tuple(leaf.batch_size)
        leaf = leaf.data if whole else [leaf.data] * leaf.batch_size.numel()
    if not isinstance(leaf, (NonTensorStack, np.ndarray, list)):
        raise _refuse(op, field, f"a {type(leaf).__name__} is neither a tensor nor one value per row")
    values = leaf.tolist() if isinstance(leaf, NonTensorStack) else list(leaf)
    # np.array would make a matrix of values of equal length.
    return np.fromiter(values, dtype=object, count=len(values))


def _pad(leaf: torch.Tensor, pad: float, least: int, multiple: int, op: str, field: str) -> torch.Tensor:
    """Pad a nested leaf to a rectangle, or a rectangular one to the width; one of the right shape is not copied."""
    if leaf.is_nested:
        values, offsets, dim = packed(_nested(leaf, op, field))
        lengths = torch.from_numpy(np.diff(offsets))
        width = _width(int(lengths.max()) if len(lengths) else 0, least, multiple)
        shape = (len(lengths), width, *values.shape[1:])
        if bool((lengths == width).all()):
            padded = values.reshape(shape)
        else:
            padded = _canvas(shape, pad, values, op, field)
            _bits(padded)[_filled(lengths, width, padded.device)] = _bits(values)
        return padded.movedim(1, dim + 1).contiguous() if dim else padded
    n, longest = leaf.shape[:2]
    width = _width(longest, least, multiple)
    if width == longest:
        return leaf
    padded = _canvas((n, width, *leaf.shape[2:]), pad, leaf, op, field)
    padded[:, :longest] = _plain(leaf, op, field)
    return padded


def _width(longest: int, least: int, multiple: int) -> int:
    return -(-max(longest, least) // multiple) * multiple


def _canvas(shape: tuple[int, ...], pad: float, like: torch.Tensor, op: str, field: str) -> torch.Tensor:
    """Allocate the result, filled with the padding value; refuse a value that torch would silently change."""
    try:
        if like.dtype == torch.bool:
            fits = pad in (0, 1)
        elif like.dtype.is_floating_point or like.dtype.is_complex:
            probe = torch.full((1,), pad, dtype=like.dtype).to(torch.complex128).item()
            # A value that is rounded is accepted (0.1 in bf16), one that is saturated is not (1e9 in float8_e4m3fn).
            fits = abs(pad) <= torch.finfo(like.dtype).max or probe == pad or cmath.isnan(pad)
        else:
            limits = torch.iinfo(like.dtype)
            fits = limits.min <= pad <= limits.max and int(pad) == pad
        if fits:
            return torch.full(shape, pad, dtype=like.dtype, device=like.device)
    except (RuntimeError, TypeError, OverflowError) as err:
        raise _refuse(op, field, f"{like.dtype} cannot hold the padding value {pad!r}") from err
    raise _refuse(op, field, f"{like.dtype} cannot hold the padding value {pad!r}")


# --- checks ---------------------------------------------------------------------------------------------------------


def _names(given: Collection[str] | None, op: str) -> frozenset[str]:
    """Check a collection of names; refuse a lone string, which would be read as a collection of letters."""
    if isinstance(given, str):
        raise _refuse(op, "token_aligned_fields", f"takes a collection of names, not {given!r}")
    return frozenset(given or ())


def _plain(tensor: object, op: str, field: str) -> torch.Tensor:
    """Return a tensor without grad and lazy conjugation, which cannot be stored; refuse one without plain values."""
    if not isinstance(tensor, torch.Tensor):
        raise _refuse(op, field, f"takes a tensor, not a {type(tensor).__name__}")
    found = plain(tensor)
    if found is None:
        raise _refuse(op, field, f"{_describe(tensor)} of layout {tensor.layout} on {tensor.device} cannot be kept")
    return found


def _describe(value: object) -> str:
    """Return a description of a value by type and shape, never by its content."""
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    dtype = str(value.dtype).removeprefix("torch.")
    return f"a nested {dtype} tensor" if value.is_nested else f"{dtype} of shape {tuple(value.shape)}"


def _refuse(op: str, field: str, why: str) -> DataPlaneBadRequest:
    return DataPlaneBadRequest(f"{field!r}: {why}", op=op, field=field)
