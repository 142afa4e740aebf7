"""An arena: one POSIX shared-memory segment with a table of slot headers and space for payloads.

::

    page 0            arena header: magic, version, sizes, epoch, host id, CRC-32; a word that says that its host
                      leaves borrowed slots alone; one that says it was given up
    table             128 bytes per unit: the header of the slot that begins there, see ``header.py``
    data              units of ``unit_bytes``; a slot takes a contiguous extent of them

The host holds a lock (flock) on the segment for as long as it runs, so a process that gets the lock knows that no host
is running. Segments are opened by ``_posixshmem`` and ``mmap``, not by ``multiprocessing.shared_memory``: its resource
tracker unlinks a segment when a process that only attached ends (CPython before 3.13) or when its owner is killed.
"""

from __future__ import annotations

import _posixshmem  # type: ignore[import-not-found]
import contextlib
import errno
import fcntl
import hashlib
import mmap
import os
import stat
import struct
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.process.private_files import check_owner
from asyncdp.process.private_mapping import PrivateMapping

from . import borrows

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["Arena", "arena_name", "sweep_arenas"]

PAGE: Final = 4096
HEADER_BYTES: Final = 128
WORDS: Final = HEADER_BYTES // 8
PREFIX: Final = "asyncdp-"
_HEADER: Final = struct.Struct("<8sIIQQQQ128s")
_MAGIC: Final = b"ADPARENA"
#: Version of the headers and of the layout of rows in slots. The positions of magic and version never change.
_VERSION: Final = 1
#: Offset of a slot's payload in the slot, in bytes.
PAYLOAD_AT: Final = 64
_LENDS_AT: Final = PAGE - 16
_GIVEN_UP_AT: Final = PAGE - 8
SHM: Final = Path("/dev/shm")  # noqa: S108 - where Linux keeps POSIX shared memory


def arena_name(host_id: str, plane: str = "") -> str:
    """Return the name of a host's shared-memory segment; it is the same at each start, so that it is found again."""
    return PREFIX + hashlib.blake2b(f"{plane}\0{host_id}".encode(), digest_size=12).hexdigest()


def _up(value: int) -> int:
    return -(-value // PAGE) * PAGE


def _open(name: str, flags: int) -> int:
    """Open a segment without following links.

    Raises:
        PermissionError: The segment belongs to another user, or other users may read or write it. A process that may
            write to a segment may also truncate it, and then the next access ends this process with SIGBUS.
    """
    try:
        fd = int(_posixshmem.shm_open("/" + name, flags, 0o600))
    except OSError as err:
        if err.errno == errno.ELOOP:
            raise PermissionError(f"{SHM / name} is a link") from err
        if err.errno not in (errno.EEXIST, errno.ENOENT):
            with contextlib.suppress(FileNotFoundError):
                found = (SHM / name).lstat()
                check_owner(found, str(SHM / name))  # its error says whose it is
                if not stat.S_ISREG(found.st_mode):
                    raise PermissionError(f"{SHM / name} is no file") from err
        raise
    found = os.fstat(fd)
    try:
        check_owner(found, str(SHM / name))
    except PermissionError:
        os.close(fd)
        raise
    return fd


class _OtherVersionError(ValueError):
    """Raised where a segment is an arena of another version."""


class Arena:
    """A mapped shared-memory segment of a host.

    Attributes:
        name: Name of the segment.
        host_id, epoch: Host that it belongs to, and epoch of the host's slots.
        unit_bytes, units: Bytes of one allocation unit, and number of units in the data space.
        data: The whole segment, uint8.
        words: The slot headers as 64-bit words, ``WORDS`` per unit. Aligned words are read and written atomically.
        owned: Whether this process holds the lock, as the segment's host.
    """

    def __init__(self, name: str, fd: int, *, owned: bool) -> None:
        """Map an open segment and check its header.

        Raises:
            ValueError: The segment is no arena, is damaged, or is of another version.
        """
        self.name = name
        self.owned = owned
        self._fd: int | None = fd
        found = os.fstat(fd)
        self.nbytes = found.st_size
        self._file = (found.st_dev, found.st_ino)
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
        self._lends: memoryview = view[_LENDS_AT:_GIVEN_UP_AT].cast("Q")
        self._given_up: memoryview = view[_GIVEN_UP_AT:PAGE].cast("Q")
        if owned:
            self._lends[0] = 1

    # -- the host's side

    @classmethod
    def create(cls, name: str, host_id: str, *, epoch: int, data_bytes: int, unit_bytes: int = 16 << 10) -> Arena:
        """Create a segment, allocate all of its memory, and lock it.

        Args:
            name: Name of the segment, from :func:`arena_name`.
            host_id: Name of the host, at most 128 bytes.
            epoch: Epoch of the host's slots.
            data_bytes: Bytes for payloads.
            unit_bytes: Bytes of one allocation unit; each unit takes 128 further bytes for a header.

        Raises:
            FileExistsError: A segment of this name exists.
            DataPlaneUnavailable: There is not enough shared memory.
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
    def recover(cls, name: str, host_id: str) -> Arena | None:
        """Adopt the segment that a previous incarnation of the host left; return None where there is no usable one.

        Raises:
            DataPlaneUnavailable: A running host holds the segment, or another version of asyncdp wrote it.
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
        """Remove the segment that a previous incarnation left, marked as given up; return whether there was one.

        Raises:
            DataPlaneUnavailable: A running host holds the segment.
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
        """Mark the segment as given up, which processes that have it mapped see, and remove its name."""
        self._given_up[0] = 1
        with contextlib.suppress(FileNotFoundError):
            _posixshmem.shm_unlink("/" + self.name)
        self._free_what_nobody_borrows()
        self.close()

    def _free_what_nobody_borrows(self) -> None:
        """Free the memory of slots: a mapping of a single one would keep that of the whole segment."""
        stretches = [(self.data_at, self.data_at + self.units * self.unit_bytes)]
        while self._fd is not None and stretches:
            begin, end = stretches.pop()
            held = borrows.locked_range(self._fd, begin, end - begin)
            if held is not None:
                parts = (begin, held[0]), (sum(held), end)
                stretches += [part for part in parts if part[0] < part[1]]
                continue
            with contextlib.suppress(OSError):  # a system that cannot
                self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)

    def mark_alive(self) -> None:
        """Set the segment's modification time to now, as a sign that its host runs."""
        if self._fd is not None:
            os.utime(self._fd)

    def is_borrowed(self, slot: int, units: int) -> bool:
        """Return whether somebody borrows a slot; where its rows died before the look, nobody borrows it after it."""
        return self._fd is not None and borrows.is_locked(self._fd, self._begin(slot), units * self.unit_bytes)

    # -- the clients' side

    def borrow(self, slot: int, units: int, nbytes: int, on_end: Callable[[], object]) -> PrivateMapping | None:
        """Map the first ``nbytes`` bytes of a slot; the slot is not reused until the mapping ends.

        It has to be checked after this, since it may have been reused before. Returns None where the segment was
        removed, where its host does not know of borrowing, or where the system does not allow it.
        """
        if not self._lends[0]:
            return None
        try:
            fd = _open(self.name, os.O_RDONLY)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) != self._file:
                return None
            borrows.lock(fd, self._begin(slot), units * self.unit_bytes)
            return PrivateMapping(fd, self._begin(slot), nbytes, on_end)
        except OSError:
            return None
        finally:
            os.close(fd)

    @classmethod
    def attach(cls, name: str, host_id: str, epoch: int) -> Arena | None:
        """Map the segment of a host on this machine; None where it cannot be opened or has another epoch."""
        try:
            fd = _open(name, os.O_RDWR)
        except OSError:
            return None
        try:
            arena = cls(name, fd, owned=False)
        except ValueError:
            os.close(fd)
            return None
        arena.close()  # the mapping keeps its own duplicate of the descriptor
        return arena if arena.host_id == host_id and arena.epoch == epoch and not arena.given_up else None

    @property
    def given_up(self) -> bool:
        """Whether the host or a later incarnation of it removed the segment, so that all its rows are dead."""
        return self._given_up[0] != 0

    def close(self) -> None:
        """Release lock and descriptor; the memory is unmapped when nothing refers to it any more. Idempotent."""
        if self._fd is not None:
            if self.owned:
                # mmap keeps a duplicate of the descriptor, and with it the lock, for as long as anything is mapped.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None

    # -- offsets

    def payload_at(self, slot: int) -> int:
        """Return the offset in the segment, in bytes, of a slot's payload: one cache line past a page.

        A destination 16 bytes above its source modulo 4096 makes copies 2.5 times slower; arrays of numpy and torch
        begin 16 or 64 bytes past a page.
        """
        return self._begin(slot) + PAYLOAD_AT

    def _begin(self, slot: int) -> int:
        return self.data_at + slot * self.unit_bytes

    def slice(self, begin: int, size: int) -> npt.NDArray[np.uint8]:
        """Return a view of ``size`` bytes of the segment from offset ``begin``."""
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
    """Open a segment and lock it; return its descriptor, or None where it does not exist."""
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
            msg = f"a host of this name runs on this machine already and holds the arena {name}"
            raise DataPlaneUnavailable(msg, retryable=False, blames_port=False, cause=err) from err
        # The segment may have been unlinked, or replaced by another of its name, between open and lock.
        path = SHM / name
        if path.exists() and path.stat().st_ino == os.fstat(fd).st_ino:
            return fd
        os.close(fd)


def sweep_arenas(older_than_s: float, *, now: float | None = None) -> list[str]:
    """Remove segments whose hosts have been dead for at least ``older_than_s`` seconds; return their names.

    The time of death is the segment's modification time, which a host sets with each heartbeat. ``now`` is in unix
    seconds; None: the current time.
    """
    now = time.time() if now is None else now
    swept = []
    for path in sorted(SHM.glob(PREFIX + "*")):
        # Segments that a running host holds, that are gone already or that belong to another user are skipped.
        with contextlib.suppress(DataPlaneUnavailable, OSError):
            if now - path.stat().st_mtime >= older_than_s and Arena.discard(path.name):
                swept.append(path.name)
    return swept
