"""Splitting the rows of a put into slots; without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncdp.errors import DataPlaneBadRequest

from ..payload.layout import ALIGN, bound

__all__ = ["RowRange", "cut"]


class RowRange(NamedTuple):
    """Rows ``first`` to ``stop`` (exclusive) of a put, and an upper bound of their payload in bytes."""

    first: int
    stop: int
    capacity: int


def cut(fields: Sequence[str], sizes: Sequence[int], max_slot_bytes: int, rows_per_slot: int | None) -> list[RowRange]:
    """Split rows into as few slots as the limits allow, in order.

    Args:
        fields: Names of the put's fields.
        sizes: Data bytes of each row.
        max_slot_bytes: Largest payload of a slot, in bytes.
        rows_per_slot: Most rows of a slot; None: as many as fit.

    Raises:
        DataPlaneBadRequest: A single row is larger than the largest payload.
    """
    most = rows_per_slot or max(1, len(sizes))
    whole = bound(fields, sizes)
    if len(sizes) <= most and whole <= max_slot_bytes:
        return [RowRange(0, len(sizes), whole)]
    # Alignment may add up to ALIGN - 1 bytes to the sums below.
    fixed, per_row, room = bound(fields, ()), 8 * len(fields), max_slot_bytes - ALIGN + 1
    shares, start, used = [], 0, fixed
    for at, size in enumerate(sizes):
        if fixed + per_row + size > room and bound(fields, (size,)) > max_slot_bytes:
            msg = f"a row of {size} bytes is larger than the largest slot (max_slot_bytes={max_slot_bytes})"
            raise DataPlaneBadRequest(msg)
        if at - start == most or (at > start and used + per_row + size > room):
            shares.append(RowRange(start, at, bound(fields, sizes[start:at])))
            start, used = at, fixed
        used += per_row + size
    return [*shares, RowRange(start, len(sizes), bound(fields, sizes[start:]))]
