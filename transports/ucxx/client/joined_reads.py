"""Small reads of many callers through one port, joined into one request, and its answer shared out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from asyncdp.calls.slots import Part, ReadResult
from asyncdp.rows.block import Block, Dense

from ..joined import SMALL, Joined
from ..payload.blocks import rows_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from asyncdp.calls.slots import SlotRef

__all__ = ["JoinedReads"]

#: Largest bytes of a ref, on average over recent answers, with which reads are joined. Each caller gets a copy of its
#: rows, and beyond this the copy takes longer than a request of its own.
_SMALL_BYTES: Final = 32 << 10
#: Weight of an answer in that average.
_WEIGHT: Final = 0.25


class _RefRows(NamedTuple):
    """The rows of one ref in an answer: the part, the position of the ref in it, and its rows."""

    part: Part
    place: int
    first: int
    stop: int


class _Answer:
    """An answer, with what it has for each ref; that is looked up once for all callers."""

    __slots__ = ("count", "result", "shares")

    def __init__(self, result: ReadResult, refs: Sequence[SlotRef]) -> None:
        self.result = result
        self.count = len(refs)
        self.shares: dict[int, _RefRows] = {}
        for part in result.parts:
            first = 0
            for place, at in enumerate(part.refs):
                stop = first + len(refs[at].index)
                self.shares[at] = _RefRows(part, place, first, stop)
                first = stop

    def of(self, first: int, count: int) -> ReadResult:
        """Return the answer to ``count`` refs from ``first``, with memory of its own; all of it as it is."""
        if count == self.count:
            return self.result
        parts, errors = [], {}
        for at in range(first, first + count):
            share = self.shares.get(at)
            if share is not None:
                part, place = share.part, share.place
                sums = None if part.checksums is None else part.checksums[place : place + 1]
                block = _own(part.block, share.first, share.stop)
                parts.append(Part((at - first,), block, part.nbytes[place : place + 1], part.schema, sums))
            elif at in self.result.errors:
                errors[at - first] = self.result.errors[at]
        return ReadResult(tuple(parts), errors)


def _own(block: Block, first: int, stop: int) -> Block:
    """Return a copy of rows, which keeps no memory of the others'."""
    rows = rows_of(block, first, stop)
    columns = {
        name: Dense(column.values.clone()) if isinstance(column, Dense) else column.take(range(stop - first))
        for name, column in rows.columns.items()
    }
    return Block(rows.n, columns, rows.specs, rows.codec)


class JoinedReads:
    """Joins the small reads of one host and port.

    Args:
        read: Sends one read and returns its answer.
    """

    def __init__(self, read: Callable[[Sequence[SlotRef]], Awaitable[ReadResult]]) -> None:
        """Start without requests."""
        self._read = read
        self._joined: Joined[None, SlotRef, _Answer] = Joined(self._send)
        self._bytes = 0.0

    async def _send(self, _: None, refs: Sequence[SlotRef]) -> _Answer:
        answer = _Answer(await self._read(refs), refs)
        nbytes = sum(sum(part.nbytes) for part in answer.result.parts) / len(refs)
        self._bytes += _WEIGHT * (nbytes - self._bytes)
        return answer

    async def read(self, refs: Sequence[SlotRef]) -> ReadResult:
        """Read refs, together with those of other callers where they are small."""
        if len(refs) > SMALL or self._bytes > _SMALL_BYTES or any(len(ref.index) > SMALL for ref in refs):
            return (await self._send(None, refs)).result
        answer, first = await self._joined.ask(None, refs)
        return answer.of(first, len(refs))
