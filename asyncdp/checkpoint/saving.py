"""Saves the rows and claims of a plane."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio

from asyncdp.calls.snapshots import PartitionState, Snapshot
from asyncdp.errors import DataPlaneUnavailable, PartialReadError, StaleSlotError
from asyncdp.meta import KVBatchMeta, RowHandle
from asyncdp.metrics.published import PARTITION
from asyncdp.rows.block import Block

from .asking import ask, need_snapshots
from .chunks import ChunkWriter
from .earlier import SavedCells
from .files import MANIFEST, VERSION, CheckpointError, Summary, alone, damaged, read_manifest, tidy, write_manifest
from .objects import object_codec
from .pipelining import one_ahead

if TYPE_CHECKING:
    from asyncdp.calls.snapshots import CellState, RowState
    from asyncdp.client import Client

    Wanted = tuple[RowState, CellState]

__all__ = ["save"]

#: Most looks at a partition; a row that changed between all of them is left out.
LOOKS: Final = 6
#: Pieces of a chunk: while one is read from the plane, the one before it is written.
PIECES: Final = 16
Progress = Callable[[int, int], None]


async def save(
    client: Client,
    path: str | os.PathLike[str],
    partition_id: str | None = None,
    *,
    chunk_bytes: int = 64 << 20,
    progress: Progress | None = None,
) -> Summary:
    """Save one partition, or all, into a folder; an earlier checkpoint there is replaced once the new one is whole.

    Of each partition the checkpoint holds the state at one moment, without the rows in ``left_out``. Partitions are
    saved one after the other. What the earlier checkpoint has of rows that still exist is not written again.

    Args:
        client: A client of the plane.
        path: The folder; made if it does not exist.
        partition_id: The partition; None: all.
        chunk_bytes: Payload bytes of a chunk, about; one row is never divided.
        progress: Called with the rows that are saved and the rows that are known, of each partition.

    Raises:
        CheckpointError: Another save into this folder is going on, the checkpoint in it cannot be read, or a file
            cannot be written; an earlier checkpoint is still there.
        DataPlaneUnavailable: Rows cannot be read, as those of a host that was lost; the error names some.
        DataPlaneUnsupported: The backend has no directory snapshots.
    """
    need_snapshots(client, "save")
    folder = Path(path)
    try:
        os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - a moment, as flock below
    except OSError as err:
        raise damaged(folder, f"cannot be a folder: {err.strerror or err}") from err
    with alone(folder):
        before: dict[str, Any] = {"generation": 0, "partitions": []}
        if MANIFEST in os.listdir(folder):  # noqa: PTH208
            try:
                before = await anyio.to_thread.run_sync(read_manifest, folder)
            except CheckpointError as err:
                msg = f"{err}; nothing is written over it: save into another folder, or remove this file first"
                raise CheckpointError(msg) from err
        earlier = {one["partition_id"]: one for one in before["partitions"]}
        number = before["generation"] + 1
        if partition_id is None:
            found = [one.partition_id for one in await client.list_partitions()]
            names = sorted(name for name in found if name != PARTITION)
        else:
            names = [partition_id]
        parts = []
        try:
            for at, name in enumerate(names):
                cells = await anyio.to_thread.run_sync(SavedCells, folder, earlier.get(name))
                one = _Partition(client, name, cells, folder / f"{number:06}-{at:03}", chunk_bytes, progress)
                parts.append(await one.saved(number))
            manifest = {"version": VERSION, "generation": number, "saved_at": time.time(), "partitions": parts}
            await anyio.to_thread.run_sync(write_manifest, folder, manifest)
        except BaseException:
            _withdraw(folder, number)
            raise
        kept = {chunk["file"] for part in parts for chunk in part["chunks"]}
        await anyio.to_thread.run_sync(tidy, folder, kept)
    return Summary.of(manifest)


def _withdraw(folder: Path, number: int) -> None:
    """Remove what a save wrote that failed, unless its manifest is there already: a full disk would stay full."""
    try:
        if (folder / MANIFEST).exists() and read_manifest(folder)["generation"] == number:
            return
    except (OSError, CheckpointError):
        return
    tidy(folder, set(), f"{number:06}-")


class _Partition:
    """Saves one partition: takes snapshots until one of them has no cell that was not read before it.

    A cell that is in a snapshot before it was read and in one after it was not replaced in between, so what was read is
    what it holds.
    """

    def __init__(
        self, client: Client, name: str, cells: SavedCells, stem: Path, chunk_bytes: int, progress: Progress | None
    ) -> None:
        self.client, self.name, self.cells, self.stem = client, name, cells, stem
        self.chunk_bytes, self.progress = chunk_bytes, progress
        self.state: PartitionState
        self.written = 0
        #: Writers of chunks, all of which are closed in the end.
        self.writers: list[ChunkWriter] = []

    async def saved(self, generation: int) -> dict[str, Any]:
        """Return the entry of the manifest."""
        missing: list[Wanted] = []
        for look in range(LOOKS + 1):
            self.state = await ask(self.client, Snapshot(self.name), "save")
            if not look:
                self.cells.drop_sparse(self.state, self.chunk_bytes)
            missing = [(row, cell) for row in self.state.rows for cell in row.cells if not self.cells.find(row, cell)]
            self._tell(len(missing))
            if not missing or look == LOOKS:
                break
            await self._read(missing, generation)
        out = {row.group_id for row, _ in missing}
        if out:
            await self._check_lost()
        return self._entry(out)

    def _entry(self, out: set[str]) -> dict[str, Any]:
        """Return the entry of the partition in the manifest, without the groups in ``out``."""
        state, info = self.state, self.state.info
        rows = [row for row in state.rows if row.group_id not in out]
        found = [[(cell, self.cells[row, cell]) for cell in row.cells] for row in rows]
        used = sorted({saved.chunk for cells in found for _, saved in cells})
        chunks = [self.cells.chunks[number] for number in used]
        anew = {number: at for at, number in enumerate(used)}
        numbers = [{name: at for at, name in enumerate(chunk["fields"])} for chunk in chunks]
        entries = []
        for row, cells in zip(rows, found, strict=True):
            told = []
            for cell, saved in cells:
                at = anew[saved.chunk]
                told.append([at, saved.at, cell.name, [numbers[at][name] for name in cell.fields]])
            entries.append([row.sample_id, row.life, row.tags, told])
        position = {(row.sample_id, row.life): at for at, row in enumerate(rows)}
        claims = []
        for claim in state.claims:
            held = [position[one] for one in claim.rows if one in position]
            if held:
                claims.append([claim.owner, claim.task_name, claim.fields, held, claim.claimed_at, claim.left_s])
        return {
            "partition_id": self.name,
            "fields": list(info.fields),
            "consumer_tasks": list(info.consumer_tasks),
            "num_samples": info.num_samples,
            "grpo_group_size": info.grpo_group_size,
            "enums": {name: list(words) for name, words in info.enums.items()},
            "nested": [name for name, spec in state.specs.items() if spec.nested],
            "ragged_dims": {name: spec.ragged_dim for name, spec in state.specs.items()},
            "rows": entries,
            "chunks": chunks,
            "claims": claims,
            "left_out": sorted(row.sample_id for row in state.rows if row.group_id in out),
        }

    def _tell(self, left: int) -> None:
        """Tell the progress, where ``left`` cells are not saved yet."""
        if self.progress is not None:
            total = len(self.state.rows)
            self.progress(max(0, total - left), total)

    async def _check_lost(self) -> None:
        """Raise if rows that could not be read are lost."""
        lost = [key for group in await self.client.list_metadata(self.name) for key in group.lost_keys]
        if lost:
            raise self._unreadable(lost, "their host has lost them")

    def _unreadable(self, ids: list[str], why: str) -> DataPlaneUnavailable:
        msg = f"{len(ids)} rows cannot be read, such as {ids[0]!r} ({why}); evict them first if they stay lost"
        return DataPlaneUnavailable(f"{msg} (asyncdp evict --lost)", partition_id=self.name, sample_ids=ids, op="save")

    async def _read(self, missing: list[Wanted], generation: int) -> None:
        """Read and write cells, in chunks of cells that have the same fields."""
        by_fields: dict[tuple[str, ...], list[Wanted]] = {}
        for row, cell in missing:
            by_fields.setdefault(tuple(sorted(cell.fields)), []).append((row, cell))
        chunks = [(cells, fields) for fields, wanted in by_fields.items() for cells in _cut(wanted, self.chunk_bytes)]
        left = len(missing)

        async def end(written: tuple[ChunkWriter, list[Wanted]]) -> None:
            nonlocal left
            writer, cells = written
            entry = await anyio.to_thread.run_sync(writer.close)
            self.cells.add({**entry, "generation": generation}, cells)
            left -= len(cells)
            self._tell(left)

        try:
            await one_ahead(chunks, self._chunk, end)  # the disk takes its time to keep a file
        finally:
            for writer in self.writers:
                writer.abandon()
            self.writers.clear()

    async def _chunk(self, chunk: tuple[list[Wanted], tuple[str, ...]]) -> tuple[ChunkWriter, list[Wanted]]:
        """Write cells of the same fields, and no head yet. Return the writer, and the cells that were there."""
        cells, fields = chunk
        pieces = _cut(cells, max(1, self.chunk_bytes // PIECES))
        file = Path(f"{self.stem}-{self.written:05}.safetensors")
        self.written += 1
        writer = await anyio.to_thread.run_sync(ChunkWriter, file, fields, len(pieces))
        self.writers.append(writer)
        read: list[Wanted] = []

        async def load(piece: list[Wanted]) -> tuple[list[Wanted], Block]:
            return await self._piece(piece, fields)

        async def use(loaded: tuple[list[Wanted], Block]) -> None:
            if loaded[0]:
                await anyio.to_thread.run_sync(writer.add, loaded[1])
                read.extend(loaded[0])

        await one_ahead(pieces, load, use)
        return writer, read

    async def _piece(self, cells: list[Wanted], fields: tuple[str, ...]) -> tuple[list[Wanted], Block]:
        """Read the fields of these rows; leave out rows that are gone or live again."""
        ids = [row.sample_id for row, _ in cells]
        handles: list[RowHandle | None] = [RowHandle(row.life) for row, _ in cells]
        try:
            data = await self.client.get_data(KVBatchMeta(self.name, sample_ids=ids, handles=handles), list(fields))
        except StaleSlotError:
            return [], Block(0, {})
        except PartialReadError as err:
            for at, one in err.errors.items():
                if not isinstance(one, StaleSlotError):
                    raise self._unreadable([ids[at]], one.message) from err
            cells = [cells[at] for at in range(len(cells)) if at not in err.errors]
            data = err.rows
        except DataPlaneUnavailable as err:
            raise self._unreadable(ids, err.message) from err
        specs = {name: self.state.specs[name] for name in fields}
        return cells, Block.from_fields(data, len(cells), specs, object_codec())


def _cut(cells: list[Wanted], most: int) -> list[list[Wanted]]:
    """Divide cells into runs of at most ``most`` bytes, or of one cell."""
    runs: list[list[Wanted]] = []
    room = 0
    for row, cell in cells:
        if not runs or cell.nbytes > room:
            runs.append([])
            room = most
        runs[-1].append((row, cell))
        room -= cell.nbytes
    return runs
