"""Restores the rows of a checkpoint."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.rows.block import Block, Column, Dense, FieldSpec, Objects, Ragged

from .files import CheckpointError, Summary, read_chunk, read_manifest, verify
from .objects import object_codec
from .saving import Progress, alone

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["restore"]


async def restore(
    client: Client,
    path: str | os.PathLike[str],
    partition_id: str | None = None,
    *,
    replace: bool = False,
    progress: Progress | None = None,
) -> Summary:
    """Restore one partition, or all, of a checkpoint. All files are checked before anything is put.

    Claims are not restored: all rows can be claimed again. Rows begin new lives, in the order of the save as far as
    their chunks have it. A restore that fails midway leaves the rows that were put; ``replace`` begins anew.

    Args:
        client: A client of the plane, of any transport.
        path: Folder of the checkpoint.
        partition_id: The partition; None: all that the checkpoint has.
        replace: Whether to drop partitions that exist and have rows; otherwise these are refused.
        progress: Called with the rows that are restored and the rows of the partition.

    Raises:
        CheckpointError: The checkpoint is missing, damaged or of another version; the file is named.
        DataPlaneBadRequest: A partition has rows, or the checkpoint lacks ``partition_id``.
    """
    folder = Path(path)
    read_manifest(folder)
    with alone(folder):
        await anyio.to_thread.run_sync(verify, folder)
        manifest = read_manifest(folder)
        parts = [one for one in manifest["partitions"] if partition_id in (None, one["partition_id"])]
        if partition_id is not None and not parts:
            raise DataPlaneBadRequest(f"{folder} has no partition {partition_id!r}", field="partition_id")
        there = {one.partition_id: one.size for one in await client.list_partitions()}
        full = [one["partition_id"] for one in parts if there.get(one["partition_id"])]
        if full and not replace:
            msg = f"partition {full[0]!r} has {there[full[0]]} rows; nothing was restored (replace=True would drop it)"
            raise DataPlaneBadRequest(msg, partition_id=full[0], field="replace")
        for part in parts:
            if part["partition_id"] in full:
                await client.drop_partition(part["partition_id"])
            await _restored(client, folder, part, progress)
    return Summary.of({**manifest, "partitions": parts})


async def _restored(client: Client, folder: Path, part: dict[str, Any], progress: Progress | None) -> None:
    name = part["partition_id"]
    declared = (part["fields"], part["num_samples"], part["consumer_tasks"], part["grpo_group_size"])
    await client.register_partition(name, *declared, enums=part["enums"] or None)
    by_chunk: dict[int, list[tuple[int, dict[str, Any]]]] = {}
    for number, at, tags in part["rows"]:
        by_chunk.setdefault(number, []).append((at, tags))
    done = 0
    for number in sorted(by_chunk):
        chunk, rows = part["chunks"][number], by_chunk[number]
        tensors = await anyio.to_thread.run_sync(read_chunk, folder, chunk)
        columns = {field: _column(field, kind, tensors) for field, kind in chunk["kinds"].items()}
        for some in _runs(rows, columns, set(part["nested"])):
            ids = [chunk["ids"][at] for at, _ in some]
            specs = {field: _spec(field, part) for field in columns}
            block = Block(len(some), {f: c.take([at for at, _ in some]) for f, c in columns.items()}, specs)
            block.codec = object_codec()
            await client.put_samples(ids, name, block.to_tensordict() if columns else None, [tags for _, tags in some])
        done += len(rows)
        if progress is not None:
            progress(done, len(part["rows"]))


def _spec(field: str, part: dict[str, Any]) -> FieldSpec:
    if field in part["enums"]:
        return FieldSpec("enum", enum=tuple(part["enums"][field]))
    nested, dim = field in part["nested"], part["ragged_dims"].get(field, 0)
    return FieldSpec("tensor", shape=(0,) * dim + (None,), nested=nested)


def _column(field: str, kind: list[Any], tensors: dict[str, Any]) -> Column:
    values = tensors[f"{field}.values"]
    if kind[0] == "dense":
        return Dense(values)
    ends = tensors[f"{field}.offsets"].numpy()
    if kind[0] == "ragged":
        return Ragged(values, ends, dim=kind[1])
    if kind[0] != "object":
        raise CheckpointError(f"field {field!r} is of the unknown kind {kind[0]!r}")
    data = values.numpy().tobytes()
    return Objects([data[a:b] for a, b in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True)])


def _runs(rows: list[Any], columns: dict[str, Column], nested: set[str]) -> list[list[Any]]:
    """Divide rows where the length of a field changes that was put dense, so that it is put dense again."""
    dense = [np.diff(c.offsets) for f, c in columns.items() if isinstance(c, Ragged) and f not in nested]
    runs: list[list[Any]] = []
    for row in rows:
        if runs and all(lengths[row[0]] == lengths[runs[-1][0][0]] for lengths in dense):
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
