"""Locks by which readers keep slots from being reused: ranges of the arena's file, held by open file descriptions.

A lock lives as long as its open file description, which a mapping keeps. So the kernel ends it with the last mapping,
or with the process, however that ends; it does not end with the slot host, and a forked child that unmaps does not end
it for its parent.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import sys
from typing import Final

__all__ = ["is_locked", "lock", "locked_range"]

#: struct flock of 64-bit Linux: type, whence, start, length, pid (0 for locks of open file descriptions).
_FLOCK: Final = struct.Struct("hhqqi4x")


def lock(fd: int, begin: int, size: int) -> None:
    """Hold a shared lock on ``size`` bytes from offset ``begin``; many may hold it at a time.

    Raises:
        OSError: The system has no such locks, or somebody else holds the range for himself.
    """
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_RDLCK, os.SEEK_SET, begin, size, 0))


def is_locked(fd: int, begin: int, size: int) -> bool:
    """Return whether another open file description holds a lock on any of these bytes."""
    return locked_range(fd, begin, size) is not None


def locked_range(fd: int, begin: int, size: int) -> tuple[int, int] | None:
    """Return offset and length of one lock that another description holds on any of these bytes, or None."""
    # The call lets go of the interpreter's lock, so what was stored before is visible to others before the look. A
    # reader checks the slot after it has its lock: one of both sees the other.
    try:
        found = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, begin, size, 0))
    except OSError as err:
        if err.errno != errno.EINVAL:
            raise
        return None  # a system without such locks, on which nobody holds one
    kind, _, first, length, _ = _FLOCK.unpack(found)
    return None if kind == fcntl.F_UNLCK else (first, length or sys.maxsize - first)  # 0: to the end of the file
