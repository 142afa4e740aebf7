"""Cells: the places of a sample's fields in slots. The server treats a slot's name as opaque bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgpack

from asyncdp.errors import DataPlaneBadRequest

from .msgpack_codec import load, pack, packer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.calls.slots import SlotRef

__all__ = [
    "Cells",
    "DeadCells",
    "RowLocations",
    "SlotName",
    "cells_of",
    "dead_cells",
    "hints_of",
    "homes_named",
    "mark_of",
    "pieces",
    "replaced_cells",
    "slot_name",
]


class SlotName(NamedTuple):
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
    """Decode a key that :func:`pack_slot` encoded.

    Raises:
        ValueError, TypeError: It is none.
    """
    host, *numbers = msgpack.unpackb(key, unicode_errors="surrogatepass")
    if type(host) is not str or any(type(number) is not int for number in numbers):
        raise ValueError(f"{key!r:.80} names no slot")
    return SlotName(host, *numbers)


class Cells(NamedTuple):
    """The packed cells of the rows of a put.

    Attributes:
        cells: Per row its packed cells; False: the put has no fields for it.
        nbytes: Per row its data bytes.
        shapes: Distinct lists of the field numbers that a row gets.
        homes: Per shape the homes of its slots, each the packed host and epoch.
        shape: Per row the number of its shape, counted from 1.
    """

    cells: list[bytes | bool]
    nbytes: list[int]
    shapes: list[list[int]]
    homes: list[list[bytes]]
    shape: list[int]


def cells_of(n: int, refs: Sequence[SlotRef], numbers: Mapping[str, int], nbytes: Mapping[str, Sequence[int]]) -> Cells:
    """Pack the cells of each row of a put.

    Args:
        n: Number of rows of the put.
        refs: Slots that hold the rows.
        numbers: Field numbers by field name.
        nbytes: By field name, the data bytes of each row.
    """
    packed: list[bytes] = [b""] * n
    count, total, kind = [0] * n, [0] * n, [0] * n
    kinds: dict[tuple[int, tuple[int, ...], bytes], int] = {}
    known: list[tuple[tuple[int, ...], tuple[bytes, ...]]] = [((), ())]
    encode = packer().pack
    for ref in refs:
        if len(ref.index) != len(ref.rows):
            raise DataPlaneBadRequest(f"slot {ref.slot}: {len(ref.index)} places for {len(ref.rows)} rows")
        fields = tuple(numbers[name] for name in ref.fields)
        home = pack(ref.host.id) + pack(ref.host.epoch)
        head, tail = b"\x94" + pack(pack_slot(ref)), pack(fields)
        every = ref.rows == range(n)
        columns = [_chosen(nbytes.get(name), ref.rows, every=every) for name in ref.fields]
        sizes = list(zip(*columns, strict=True)) if columns else [()] * len(ref.rows)
        ends = {size: (tail + encode([int(one) for one in size]), int(sum(size))) for size in set(sizes)}
        if every and len(refs) == 1:
            head = b"\x91" + head
            return Cells(
                [head + encode(int(at)) + ends[size][0] for at, size in zip(ref.index, sizes, strict=True)],
                [ends[size][1] for size in sizes],
                [list(fields)],
                [[home]],
                [1] * n,
            )
        for index, row, size in zip(ref.index, ref.rows, sizes, strict=True):
            end = ends[size]
            packed[row] += head + encode(int(index)) + end[0]
            total[row] += end[1]
            count[row] += 1
            step = kind[row], fields, home
            made = kinds.get(step)
            if made is None:
                before = known[kind[row]]
                made = kinds[step] = len(known)
                known.append((before[0] + fields, tuple(dict.fromkeys((*before[1], home)))))
            kind[row] = made
    cells = [_array(pieces) + row if pieces else False for row, pieces in zip(packed, count, strict=True)]
    used = {number: at for at, number in enumerate(dict.fromkeys(kind), 1)}
    shapes, homes = [list(known[number][0]) for number in used], [list(known[number][1]) for number in used]
    return Cells(cells, total, shapes, homes, [used[number] for number in kind])


def _chosen(column: Sequence[int] | None, rows: Sequence[int], *, every: bool) -> Sequence[int]:
    """Return the data bytes of some rows; zeros where the put does not tell them."""
    if column is None:
        return [0] * len(rows)
    return column if every else [column[row] for row in rows]


def homes_named(homes: bytes) -> Iterator[tuple[str, int]]:
    """Decode joined homes: host and epoch of each."""
    parts = msgpack.Unpacker(unicode_errors="surrogatepass")
    parts.feed(homes)
    return zip(parts, parts, strict=True)


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


def mark_of(version: bytes, moved: bytes) -> bytes:
    """Return when the places of rows were noted: the version of the schema, and when rows of it last moved."""
    return version + b" " + moved


def hints_of(
    sample_ids: Sequence[str], mark: bytes, cells: Sequence[bytes | bool]
) -> list[tuple[str, bytes, bytes] | None]:
    """Return the hints of rows: the id, when their places were noted, and their cells; None for one without cells."""
    return [
        (sample_id, mark, cell) if isinstance(cell, bytes) else None
        for sample_id, cell in zip(sample_ids, cells, strict=True)
    ]


class RowLocations:
    """Collects where the rows of a request lie: by slot key and fields, row indices in the slot and in the request.

    Args:
        names: Fields to be read.
        numbers: Their numbers; 0 for a field that no row has.
    """

    def __init__(self, names: tuple[str, ...], numbers: Sequence[int]) -> None:
        """Start without rows."""
        self.spots: dict[tuple[bytes, tuple[str, ...]], tuple[list[int], list[int]]] = {}
        self._names = names
        self._numbers = numbers

    def add(self, rows: Iterable[tuple[int, bytes | None]]) -> dict[int, str]:
        """Add rows by their packed cells; return the first field that is not produced, by row, where one is not.

        Raises:
            ValueError: The bytes of a row are no cells.
        """
        absent: dict[int, str] = {}
        # What a row of the same slot and fields as the last one begins with, and has behind its index in the slot.
        head, fields, at = b"", b"", 0
        spot: tuple[list[int], list[int]] = ([], [])
        for row, blob in rows if self._names else ():
            if at and blob and blob.startswith(head):
                first = blob[at]
                size = 1 if first < 0x80 else 2 if first == 0xCC else 3 if first == 0xCD else 0  # noqa: PLR2004 - msgpack
                if size and blob.startswith(fields, at + size):
                    spot[0].append(first if size == 1 else int.from_bytes(blob[at + 1 : at + size], "big"))
                    spot[1].append(row)
                    continue
            mine = pieces(blob)
            if any(type(piece[1]) is not int for piece in mine):
                raise ValueError(f"{blob!r:.80} are no cells")
            name = self._add(row, mine)
            if name is not None:
                absent[row] = name
            elif len(mine) == 1:
                key, _, numbers, _ = mine[0]
                spot = self.spots[key, self._names]
                head, fields = b"\x91\x94" + pack(key), pack(numbers)
                at = len(head)
        return absent

    def _add(self, row: int, mine: Sequence[Any]) -> str | None:
        if len(mine) == 1 and all(map(mine[0][2].__contains__, self._numbers)):
            indices, rows = self.spots.setdefault((mine[0][0], self._names), ([], []))
            indices.append(mine[0][1])
            rows.append(row)
            return None
        where = {number: at for at, piece in enumerate(mine) for number in piece[2]}
        found: dict[int, list[str]] = {}
        for name, number in zip(self._names, self._numbers, strict=True):
            if number not in where:
                return name
            found.setdefault(where[number], []).append(name)
        for at, names in found.items():
            indices, rows = self.spots.setdefault((mine[at][0], tuple(names)), ([], []))
            indices.append(mine[at][1])
            rows.append(row)
        return None
