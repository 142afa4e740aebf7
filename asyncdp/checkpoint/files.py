"""The files of a checkpoint: a manifest, which is replaced last, and what checks all of them.

The manifest is 32 bytes of SHA-256 and then msgpack. It names each chunk with its length and SHA-256.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import IO, Annotated, Any, Final

import msgspec

from asyncdp.errors import DataPlaneError

__all__ = ["CheckpointError", "Summary", "contents", "read_manifest", "verify"]

MANIFEST: Final = "manifest.msgpack"
VERSION: Final = 2
DIGEST: Final = 32
#: Bytes that are read at a time when a file is checked.
STEP: Final = 1 << 20
LOCK: Final = "lock"
#: Names of chunks: numbers of the save, of the partition, and of the chunk. No other file of the folder is touched.
CHUNK_NAME: Final = r"^\d{6,}-\d{3,}-\d{5,}\.safetensors$"


class _Versioned(msgspec.Struct):
    version: int


_Natural = Annotated[int, msgspec.Meta(ge=0)]


class _Piece(msgspec.Struct):
    rows: _Natural
    begin: _Natural
    kinds: dict[str, list[Any]]
    tensors: dict[str, tuple[str, list[_Natural], _Natural]]


class _Chunk(msgspec.Struct):
    file: Annotated[str, msgspec.Meta(pattern=CHUNK_NAME)]
    begin: _Natural
    nbytes: _Natural
    sha256: bytes
    fields: list[str]
    field_bytes: list[_Natural]
    rows: _Natural
    pieces: list[_Piece]
    generation: int


class _Part(msgspec.Struct):
    partition_id: str
    fields: list[str]
    consumer_tasks: list[str]
    num_samples: int | None
    grpo_group_size: int | None
    enums: dict[str, list[str]]
    nested: list[str]
    ragged_dims: dict[str, int]
    rows: list[tuple[str, int, dict[str, Any], list[tuple[_Natural, _Natural, str, list[_Natural]]]]]
    chunks: list[_Chunk]
    claims: list[tuple[str, str, list[str], list[_Natural], float, float | None]]
    left_out: list[str]


class _Manifest(msgspec.Struct):
    generation: int
    saved_at: float
    partitions: list[_Part]


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


def open_new(file: Path) -> IO[bytes]:
    """Create a file in place of what has its name, which may be a link to a file elsewhere."""
    file.unlink(missing_ok=True)
    return file.open("xb")


def open_regular(file: Path) -> BufferedReader:
    """Open a regular file to read; a FIFO would hold up the reader, a device may never end."""
    at = os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(at).st_mode):
        os.close(at)
        raise OSError("it is no regular file")
    return os.fdopen(at, "rb")


def write_manifest(path: Path, manifest: dict[str, Any]) -> None:
    """Replace the manifest; this makes a save valid. The disk has the names of the chunks before."""
    body = msgspec.msgpack.encode(manifest)
    file = path / MANIFEST
    part = file.with_name(file.name + ".part")
    with writing(file):
        with open_new(part) as out:
            out.write(hashlib.sha256(body).digest() + body)
            out.flush()
            os.fsync(out.fileno())
        sync_folder(path)
        part.replace(file)
        sync_folder(path)


def tidy(folder: Path, kept: set[str], of: str = "") -> None:
    """Remove chunks that no manifest needs, whose names begin with ``of``; the next save tries again what fails."""
    named = re.compile(CHUNK_NAME)
    for old in [*folder.glob(f"{of}*.safetensors"), folder / f"{MANIFEST}.part"]:
        if old.name not in kept and (old.suffix == ".part" or named.match(old.name)):
            with suppress(OSError):
                old.unlink(missing_ok=True)


@contextmanager
def alone(folder: Path, *, reads: bool = False) -> Iterator[None]:
    """Keep saves off the folder, and those that read it too unless this one only ``reads`` it.

    Raises:
        CheckpointError: Another process, or another call of this one, works on the folder; or it cannot be locked.
    """
    file = folder / LOCK
    try:
        lock = _open_lock(file, reads=reads)
    except OSError as err:
        raise damaged(file, f"cannot be opened: {err.strerror or err}") from err
    if lock is None:
        yield
        return
    try:
        try:
            fcntl.flock(lock, (fcntl.LOCK_SH if reads else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError as err:
            raise CheckpointError(f"{folder}: another save or restore of this checkpoint is going on") from err
        except OSError as err:
            raise damaged(file, f"cannot be locked: {err.strerror or err}") from err
        yield
    finally:
        os.close(lock)


def _open_lock(file: Path, *, reads: bool) -> int | None:
    """Open the lock, where a link is refused; None if there is none and a reader cannot make it."""
    flags = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | flags, 0o666)
    except OSError as err:
        if not reads or err.errno not in {errno.EACCES, errno.EPERM, errno.EROFS}:
            raise
    try:
        return os.open(file, os.O_RDONLY | flags)
    except FileNotFoundError:
        return None


def read_manifest(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read and check the manifest of a checkpoint.

    Raises:
        CheckpointError: There is none, it is damaged, or of another version.
    """
    file = Path(path) / MANIFEST
    try:
        with open_regular(file) as source:
            data = source.read()
    except OSError as err:
        raise damaged(file, f"no checkpoint can be read here: {err.strerror or err}") from err
    if hashlib.sha256(data[DIGEST:]).digest() != data[:DIGEST]:
        raise damaged(file, "the manifest is damaged: its checksum does not match")
    try:
        version = msgspec.msgpack.decode(data[DIGEST:], type=_Versioned).version
        if version != VERSION:
            raise damaged(file, f"is of version {version}; this release reads version {VERSION}")
        msgspec.msgpack.decode(data[DIGEST:], type=_Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as err:
        raise damaged(file, f"is not the manifest of a checkpoint: {err}") from err
    manifest: dict[str, Any] = msgspec.msgpack.decode(data[DIGEST:])
    _check_references(file, manifest)
    return manifest


def _check_references(file: Path, manifest: dict[str, Any]) -> None:
    """Raise if a row or claim of the manifest refers to something that the manifest does not have."""
    for part in manifest["partitions"]:
        chunks, rows = part["chunks"], part["rows"]
        sizes = [(chunk["rows"], len(chunk["fields"])) for chunk in chunks]
        for sample_id, _, _, cells in rows:
            for chunk, at, _, fields in cells:
                if chunk >= len(sizes) or at >= sizes[chunk][0] or max(fields, default=0) >= sizes[chunk][1]:
                    raise damaged(file, f"row {sample_id!r} of {part['partition_id']!r} is in no chunk")
        if any(at >= len(rows) for claim in part["claims"] for at in claim[3]):
            raise damaged(file, f"a claim of {part['partition_id']!r} has a row that does not exist")


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
        with open_regular(file) as data:
            if os.fstat(data.fileno()).st_size != chunk["nbytes"]:
                raise damaged(file, f"it has {os.fstat(data.fileno()).st_size} bytes; {chunk['nbytes']} were saved")
            head = data.read(chunk["begin"])
            while piece := data.read(STEP):
                digest.update(piece)
    except OSError as err:
        raise damaged(file, err.strerror or str(err)) from err
    digest.update(head)
    if digest.digest() != chunk["sha256"]:
        raise damaged(file, "its content is not what was saved: the checksum does not match")
