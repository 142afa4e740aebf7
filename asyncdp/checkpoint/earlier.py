"""What of an earlier save a new one can refer to: chunks that are there, and in them cells that still exist."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from asyncdp.calls.snapshots import CellState, PartitionState, RowState

__all__ = ["SavedCells"]

#: A chunk of which less than this share still exists is written again.
LIVING_SHARE: Final = 0.5
#: Most chunks of the same fields that are smaller than half a chunk; one more, and all of these are written again.
MOST_SMALL: Final = 8


class Saved(NamedTuple):
    """Where a cell is: the number of its chunk, its position in there, and which fields of the chunk are its own."""

    chunk: int
    at: int
    fields: frozenset[str]


class SavedCells:
    """The cells of one partition that are in files, by id and life of the row and name of the cell.

    Args:
        folder: Folder of the checkpoint.
        part: Entry of the partition in the earlier manifest; None: there is none.
    """

    def __init__(self, folder: Path, part: dict[str, Any] | None) -> None:
        """Take over the cells whose files are there and as long as they were."""
        self.chunks: list[dict[str, Any]] = [] if part is None else list(part["chunks"])
        self._where: dict[tuple[str, int, str], Saved] = {}
        usable = [_is_there(folder, chunk) for chunk in self.chunks]
        for sample_id, life, _, cells in [] if part is None else part["rows"]:
            for chunk, at, name, fields in cells:
                if usable[chunk]:
                    named = frozenset(self.chunks[chunk]["fields"][number] for number in fields)
                    self._where[sample_id, life, name] = Saved(chunk, at, named)

    def find(self, row: RowState, cell: CellState) -> Saved | None:
        """Return where the cell is, or None if it has to be read."""
        saved = self._where.get((row.sample_id, row.life, cell.name))
        return saved if saved is not None and saved.fields.issuperset(cell.fields) else None

    def __getitem__(self, key: tuple[RowState, CellState]) -> Saved:
        """Return where a cell is that :meth:`find` finds."""
        row, cell = key
        return self._where[row.sample_id, row.life, cell.name]

    def add(self, chunk: dict[str, Any], cells: Iterable[tuple[RowState, CellState]]) -> None:
        """Add a chunk that was written, with its cells in order."""
        number, fields = len(self.chunks), frozenset(chunk["fields"])
        self.chunks.append(chunk)
        for at, (row, cell) in enumerate(cells):
            self._where[row.sample_id, row.life, cell.name] = Saved(number, at, fields)

    def drop_sparse(self, state: PartitionState, chunk_bytes: int) -> None:
        """Forget the chunks of which little exists any more, and many small ones: their cells are written again."""
        living = [dict.fromkeys(chunk["fields"], 0) for chunk in self.chunks]
        for row in state.rows:
            for cell in row.cells:
                saved = self.find(row, cell)
                for name in cell.fields if saved is not None else ():
                    living[saved.chunk][name] += 1  # type: ignore[union-attr]
        sparse, small = set[int](), dict[tuple[str, ...], list[int]]()
        for number, (chunk, counts) in enumerate(zip(self.chunks, living, strict=True)):
            sizes = dict(zip(chunk["fields"], chunk["field_bytes"], strict=True))
            whole = sum(sizes.values())
            exists = sum(sizes[name] * count for name, count in counts.items()) / max(1, chunk["rows"])
            if exists < LIVING_SHARE * whole:
                sparse.add(number)
            elif any(counts.values()) and whole < chunk_bytes / 2:
                small.setdefault(tuple(chunk["fields"]), []).append(number)
        for numbers in small.values():
            if len(numbers) > MOST_SMALL:
                sparse.update(numbers)
        self._where = {key: saved for key, saved in self._where.items() if saved.chunk not in sparse}


def _is_there(folder: Path, chunk: dict[str, Any]) -> bool:
    try:
        return bool((folder / chunk["file"]).stat().st_size == chunk["nbytes"])
    except OSError:
        return False
