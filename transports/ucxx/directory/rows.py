"""Rows of a listing, as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from .msgpack_codec import load, load_tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.meta import Tags

__all__ = ["Rows", "full_tags", "rid_of"]


def rid_of(life: int | None) -> str | bool:
    """Return the key of an incarnation in the library's tables; False where there is none."""
    return False if life is None else f"{life:016d}"


def full_tags(blob: bytes | None, created_at: float, size0: int) -> Tags:
    """Read tags and add what the producer did not say."""
    tags = load_tags(blob)
    tags.setdefault("created_at", created_at)
    tags.setdefault("size_bytes", size0)
    return tags


class Rows:
    """Samples as the server keeps them, one entry per row in each column.

    Columns of plain values, and no object per row: with tens of thousands of new objects the garbage collector, which
    then looks through the whole process, takes longer than everything else.

    Attributes:
        rids: Incarnations, 16 digits.
        ids, groups, owners: Names.
        created_at: Unix seconds.
        size0: Bytes after the first put.
        unfit: Whether the row is tagged committed=False.
        failed: Whether it is tagged status=failed.
        nbytes: Bytes now.
        tags, cells: Packed, or None.
    """

    def __init__(self) -> None:
        """Begin empty."""
        self.rids: list[bytes] = []
        self.ids: list[str] = []
        self.groups: list[str] = []
        self.owners: list[str] = []
        self.created_at: list[float] = []
        self.size0: list[int] = []
        self.unfit: list[bool] = []
        self.failed: list[bool] = []
        self.nbytes: list[int] = []
        self.tags: list[bytes | None] = []
        self.cells: list[bytes | None] = []

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.rids)

    def add(self, reply: Sequence[Any]) -> None:
        """Take a page of the server: rids, _, rows, tags, cells; by incarnation; rows that are gone are left out."""
        for rid, blob, tags, cells in sorted(zip(reply[0], *reply[2:5], strict=True)):
            if not blob:
                continue
            row = msgpack.unpackb(blob, strict_map_key=False, unicode_errors="surrogatepass")
            self.rids.append(rid)
            self.ids.append(row[0])
            self.groups.append(row[1])
            self.owners.append(row[2])
            self.created_at.append(float(row[3]))
            self.size0.append(row[4])
            self.unfit.append(row[6] == 2)  # noqa: PLR2004 - as the library keeps it
            self.failed.append(row[7] == 1)
            self.nbytes.append(row[9])
            self.tags.append(tags or None)
            self.cells.append(cells or None)

    def age(self, at: int) -> tuple[float, bytes]:
        """Return what rows are ordered by; rows of one put were created in the same moment."""
        return self.created_at[at], self.rids[at]

    def all_tags(self, at: int) -> Tags:
        """Return the tags of one row, with what the plane adds."""
        return full_tags(self.tags[at], self.created_at[at], self.size0[at])

    def slots(self, at: int) -> list[tuple[bytes, int]]:
        """Return the keys of the slots that hold one row, and its place in each."""
        blob = self.cells[at]
        return [(piece[0], piece[1]) for piece in load(blob)] if blob else []
