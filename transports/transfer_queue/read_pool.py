"""Memory for large reads that is used again when its reader has let go of it.

Most of the time of a large read goes into pages that the kernel has to find and clear for its result. A trainer that
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

#: Smaller results come from the allocator's own free lists anyway.
POOLED_BYTES = 4 << 20
#: Seconds after which memory that nobody asked for goes back to the system.
IDLE_S = 10.0

Buffer = Any  # np.ndarray of bytes


class ReadPool:
    """Buffers between two reads. Finalizers fill it, so any thread may.

    Args:
        limit_bytes: How much may lie idle; 0: nothing is kept.
    """

    def __init__(self, limit_bytes: int) -> None:
        """Begin empty."""
        self.limit_bytes = limit_bytes
        self._lock = threading.RLock()  # a finalizer may run while this thread holds it
        self._idle: list[tuple[float, Buffer]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """Begin anew: another thread may have held the lock, and the loop is the parent's."""
        self._lock, self._loop = threading.RLock(), None

    def trim_in(self, loop: asyncio.AbstractEventLoop) -> None:
        """Have an event loop see to it that nothing lies idle for long."""
        self._loop = loop

    def allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory, ``size`` bytes as one row of ``dtype``."""
        if size < POOLED_BYTES:
            return torch.empty(size // dtype.itemsize, dtype=dtype)
        whole = self._take(size)
        if whole is None:
            # Not from numpy, which asks for huge pages: where memory is in pieces these take seconds to be found.
            # Private: a forked child keeps what it holds, whatever is read into this memory here later on.
            memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            whole = np.frombuffer(memory, dtype=np.uint8)
        if not self.limit_bytes or self._loop is None:
            return torch.from_numpy(whole).view(dtype)
        lent = whole[:size]
        # The tensor keeps ``lent`` alive, through all its views; so its end is the end of the last reader.
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
        if self._loop is None:  # lent before a fork
            return
        try:
            self._loop.call_soon_threadsafe(self._loop.call_later, IDLE_S * 1.05, self.trim)
        except RuntimeError:  # the loop was closed: nobody will read again
            self.clear()

    @property
    def idle_bytes(self) -> int:
        """What lies idle."""
        with self._lock:
            return sum(entry[1].nbytes for entry in self._idle)

    def trim(self) -> None:
        """Return to the system what nobody asked for in a while."""
        with self._lock:
            oldest = time.monotonic() - IDLE_S
            self._idle = [entry for entry in self._idle if entry[0] > oldest]

    def clear(self) -> None:
        """Return all of it to the system."""
        with self._lock:
            self._idle.clear()
