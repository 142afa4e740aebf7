"""A pool of memory for results, which is reused once every tensor on it is garbage collected.

Fresh pages cost more than the copy into them: two thirds of a large read (measured: 1.2 against 5 GB/s).
"""

from __future__ import annotations

import mmap
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from ..slots.extents import size_class

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["BufferPool"]

_GRAIN: Final = 64 << 10


class BufferPool:
    """Allocates byte arrays from memory that it reuses.

    Args:
        keep_bytes: Most bytes of free memory that are kept for reuse.
        least_bytes: Least size of a pooled array, in bytes; malloc itself reuses smaller ones.
    """

    def __init__(self, *, keep_bytes: int = 1 << 30, least_bytes: int = 1 << 20) -> None:
        """Start without memory."""
        self.keep_bytes = keep_bytes
        self.least_bytes = least_bytes
        self.hits = 0
        self.misses = 0
        #: Free memory with the time of its return, the oldest first.
        self._free: list[tuple[float, mmap.mmap]] = []
        # Filled by finalizers, which run in any thread and at any time, so they only append.
        self._returned: deque[tuple[float, mmap.mmap]] = deque()

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an uninitialised array of ``nbytes`` bytes; its memory is reused once nothing refers to it."""
        if nbytes < self.least_bytes:
            return np.empty(nbytes, np.uint8)
        memory = self._take(nbytes)
        # The array does not own its memory. Views of views therefore refer to this array, and its finalizer runs only
        # when none of them is left.
        lent = np.frombuffer(memory, np.uint8, count=nbytes)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent

    def _give_back(self, memory: mmap.mmap) -> None:
        if self.keep_bytes:
            self._returned.append((time.monotonic(), memory))

    def _take(self, nbytes: int) -> mmap.mmap:
        self._collect()
        fitting = [entry for entry in self._free if nbytes <= len(entry[1]) <= 2 * nbytes]
        if fitting:
            entry = min(fitting, key=lambda entry: len(entry[1]))
            self._free.remove(entry)
            memory = entry[1]
            self.hits += 1
        else:
            self.misses += 1
            # Private: a forked child keeps the content it has, whatever the parent later reads into this memory.
            private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            memory = mmap.mmap(-1, size_class(-(-nbytes // _GRAIN)) * _GRAIN, flags=private)
            if hasattr(mmap, "MADV_HUGEPAGE"):
                memory.madvise(mmap.MADV_HUGEPAGE)
        held = sum(len(free) for _, free in self._free)
        while self._free and held > self.keep_bytes:
            held -= len(self._free.pop(0)[1])
        return memory

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def trim(self, idle_s: float) -> None:
        """Return memory to the system that was free for ``idle_s`` seconds."""
        self._collect()
        oldest = time.monotonic() - idle_s
        self._free = [entry for entry in self._free if entry[0] > oldest]

    def clear(self) -> None:
        """Return all free memory to the system, and from now on all memory that is freed."""
        self.keep_bytes = 0
        self._free.clear()
        self._returned.clear()
