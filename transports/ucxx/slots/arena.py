"""An arena: one POSIX shared-memory segment with a table of slot headers and space for payloads.

::

    page 0            arena header: magic, version, sizes, epoch, host id, CRC-32; a word that tells it was given up
    table             128 bytes per unit: the header of the slot that begins there, see slot_header
    data              units of ``unit_bytes``; a slot takes a stretch of them

The host holds a lock (flock) on the segment for as long as it lives: whoever gets the lock knows that no host does.
Segments are opened by ``_posixshmem`` and ``mmap``, not by ``multiprocessing.shared_memory``, whose resource tracker
unlinks a segment when a process that only attached ends (CPython before 3.13) or when its owner is killed.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.process.private_files import check_owner

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Arena", "arena_name", "sweep_arenas"]

PAGE: Final = 4096
HEADER_BYTES: Final = 128
WORDS: Final = HEADER_BYTES // 8
PREFIX: Final = "asyncdp-"
_HEADER: Final = struct.Struct("<8sIIQQQQ128s")
_MAGIC: Final = b"ADPARENA"
#: Of the headers and of how rows lie in slots. Magic and version stay where they are, whatever else changes.
_VERSION: Final = 1
_GIVEN_UP_AT: Final = PAGE - 8
_SHM: Final = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


def arena_name(host_id: str, plane: str = "") -> str:
    """Name of the segment of a host: the same at each start, so that it is found again."""
    return PREFIX + hashlib.blake2b(f"{plane}\0{host_id}".encode(), digest_size=12).hexdigest()


def _up(value: int) -> int:
    return -(-value // PAGE) * PAGE


def _open(name: str, flags: int) -> int:
    """Open a segment without following links.

    Raises:
        PermissionError: It is another user's, or others may read or write it: whoever may write to a segment may also
            shorten it, and then the next access ends the process with SIGBUS.
    """
    try:
        fd = int(_posixshmem.shm_open("/" + name, flags, 0o600))
    except OSError as err:
        if err.errno == errno.ELOOP:
            raise PermissionError(f"{_SHM / name} is a link") from err
        raise
    found = os.fstat(fd)
    try:
        check_owner(found, str(_SHM / name))
    except PermissionError:
        os.close(fd)
        raise
    return fd


class _OtherVersionError(ValueError):
    """A segment is an arena, of another version."""


class Arena:
    """A mapped segment.

    Attributes:
        name: Of the segment.
        host_id, epoch: Whose it is, and in which of its lives.
        unit_bytes, units: How its data space is divided.
        data: The whole segment, uint8.
        words: The slot headers as 64-bit words, ``WORDS`` per unit. Aligned words are read and written whole.
        owned: Whether this process holds the lock, as its host.
    """

    def __init__(self, name: str, fd: int, *, owned: bool) -> None:
        """Map an open segment and check its header.

        Raises:
            ValueError: It is no arena, or a damaged one.
        """
        self.name = name
        self.owned = owned
        self._fd: int | None = fd
        self.nbytes = os.fstat(fd).st_size
        if self.nbytes < PAGE:
            raise ValueError(f"segment {name} has {self.nbytes} bytes")
        self._map = mmap.mmap(fd, self.nbytes)
        header = self._map[: _HEADER.size]
        magic, version, unit, units, epoch, data_at, nbytes, host = _HEADER.unpack(header)
        (crc,) = struct.unpack_from("<I", self._map, _HEADER.size)
        if magic == _MAGIC and version != _VERSION:
            raise _OtherVersionError(f"the arena {name} is of version {version}, this asyncdp reads version {_VERSION}")
        if magic != _MAGIC or crc != zlib.crc32(header):
            raise ValueError(f"segment {name} is no arena")
        if nbytes > self.nbytes or data_at < PAGE + units * HEADER_BYTES or data_at + unit * units > nbytes:
            raise ValueError(f"segment {name} is shorter than its header says")
        self.host_id = host.rstrip(b"\0").decode()
        self.epoch: int = epoch
        self.unit_bytes: int = unit
        self.units: int = units
        self.data_at: int = data_at
        self.data: npt.NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        view: Any = memoryview(self._map)
        self.words: memoryview = view[PAGE : PAGE + units * HEADER_BYTES].cast("Q")
        self._given_up: memoryview = view[_GIVEN_UP_AT:PAGE].cast("Q")

    # -- the host's side

    @classmethod
    def create(cls, name: str, host_id: str, *, epoch: int, data_bytes: int, unit_bytes: int = 16 << 10) -> Arena:
        """Make a segment, allocate all of it, and lock it.

        Args:
            name: Of the segment; see :func:`arena_name`.
            host_id: At most 128 bytes.
            epoch: Of this life of the host.
            data_bytes: Space for payloads.
            unit_bytes: Space is handed out in units of so many bytes; each costs 128 bytes for a header.

        Raises:
            FileExistsError: A segment of this name is there.
            DataPlaneUnavailable: There is not as much shared memory.
        """
        if unit_bytes % PAGE or len(host_id.encode()) > 128:  # noqa: PLR2004 - bytes in the header
            raise ValueError(f"unit_bytes {unit_bytes} is no multiple of {PAGE}, or the host id is too long")
        units = max(1, data_bytes // unit_bytes)
        data_at = _up(PAGE + units * HEADER_BYTES)
        nbytes = data_at + units * unit_bytes
        try:
            fd = _open(name, os.O_CREAT | os.O_EXCL | os.O_RDWR)
        except PermissionError as err:
            raise _foreign(name, err) from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(fd, nbytes)
            _allocate(fd, nbytes)
            header = _HEADER.pack(_MAGIC, _VERSION, unit_bytes, units, epoch, data_at, nbytes, host_id.encode())
            os.pwrite(fd, header + struct.pack("<I", zlib.crc32(header)), 0)
            return cls(name, fd, owned=True)
        except BaseException:
            os.close(fd)
            _posixshmem.shm_unlink("/" + name)
            raise

    @classmethod
    def adopt(cls, name: str, host_id: str) -> Arena | None:
        """Take over the segment that an earlier life of the host left; None where there is none that can be used.

        Raises:
            DataPlaneUnavailable: A host that lives holds it, or another version of asyncdp wrote it.
        """
        fd = _locked(name)
        if fd is None:
            return None
        try:
            arena = cls(name, fd, owned=True)
        except ValueError as err:
            os.close(fd)
            if isinstance(err, _OtherVersionError):
                msg = f"{err}: start that version to serve its rows, or a host without adoption, which gives them up"
                raise DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err) from err
            return None
        if arena.host_id == host_id and not arena.given_up:
            return arena
        arena.close()
        return None

    @classmethod
    def discard(cls, name: str) -> bool:
        """Remove the segment that an earlier life left, telling those who have it mapped. Whether there was one.

        Raises:
            DataPlaneUnavailable: A host that lives holds it.
        """
        fd = _locked(name)
        if fd is None:
            return False
        try:
            arena = cls(name, fd, owned=True)
        except ValueError:
            os.close(fd)
            _posixshmem.shm_unlink("/" + name)
            return True
        arena.unlink()
        return True

    def unlink(self) -> None:
        """Give the segment up and remove its name; those who have it mapped see it as given up."""
        self._given_up[0] = 1
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink("/" + self.name)
        self.close()

    def touch(self) -> None:
        """Show in the segment's modification time that its host lived until now."""
        if self._fd is not None:
            os.utime(self._fd)

    # -- others

    @classmethod
    def attach(cls, name: str, host_id: str, epoch: int) -> Arena | None:
        """Map the segment of a host on this machine; None where it cannot be read or is another life's."""
        try:
            fd = _open(name, os.O_RDWR)
        except OSError:
            return None
        try:
            arena = cls(name, fd, owned=False)
        except ValueError:
            os.close(fd)
            return None
        arena.close()  # the mapping has a descriptor of its own, which goes with it
        return arena if arena.host_id == host_id and arena.epoch == epoch and not arena.given_up else None

    @property
    def given_up(self) -> bool:
        """Whether the host, or its next life, removed the segment: nothing in it is anybody's content any more."""
        return self._given_up[0] != 0

    def close(self) -> None:
        """Release lock and descriptor; the memory is unmapped when nothing refers to it any more. Twice is fine."""
        if self._fd is not None:
            if self.owned:
                # mmap keeps a duplicate of the descriptor, and with it the lock, for as long as anything is mapped.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    # -- places

    def payload_at(self, slot: int) -> int:
        """Where the payload of a slot begins: a cache line past a page.

        A destination 16 bytes above its source modulo 4096 makes copies 2.5 times slower; arrays of numpy and torch
        begin 16 or 64 bytes past a page.
        """
        return self.data_at + slot * self.unit_bytes + 64

    def slice(self, begin: int, size: int) -> npt.NDArray[np.uint8]:
        """Return bytes of the segment."""
        return self.data[begin : begin + size]


def _allocate(fd: int, nbytes: int) -> None:
    try:
        os.posix_fallocate(fd, 0, nbytes)
    except OSError as err:
        if err.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
            raise
        space = os.fstatvfs(fd)
        msg = (
            f"the arena needs {nbytes >> 20} MiB of shared memory, {space.f_bavail * space.f_frsize >> 20} MiB are left"
            " in /dev/shm (containers begin with 64 MiB: docker run --shm-size)"
        )
        raise DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err) from err


def _foreign(name: str, err: OSError) -> DataPlaneUnavailable:
    msg = (
        f"the arena {name} cannot be used: {err}. Two planes on one machine need other names (`plane`, or `host_id`); a"
        " segment that another user put there is for that user, or root, to remove"
    )
    return DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err)


def _locked(name: str) -> int | None:
    """Open a segment and lock it; None where there is none."""
    while True:
        try:
            fd = _open(name, os.O_RDWR)
        except FileNotFoundError:
            return None
        except PermissionError as err:
            raise _foreign(name, err) from err
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as err:
            os.close(fd)
            msg = f"a host of this name lives on this machine already: it holds the arena {name}"
            raise DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err) from err
        # Unlinked, or replaced by another of its name, between open and lock?
        path = _SHM / name
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
        os.close(fd)


def sweep_arenas(older_than_s: float, *, now: float | None = None) -> list[str]:
    """Remove segments whose hosts are dead and have not come back for ``older_than_s`` seconds; returns their names.

    A host touches its segment with each heartbeat. ``now`` is in unix seconds.
    """
    now = time.time() if now is None else now
    swept = []
    for path in sorted(_SHM.glob(PREFIX + "*")):
        # Held by a host that lives, gone already, or another user's: not ours to remove.
        with contextlib.suppress(DataPlaneUnavailable, OSError):
            if now - path.stat().st_mtime >= older_than_s and Arena.discard(path.name):
                swept.append(path.name)
    return swept
