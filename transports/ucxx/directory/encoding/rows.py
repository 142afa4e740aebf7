"""The rows of a listing, stored as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgpack

from .msgpack_codec import load, load_tags

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.meta import Tags

__all__ = ["Rows", "full_tags", "rid_of"]


def rid_of(life: int | None) -> str | bool:
    """Return the key of an incarnation in the Lua library's tables; False for None."""
    return False if life is None else f"{life:016d}"


def full_tags(blob: bytes | None, created_at: float, size0: int) -> Tags:
    """Decode tags and add ``created_at`` and ``size_bytes`` where the producer did not set them."""
    tags = load_tags(blob)
    tags.setdefault("created_at", created_at)
    tags.setdefault("size_bytes", size0)
    return tags


class Rows:
    """Samples as the server stores them, one entry per row in each column.

    The columns hold plain values, without an object per row: tens of thousands of new objects would trigger the garbage
    collector, which examines the whole process and then takes longer than everything else.

    Attributes:
        rids: Keys of the incarnations, 16 digits each.
        ids, groups, owners: Sample ids, group ids, and names of the clients that created the samples.
        created_at: Times of creation, in unix seconds.
        size0: Data bytes after the first put.
        unfit: Whether the row is tagged committed=False.
        failed: Whether the row is tagged status=failed.
        nbytes: Current data bytes.
        tags, cells: Encoded tags and cells, or None.
    """

    def __init__(self) -> None:
        """Start with no rows."""
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
        """Add a page of the server (rids, _, rows, tags, cells) in order of incarnation; omit rows that are gone."""
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
            self.unfit.append(row[6] == 2)  # noqa: PLR2004 - the Lua library's code for committed=False
            self.failed.append(row[7] == 1)
            self.nbytes.append(row[9])
            self.tags.append(tags or None)
            self.cells.append(cells or None)

    def age(self, at: int) -> tuple[float, bytes]:
        """Return the sort key of a row: time of creation, then incarnation, since rows of one put have equal times."""
        return self.created_at[at], self.rids[at]

    def all_tags(self, at: int) -> Tags:
        """Return the tags of one row, including those that the plane adds."""
        return full_tags(self.tags[at], self.created_at[at], self.size0[at])

    def slots(self, at: int) -> list[tuple[bytes, int]]:
        """Return the keys of the slots that hold one row, and its row index in each."""
        blob = self.cells[at]
        return [(piece[0], piece[1]) for piece in load(blob)] if blob else []
