"""The rows of a listing, stored as columns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .msgpack_codec import load, load_tags, pack_tags, packer, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncdp.meta import Tags

__all__ = ["CELLS", "Rows", "full_tags", "rid_of", "row_parts"]

#: Position of the packed cells, or false, in a row as the server stores it.
CELLS = 4


def rid_of(life: int | None) -> str | bool:
    """Return the key of an incarnation in the Lua library's tables; False for None."""
    return False if life is None else f"{life:016d}"


def full_tags(blob: bytes | None, created_at: float, size0: int) -> Tags:
    """Decode tags and add ``created_at`` and ``size_bytes`` where the producer did not set them."""
    tags = load_tags(blob)
    tags.setdefault("created_at", created_at)
    tags.setdefault("size_bytes", size0)
    return tags


def row_parts(
    ids: Sequence[str],
    groups: Sequence[str],
    nbytes: Sequence[int],
    cells: Sequence[bytes | bool],
    tags: Sequence[Tags] | None,
) -> list[bytes]:
    """Encode what a put has for each row: the beginning of a row as the server stores it, without the array's head."""
    encoder = packer()
    encode = encoder.pack
    told = (
        [False] * len(ids)
        if tags is None
        else [row and pack_tags(row, i, encoder) for i, row in zip(ids, tags, strict=True)]
    )
    return [
        encode((sample_id, group, size, size, cell, tag or False))[1:]
        for sample_id, group, size, cell, tag in zip(ids, groups, nbytes, cells, told, strict=True)
    ]


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

    def add(self, stored: Mapping[bytes, bytes]) -> None:
        """Add rows as the server stores them, by key, in order of incarnation."""
        names: dict[bytes, str] = {}
        for rid in sorted(stored):
            sample_id, group, size0, nbytes, cells, tags, owner, created, _, committed, failed, *_ = load(stored[rid])
            for name in (group, owner):
                if name not in names:
                    names[name] = text(name)
            self.rids.append(rid)
            self.ids.append(text(sample_id))
            self.groups.append(names[group])
            self.owners.append(names[owner])
            self.created_at.append(float(created))
            self.size0.append(size0)
            self.unfit.append(committed == 2)  # noqa: PLR2004 - the Lua library's code for committed=False
            self.failed.append(failed == 1)
            self.nbytes.append(nbytes)
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
