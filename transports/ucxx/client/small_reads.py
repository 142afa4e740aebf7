"""Reads of a few rows of one slot over the lane, as a client makes thousands of a second.

What a slot's payload looks like is remembered by the bytes that it begins with, since those of one put are equal. A
read is then a comparison of these bytes and one copy per field, between two looks at the slot's header. Whatever is not
as usual is left to :class:`~.lane.Lane`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

from asyncdp.calls.slots import Part, ReadResult
from asyncdp.errors import CorruptPayload
from asyncdp.rows.block import Block, Column, Dense

from ..payload.gather import span_of
from ..payload.layout import DENSE, read_layout, schema_of
from ..slots.arena import WORDS
from ..slots.header import DEAD, STATE, State

if TYPE_CHECKING:
    from asyncdp.calls.slots import SlotRef

    from ..payload.layout import Layout
    from ..slots.arena import Arena

__all__ = ["SmallReads"]

#: Largest read in bytes; larger ones get memory of the pool, and let the event loop run.
_SMALL_BYTES: Final = 512 << 10
#: Longest head of a payload in bytes that is remembered, and most of them.
_HEAD: Final = 512
_MOST: Final = 256


class _Field(NamedTuple):
    """A field of a payload: its name, offset in bytes, bytes of a row, dtype, and shape of a row."""

    name: str
    at: int
    unit: int
    dtype: torch.dtype
    shape: tuple[int, ...]


class _Known(NamedTuple):
    """Fields of payloads that begin with the same bytes.

    Attributes:
        rows, nbytes: Number of rows, and bytes, of the payload.
        row_nbytes: Bytes of one row in these fields.
        fields: The fields.
        schema: Hash of their schema.
    """

    rows: int
    nbytes: int
    row_nbytes: int
    fields: tuple[_Field, ...]
    schema: int


class SmallReads:
    """Reads rows that lie one after the other in one slot, of fields whose rows have one shape.

    Args:
        arena: The host's arena, attached.
    """

    def __init__(self, arena: Arena) -> None:
        """Start without remembered payloads."""
        self._arena = arena
        self._known: dict[tuple[bytes, tuple[str, ...]], _Known] = {}
        self._head_bytes: list[int] = []

    def read(self, ref: SlotRef) -> ReadResult | None:
        """Return rows, or None where the slot has to be read in the general way; ``ref`` is of this arena."""
        span = span_of(ref.index)
        if span is None or not self._whole(ref):
            return None
        begin = self._arena.payload_at(ref.slot)
        known = self._look(ref, begin)
        first, stop = span
        if known is None or not 0 <= first < stop <= known.rows:
            return None
        n = stop - first
        if n * known.row_nbytes > _SMALL_BYTES or begin + known.nbytes > self._arena.nbytes:
            return None
        data = self._arena.data
        columns: dict[str, Column] = {}
        for field in known.fields:
            at = begin + field.at + first * field.unit
            copied = torch.from_numpy(data[at : at + n * field.unit].copy())
            columns[field.name] = Dense(copied.view(field.dtype).view(n, *field.shape))
        if not self._whole(ref):
            return None
        part = Part((0,), Block(n, columns), (n * known.row_nbytes,), known.schema)
        return ReadResult((part,), {}, through_port=False)

    def _whole(self, ref: SlotRef) -> bool:
        """Return whether the slot holds the generation that the ref means, written, and no row of it is dead.

        Dead rows are looked for first, because a slot that is reused first stops being READY.
        """
        words, base = self._arena.words, ref.slot * WORDS
        dead, state = words[base + DEAD], words[base + STATE]
        return not dead and state == ref.generation << 8 | State.READY and not self._arena.given_up

    def _look(self, ref: SlotRef, begin: int) -> _Known | None:
        """Return the fields of the slot's payload that the ref names; None where they cannot be read here."""
        head = self._arena.data[begin : begin + _HEAD].tobytes()
        for size in self._head_bytes:
            known = self._known.get((head[:size], ref.fields))
            if known is not None:
                return known
        try:
            layout = read_layout(self._arena.data[begin:])
        except CorruptPayload:
            return None
        known = _known(layout, ref.fields) if layout.head_bytes <= _HEAD else None
        if known is None:
            return None
        if len(self._known) >= _MOST:
            self._known.clear()
            self._head_bytes.clear()
        if layout.head_bytes not in self._head_bytes:
            self._head_bytes.append(layout.head_bytes)
        self._known[layout.head(), ref.fields] = known
        return known


def _known(layout: Layout, names: tuple[str, ...]) -> _Known | None:
    fields = []
    for name in names:
        at = layout.column(name)
        if at is None:
            return None
        meta = layout.metas[at]
        dtype = getattr(torch, meta.dtype, None)
        if meta.kind != DENSE or not meta.unit or not isinstance(dtype, torch.dtype):
            return None
        fields.append(_Field(name, layout.data_at[at], meta.unit, dtype, meta.shape))
    picked = tuple(layout.metas[at] for name in names if (at := layout.column(name)) is not None)
    return _Known(layout.n, layout.nbytes, sum(field.unit for field in fields), tuple(fields), schema_of(picked))
