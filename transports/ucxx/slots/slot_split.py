"""Splitting the rows of a put into slots; without I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncdp.errors import DataPlaneBadRequest

from ..payload.layout import ALIGN, bound, bound_of, described

__all__ = ["Split", "cut", "refuse_too_large"]


class RowRange(NamedTuple):
    """Rows ``first`` to ``stop`` (exclusive) of a put, and an upper bound of their payload in bytes."""

    first: int
    stop: int
    capacity: int


class Split(NamedTuple):
    """Rows of a put as slots: the rows of each slot, its units, and the sum of these; no shares: not computed."""

    shares: Sequence[RowRange]
    units: Sequence[int]
    total: int


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
    schema_bytes, columns, total = described(fields), len(fields), sum(sizes)
    whole = bound_of(schema_bytes, columns, len(sizes), total)
    if len(sizes) <= most and whole <= max_slot_bytes:
        return [RowRange(0, len(sizes), whole)]
    refuse_too_large(fields, sizes, max_slot_bytes)
    # Alignment may add up to ALIGN - 1 bytes to the sums below.
    fixed, per_row, room = bound_of(schema_bytes, columns, 0, 0), 8 * columns, max_slot_bytes - ALIGN + 1
    shares, start, used = [], 0, 0
    for at, size in enumerate(sizes):
        rows = at - start
        if rows == most or (rows and fixed + (rows + 1) * per_row + used + size > room):
            shares.append(RowRange(start, at, bound_of(schema_bytes, columns, rows, used)))
            start, used = at, 0
        used += size
    return [*shares, RowRange(start, len(sizes), bound_of(schema_bytes, columns, len(sizes) - start, used))]


def refuse_too_large(fields: Sequence[str], sizes: Sequence[int], max_slot_bytes: int) -> None:
    """Refuse rows that fit into no slot.

    Raises:
        DataPlaneBadRequest: A row is larger than ``max_slot_bytes``; the message gives its size.
    """
    size = max(sizes, default=0)
    if bound(fields, (size,)) > max_slot_bytes:
        msg = f"a row of {size} bytes is larger than the largest slot (max_slot_bytes={max_slot_bytes})"
        raise DataPlaneBadRequest(msg)
