"""The files of a checkpoint: chunks of rows in the safetensors format, and a manifest that is replaced last.

The manifest is 32 bytes of SHA-256 and then msgpack. It names each chunk with its length and SHA-256.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import torch

from asyncdp.errors import DataPlaneError
from asyncdp.rows.objects import raw_bytes

__all__ = ["CheckpointError", "Summary", "contents", "read_chunk", "read_manifest", "verify"]

MANIFEST: Final = "manifest.msgpack"
VERSION: Final = 1
DIGEST: Final = 32
#: Bytes that are read at a time when a file is checked.
STEP: Final = 1 << 20
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


class CheckpointError(DataPlaneError):
    """A checkpoint is missing, damaged, of another version, being written, or cannot be written; it names the file."""


@dataclass(frozen=True, slots=True)
class Summary:
    """What a checkpoint holds, or what was restored of it.

    Attributes:
        generation: Number of the save, from 1.
        saved_at: Unix time of the save, in seconds.
        partitions: Rows by partition.
        size_bytes: Bytes of all chunks.
        left_out: Rows by partition that changed at every look while the save went on, with the rest of their groups.
    """

    generation: int
    saved_at: float
    partitions: dict[str, int]
    size_bytes: int
    left_out: dict[str, list[str]]

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Summary:
        """Return the summary of a manifest."""
        parts = manifest["partitions"]
        return cls(
            manifest["generation"],
            manifest["saved_at"],
            {one["partition_id"]: len(one["rows"]) for one in parts},
            sum(chunk["nbytes"] for one in parts for chunk in one["chunks"]),
            {one["partition_id"]: one["left_out"] for one in parts if one["left_out"]},
        )


def damaged(file: Path, why: str) -> CheckpointError:
    """Return the error of a damaged file."""
    return CheckpointError(f"{file}: {why}")


def write_file(file: Path, fill: Callable[[BinaryIO], None]) -> None:
    """Write a file and have the disk keep it; the name appears only with the whole content.

    Raises:
        CheckpointError: The file cannot be written, as on a full disk.
    """
    part = file.with_name(file.name + ".part")
    try:
        with part.open("wb") as out:
            fill(out)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
        sync_folder(file.parent)
    except OSError as err:
        raise CheckpointError(f"{file}: cannot be written: {err.strerror or err}") from err


def sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(at)
    finally:
        os.close(at)


def write_chunk(file: Path, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Write tensors as one safetensors file; return its name, length and SHA-256 for the manifest."""
    heads: dict[str, Any] = {}
    end = 0
    for name, one in tensors.items():
        plain = one.dtype in NAMES
        shape = list(one.shape) if plain else [one.nbytes]
        heads[name] = {"dtype": NAMES.get(one.dtype, "U8"), "shape": shape, "data_offsets": [end, end + one.nbytes]}
        end += one.nbytes
    head = json.dumps(heads).encode()
    head += b" " * (-len(head) % 8)
    digest = hashlib.sha256()

    def fill(out: BinaryIO) -> None:
        for piece in (len(head).to_bytes(8, "little"), head, *map(raw_bytes, tensors.values())):
            out.write(piece)
            digest.update(piece)

    write_file(file, fill)
    return {"file": file.name, "nbytes": 8 + len(head) + end, "sha256": digest.digest()}


def read_chunk(path: Path, chunk: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Read the tensors of one chunk, whose checksum is checked first.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    file = path / chunk["file"]
    try:
        data = bytearray(file.read_bytes())
    except OSError as err:
        raise damaged(file, err.strerror or str(err)) from err
    if len(data) != chunk["nbytes"] or hashlib.sha256(data).digest() != chunk["sha256"]:
        raise damaged(file, "its content is not what was saved: the checksum does not match")
    begin = 8 + int.from_bytes(data[:8], "little")
    heads = json.loads(data[8:begin])
    found = {}
    for name, (dtype, shape) in chunk["tensors"].items():
        kind = getattr(torch, dtype)
        first, last = heads[name]["data_offsets"]
        if first == last:
            found[name] = torch.empty(shape, dtype=kind)
        else:
            raw = torch.frombuffer(data, dtype=torch.uint8, count=last - first, offset=begin + first)
            whole = raw if (begin + first) % kind.itemsize == 0 else raw.clone()
            found[name] = whole.view(kind).view(shape)
    return found


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest; this makes a save valid."""
    body = msgspec.msgpack.encode(manifest)
    data = hashlib.sha256(body).digest() + body

    def fill(out: BinaryIO) -> None:
        out.write(data)

    write_file(path / MANIFEST, fill)


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, it is damaged, or of another version.
    """
    file = Path(path) / MANIFEST
    try:
        data = file.read_bytes()
    except OSError as err:
        raise damaged(file, f"no checkpoint can be read here: {err.strerror or err}") from err
    if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        raise damaged(file, "the manifest is damaged: its checksum does not match")
    manifest: dict[str, Any] = msgspec.msgpack.decode(data[DIGEST:])
    if manifest.get("version") != VERSION:
        raise damaged(file, f"is of version {manifest.get('version')}; this release reads version {VERSION}")
    return manifest


def contents(path: str | os.PathLike[str]) -> Summary:
    """Return what a checkpoint holds, from its manifest alone.

    Raises:
        CheckpointError: There is none, it is damaged, or of another version.
    """
    return Summary.of(read_manifest(path))


def verify(path: str | os.PathLike[str]) -> Summary:
    """Check every byte of a checkpoint against its checksums, with little memory.

    Raises:
        CheckpointError: A file is missing or damaged; it is named.
    """
    manifest = read_manifest(path)
    for part in manifest["partitions"]:
        for chunk in part["chunks"]:
            file, digest = Path(path) / chunk["file"], hashlib.sha256()
            try:
                with file.open("rb") as data:
                    while piece := data.read(STEP):
                        digest.update(piece)
            except OSError as err:
                raise damaged(file, err.strerror or str(err)) from err
            if digest.digest() != chunk["sha256"]:
                raise damaged(file, "its content is not what was saved: the checksum does not match")
    return Summary.of(manifest)
