"""The watchdog: prints the stacks of all threads and tasks when an event loop is blocked.

pytest imports this module even in runs that use no fixture of asyncdp, so it does not import the core.
"""

from __future__ import annotations

import asyncio
import io
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["Watchdog"]

#: Multiple of the limit after which the stacks are printed even if the loop is responsive.
LONG = 6


@dataclass
class _Watched:
    """State of the watchdog for the event loop of one test."""

    name: str
    post: Callable[[Callable[[], None]], object]
    tasks: Callable[[], Iterator[tuple[str, list[FrameType]]]]
    began: float
    asked: float | None = None
    answered: threading.Event = field(default_factory=threading.Event)
    reported: set[str] = field(default_factory=set)


class Watchdog:
    """Checks from its own thread whether an event loop is still responsive.

    The loop is not contacted in the first ``after_s`` seconds of a test, so that the watchdog does not change the task
    order of shorter tests.

    Args:
        after_s: Seconds without an answer after which a loop counts as blocked.
        write: Called with the text to print.
    """

    def __init__(self, after_s: float, write: Callable[[str], object]) -> None:
        self.after_s = after_s
        self._write = write
        self._watched: _Watched | None = None
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def watching(self, name: str) -> Iterator[None]:
        """Watch the running loop; ``name`` is the name of the test."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="asyncdp watchdog", daemon=True)
            self._thread.start()
        post, tasks = _loop()
        with self._lock:
            self._watched = _Watched(name, post, tasks, time.monotonic())
        try:
            yield
        finally:
            with self._lock:
                self._watched = None

    def close(self) -> None:
        """Stop the thread."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(self.after_s / 10):
            with self._lock:  # keeps the test from ending, and its loop from closing, during the check
                if self._watched is not None:
                    self._look(self._watched, time.monotonic())

    def _look(self, watched: _Watched, now: float) -> None:
        if now - watched.began > self.after_s * LONG:
            self._tell(watched, "long", f"has been running for {now - watched.began:.0f} s; its loop turns")
        if watched.asked is None:
            if now - watched.began >= self.after_s:
                watched.asked = now
                watched.answered.clear()
                with suppress(RuntimeError):  # the loop has just been closed
                    watched.post(watched.answered.set)
        elif watched.answered.is_set():
            watched.asked = None
            watched.reported.discard("still")
        elif now - watched.asked >= self.after_s:
            self._tell(watched, "still", f"stands still: its event loop has not turned for {now - watched.asked:.1f} s")

    def _tell(self, watched: _Watched, kind: str, what: str) -> None:
        if kind in watched.reported:
            return
        watched.reported |= {kind, "long"}
        self._write(report(f"{watched.name} {what}", watched.tasks))


def report(title: str, tasks: Callable[[], Iterator[tuple[str, list[FrameType]]]]) -> str:
    """Return the stacks of all threads and tasks as text."""
    out = io.StringIO()
    out.write(f"\n{'=' * 20} {title} {'=' * 20}\n")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():  # noqa: SLF001 - documented, for debuggers
        if names.get(ident) != "asyncdp watchdog":
            out.write(f"\nthread {names.get(ident, ident)!r}\n{''.join(traceback.format_stack(frame))}")
    for name, frames in tasks():
        out.write(f"\ntask {name}\n")
        summary = traceback.StackSummary.extract((frame, frame.f_lineno) for frame in frames)
        out.write("".join(summary.format()) or "  (it runs: see its thread)\n")
    out.write(f"{'=' * 60}\n")
    return out.getvalue()


def _loop() -> tuple[Callable[[Callable[[], None]], object], Callable[[], Iterator[tuple[str, list[FrameType]]]]]:
    """Return a function that schedules a callback on the running loop from any thread, and one that lists its tasks."""
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return _trio()

    def tasks() -> Iterator[tuple[str, list[FrameType]]]:
        for task in asyncio.all_tasks(loop):
            yield f"{task.get_name()!r}", list(_frames(task.get_coro()))

    return loop.call_soon_threadsafe, tasks


def _frames(at: Any) -> Iterator[FrameType]:
    """Yield the frames of a suspended coroutine down to where it waits; Task.get_stack() returns only the first."""
    while at is not None:
        for kind in ("cr", "gi", "ag"):
            if (frame := getattr(at, f"{kind}_frame", None)) is not None:
                yield frame
                at = getattr(at, f"{kind}_await" if kind != "gi" else "gi_yieldfrom", None)
                break
        else:
            return


def _trio() -> tuple[Callable[[Callable[[], None]], object], Callable[[], Iterator[tuple[str, list[FrameType]]]]]:
    import trio

    root: Any = trio.lowlevel.current_root_task()

    def tasks() -> Iterator[tuple[str, list[FrameType]]]:
        todo = [root]
        while todo:
            task = todo.pop()
            yield f"{task.name!r}", [frame for frame, _ in task.iter_await_frames()]
            todo += [child for nursery in task.child_nurseries for child in nursery.child_tasks]

    return trio.lowlevel.current_trio_token().run_sync_soon, tasks
