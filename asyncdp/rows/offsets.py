"""Offsets of rows that are concatenated; needs no torch, which slot hosts do not import."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["offsets_of", "steps_of"]


def offsets_of(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the offsets of n rows with these lengths, int64 ``(..., n + 1)`` for lengths ``(..., n)``."""
    offsets = np.zeros((*lengths.shape[:-1], lengths.shape[-1] + 1), dtype=np.int64)
    lengths.cumsum(axis=-1, out=offsets[..., 1:])
    return offsets


def steps_of(starts: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return, for rows with the lengths of ``offsets`` that begin at ``starts``, the index of each of their steps."""
    return np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts - offsets[:-1], np.diff(offsets))
