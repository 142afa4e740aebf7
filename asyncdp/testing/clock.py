"""Virtual time: tests that wait for minutes end in milliseconds."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeVar

import anyio

__all__ = ["VirtualLoop", "run_virtual"]

T = TypeVar("T")


class _NoWait(selectors.DefaultSelector):
    """A selector that, instead of waiting for a timer, lets the loop's clock jump to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None and timeout > 0:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose clock stands still while anything is ready, then jumps to the next timer.

    Time that passes outside, in threads or in other processes, does not count: whoever waits for those with a timeout
    sees the timeout first.
    """

    def __init__(self) -> None:
        """Begin at time 0."""
        self._virtual = _NoWait()
        super().__init__(self._virtual)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual.now


def run_virtual(
    fn: Callable[[], Awaitable[T]],
    backend: Literal["asyncio", "trio"] | str = "asyncio",  # noqa: PYI051 - says which there are
    seed: int = 0,
    *,
    limit_s: float = 3600.0,
) -> T:
    """Run a coroutine function to its end, in virtual time, and return what it returns.

    ::

        async def main() -> None:
            await anyio.sleep(600)

        run_virtual(main, "trio")  # at once

    Args:
        fn: Called without arguments.
        backend: The event loop.
        seed: Of the global random source and of trio's scheduler, so that a run can be repeated; both are put back.
        limit_s: Virtual seconds after which it is taken for hung.

    Raises:
        TimeoutError: It did not end within ``limit_s``.
    """

    async def main() -> T:
        with anyio.fail_after(limit_s):
            return await fn()

    state = random.getstate()
    random.seed(seed)
    try:
        if backend == "trio":
            return _run_trio(main, seed)
        return anyio.run(main, backend=backend, backend_options={"loop_factory": VirtualLoop})
    finally:
        random.setstate(state)


def _run_trio(main: Callable[[], Awaitable[T]], seed: int) -> T:
    import trio._core._run as scheduler
    import trio.testing

    order: Any = scheduler
    before = order._ALLOW_DETERMINISTIC_SCHEDULING, order._r.getstate()  # noqa: SLF001 - trio has no public way
    order._ALLOW_DETERMINISTIC_SCHEDULING = True  # noqa: SLF001
    order._r.seed(seed)  # noqa: SLF001
    try:
        clock = trio.testing.MockClock(autojump_threshold=0)
        return anyio.run(main, backend="trio", backend_options={"clock": clock})
    finally:
        order._ALLOW_DETERMINISTIC_SCHEDULING = before[0]  # noqa: SLF001
        order._r.setstate(before[1])  # noqa: SLF001
