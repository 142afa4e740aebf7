"""Virtual time: the clock of the event loop jumps to the next timer, so that long waits take milliseconds."""

from __future__ import annotations

import asyncio
import random
import selectors
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Literal, TypeVar

import anyio

__all__ = ["VirtualLoop", "run_virtual"]

T = TypeVar("T")


#: Iterations of a busy loop between two polls of its file descriptors; a poll costs as much as a short task step.
LOOK_EVERY = 16


class _NoWait(selectors.DefaultSelector):
    """A selector that advances the loop's clock to the next timer instead of waiting for it."""

    def __init__(self, at_each_round: Callable[[], None] | None) -> None:
        super().__init__()
        self.now = 0.0
        self._at_each_round = at_each_round
        self._rounds = 0

    def select(self, timeout: float | None = None) -> Any:
        if self._at_each_round is not None:
            self._at_each_round()
        if timeout is not None and timeout <= 0:
            self._rounds += 1
            return super().select(0) if self._rounds % LOOK_EVERY == 0 else []
        ready = super().select(0 if timeout is not None else None)
        if not ready and timeout is not None:
            self.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio event loop whose clock stands still while a callback is ready, and then jumps to the next timer.

    Real time that passes in threads or other processes does not advance the clock: a wait for them with a timeout ends
    by the timeout.

    Args:
        seed: Seed of the order in which tasks that are ready at the same time run, as on trio; other callbacks keep
            their order. None: first in, first out, as on other asyncio loops.
    """

    def __init__(self, seed: int | None = None) -> None:
        """Start at time 0."""
        self._virtual = _NoWait(None if seed is None else self._shuffle)
        self._order = random.Random(seed)  # noqa: S311 - an order, no secret
        self._made = 0
        super().__init__(self._virtual)

    def time(self) -> float:
        """Return the virtual time in seconds since the loop was created."""
        return self._virtual.now

    def create_task(self, *args: Any, **kwargs: Any) -> asyncio.Task[Any]:
        """Create a task with a number that makes its order deterministic: anyio keeps tasks in sets."""
        task = super().create_task(*args, **kwargs)
        self._made += 1
        task._number = self._made  # type: ignore[attr-defined]  # noqa: SLF001 - ours
        return task

    def _shuffle(self) -> None:
        """Shuffle the ready tasks into an order that depends only on the seed."""
        ready: Any = self._ready  # type: ignore[attr-defined] # asyncio has no public way
        if len(ready) < 2:  # noqa: PLR2004 - one has no order
            return
        places = [
            (at, handle)
            for at, handle in enumerate(ready)
            if isinstance(getattr(handle._callback, "__self__", None), asyncio.Task)  # noqa: SLF001
        ]
        handles = [handle for _, handle in places]
        handles.sort(key=lambda handle: handle._callback.__self__._number)  # noqa: SLF001
        self._order.shuffle(handles)
        for (at, _), handle in zip(places, handles, strict=True):
            ready[at] = handle


def run_virtual(
    fn: Callable[[], Awaitable[T]],
    backend: Literal["asyncio", "trio"] | str = "asyncio",  # noqa: PYI051 - says which there are
    seed: int = 0,
    *,
    limit_s: float = 3600.0,
    shuffle: bool = False,
) -> T:
    """Run a coroutine function in virtual time and return its result.

    ::

        async def main() -> None:
            await anyio.sleep(600)

        run_virtual(main, "trio")  # at once

    Args:
        fn: Coroutine function without arguments.
        backend: Event loop to run it on, ``"asyncio"`` or ``"trio"``.
        seed: Seed of the global random source and of the scheduler; both are restored afterwards.
        limit_s: Virtual seconds after which the run counts as hung.
        shuffle: Whether the seed decides the order of tasks that are ready at the same time; only for asyncio, since
            trio always does so.

    Raises:
        TimeoutError: The function did not end within ``limit_s``.
    """

    async def main() -> T:
        with anyio.move_on_after(limit_s):
            return await fn()
        raise TimeoutError(
            f"not done after {limit_s:g} s of virtual time: it waits for what never comes, or for longer"
        )

    state = random.getstate()
    random.seed(seed)
    try:
        if backend == "trio":
            return _run_trio(main, seed)
        loop = partial(VirtualLoop, seed if shuffle else None)
        return anyio.run(main, backend=backend, backend_options={"loop_factory": loop})
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
