"""Folders of checkpoints that hold what a save did not write: links, FIFOs, other files, manifests of somebody else."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from asyncdp.checkpoint import CheckpointError, contents, restore, save, verify
from asyncdp.checkpoint.files import alone

from .test_checkpoints import fill, plane

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytestmark = pytest.mark.anyio


def chunks(folder: Path) -> list[Path]:
    """Return the files with rows."""
    return sorted(folder.glob("0*.safetensors"))


def forge(folder: Path, change: Callable[[Any], Any]) -> None:
    """Replace the manifest by a changed one, with the checksum that fits it."""
    file = folder / "manifest.msgpack"
    body = change(msgspec.msgpack.decode(file.read_bytes()[32:]))
    body = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    file.write_bytes(hashlib.sha256(body).digest() + body)


async def test_files_of_others_stay(tmp_path: Path) -> None:
    """A save removes chunks of its own only, whatever else ends as they do: a model's weights, say."""
    names = ["model.safetensors", "model-00001-of-00002.safetensors", "download.part", "1-2-3.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(b"mine")
    async with plane() as one:
        await fill(one, 4)
        await save(one, tmp_path)
        first = chunks(tmp_path)
        await one.put_samples(["s0", "s1", "s2", "s3"], "p", {"dense": torch.zeros(4, 3, dtype=torch.int64)})
        await save(one, tmp_path)
    assert set(chunks(tmp_path)) != set(first)
    assert all((tmp_path / name).read_bytes() == b"mine" for name in names)


@pytest.mark.parametrize("name", ["lock", "manifest.msgpack.part", "manifest.msgpack", "000001-000-00000.safetensors"])
async def test_a_link_that_was_put_there_is_not_written_through(tmp_path: Path, name: str) -> None:
    """What it points to stays as it is; the save succeeds, or names the link."""
    target, folder = tmp_path / "precious", tmp_path / "c"
    target.write_bytes(b"precious")
    folder.mkdir()
    (folder / name).symlink_to(target)
    async with plane() as one:
        await fill(one, 4)
        if name in {"lock", "manifest.msgpack"}:  # the second is read before anything is written
            with pytest.raises(CheckpointError, match=f"/{name}: "):
                await save(one, folder)
        else:
            await save(one, folder)
            assert verify(folder).partitions == {"p": 5}
    assert target.read_bytes() == b"precious"


@pytest.mark.parametrize("which", ["manifest", "chunk"])
async def test_a_fifo_holds_up_nobody(tmp_path: Path, which: str) -> None:
    """No regular file: the error names it at once."""
    async with plane() as one, plane() as two:
        await fill(one, 4)
        await save(one, tmp_path)
        file = tmp_path / "manifest.msgpack" if which == "manifest" else chunks(tmp_path)[0]
        file.unlink()
        os.mkfifo(file)
        for look in (verify, contents) if which == "manifest" else (verify,):
            with pytest.raises(CheckpointError, match=rf"{file.name}.*no regular file"):
                look(tmp_path)
        with pytest.raises(CheckpointError, match=rf"{file.name}.*no regular file"):
            await restore(two, tmp_path)


def _part(manifest: Any) -> Any:
    return manifest["partitions"][0]


def _outside(manifest: Any) -> Any:
    _part(manifest)["chunks"][0]["file"] = "../outside.safetensors"
    return manifest


def _far_row(manifest: Any) -> Any:
    _part(manifest)["rows"][0][3][0][0] = 99
    return manifest


def _far_claim(manifest: Any) -> Any:
    _part(manifest)["claims"].append(["me", "train", ["dense"], [99], 0.0, None])
    return manifest


def _huge(manifest: Any) -> Any:
    piece = _part(manifest)["chunks"][0]["pieces"][0]
    name = next(iter(piece["tensors"]))
    piece["tensors"][name][2] = 1 << 50
    return manifest


def _no_dtype(manifest: Any) -> Any:
    piece = _part(manifest)["chunks"][0]["pieces"][0]
    piece["tensors"][next(iter(piece["tensors"]))][0] = "load"
    return manifest


FORGED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "outside": (_outside, r"manifest.*chunks\[0\]\.file"),
    "a row in no chunk": (_far_row, r"manifest.*row 's0' of 'p' is in no chunk"),
    "a claim of no row": (_far_claim, r"manifest.*a claim of 'p'"),
    "another version": (lambda manifest: {**manifest, "version": 3}, r"manifest.*version 3.*reads version 2"),
    "nothing": (lambda _: b"", "manifest.*is not the manifest"),
    "no map": (lambda _: [1, 2], "manifest.*is not the manifest"),
    "no partitions": (lambda manifest: {"version": 2, "generation": manifest["generation"]}, "is not the manifest"),
    "no msgpack": (lambda _: b"\xc1" * 9, "manifest.*is not the manifest"),
}


@pytest.mark.parametrize("case", FORGED)
async def test_a_manifest_that_no_save_wrote_is_refused(tmp_path: Path, case: str) -> None:
    """With a checksum that fits: the error names the manifest, nothing is put, and no save goes on from it."""
    change, told = FORGED[case]
    folder = tmp_path / "c"
    async with plane() as one, plane() as two:
        await fill(one, 4)
        await save(one, folder)
        (tmp_path / "outside.safetensors").write_bytes(chunks(folder)[0].read_bytes())
        forge(folder, change)
        for look in (contents, verify):
            with pytest.raises(CheckpointError, match=told):
                look(folder)
        with pytest.raises(CheckpointError, match=told):
            await restore(two, folder)
        with pytest.raises(CheckpointError, match=told + ".*remove this file first"):
            await save(one, folder)
        assert await two.list_partitions() == []
        (folder / "manifest.msgpack").unlink()
        await save(one, folder)
        assert len((await restore(two, folder)).partitions) == 1


@pytest.mark.parametrize("change", [_huge, _no_dtype])
async def test_a_manifest_that_lies_about_a_chunk_is_refused(tmp_path: Path, change: Callable[[Any], Any]) -> None:
    """The restore fails by the chunk's name, without an allocation of what the manifest says."""
    async with plane() as one, plane() as two:
        await fill(one, 4)
        await save(one, tmp_path)
        forge(tmp_path, change)
        with pytest.raises(CheckpointError, match=r"\d+\.safetensors: the manifest"):
            await restore(two, tmp_path)


async def test_a_save_that_fails_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that was full is not left fuller; the earlier checkpoint is whole."""
    async with plane() as one:
        await fill(one, 4)
        await save(one, tmp_path)
        before = set(os.listdir(tmp_path))  # noqa: PTH208
        await one.put_samples(["s0", "s1", "s2", "s3"], "p", {"dense": torch.zeros(4, 3, dtype=torch.int64)})

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "replace", full)
        with pytest.raises(CheckpointError, match="No space left"):
            await save(one, tmp_path)
    assert set(os.listdir(tmp_path)) == before  # noqa: PTH208
    assert verify(tmp_path).generation == 1


async def test_restores_share_a_folder_and_saves_do_not(tmp_path: Path) -> None:
    """Two planes may be restored from one checkpoint at once; a save waits for neither, it is refused."""
    async with plane() as one, plane() as two:
        await fill(one, 4)
        await save(one, tmp_path)
        with alone(tmp_path, reads=True):
            assert (await restore(two, tmp_path)).partitions == {"p": 5}
            with pytest.raises(CheckpointError, match="going on"):
                await save(one, tmp_path)
        with alone(tmp_path), pytest.raises(CheckpointError, match="going on"):
            await restore(two, tmp_path, replace=True)


async def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is saved to it, as two saves at once would damage each other."""

    def flock(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", flock)
    async with plane() as one:
        await fill(one, 4)
        with pytest.raises(CheckpointError, match=f"{tmp_path}/lock: cannot be locked: No locks available"):
            await save(one, tmp_path)
    assert not chunks(tmp_path)


@pytest.mark.parametrize("lock", [True, False])
async def test_a_folder_that_cannot_be_written_is_restored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, lock: bool
) -> None:
    """A read-only disk, or somebody else's folder; a save into it names the file."""
    async with plane() as one, plane() as two:
        await fill(one, 4)
        await save(one, tmp_path)
        if not lock:
            (tmp_path / "lock").unlink()
        real = os.open

        def read_only(file: Any, flags: int, *args: Any, **named: Any) -> int:
            if flags & (os.O_RDWR | os.O_WRONLY | os.O_CREAT):
                raise OSError(30, "Read-only file system")
            return real(file, flags, *args, **named)

        monkeypatch.setattr(os, "open", read_only)
        assert (await restore(two, tmp_path)).partitions == {"p": 5}
        with pytest.raises(CheckpointError, match="lock: cannot be opened: Read-only file system"):
            await save(one, tmp_path)


async def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """A file is where the folder should be, or above it."""
    (tmp_path / "file").write_bytes(b"")
    async with plane() as one:
        await fill(one, 4)
        for name in ("file", "file/below"):
            with pytest.raises(CheckpointError, match=f"/{name}: cannot be a folder"):
                await save(one, tmp_path / name)
