"""Saves the rows of a plane."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import anyio
import numpy as np
import torch

from asyncdp.calls.context import CallContext
from asyncdp.calls.slots import Locate, Located
from asyncdp.errors import DataPlaneUnavailable, DataPlaneUnsupported, PartialReadError, StaleSlotError
from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta, RowHandle
from asyncdp.metrics.published import PARTITION
from asyncdp.rows.block import Block, FieldSpec, Objects, Ragged

from .files import MANIFEST, VERSION, CheckpointError, Summary, read_manifest, write_chunk, write_manifest
from .objects import object_codec

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdp.client import Client

__all__ = ["save"]

#: Most looks at a partition; a row that changed between all of them is left out.
LOOKS: Final = 6
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

    Of each partition the checkpoint holds the state at one moment, that of its last listing, without the rows in
    ``left_out``. Partitions are saved one after the other. Claims are not saved.

    Args:
        client: A client of the plane.
        path: The folder; made if it does not exist.
        partition_id: The partition; None: all.
        chunk_bytes: Payload bytes of a chunk, about; one row is never divided.
        progress: Called with the rows that are saved and the rows that are known, of each partition.

    Raises:
        CheckpointError: Another save into this folder is going on, the checkpoint in it cannot be read, or a file
            cannot be written; an earlier checkpoint is still there.
        DataPlaneUnavailable: Rows are lost; the error names some.
        DataPlaneUnsupported: The backend is not slot-addressable.
    """
    if not client.get_capabilities().slot_addressable:
        raise DataPlaneUnsupported("a checkpoint needs slot_addressable", capability="slot_addressable", op="save")
    folder = Path(path)
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - a moment, as flock below
    with alone(folder):
        number = read_manifest(folder)["generation"] + 1 if MANIFEST in os.listdir(folder) else 1  # noqa: PTH208
        if partition_id is None:
            found = [one.partition_id for one in await client.list_partitions()]
            names = sorted(name for name in found if name != PARTITION)
        else:
            names = [partition_id]
        parts = []
        for at, name in enumerate(names):
            parts.append(await _Partition(client, folder, f"{number:06}-{at:03}", name, chunk_bytes, progress).saved())
        manifest = {"version": VERSION, "generation": number, "saved_at": time.time(), "partitions": parts}
        await anyio.to_thread.run_sync(write_manifest, folder, manifest)
        kept = {chunk["file"] for part in parts for chunk in part["chunks"]}
        await anyio.to_thread.run_sync(_tidy, folder, kept)
    return Summary.of(manifest)


def _tidy(folder: Path, kept: set[str]) -> None:
    """Remove the files of earlier saves, and of those that did not end; what cannot be removed is left to the next."""
    for old in [*folder.glob("*.safetensors"), *folder.glob("*.part")]:
        if old.name not in kept:
            with suppress(OSError):
                old.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            raise CheckpointError(f"{folder}: another save or restore of this checkpoint is going on") from err
        yield


#: Where the fields of a row lie: unequal as soon as one of them was replaced.
Cells = dict[str, tuple[Any, ...]]


class _Partition:
    """Saves one partition: lists it and locates its rows until two looks agree about what was read between them."""

    def __init__(
        self, client: Client, folder: Path, stem: str, name: str, chunk_bytes: int, progress: Progress | None
    ) -> None:
        self.client, self.folder, self.stem, self.name = client, folder, stem, name
        self.chunk_bytes, self.progress = chunk_bytes, progress
        self.chunks: list[dict[str, Any]] = []
        self.specs: dict[str, FieldSpec] = {}
        #: By row and life, where its fields lay when they were read.
        self.read: dict[tuple[str, RowHandle | None], Cells] = {}
        self.at: dict[tuple[str, RowHandle | None], tuple[int, int]] = {}

    async def saved(self) -> dict[str, Any]:
        """Return the entry of the manifest."""
        info = await self.client.describe(self.name)
        groups: list[DataPlaneGroupMeta] = []
        missing: list[tuple[DataPlaneGroupMeta, Any]] = []
        for _ in range(LOOKS):
            info = await self.client.describe(self.name)
            groups = await self.client.list_metadata(self.name)
            cells = await self._cells(groups, list(info.fields))
            whole = {row for row in self.at if row in cells and self.read[row] == cells[row]}
            missing = [(g, row) for g in groups for row in _rows(g) if row not in whole]
            if not missing and (await self.client.describe(self.name)).fields.keys() == info.fields.keys():
                break
            await self._read(groups, {row: cells[row] for _, row in missing if row in cells})
        out = {group.group_id for group, _ in missing}
        kept = [(group, row) for group in groups if group.group_id not in out for row in _rows(group)]
        order: list[list[Any]] = []
        for group, row in kept:
            order.append([*self.at[row], dict(group.tags[group.keys.index(row[0])])])
        return {
            "partition_id": self.name,
            "fields": list(info.fields),
            "consumer_tasks": list(info.consumer_tasks),
            "num_samples": info.num_samples,
            "grpo_group_size": info.grpo_group_size,
            "enums": {name: list(words) for name, words in info.enums.items()},
            "nested": [name for name, spec in self.specs.items() if spec.nested],
            "ragged_dims": {name: spec.ragged_dim for name, spec in self.specs.items()},
            "rows": order,
            "chunks": self.chunks,
            "left_out": sorted(row[0] for group in groups if group.group_id in out for row in _rows(group)),
        }

    async def _cells(self, groups: Sequence[DataPlaneGroupMeta], fields: list[str]) -> dict[Any, Cells]:
        """Return where the fields of the listed rows lie, without rows that are gone or live again."""
        rows = [row for group in groups for row in _rows(group)]
        lost = [key for group in groups for key in group.lost_keys]
        if lost:
            msg = f"{len(lost)} rows are lost, such as {lost[0]!r}: evict them first (asyncdp evict --lost)"
            raise DataPlaneUnavailable(msg, partition_id=self.name, sample_ids=tuple(lost), op="save")
        found: dict[Any, Cells] = {row: {} for row in rows}
        if not rows or not fields:
            return found
        absent = await self._locate(rows, fields, found)
        # A row that lacks a field is looked up again field by field.
        for name in fields if absent else ():
            await self._locate(absent, [name], found)
        return found

    async def _locate(self, rows: list[Any], fields: list[str], found: dict[Any, Cells]) -> list[Any]:
        ids, handles = tuple(row[0] for row in rows), tuple(row[1] for row in rows)
        env = self.client.env
        ctx = CallContext(env, env.next_op_id(), env.clock.now() + self.client.call_timeout_s, "save")
        got: Located = await self.client.execute(Locate(ids, self.name, tuple(fields), handles), ctx)
        self.specs.update(got.specs)
        for ref in got.refs:
            for index, at in zip(ref.index, ref.rows, strict=True):
                for name in ref.fields:
                    found[rows[at]][name] = (ref.host.id, ref.host.epoch, ref.slot, ref.generation, index)
        for at, err in got.missing.items():
            if isinstance(err, StaleSlotError):
                found.pop(rows[at], None)
        return [rows[at] for at in got.missing if rows[at] in found]

    async def _read(self, groups: Sequence[DataPlaneGroupMeta], wanted: dict[Any, Cells]) -> None:
        """Read and write rows, in chunks of rows that have the same fields."""
        sizes = {row: group.size_bytes // max(1, len(group.keys)) for group in groups for row in _rows(group)}
        by_fields: dict[tuple[str, ...], list[Any]] = {}
        for row, cells in wanted.items():
            by_fields.setdefault(tuple(sorted(cells)), []).append(row)
        for fields, rows in by_fields.items():
            batch: list[Any] = []
            room = self.chunk_bytes
            for row in rows:
                if batch and sizes[row] > room:
                    await self._chunk(batch, fields, wanted)
                    batch, room = [], self.chunk_bytes
                batch.append(row)
                room -= sizes[row]
            await self._chunk(batch, fields, wanted)
            if self.progress is not None:
                self.progress(len(self.at), sum(len(group.keys) for group in groups))

    async def _chunk(self, rows: list[Any], fields: tuple[str, ...], wanted: dict[Any, Cells]) -> None:
        block = Block(len(rows), {})
        if fields:
            meta = KVBatchMeta(self.name, sample_ids=[r[0] for r in rows], handles=[r[1] for r in rows])
            try:
                data = await self.client.get_data(meta, list(fields))
            except StaleSlotError:
                return
            except PartialReadError as err:
                if any(not isinstance(one, StaleSlotError) for one in err.errors.values()):
                    raise
                rows = [rows[at] for at in range(len(rows)) if at not in err.errors]
                data = err.rows
            codec = object_codec()
            block = Block.from_fields(data, len(rows), {n: self.specs[n] for n in fields}, codec)
        tensors, kinds = _tensors(block)
        number = len(self.chunks)
        file = self.folder / f"{self.stem}-{number:05}.safetensors"
        entry = await anyio.to_thread.run_sync(write_chunk, file, tensors)
        entry["tensors"] = {name: [str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in tensors.items()}
        self.chunks.append({**entry, "ids": [row[0] for row in rows], "kinds": kinds})
        for at, row in enumerate(rows):
            self.read[row] = wanted[row]
            self.at[row] = (number, at)


def _rows(group: DataPlaneGroupMeta) -> list[tuple[str, RowHandle | None]]:
    return list(zip(group.keys, group.handles or [None] * len(group.keys), strict=True))


def _tensors(block: Block) -> tuple[dict[str, torch.Tensor], dict[str, list[Any]]]:
    """Return the tensors that hold the columns of a block, and the kind of each column."""
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, list[Any]] = {}
    for name, column in block.columns.items():
        if isinstance(column, Objects):
            ends = np.cumsum([0, *map(len, column.items)], dtype=np.int64)
            data = bytearray(b"".join(column.items))
            tensors[f"{name}.values"] = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte()
            tensors[f"{name}.offsets"] = torch.from_numpy(ends)
            kinds[name] = ["object"]
        elif isinstance(column, Ragged):
            tensors[f"{name}.values"] = column.values.contiguous()
            tensors[f"{name}.offsets"] = torch.from_numpy(np.ascontiguousarray(column.offsets))
            kinds[name] = ["ragged", column.dim]
        else:
            tensors[f"{name}.values"] = column.values.contiguous()  # type: ignore[attr-defined]
            kinds[name] = ["dense"]
    return tensors, kinds
