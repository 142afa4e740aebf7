"""Restores the rows and claims of a checkpoint."""

from __future__ import annotations

import os
from bisect import bisect_right
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np

from asyncdp.calls.snapshots import ClaimState, RestoreClaims
from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.block import Block, Column, FieldSpec, Ragged

from .asking import ask, need_snapshots
from .chunks import read_piece
from .files import Summary, alone, read_manifest, verify
from .objects import object_codec
from .pipelining import one_ahead

if TYPE_CHECKING:
    from collections.abc import Iterable

    from asyncdp.client import Client

    from .saving import Progress

__all__ = ["restore"]

#: Rows of a put of tags.
TAGGED_ROWS: Final = 1024


async def restore(
    client: Client,
    path: str | os.PathLike[str],
    partition_id: str | None = None,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Restore one partition, or all, of a checkpoint. All files are checked before anything is put.

    Rows begin new lives, in the order of their age; fields follow as the chunks have them. Then, in one step, the
    tasks are declared and the claims made again: for the same owners, with new ids, and with the leases that were left
    at the save. A restore that fails midway leaves the rows that were put; ``replace`` begins anew.

    Args:
        client: A client of the plane, of any transport.
        path: Folder of the checkpoint.
        partition_id: The partition; None: all that the checkpoint has.
        replace: Whether to drop partitions that exist and have rows; otherwise these are refused.
        progress: Called with the rows that are restored and the rows of the partition.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or of another version; the file is named.
        DataPlaneBadRequest: A partition has rows, or the checkpoint lacks ``partition_id``; or a consumer of a task
            that was declared before has claimed rows meanwhile that the checkpoint has as claimed.
        DataPlaneUnsupported: There are claims, and the backend has no directory snapshots.
    """
    folder = Path(path)
    read_manifest(folder)
    with alone(folder, reads=True):
        await anyio.to_thread.run_sync(verify, folder)
        manifest = read_manifest(folder)
        parts = [one for one in manifest["partitions"] if partition_id in (None, one["partition_id"])]
        if partition_id is not None and not parts:
            raise DataPlaneBadRequest(f"{folder} has no partition {partition_id!r}", field="partition_id")
        if any(part["claims"] for part in parts):
            need_snapshots(client, "restore")
        there = {one.partition_id: one.size for one in await client.list_partitions()}
        full = [one["partition_id"] for one in parts if there.get(one["partition_id"])]
        if full and not replace:
            told = "nothing was restored (replace=True, or --replace, would drop them)"
            msg = f"partition {full[0]!r} has {there[full[0]]} rows; {told}"
            raise DataPlaneBadRequest(msg, partition_id=full[0], field="replace")
        for part in parts:
            if part["partition_id"] in full:
                await client.drop_partition(part["partition_id"])
            await _Partition(client, folder, part, progress).restored()
    return Summary.of({**manifest, "partitions": parts})


class _Partition:
    """Restores one partition, chunk by chunk, in the order of the oldest row of each."""

    def __init__(self, client: Client, folder: Path, part: dict[str, Any], progress: Progress | None) -> None:
        self.client, self.folder, self.part, self.progress = client, folder, part, progress
        self.name: str = part["partition_id"]
        #: The new life of each row.
        self.lives: list[int] = []
        #: Rows that have fields again.
        self.done: set[int] = set()

    async def restored(self) -> None:
        """Restore rows, tasks and claims."""
        part = self.part
        await self._declare([])
        await self._begin()
        #: By chunk and piece: of each cell the position in the piece, the row, and its fields.
        pieces: dict[tuple[int, int], list[tuple[int, int, tuple[int, ...]]]] = {}
        first: dict[int, int] = {}
        starts = [[0, *accumulate(piece["rows"] for piece in chunk["pieces"])] for chunk in part["chunks"]]
        for row, (_, _, _, cells) in enumerate(part["rows"]):
            for chunk, at, _, fields in cells:
                first.setdefault(chunk, row)
                piece = bisect_right(starts[chunk], at) - 1
                cell = (at - starts[chunk][piece], row, tuple(fields))
                pieces.setdefault((chunk, piece), []).append(cell)
        order = sorted(pieces, key=lambda one: (first[one[0]], one))

        async def load(one: tuple[int, int]) -> tuple[int, list[Any], dict[str, Column]]:
            chunk, piece = one
            columns = await anyio.to_thread.run_sync(read_piece, self.folder, part["chunks"][chunk], piece)
            return chunk, sorted(pieces[one]), columns

        await one_ahead(order, load, self._put)
        await self._claims()

    async def _declare(self, tasks: list[str]) -> None:
        part, size = self.part, self.part["grpo_group_size"]
        enums = part["enums"] or None
        await self.client.register_partition(self.name, part["fields"], part["num_samples"], tasks, size, enums=enums)

    async def _begin(self) -> None:
        """Put all rows with their tags, in their order: that is how old they are, whichever fields come first."""
        rows = self.part["rows"]
        for at in range(0, len(rows), TAGGED_ROWS):
            some = rows[at : at + TAGGED_ROWS]
            meta = await self.client.put_samples([row[0] for row in some], self.name, tags=[row[2] for row in some])
            self.lives += [handle.incarnation for handle in meta.handles or () if handle is not None]
        self._tell(row for row, told in enumerate(rows) if not told[3])

    async def _put(self, loaded: tuple[int, list[Any], dict[str, Column]]) -> None:
        """Put the cells of one piece."""
        chunk, cells, columns = loaded
        fields = self.part["chunks"][chunk]["fields"]
        by_fields: dict[tuple[int, ...], list[tuple[int, int]]] = {}
        for at, row, numbers in cells:
            by_fields.setdefault(numbers, []).append((at, row))
        for numbers, rows in by_fields.items():
            mine = {fields[number]: columns[fields[number]] for number in numbers}
            specs = {name: self._spec(name) for name in mine}
            for some in _runs(rows, mine, set(self.part["nested"])):
                at = [at for at, _ in some]
                block = Block(len(some), {name: column.take(at) for name, column in mine.items()}, specs)
                block.codec = object_codec()
                ids = [self.part["rows"][row][0] for _, row in some]
                await self.client.put_samples(ids, self.name, block.to_tensordict())
        self._tell(row for _, row, _ in cells)

    def _tell(self, rows: Iterable[int]) -> None:
        self.done.update(rows)
        if self.progress is not None:
            self.progress(len(self.done), len(self.lives))

    def _spec(self, field: str) -> FieldSpec:
        if field in self.part["enums"]:
            return FieldSpec("enum", enum=tuple(self.part["enums"][field]))
        nested, dim = field in self.part["nested"], self.part["ragged_dims"].get(field, 0)
        return FieldSpec("tensor", shape=(0,) * dim + (None,), nested=nested)

    async def _claims(self) -> None:
        """Declare the tasks, and claim what was claimed; nobody else can claim before."""
        part, tasks = self.part, self.part["consumer_tasks"]
        if not part["claims"]:
            await self._declare(tasks)
            return
        claims = []
        for owner, task, fields, rows, claimed_at, left_s in part["claims"]:
            held = tuple((part["rows"][row][0], self.lives[row]) for row in rows)
            claims.append(ClaimState(owner, task, tuple(fields), held, claimed_at, left_s))
        await ask(self.client, RestoreClaims(self.name, tuple(tasks), tuple(claims)), "restore")


def _runs(rows: list[tuple[int, int]], columns: dict[str, Column], nested: set[str]) -> list[list[tuple[int, int]]]:
    """Divide rows where the length of a field changes that was put dense, so that it is put dense again."""
    dense = [np.diff(c.offsets) for f, c in columns.items() if isinstance(c, Ragged) and f not in nested]
    runs: list[list[tuple[int, int]]] = []
    for row in rows:
        if runs and all(lengths[row[0]] == lengths[runs[-1][0][0]] for lengths in dense):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
