"""A private mapping of a file: arrays and tensors on it keep it, and what is written to them stays in this process."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import weakref
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["PrivateMapping", "mapping_at"]

_LIBC: Final = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
_LIBC.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_MAP_FIXED: Final = 0x10
#: Most mappings that a process has at a time: the system allows 65,530 of all kinds, and looks through the locks of a
#: file one by one.
_MOST: Final = 4096
_FAILED: Final = ctypes.c_void_p(-1).value
#: Mappings in use by address. They are module state since a tensor knows nothing but the address of its memory.
_LIVE: weakref.WeakValueDictionary[int, PrivateMapping] = weakref.WeakValueDictionary()


class PrivateMapping:
    """Pages of a file, copied when they are written to; unmapped when no array or tensor on them is left.

    The mapping keeps the open file description of ``fd``, and with it the description's locks (``F_OFD_SETLK``), also
    after ``fd`` is closed. In a forked child it is a mapping of its own: each of both ends by itself, and the locks
    with the last one.

    Args:
        fd: Descriptor of the file, readable.
        offset: Where the mapping begins in the file, in bytes: a multiple of the size of a page.
        nbytes: Length of the mapping in bytes.
        on_end: Called once when the mapping ends, in any thread.

    Raises:
        OSError: The system does not map it, or this process has 4,096 of them.
    """

    # Not mmap.mmap: that keeps a descriptor for each mapping, and cannot be ended while arrays use it.

    def __init__(self, fd: int, offset: int, nbytes: int, on_end: Callable[[], object] = lambda: None) -> None:
        """Map the pages."""
        self._begin: int | None = None
        self._nbytes = nbytes
        self._on_end = on_end
        self._ended = False
        if len(_LIVE) >= _MOST:
            raise OSError(errno.ENOMEM, "this process has too many private mappings")
        self._begin = _map(None, nbytes, mmap.MAP_PRIVATE, fd, offset)
        _LIVE[self._begin] = self

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._begin, False), "shape": (self._nbytes,), "typestr": "|u1", "version": 3}

    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes, uint8 of shape ``(nbytes,)``; the array, and each view of it, keeps the mapping."""
        return np.asarray(self)

    def holds(self, address: int) -> bool:
        """Return whether the memory at this address is part of the mapping."""
        return self._begin is not None and self._begin <= address < self._begin + self._nbytes

    def end(self) -> None:
        """Let go of the file now: what is left of arrays and tensors on the mapping holds zeros. Idempotent."""
        if not self._ended:
            self._ended = True  # before the system is called, meanwhile other threads run
            _map(self._begin, self._nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED, -1, 0)
            self._on_end()

    def __del__(self, unmap: Callable[..., int] = _LIBC.munmap) -> None:
        if self._begin is not None:
            unmap(self._begin, self._nbytes)
            if not self._ended:
                self._on_end()


def _map(address: int | None, nbytes: int, flags: int, fd: int, offset: int) -> int:
    begin = _LIBC.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, offset)
    if begin is None or begin == _FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return int(begin)


def mapping_at(address: int) -> PrivateMapping | None:
    """Return the mapping in use that the memory at this address is part of, or None."""
    live = (ref() for ref in _LIVE.valuerefs())  # in one step, since other threads map and unmap meanwhile
    return next((mapping for mapping in live if mapping is not None and mapping.holds(address)), None)
