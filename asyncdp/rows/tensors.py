"""Tensors that users give: what can be stored of them, and the parts of nested ones (layout ``torch.jagged``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from .column import picked
from .offsets import offsets_of, steps_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["from_array", "jagged", "packed", "plain"]


def plain(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return a tensor without grad and lazy conjugation, which are not stored, on its device.

    None for a tensor whose values cannot be stored: a sparse, quantized or meta tensor.
    """
    if tensor.layout not in (torch.strided, torch.jagged) or tensor.is_quantized or tensor.device.type == "meta":
        return None
    return tensor.detach() if tensor.is_nested else tensor.detach().resolve_conj().resolve_neg()


def from_array(array: npt.NDArray[Any]) -> torch.Tensor:
    """Return an array of numbers as a tensor; it is copied if its bytes are swapped, it is read-only or reversed.

    Raises:
        TypeError, ValueError: torch has no dtype for it, or cannot express its strides.
    """
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    elif not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    return torch.from_numpy(array)


def packed(nested: Any) -> tuple[torch.Tensor, npt.NDArray[np.int64], int]:
    """Return the parts of a nested tensor of layout ``torch.jagged``, without a copy if it has no gaps between rows.

    Returns:
        The values of all rows, concatenated in their first dimension; the n + 1 offsets of the rows in it; and the
        dimension of a row in which rows differ, which was moved to the front.
    """
    dim: int = nested._ragged_idx - 1  # noqa: SLF001 - torch has no public name for it
    values: torch.Tensor = nested.values().movedim(dim, 0)
    starts: npt.NDArray[np.int64] = nested.offsets().cpu().numpy().astype(np.int64)
    sparse_lengths = nested.lengths()
    lengths = np.diff(starts) if sparse_lengths is None else sparse_lengths.cpu().numpy().astype(np.int64)
    offsets = offsets_of(lengths)
    begins = starts[: len(lengths)]
    if not np.array_equal(begins, offsets[:-1]) or offsets[-1] != values.shape[0]:
        values = picked(values, torch.from_numpy(steps_of(begins, offsets)).to(values.device))
    return values, offsets, dim


def jagged(values: torch.Tensor, offsets: npt.NDArray[np.int64], dim: int = 0) -> torch.Tensor:
    """Make a nested tensor, without a copy, of rows that are concatenated in dimension ``dim`` of ``values``."""
    lengths = np.diff(offsets)
    low, high = (int(lengths.min()), int(lengths.max())) if len(lengths) else (0, 0)
    nested: torch.Tensor = torch.nested.nested_tensor_from_jagged(
        values, torch.from_numpy(offsets).to(values.device), jagged_dim=dim + 1, min_seqlen=low, max_seqlen=high
    )
    return nested
