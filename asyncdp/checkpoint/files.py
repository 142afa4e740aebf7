"""The files of a checkpoint: a manifest, which is replaced last, and what checks all of them.

The manifest is 32 bytes of SHA-256 and then msgpack. It names each chunk with its length and SHA-256.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncdp.errors import DataPlaneError

__all__ = ["CheckpointError", "Summary", "contents", "read_manifest", "verify"]

MANIFEST: Final = "manifest.msgpack"
VERSION: Final = 2
DIGEST: Final = 32
#: Bytes that are read at a time when a file is checked.
STEP: Final = 1 << 20


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
        written_bytes: Bytes of the chunks that this save wrote; the others are of earlier saves.
        left_out: Rows by partition that changed at every look while the save went on, with the rest of their groups.
    """

    generation: int
    saved_at: float
    partitions: dict[str, int]
    size_bytes: int
    written_bytes: int
    left_out: dict[str, list[str]]

    @classmethod
    def of(cls, manifest: dict[str, Any]) -> Summary:
        """Return the summary of a manifest."""
        parts = manifest["partitions"]
        chunks = [chunk for one in parts for chunk in one["chunks"]]
        return cls(
            manifest["generation"],
            manifest["saved_at"],
            {one["partition_id"]: len(one["rows"]) for one in parts},
            sum(chunk["nbytes"] for chunk in chunks),
            sum(chunk["nbytes"] for chunk in chunks if chunk["generation"] == manifest["generation"]),
            {one["partition_id"]: one["left_out"] for one in parts if one["left_out"]},
        )


def damaged(file: Path, why: str) -> CheckpointError:
    """Return the error of a damaged file."""
    return CheckpointError(f"{file}: {why}")


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Name the file in the error of what cannot be written."""
    try:
        yield
    except OSError as err:
        raise CheckpointError(f"{file}: cannot be written: {err.strerror or err}") from err


def sync_folder(folder: Path) -> None:
    """Have the disk keep the names in a folder."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(at)
    finally:
        os.close(at)


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest; this makes a save valid. The disk has the names of the chunks before."""
    body = msgspec.msgpack.encode(manifest)
    file = path / MANIFEST
    part = file.with_name(file.name + ".part")
    with writing(file):
        with part.open("wb") as out:
            out.write(hashlib.sha256(body).digest() + body)
            out.flush()
            os.fsync(out.fileno())
        sync_folder(path)
        part.replace(file)
        sync_folder(path)


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
            check_chunk(Path(path) / chunk["file"], chunk)
    return Summary.of(manifest)


def check_chunk(file: Path, chunk: dict[str, Any]) -> None:
    """Check one chunk: the SHA-256 is that of its data, followed by that of the head in front of them."""
    digest = hashlib.sha256()
    try:
        with file.open("rb") as data:
            head = data.read(chunk["begin"])
            while piece := data.read(STEP):
                digest.update(piece)
    except OSError as err:
        raise damaged(file, err.strerror or str(err)) from err
    digest.update(head)
    if digest.digest() != chunk["sha256"]:
        raise damaged(file, "its content is not what was saved: the checksum does not match")
