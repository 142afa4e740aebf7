"""Rows whose every element says whose row it is and of which put; their sizes are as mixed as can be."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

import torch

__all__ = ["FIELDS", "WrongBytesError", "fields_of", "lengths", "versions_of"]

FIELDS = ["x", "y"]
#: Longest row, in elements of 8 bytes.
LONGEST = 40_000


class WrongBytesError(AssertionError):
    """A row came that is not the one that was asked for, or that is not whole."""


def _mark(sample_id: str) -> int:
    return zlib.crc32(sample_id.encode())


def lengths(rng: Random, n: int) -> list[int]:
    """Draw lengths of rows: most are short, some long, a few empty."""
    return [int(LONGEST * rng.random() ** 4) for _ in range(n)]


def fields_of(ids: Sequence[str], version: int, sizes: Sequence[int]) -> dict[str, Any]:
    """``x``: ragged, the id's mark and the version in turns; ``y``: (n, 4), the mark, the version, the length, 7."""
    marks = torch.tensor([_mark(sample_id) for sample_id in ids])
    rows = []
    for mark, size in zip(marks, sizes, strict=True):
        row = torch.full((size,), version)
        row[0::2] = mark
        rows.append(row)
    y = torch.stack([marks, torch.full_like(marks, version), torch.tensor(sizes), torch.full_like(marks, 7)], 1)
    return {"x": torch.nested.nested_tensor(rows, layout=torch.jagged), "y": y}


def versions_of(ids: Sequence[str], rows: Any) -> dict[str, int]:
    """Check rows element by element; return which version of each came.

    Raises:
        WrongBytesError: A row is another one's, or put together from two.
    """
    out = {}
    for sample_id, x, y in zip(ids, rows["x"].unbind(), rows["y"].unbind(), strict=True):
        mark, version, size, seven = y.tolist()
        right = mark == _mark(sample_id) and seven == 7 and size == len(x)
        if not (right and bool((x[0::2] == mark).all()) and bool((x[1::2] == version).all())):
            raise WrongBytesError(f"row {sample_id!r} came with {y.tolist()} and {x[:4].tolist()} of {len(x)}")
        out[sample_id] = version
    return out
