"""Lays out rows for Mooncake: large ones stay where they are, small ones are copied together."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

__all__ = ["Lent", "lay_out"]

Region = tuple[int, int]

#: Minimum mean size in bytes of a row from which its values are sent from where they are. Measured: Mooncake needs a
#: connection more for each row, which costs more than the copy of a smaller one.
LARGE_ROW_BYTES = 256 << 10
#: Minimum size in bytes of a value, or of padding, that is sent from where it is.
LARGE_PART_BYTES = 64 << 10
#: Most regions of memory that are registered with Mooncake for one request.
MOST_REGIONS = 8


class Outgoing(NamedTuple):
    """Rows as Mooncake takes them.

    Attributes:
        pointers, sizes: Addresses and sizes in bytes of each row's pieces.
        copied: Memory that was made for them.
        regions: Address and size in bytes of the memory of the caller that they use, without overlaps.
    """

    pointers: list[list[int]]
    sizes: list[list[int]]
    copied: torch.Tensor
    regions: list[Region]


def lay_out(rows: Sequence[Sequence[memoryview]]) -> Outgoing | None:
    """Return rows of large values without a copy of those; None if they are small, or lie in too many places."""
    if sum(part.nbytes for row in rows for part in row) < LARGE_ROW_BYTES * len(rows):
        return None
    copied = torch.frombuffer(
        bytearray().join(part for row in rows for part in row if part.nbytes < LARGE_PART_BYTES), dtype=torch.uint8
    )
    pointers: list[list[int]] = []
    sizes: list[list[int]] = []
    large: list[Region] = []
    at = copied.data_ptr()
    for row in rows:
        pieces: list[Region] = []
        for part in row:
            if part.nbytes >= LARGE_PART_BYTES:
                pieces.append((np.frombuffer(part, np.uint8).ctypes.data, part.nbytes))
                large.append(pieces[-1])
                continue
            if pieces and pieces[-1][0] + pieces[-1][1] == at:
                pieces[-1] = (pieces[-1][0], pieces[-1][1] + part.nbytes)
            else:
                pieces.append((at, part.nbytes))
            at += part.nbytes
        pointers.append([pointer for pointer, _ in pieces])
        sizes.append([size for _, size in pieces])
    regions = _merged(large)
    return Outgoing(pointers, sizes, copied, regions) if len(regions) <= MOST_REGIONS else None


def _merged(pieces: list[Region]) -> list[Region]:
    out: list[Region] = []
    for start, size in sorted(pieces):
        if out and start <= out[-1][0] + out[-1][1]:
            first = out[-1][0]
            out[-1] = (first, max(out[-1][1], start + size - first))
        else:
            out.append((start, size))
    return out


class Lent:
    """The callers' memory that is registered with Mooncake, which refuses to register any of it twice."""

    def __init__(self) -> None:
        """Start with none."""
        self._lock = threading.Lock()
        self._regions: set[Region] = set()

    def take(self, regions: Sequence[Region]) -> bool:
        """Add regions; False, and none is added, if one overlaps with those of another request."""
        with self._lock:
            for start, size in regions:
                if any(start < first + count and first < start + size for first, count in self._regions):
                    return False
            self._regions.update(regions)
            return True

    def give_back(self, regions: Sequence[Region]) -> None:
        """Remove regions."""
        with self._lock:
            self._regions.difference_update(regions)
