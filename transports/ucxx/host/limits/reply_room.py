"""What one reply to a read may hold: its bytes, rows that are repeated, fields and rows that are named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, DataPlaneNotReady

if TYPE_CHECKING:
    from ...payload.gather import Selection

__all__ = ["ASK_AGAIN", "MOST_NAMED", "REPEATED_BYTES", "ReplyRoom"]

#: Most fields of all refs, and rows named one by one, of one reply; each takes 0.1 to 1 us. A single ref may have more.
MOST_NAMED: Final = 1 << 16
#: Most bytes of one reply for rows that the read names repeatedly; unbounded, a reply could be far larger than what is
#: stored.
REPEATED_BYTES: Final = 64 << 20
#: Told of each ref that a reply leaves out; it carries no more than that, so one object serves all of them.
ASK_AGAIN: Final = DataPlaneNotReady("the reply would be too long: ask again", retry_after_s=0.0)


class ReplyRoom:
    """What still fits into a reply; the first selection always does, so that each reply goes on.

    Args:
        most: Largest reply in bytes.

    Attributes:
        kept: Selections that fit.
    """

    def __init__(self, most: int) -> None:
        self.kept: list[Selection] = []
        self._most = most
        self._total = 0
        self._repeated = 0
        self._named = 0
        self._full = False
        self._rows: dict[int, int] = {}

    def named(self, count: int) -> bool:
        """Count fields and rows that a ref names; return whether the ref is to be looked at at all."""
        self._named += count
        self._full = self._full or (self._named > MOST_NAMED and bool(self.kept))
        return not self._full

    def take(self, pick: Selection) -> DataPlaneError | None:
        """Keep a selection, or return why not: it exceeds the reply's limit, or repeats too many rows."""
        layout = pick.payload.layout
        size = int(layout.nbytes * len(pick.rows) / max(1, layout.n)) + 64
        before = self._rows.get(id(pick.payload), 0)
        rows = before + len(pick.rows)
        repeated = int(size * min(1.0, max(0, rows - layout.n) / max(1, len(pick.rows))))
        if self._repeated + repeated <= REPEATED_BYTES and (self._total + size <= self._most or not self.kept):
            self._rows[id(pick.payload)] = rows
            self._total, self._repeated = self._total + size, self._repeated + repeated
            self.kept.append(pick)
            return None
        if not self.kept:
            return DataPlaneBadRequest("rows that are asked for again and again do not fit a reply")
        self._full = True
        return ASK_AGAIN
