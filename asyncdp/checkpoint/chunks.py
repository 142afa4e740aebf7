"""Chunks: files in the safetensors format that hold the cells of many rows, in pieces.

All cells of a chunk have the same fields. A piece is written and read at once, so that it alone is in memory. The
tensors of piece 3 are called ``3.field.values`` and, where rows differ in length, ``3.field.offsets``.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from asyncdp.rows.block import Block, Column, Dense, Objects, Ragged
from asyncdp.rows.objects import raw_bytes

from .files import CheckpointError, damaged, open_new, open_regular, writing

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ChunkWriter", "read_piece"]

#: Names that safetensors has for dtypes; tensors of others are written as bytes, and the manifest has their dtype.
NAMES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
#: Bytes of the head that are left for each tensor, beside its name: dtype, offsets, and up to ``MOST_DIMS`` dimensions.
ROOM: Final = 300
MOST_DIMS: Final = 8


class ChunkWriter:
    """Writes one chunk. The head stands in front of the data and is written last, into room that was left for it.

    Args:
        file: The file.
        fields: Fields of the cells.
        pieces: Number of pieces, at most.

    Raises, from all methods:
        CheckpointError: The file cannot be written, as on a full disk.
    """

    def __init__(self, file: Path, fields: Sequence[str], pieces: int) -> None:
        """Open the file and leave room for the head."""
        self.file = file
        self.fields = list(fields)
        self.pieces: list[dict[str, Any]] = []
        self._heads: dict[str, Any] = {}
        self._end = 0
        self._digest = hashlib.sha256()
        names = sum(len(json.dumps(name)) + ROOM for name in self.fields)
        self._room = -(-(2 + 2 * pieces * names) // 8) * 8
        with writing(file):
            self._out = open_new(file)
        self._out.seek(8 + self._room)

    def add(self, block: Block) -> None:
        """Append the cells of a block as the next piece."""
        tensors, kinds = _tensors(block)
        begin, shapes = self._end, {}
        number = len(self.pieces)
        with writing(self.file):
            for name, one in tensors.items():
                plain = one.dtype in NAMES and one.ndim <= MOST_DIMS
                shape = list(one.shape) if plain else [one.nbytes]
                span = [self._end, self._end + one.nbytes]
                self._heads[f"{number}.{name}"] = {
                    "dtype": NAMES[one.dtype] if plain else "U8",
                    "shape": shape,
                    "data_offsets": span,
                }
                shapes[name] = [str(one.dtype).removeprefix("torch."), list(one.shape), one.nbytes]
                self._end = span[1]
                data = raw_bytes(one)
                self._out.write(data)
                self._digest.update(data)
        self.pieces.append({"rows": block.n, "begin": begin, "kinds": kinds, "tensors": shapes})

    def close(self) -> dict[str, Any]:
        """Write the head and have the disk keep the file; return its entry of the manifest."""
        body = json.dumps(self._heads).encode()
        if len(body) > self._room:
            raise CheckpointError(f"{self.file}: its head of {len(body)} bytes is larger than the room for it")
        head = self._room.to_bytes(8, "little") + body.ljust(self._room)
        self._digest.update(head)
        with writing(self.file):
            self._out.seek(0)
            self._out.write(head)
            self._out.flush()
            os.fsync(self._out.fileno())
        self._out.close()
        nbytes = dict.fromkeys(self.fields, 0)
        for piece in self.pieces:
            for name, (_, _, size) in piece["tensors"].items():
                nbytes[name.rpartition(".")[0]] += size
        return {
            "file": self.file.name,
            "begin": len(head),
            "nbytes": len(head) + self._end,
            "sha256": self._digest.digest(),
            "fields": self.fields,
            "field_bytes": [nbytes[name] for name in self.fields],
            "rows": sum(piece["rows"] for piece in self.pieces),
            "pieces": self.pieces,
        }

    def abandon(self) -> None:
        """Close the file as it is; no manifest names it."""
        with suppress(OSError):
            self._out.close()


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


def read_piece(path: Path, chunk: dict[str, Any], number: int) -> dict[str, Column]:
    """Read the columns of one piece.

    Raises:
        CheckpointError: The file is missing or shorter than it was, or the manifest describes what cannot be.
    """
    file, piece = path / chunk["file"], chunk["pieces"][number]
    size = sum(size for _, _, size in piece["tensors"].values())
    if size > chunk["nbytes"]:
        raise damaged(file, f"the manifest has a piece of {size} bytes in it")
    data = bytearray(size)
    try:
        with open_regular(file) as source:
            source.seek(chunk["begin"] + piece["begin"])
            count = source.readinto(data)
    except OSError as err:
        raise damaged(file, err.strerror or str(err)) from err
    if count != len(data):
        raise damaged(file, "it is shorter than what was saved")
    try:
        tensors = _split(piece, data)
        return {name: _column(name, kind, tensors) for name, kind in piece["kinds"].items()}
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as err:
        raise damaged(file, f"the manifest says of it what cannot be: {err}") from err


def _split(piece: dict[str, Any], data: bytearray) -> dict[str, torch.Tensor]:
    """Return the tensors of a piece, which share the memory of ``data``."""
    tensors: dict[str, torch.Tensor] = {}
    at = 0
    for name, (dtype, shape, size) in piece["tensors"].items():
        kind = getattr(torch, dtype)
        if size:
            raw = torch.frombuffer(data, dtype=torch.uint8, count=size, offset=at)
            tensors[name] = (raw if at % kind.itemsize == 0 else raw.clone()).view(kind).view(shape)
        else:
            tensors[name] = torch.empty(shape, dtype=kind)
        at += size
    return tensors


def _column(field: str, kind: list[Any], tensors: dict[str, torch.Tensor]) -> Column:
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
