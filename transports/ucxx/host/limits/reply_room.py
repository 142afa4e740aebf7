"""What one reply to a read may hold: its bytes, rows that are repeated, fields and rows that are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, DataPlaneNotReady

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...payload.gather import Gather, Selection

__all__ = ["ASK_AGAIN", "MOST_CELLS", "MOST_NAMED", "REPEATED", "REPEATED_BYTES", "ReplyRoom"]

#: Most fields of all refs, and rows named one by one, of one reply; each takes 0.1 to 1 us. A single ref may have more.
MOST_NAMED: Final = 1 << 16
#: Most cells (rows named one by one x fields) of one reply. A single ref may have more where its slot has.
MOST_CELLS: Final = 1 << 20
#: Most bytes of one reply for rows that the read names repeatedly; unbounded, a reply could be far larger than what is
#: stored.
REPEATED_BYTES: Final = 64 << 20
#: Told of each ref that a reply leaves out; it carries no more than that, so one object serves all of them.
ASK_AGAIN: Final = DataPlaneNotReady("the reply would be too long: ask again", retry_after_s=0.0)


#: Told of a ref that does not fit, whatever is left out beside it.
REPEATED: Final = DataPlaneBadRequest("rows that are asked for again and again do not fit a reply")


class ReplyRoom:
    """What still fits into a reply; the first selection always does, so that each reply goes on.

    Args:
        most: Largest reply in bytes.

    Attributes:
        kept: Selections that fit.
        total: Estimated size in bytes of the reply that holds them.
    """

    def __init__(self, most: int) -> None:
        self.kept: list[Selection] = []
        self.total = 0
        self._most = most
        self._repeated = 0
        self._named = 0
        self._cells = 0
        self._full = False
        self._rows: dict[int, int] = {}
        self._slots: dict[int, int] = {}

    def named(self, fields: int, rows: int) -> bool:
        """Count fields and rows that a ref names; return whether the ref is to be looked at at all."""
        self._named += fields + rows
        self._cells += fields * rows
        self._full = self._full or ((self._named > MOST_NAMED or self._cells > MOST_CELLS) and bool(self.kept))
        return not self._full

    def take(self, pick: Selection, slot: int) -> DataPlaneError | None:
        """Keep a selection of a slot, or return why not: it exceeds the reply's limit, or repeats too many rows."""
        layout = pick.payload.layout
        size = int(layout.nbytes * len(pick.rows) / max(1, layout.n)) + 64
        rows = self._rows.get(slot, 0) + len(pick.rows)
        repeated = int(size * min(1.0, max(0, rows - layout.n) / max(1, len(pick.rows))))
        if self._repeated + repeated <= REPEATED_BYTES and (self.total + size <= self._most or not self.kept):
            self._rows[slot] = rows
            self._slots[pick.ref] = slot
            self.total, self._repeated = self.total + size, self._repeated + repeated
            self.kept.append(pick)
            return None
        if not self.kept:
            return REPEATED
        self._full = True
        return ASK_AGAIN

    def recheck(self, made: Sequence[Gather]) -> dict[int, DataPlaneError]:
        """Return an error for each selection that does not fit by its exact size; rows may be longer than estimated."""
        sizes: dict[int, int] = {}
        for gather in made:
            heads = (gather.layout.nbytes - sum(gather.nbytes)) / max(1, gather.layout.n)
            for pick, nbytes in zip(gather.picks, gather.nbytes, strict=True):
                sizes[pick.ref] = nbytes + int(heads * len(pick.rows))
        errors: dict[int, DataPlaneError] = {}
        taken: dict[int, int] = {}
        total = repeated = 0
        for pick in self.kept:
            size, slot = sizes.get(pick.ref), self._slots[pick.ref]
            if size is None:
                continue
            whole, before = pick.payload.layout.nbytes, taken.get(slot, 0)
            again = max(0, before + size - whole) - max(0, before - whole)
            if repeated + again > REPEATED_BYTES or (total + size > self._most and total):
                errors[pick.ref] = ASK_AGAIN if total else REPEATED
                continue
            taken[slot] = before + size
            total, repeated = total + size, repeated + again
        return errors
