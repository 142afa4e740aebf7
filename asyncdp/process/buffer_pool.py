"""A pool of memory for large results, which is reused once every tensor and array on it is garbage collected.

Fresh pages cost more than the copy into them: two thirds of a large read (measured: 1.2 against 5 GB/s). A trainer that
reads batch after batch gets the memory of an earlier batch instead.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from .forks import on_fork

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["KEPT_BYTES", "BufferPool", "size_class"]

Memory = mmap.mmap | memoryview

KEPT_BYTES: Final = min(2 << 30, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 8)
_GRAIN: Final = 64 << 10
#: Huge pages are too slow where so many bytes of them take more processor time than this; measured: 0.5 ms, and 2.3 ms
#: in small pages.
_JUDGED_BYTES, _SLOW_S = 4 << 20, 0.005
#: Seconds for which fresh memory then has small pages.
_SMALL_S: Final = 60.0


def size_class(units: int) -> int:
    """Round up to a size class: exact up to 8 units, then eight classes per doubling, so at most 1/8 is wasted.

    Payloads of similar sizes then fit exactly into memory that others of the class freed, as in jemalloc.
    """
    step = 1 << max(0, (units - 1).bit_length() - 4)
    return -(-units // step) * step


class BufferPool:
    """Allocates byte arrays from memory that it reuses; may be used from any thread.

    Args:
        keep_bytes: Most bytes of free memory that are kept for reuse; 0: none is. By default 2 GiB, which has
            room for the two replies in which 1 GiB comes; an eighth of the machine's memory at most.
        least_bytes: Least size of a pooled array, in bytes; malloc itself reuses smaller ones.
        huge_pages: Whether to ask for huge pages. Fresh ones come five times as fast, and large copies are faster; but
            where memory is fragmented they take up to 20 s for each GiB, see :meth:`populate`.
        clock: Tells seconds, by which free memory becomes old.
        allocate: Allocates memory of so many bytes; None: the system does.
    """

    def __init__(
        self,
        *,
        keep_bytes: int = KEPT_BYTES,
        least_bytes: int = 1 << 20,
        huge_pages: bool = True,
        clock: Callable[[], float] = time.monotonic,
        allocate: Callable[[int], Memory] | None = None,
    ) -> None:
        """Start without memory."""
        self.keep_bytes = keep_bytes
        self.least_bytes = least_bytes
        self.huge_pages = huge_pages
        self.hits = 0
        self.misses = 0
        self._clock = clock
        self._allocate = self._mapped if allocate is None else allocate
        self._small_until = clock()
        self._lock = threading.Lock()
        #: Free memory with the time of its return, the oldest first.
        self._free: list[tuple[float, Memory]] = []
        # Filled by finalizers, which run in any thread and at any time, so they only append.
        self._returned: deque[tuple[float, Memory]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._idle_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        on_fork(self)

    def after_fork(self) -> None:
        """Reset the pool in a forked child: a thread of the parent may hold the lock, and the loop is the parent's."""
        self._lock, self._loop, self._timer = threading.Lock(), None, None

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Return an uninitialised array of ``nbytes`` bytes; its memory is reused once nothing refers to it."""
        return self.take(nbytes)[0]

    def take(self, nbytes: int) -> tuple[npt.NDArray[np.uint8], bool]:
        """Return an array as :meth:`empty` does, and whether its pages are fresh, so that writing to them is slow."""
        if nbytes < self.least_bytes:
            return np.empty(nbytes, np.uint8), False
        with self._lock:
            misses = self.misses
            memory = self._take(nbytes)
            fresh = self.misses > misses
        # The array does not own its memory. Views of views therefore refer to this array, and its finalizer runs only
        # when none of them is left.
        lent = np.frombuffer(memory, np.uint8, count=nbytes)
        weakref.finalize(lent, self._give_back, memory).atexit = False
        return lent, fresh

    def populate(self, fresh: npt.NDArray[np.uint8]) -> None:
        """Have the system provide the pages of a fresh array now: in any thread, without the interpreter's lock.

        Where memory is so fragmented that huge pages take longer than small ones, the rest of the array gets small
        ones, and so does what is allocated in the next minute.
        """
        base: Any = fresh
        while isinstance(base, np.ndarray):  # a view of a view
            base = base.base
        memory: mmap.mmap = getattr(base, "obj", base)  # numpy, in some releases, holds a memoryview
        for begin in range(0, len(fresh), _JUDGED_BYTES):
            stop, before = begin + _JUDGED_BYTES, time.thread_time()
            fresh[begin : stop : mmap.PAGESIZE].fill(0)
            slow = stop <= len(fresh) and time.thread_time() - before > _SLOW_S
            if slow and self._asks_for_huge_pages():
                self._small_until = self._clock() + _SMALL_S
                if stop < len(memory):
                    memory.madvise(mmap.MADV_NOHUGEPAGE, stop)

    def _asks_for_huge_pages(self) -> bool:
        return self.huge_pages and hasattr(mmap, "MADV_HUGEPAGE") and self._clock() >= self._small_until

    def _give_back(self, memory: Memory) -> None:
        if not self.keep_bytes:
            return
        self._returned.append((self._clock(), memory))
        loop = self._loop
        if loop is None:
            return
        try:
            loop.call_soon_threadsafe(self._in_loop, loop)
        except RuntimeError:  # the loop was closed, so nothing would return the memory to the system
            self._loop = None
            self._returned.clear()
            self._free = []

    def _in_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count what was returned, and look again later, for as long as there is something."""
        held = self.idle_bytes  # what is beyond the limit goes at once
        if loop is not self._loop or self._timer is not None or not held:
            return

        def look() -> None:
            if loop is self._loop:
                self._timer = None
                self.trim(self._idle_s)
                self._in_loop(loop)

        self._timer = loop.call_later(self._idle_s, look)

    def _take(self, nbytes: int) -> Memory:
        self._collect()
        free = self._free
        size = size_class(-(-nbytes // _GRAIN)) * _GRAIN
        fitting = [entry for entry in free if size <= len(entry[1]) <= 2 * size]
        if fitting:  # of equal ones the last that came back, so that those that nobody needs become old
            entry = min(reversed(fitting), key=lambda entry: len(entry[1]))
            self._free = [other for other in free if other is not entry]
            self.hits += 1
            return entry[1]
        self.misses += 1
        return self._allocate(size)

    def _mapped(self, nbytes: int) -> mmap.mmap:
        # Private: a forked child keeps the content it has, whatever the parent later reads into this memory.
        private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        memory = mmap.mmap(-1, nbytes, flags=private)
        if self._asks_for_huge_pages():
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory

    def _collect(self) -> None:
        """Take what was returned, and return to the system what is beyond the limit, the oldest first."""
        while self._returned:
            self._free.append(self._returned.popleft())
        held = sum(len(memory) for _, memory in self._free)
        while self._free and held > self.keep_bytes:
            held -= len(self._free.pop(0)[1])

    @property
    def idle_bytes(self) -> int:
        """Total size of the free memory, in bytes."""
        with self._lock:
            self._collect()
            return sum(len(memory) for _, memory in self._free)

    def trim_in(self, loop: asyncio.AbstractEventLoop, idle_s: float) -> None:
        """Have this event loop return memory to the system that was free for ``idle_s`` seconds, twice that at most."""
        if loop is not self._loop:
            self._timer = None  # it is another loop's
        self._loop, self._idle_s = loop, idle_s
        self._in_loop(loop)

    def trim(self, idle_s: float) -> None:
        """Return memory to the system that was free for ``idle_s`` seconds."""
        with self._lock:
            self._collect()
            oldest = self._clock() - idle_s
            self._free = [entry for entry in self._free if entry[0] > oldest]

    def clear(self) -> None:
        """Return all free memory to the system, and from now on all memory that is freed."""
        self.keep_bytes = 0
        with self._lock:
            self._free.clear()
            self._returned.clear()
