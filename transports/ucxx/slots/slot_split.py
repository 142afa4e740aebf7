"""How the rows of a put are cut into slots. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from asyncdp.errors import DataPlaneBadRequest

from ..payload.layout import ALIGN, bound

__all__ = ["Share", "cut"]


class Share(NamedTuple):
    """Rows ``first`` to ``stop`` of a put, and the bytes that their payload never exceeds."""

    first: int
    stop: int
    capacity: int


def cut(fields: Sequence[str], sizes: Sequence[int], max_slot_bytes: int, rows_per_slot: int | None) -> list[Share]:
    """Cut rows into slots: as few as may be, in order.

    Args:
        fields: Names of the put's fields.
        sizes: Data bytes per row.
        max_slot_bytes: Largest payload.
        rows_per_slot: Most rows of a slot; None: as many as fit.

    Raises:
        DataPlaneBadRequest: A row alone is larger than the largest payload.
    """
    most = rows_per_slot or max(1, len(sizes))
    whole = bound(fields, sizes)
    if len(sizes) <= most and whole <= max_slot_bytes:
        return [Share(0, len(sizes), whole)]
    # What begins on a boundary may lie up to ALIGN - 1 bytes behind what is summed up here.
    fixed, per_row, room = bound(fields, ()), 8 * len(fields), max_slot_bytes - ALIGN + 1
    shares, start, used = [], 0, fixed
    for at, size in enumerate(sizes):
        if fixed + per_row + size > room and bound(fields, (size,)) > max_slot_bytes:
            msg = f"a row of {size} bytes is larger than the largest slot (max_slot_bytes={max_slot_bytes})"
            raise DataPlaneBadRequest(msg)
        if at - start == most or (at > start and used + per_row + size > room):
            shares.append(Share(start, at, bound(fields, sizes[start:at])))
            start, used = at, fixed
        used += per_row + size
    return [*shares, Share(start, len(sizes), bound(fields, sizes[start:]))]
