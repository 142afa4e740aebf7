"""Cells: the places of a sample's fields in slots. The server treats a slot's name as opaque bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from asyncdp.errors import DataPlaneBadRequest

from .msgpack_codec import load, pack

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.calls.slots import SlotRef

__all__ = ["DeadCells", "SlotName", "cells_of", "dead_cells", "pieces", "replaced_cells", "slot_name"]


@dataclass(frozen=True, slots=True)
class SlotName:
    """Identifies one use of one slot: host, epoch, number and generation."""

    host: str
    epoch: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class DeadCells:
    """Rows of a slot whose life has ended.

    Attributes:
        slot: Slot that holds the rows.
        index: Indices of the rows in the slot.
        fields: The dead fields, where others of the same rows are still live; None: all fields.
    """

    slot: SlotName
    index: tuple[int, ...]
    fields: tuple[str, ...] | None = None


def pack_slot(ref: SlotRef) -> bytes:
    """Return the key of a ref's slot."""
    return pack((ref.host.id, ref.host.epoch, ref.slot, ref.generation))


def slot_name(key: bytes) -> SlotName:
    """Decode a key that :func:`pack_slot` encoded."""
    return SlotName(*msgpack.unpackb(key, unicode_errors="surrogatepass"))


def cells_of(
    n: int, refs: Sequence[SlotRef], numbers: Mapping[str, int], nbytes: Mapping[str, Sequence[int]]
) -> tuple[list[Any], list[int], list[list[int]], list[int]]:
    """Pack the cells of each row of a put.

    Args:
        n: Number of rows of the put.
        refs: Slots that hold the rows.
        numbers: Field numbers by field name.
        nbytes: By field name, the data bytes of each row.

    Returns:
        Per row its packed cells (None: the put has no fields for it); per row its data bytes; the shapes, each a list
        of the field numbers that a row gets; and per row the number of its shape, counted from 1.
    """
    pieces: list[list[bytes]] = [[] for _ in range(n)]
    fields: list[tuple[int, ...]] = [()] * n
    total = [0] * n
    for ref in refs:
        named = tuple(numbers[name] for name in ref.fields)
        head, tail = b"\x94" + pack(pack_slot(ref)), pack(named)
        columns = [nbytes.get(name) for name in ref.fields]
        if len(ref.index) != len(ref.rows):
            raise DataPlaneBadRequest(f"slot {ref.slot}: {len(ref.index)} places for {len(ref.rows)} rows")
        for index, row in zip(ref.index, ref.rows, strict=True):
            sizes = [0 if column is None else int(column[row]) for column in columns]
            pieces[row].append(head + pack(int(index)) + tail + pack(sizes))
            fields[row] += named
            total[row] += sum(sizes)
    cells = [_array(len(row)) + b"".join(row) if row else None for row in pieces]
    shapes = {shape: at for at, shape in enumerate(dict.fromkeys(fields), 1)}
    return cells, total, [list(shape) for shape in shapes], [shapes[shape] for shape in fields]


def _array(n: int) -> bytes:
    """Return the head of a msgpack array of ``n`` items."""
    return bytes((0x90 + n,)) if n < 16 else b"\xdc" + n.to_bytes(2, "big")  # noqa: PLR2004 - the format's limit


def dead_cells(spots: Iterable[Sequence[Any]]) -> tuple[DeadCells, ...]:
    """Decode pairs of slot key and row indices."""
    return tuple(DeadCells(slot_name(key), tuple(index)) for key, index in spots)


def replaced_cells(dead: Iterable[Sequence[Any]], names: Sequence[str]) -> tuple[DeadCells, ...]:
    """Decode triples of slot key, row index and field numbers (or false for all); merge those of one slot."""
    merged: dict[tuple[bytes, tuple[str, ...] | None], list[int]] = {}
    for key, index, numbers in dead:
        # Numbers beyond the schema mean that the partition was dropped since, and the whole rows with it.
        whole = numbers is False or max(numbers) > len(names)
        fields = None if whole else tuple(names[number - 1] for number in numbers)
        merged.setdefault((key, fields), []).append(index)
    return tuple(DeadCells(slot_name(key), tuple(index), fields) for (key, fields), index in merged.items())


def pieces(blob: bytes | None) -> list[Any]:
    """Decode the cells of one row: slot key, row index, field numbers and data bytes of each."""
    return load(blob) if blob else []
