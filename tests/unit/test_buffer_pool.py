"""Memory for large results: how it is given back after a burst, and how its fresh pages are made."""

import asyncio
import gc
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncdp.process.buffer_pool import BufferPool

MIB = 1 << 20


class Loop:
    """An event loop in virtual time: it runs what it was told to call when it is asked to."""

    def __init__(self) -> None:
        """Begin at 0 s."""
        self.now = 0.0
        self.timers: list[tuple[float, Callable[..., Any], tuple[Any, ...]]] = []
        self.closed = False

    def call_soon_threadsafe(self, work: Callable[..., Any], *args: Any) -> None:
        """Call it at once."""
        if self.closed:
            raise RuntimeError("Event loop is closed")
        work(*args)

    def call_later(self, delay: float, work: Callable[..., Any], *args: Any) -> object:
        """Call it when time has come."""
        self.timers.append((self.now + delay, work, args))
        return object()

    def pass_time(self, seconds: float) -> None:
        """Let time pass."""
        until = self.now + seconds
        while due := [timer for timer in self.timers if timer[0] <= until]:
            first = min(due, key=lambda timer: timer[0])
            self.timers.remove(first)
            self.now = first[0]
            first[1](*first[2])
        self.now = until


def pool_on(loop: Any, **options: Any) -> BufferPool:
    """A pool that this loop looks after."""
    pool = BufferPool(clock=lambda: loop.now, huge_pages=False, **options)
    pool.trim_in(loop, 10.0)
    return pool


def test_memory_of_a_burst_goes_back_to_the_system() -> None:
    """After 20 s at the most, by one timer at a time; what is used meanwhile stays."""
    loop = Loop()
    pool = pool_on(loop)
    burst = [pool.empty(4 * MIB) for _ in range(8)]
    burst.clear()
    assert pool.idle_bytes == 32 * MIB
    for _ in range(25):
        pool.empty(4 * MIB)  # returned at once
        loop.pass_time(1.0)
        assert len(loop.timers) == 1
    assert pool.idle_bytes == 4 * MIB
    loop.pass_time(20.0)
    assert pool.idle_bytes == 0
    assert not loop.timers


def test_what_is_beyond_the_limit_goes_at_once() -> None:
    """Also while a timer runs."""
    loop = Loop()
    pool = pool_on(loop, keep_bytes=8 * MIB)
    burst = [pool.empty(4 * MIB) for _ in range(8)]
    while burst:
        burst.pop()
        assert sum(len(memory) for _, memory in [*pool._free, *pool._returned]) <= 8 * MIB


def test_a_pool_on_its_next_loop() -> None:
    """The loop before is closed, with a timer that never comes; the next one looks after the memory."""
    before, loop = Loop(), Loop()
    pool = pool_on(before)
    held = pool.empty(4 * MIB)
    pool.empty(4 * MIB)
    before.closed = True
    pool.trim_in(loop, 10.0)  # type: ignore[arg-type]
    assert len(loop.timers) == 1
    del held
    pool._clock = lambda: loop.now
    loop.pass_time(40.0)
    assert pool.idle_bytes == 0


def test_a_real_loop_gives_it_back() -> None:
    """Asyncio calls it as it is called here."""

    async def main() -> None:
        pool = BufferPool(huge_pages=False)
        pool.trim_in(asyncio.get_running_loop(), 0.01)
        pool.empty(4 * MIB)
        assert pool.idle_bytes
        async with asyncio.timeout(60):
            while pool.idle_bytes:  # noqa: ASYNC110 - a timer is no event
                await asyncio.sleep(0.01)

    asyncio.run(main())


def flags_at(address: int) -> str:
    """The flags of the mapping that has this address."""
    text = Path("/proc/self/smaps").read_text()
    for entry in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", text):
        begin, end = (int(part, 16) for part in entry.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return entry.split("VmFlags:")[1]
    raise AssertionError("no mapping there")


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages")
def test_huge_pages_that_take_long_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the rest of the array and for a minute; what was made is kept, and what comes after it is huge again."""
    now, spent = [0.0], [0.0]
    cost = iter([0.0, 0.001, 0.0, 0.006])

    def processor_time() -> float:
        spent[0] += next(cost, 0.0)
        return spent[0]

    pool = BufferPool(clock=lambda: now[0])
    array, fresh = pool.take(16 * MIB)
    assert fresh
    address = array.ctypes.data
    assert " hg" in flags_at(address)
    monkeypatch.setattr(time, "thread_time", processor_time)
    pool.populate(array[:])  # a view of it; the second piece takes 6 ms
    monkeypatch.undo()
    assert " hg" in flags_at(address + 7 * MIB)
    assert " nh" in flags_at(address + 8 * MIB)
    assert not array.any()
    assert " hg" not in flags_at(pool.take(8 * MIB)[0].ctypes.data)
    now[0] = 60.0
    other = pool.take(64 * MIB)[0]
    assert " hg" in flags_at(other.ctypes.data)
    del array, other
    gc.collect()


def test_populating_provides_all_pages() -> None:
    """Also those of a last piece."""
    pool = BufferPool(huge_pages=False)
    array = pool.empty(29 * MIB + 5)
    before = resident()
    pool.populate(array)
    assert resident() - before > 28 * MIB


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
