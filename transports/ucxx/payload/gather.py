"""Gather: concatenate rows of many payloads in one payload.

It serves reads of many slots, in the slot host (into a message) and on the shared-memory lane (into the reader's
memory). Rows of slots with equal columns go into one payload, others into a payload of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from asyncdp.errors import CorruptPayload
from asyncdp.rows.offsets import offsets_of

from .layout import ColumnMeta, Layout, spans
from .payload import PIECE_BYTES, Payload, copy_pieces, messages_of

if TYPE_CHECKING:
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Gather", "Selection", "gathers"]

#: Scattered runs of rows of up to this many bytes each are picked by numpy in one step; of larger ones, each is copied
#: by itself (1 us each).
_PICK_BYTES: Final = 2048
#: Most bytes of such rows picked in one step; of shorter rows, some 8,000.
_PICKED_BYTES: Final = 1 << 20
#: Bytes that are copied in the time that a copy takes beside that of its bytes (2 us).
_COPY_BYTES: Final = 8192


class Selection(NamedTuple):
    """A selection of rows and fields of one payload.

    Attributes:
        ref: Number by which the caller identifies the selection.
        payload: Payload that holds the rows.
        fields: Names of the selected columns.
        rows: Indices of the selected rows, in order; a range or integers.
    """

    ref: int
    payload: Payload
    fields: tuple[str, ...]
    rows: Sequence[int]


Span = tuple[int, int]


def span_of(index: Sequence[int]) -> Span | None:
    """Return (first, stop) where the index counts up by one, else None."""
    if isinstance(index, range):
        return (index.start, index.stop) if index.step == 1 else None
    if not index:
        return 0, 0
    first, count = index[0], len(index)
    if index[-1] - first != count - 1 or list(index) != list(range(first, first + count)):
        return None
    return first, first + count


@dataclass(slots=True)
class Gather:
    """A payload to be built from selections with equal columns.

    Attributes:
        picks: The selections, in order.
        layout: Layout of the payload to be built.
        nbytes: Data bytes of each selection.
    """

    picks: list[Selection]
    layout: Layout
    nbytes: tuple[int, ...]
    _spans: list[Span | None]
    _columns: list[list[int]] = field(default_factory=list)

    @classmethod
    def of(cls, picks: list[Selection], metas: tuple[ColumnMeta, ...]) -> Gather:
        """Return the gather that builds the payload of these selections; ``metas`` are its columns."""
        marks = [span_of(pick.rows) for pick in picks]
        counts = [len(pick.rows) for pick in picks]
        places: dict[bytes, list[int]] = {}
        for pick in picks:
            layout = pick.payload.layout
            if layout.schema not in places:
                at_name = {meta.name: at for at, meta in enumerate(layout.metas)}
                places[layout.schema] = [at_name[meta.name] for meta in metas]
        columns = [[places[pick.payload.layout.schema][at] for pick in picks] for at in range(len(metas))]
        sizes = np.zeros(len(picks), np.int64)
        offsets: list[npt.NDArray[np.int64] | None] = []
        named: list[npt.NDArray[np.int64] | None] | None = None
        firsts = np.asarray([first for first, _ in spans(counts)], np.int64)
        for meta, column in zip(metas, columns, strict=True):
            if picks[0].payload.layout.offsets[column[0]] is None:
                offsets.append(None)
                sizes += np.asarray(counts, np.int64) * meta.unit
                continue
            if named is None:  # once for all columns
                named = [
                    None if mark is not None else np.asarray(pick.rows, np.int64)
                    for pick, mark in zip(picks, marks, strict=True)
                ]
            lengths = np.concatenate(
                [
                    _lengths(pick, at, mark, rows)
                    for pick, at, mark, rows in zip(picks, column, marks, named, strict=True)
                ]
            )
            steps = offsets_of(lengths)
            offsets.append(steps)
            sizes += (steps[firsts + counts] - steps[firsts]) * meta.unit
        layout = Layout.make(sum(counts), metas, offsets)
        return cls(picks, layout, tuple(sizes.tolist()), marks, columns)

    @property
    def counts(self) -> list[int]:
        """Number of rows of each selection."""
        return [len(pick.rows) for pick in self.picks]

    def messages(self, size: int, take: Callable[[int], Bytes], copied: int) -> Iterator[Bytes | None]:
        """Return the payload as messages of ``size`` bytes, the last one shorter; as :func:`.payload.messages_of`."""
        left = self.layout.nbytes
        lengths = [min(size, left - begin) for begin in range(0, left, size)]
        return messages_of(self._segments(), lengths, take, copied)

    def _segments(self) -> Iterator[Bytes]:
        """Return all bytes of the payload, in order, in pieces as they lie."""
        yield np.frombuffer(self.layout.head(), np.uint8)
        gaps = dict(self.layout.gaps())
        for number, meta in enumerate(self.layout.metas):
            end = self.layout.data_at[number] + self.layout.data_bytes[number]
            if self.layout.data_bytes[number]:
                for pick, place, mark in zip(self.picks, self._columns[number], self._spans, strict=True):
                    yield from _pieces(pick, place, mark, meta.unit)
            if end in gaps:
                yield np.zeros(gaps[end] - end, np.uint8)

    def fill(self, out: Bytes, piece_bytes: int = PIECE_BYTES) -> Iterator[int]:
        """Write the payload into ``out`` as a generator, which yields the number of bytes copied after each piece.

        A piece is at most ``piece_bytes``; each copy counts for ``_COPY_BYTES`` at least.
        """
        head = self.layout.head()
        out[: len(head)] = np.frombuffer(head, np.uint8)
        for begin, end in self.layout.gaps():
            out[begin:end] = 0
        since = 0
        for number, meta in enumerate(self.layout.metas):
            if not self.layout.data_bytes[number]:
                continue
            at = self.layout.data_at[number]
            for pick, place, mark in zip(self.picks, self._columns[number], self._spans, strict=True):
                for piece in _pieces(pick, place, mark, meta.unit):
                    size = len(piece)
                    if size > piece_bytes:
                        yield from copy_pieces(out[at : at + size], piece, piece_bytes)
                    else:
                        out[at : at + size] = piece
                        since += max(size, _COPY_BYTES)
                        if since >= piece_bytes:
                            yield since
                            since = 0
                    at += size
        yield since


def _lengths(pick: Selection, at: int, mark: Span | None, rows: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64]:
    offsets = pick.payload.layout.offsets[at]
    assert offsets is not None  # noqa: S101 - not dense
    if mark is not None:
        return offsets[mark[0] + 1 : mark[1] + 1] - offsets[mark[0] : mark[1]]
    assert rows is not None  # noqa: S101 - given where there is no span
    return offsets[rows + 1] - offsets[rows]


def _pieces(pick: Selection, at: int, mark: Span | None, unit: int) -> Iterable[Bytes]:
    """Return the bytes of the selected rows of one column, in order."""
    layout = pick.payload.layout
    offsets = layout.offsets[at]
    if mark is not None:
        begin, end = mark if offsets is None else (int(offsets[mark[0]]), int(offsets[mark[1]]))
        base = layout.data_at[at]
        return (pick.payload.data[base + begin * unit : base + end * unit],)
    return _scattered(pick, pick.payload.bytes_of(at), offsets, unit)


def _scattered(pick: Selection, data: Bytes, offsets: npt.NDArray[np.int64] | None, unit: int) -> Iterator[Bytes]:
    index = np.asarray(pick.rows, np.int64)
    if not unit or not len(index):
        return
    cuts = np.flatnonzero(np.diff(index) != 1) + 1  # rows that follow one another are copied in one step
    if offsets is None and len(index) * unit <= _PICK_BYTES * (len(cuts) + 1):
        rows = data.reshape(pick.payload.layout.n, unit)
        step = max(1, _PICKED_BYTES // max(unit, _PICK_BYTES >> 4))
        for begin in range(0, len(index), step):
            yield rows[index[begin : begin + step]].reshape(-1)
        return
    firsts, stops = index[np.r_[0, cuts]], index[np.r_[cuts, 0] - 1] + 1
    if offsets is not None:
        firsts, stops = offsets[firsts], offsets[stops]
    for first, stop in zip((firsts * unit).tolist(), (stops * unit).tolist(), strict=True):
        yield data[first:stop]


def _within(index: Sequence[int], n: int) -> bool:
    if isinstance(index, range) and index.step == 1:
        return index.start >= 0 and index.stop <= n
    return min(index, default=0) >= 0 and max(index, default=-1) < n


def gathers(selections: Sequence[Selection]) -> tuple[list[Gather], dict[int, CorruptPayload]]:
    """Group selections by their columns, in order within a group.

    Returns the payloads to be built, and an error for each selection whose payload lacks a field or a row.
    """
    groups: dict[tuple[ColumnMeta, ...], list[Selection]] = {}
    known: dict[tuple[bytes, tuple[str, ...]], list[Selection] | CorruptPayload] = {}
    errors: dict[int, CorruptPayload] = {}
    for pick in selections:
        layout = pick.payload.layout
        key = (layout.schema, pick.fields)
        group = known.get(key)
        if group is None:
            by_name = {meta.name: meta for meta in layout.metas}
            lacking = next((name for name in pick.fields if name not in by_name), None)
            if lacking is None:
                group = groups.setdefault(tuple(by_name[name] for name in pick.fields), [])
            else:  # one error for all of them, since a name may be long
                group = CorruptPayload(f"the slot holds no field {lacking!r:.80}", field=lacking)
            known[key] = group
        if isinstance(group, CorruptPayload):
            errors[pick.ref] = group
        elif not _within(pick.rows, layout.n):
            errors[pick.ref] = CorruptPayload(f"the slot holds {layout.n} rows, not all that were asked for")
        else:
            group.append(pick)
    return [Gather.of(picks, metas) for metas, picks in groups.items() if picks], errors
