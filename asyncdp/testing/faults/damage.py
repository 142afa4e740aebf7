"""Damage to payloads in transit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from asyncdp.rows.block import Block, Dense, Objects, Ragged

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from asyncdp.calls.slots import Part, ReadSlots

__all__ = ["damaged", "flip_bit"]


def damaged(part: Part, call: ReadSlots, slots: Collection[int], kind: str, draw: float, *, schema: bool) -> Part:
    """Return a part of a read's answer with the payload of some slots damaged.

    Args:
        part: The part as the host sent it, for some of the slots.
        call: The read request.
        slots: Indexes of the slots to damage, in the refs of the read.
        kind: ``"truncate"``: remove the last row of the slot. ``"corrupt"``: flip one bit.
        draw: Random number in [0, 1) that selects the bit.
        schema: Whether to damage the schema hash instead of the payload.
    """
    first = 0
    cut: list[int] = []
    for ref in part.refs:
        count = len(call.refs[ref].rows)
        if ref in slots and count:
            if kind == "truncate":
                cut.append(first + count - 1)
            elif schema:
                part = replace(part, schema=part.schema ^ 1)
            else:
                block = part.block.take(range(part.block.n))
                flip_bit(block, range(first, first + count), draw)
                part = replace(part, block=block)
        first += count
    if cut:
        part = replace(part, block=part.block.take([row for row in range(part.block.n) if row not in cut]))
    return part


def flip_bit(block: Block, rows: Sequence[int], draw: float) -> bool:
    """Flip one bit of these rows in place; return False if they have no bytes. The block must own its memory."""
    spots: list[tuple[str, int, int]] = []
    for name in sorted(block.columns):
        sizes = block.columns[name].row_nbytes()
        spots.extend((name, row, int(sizes[row])) for row in rows)
    total = sum(size for _, _, size in spots)
    if not total:
        return False
    at = int(draw * total)
    for name, row, size in spots:
        if at < size:
            _flip(block, name, row, at)
            break
        at -= size
    return True


def _flip(block: Block, name: str, row: int, at: int) -> None:
    column = block.columns[name]
    if isinstance(column, Objects):
        item = column.items[row]
        column.items[row] = item[:at] + bytes([item[at] ^ 1]) + item[at + 1 :]
        return
    assert isinstance(column, (Dense, Ragged))  # noqa: S101 - there are no others
    if isinstance(column, Dense):
        values = column.values[row : row + 1]
    else:
        values = column.values[int(column.offsets[row]) : int(column.offsets[row + 1])]
    # Flipping the lowest bit of a byte keeps the value valid for every dtype, including bool.
    values.reshape(-1).view(torch.uint8)[at] ^= 1
