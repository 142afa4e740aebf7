"""A pool of memory for large reads, which is reused once the reader has released its tensors.

Most of the time of a large read is spent in the kernel, which allocates and clears pages for the result. A trainer that
reads batch after batch gets the memory of an earlier batch instead.
"""

from __future__ import annotations

import asyncio
import mmap
import threading
import time
import weakref
from typing import Any

import numpy as np
import torch

from asyncdp.process.forks import on_fork

__all__ = ["ReadPool"]

#: Minimum size in bytes of a pooled buffer; the allocator serves smaller ones from its own free lists.
POOLED_BYTES = 4 << 20
#: Seconds after which an idle buffer is returned to the system.
IDLE_S = 10.0

Buffer = Any  # np.ndarray of bytes


class ReadPool:
    """Keeps idle buffers for the next read. Finalizers return buffers, so it may be used from any thread.

    Args:
        limit_bytes: Maximum size of all idle buffers; 0 disables the pool.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Start empty."""
        self.limit_bytes = limit_bytes
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._idle: list[tuple[float, Buffer]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """Reset the pool in a forked child: a thread of the parent may hold the lock, and the loop is the parent's."""
        self._lock, self._loop = threading.RLock(), None

    def trim_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Use this event loop to return idle buffers to the system after ``IDLE_S``."""
        self._loop = loop

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory, ``size`` bytes as one row of ``dtype``."""
        if size < POOLED_BYTES:
            return torch.empty(size // dtype.itemsize, dtype=dtype)
        whole = self._take(size)
        if whole is None:
            # numpy would request huge pages, which take seconds to allocate when memory is fragmented. The mapping is
            # private, so that the results held by a forked child do not change when this process reuses the memory.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole = np.frombuffer(memory, dtype=np.uint8)
        if not self.limit_bytes or self._loop is None:
            return torch.from_numpy(whole).view(dtype)
        lent = whole[:size]
        # The tensor and all of its views keep ``lent`` alive, so it is finalized after the last of them.
        weakref.finalize(lent, self._give_back, whole).atexit = False
        return torch.from_numpy(lent).view(dtype)

    def _take(self, size: int) -> Buffer | None:
        """Return the smallest idle buffer that is large enough, but no more than twice as large."""
        with self._lock:
            fitting = [entry for entry in self._idle if size <= entry[1].nbytes <= 2 * size]
            if not fitting:
                return None
            best = min(fitting, key=lambda entry: entry[1].nbytes)
            self._idle = [entry for entry in self._idle if entry is not best]
            return best[1]

    def _give_back(self, whole: Buffer) -> None:
        with self._lock:
            self._idle.append((time.monotonic(), whole))
            while sum(entry[1].nbytes for entry in self._idle) > self.limit_bytes:
                self._idle.pop(0)
        if self._loop is None:  # allocated before a fork
            return
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, IDLE_S * 1.05, self.trim)
        except RuntimeError:  # the loop was closed, so that there will be no further reads
            self.clear()

    @property
    def idle_bytes(self) -> int:
        """Total size of the idle buffers in bytes."""
        with self._lock:
            return sum(entry[1].nbytes for entry in self._idle)

    def trim(self) -> None:
        """Return buffers to the system that have been idle for ``IDLE_S``."""
        with self._lock:
            oldest = time.monotonic() - IDLE_S
            self._idle = [entry for entry in self._idle if entry[0] > oldest]

    def clear(self) -> None:
        """Return all idle buffers to the system."""
        with self._lock:
            self._idle.clear()
