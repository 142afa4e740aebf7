"""Forked children of a test."""

from __future__ import annotations

import faulthandler
import inspect
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import anyio
import sniffio

__all__ = ["Child", "fork", "forked"]

#: Seconds that a child may live: then it prints where it hangs, and its test fails.
PATIENCE_S = 90.0


class Child:
    """A forked child.

    Attributes:
        pid: Its process id.
    """

    def __init__(self, pid: int, go: int) -> None:
        self.pid = pid
        self._go = go
        self._code: int | None = None

    def go_on(self) -> None:
        """Let it go on that waits for that."""
        if self._go >= 0:
            os.close(self._go)
            self._go = -1

    async def code(self) -> int:
        """Return its exit code, or minus a signal; the event loop goes on meanwhile."""
        self.go_on()
        with anyio.fail_after(2 * PATIENCE_S):
            while (code := self.poll()) is None:  # noqa: ASYNC110 - a process sets no event
                await anyio.sleep(0.005)
        return code

    def wait(self) -> int:
        """Return its exit code as :meth:`code` does, in a thread or outside of any event loop."""
        self.go_on()
        until = time.monotonic() + 2 * PATIENCE_S
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError("the child hangs")
            time.sleep(0.005)
        return code

    def poll(self) -> int | None:
        """Return its exit code, None while it lives."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """End it, if it still lives."""
        self.go_on()
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@asynccontextmanager
async def forked(work: Callable[[], Any], *, waits: bool = False) -> AsyncIterator[Child]:
    """Fork a child that runs ``work`` and ends by os._exit; at the end of the block it has to have ended well.

    Args:
        work: A function, or a coroutine function, which runs in an event loop of its own. It ends the child by code 0,
            or by what it returns.
        waits: Whether the child begins only once it is told to go on, or at the end of the block.
    """
    child = fork(work, waits=waits)
    try:
        yield child
        assert await child.code() == 0
    finally:
        child.kill()


def fork(work: Callable[[], Any], *, waits: bool = False, exits: bool = False) -> Child:
    """Fork a child as in :func:`forked`, which the caller waits for.

    Args:
        work: As there; with ``exits`` a plain function.
        waits: As there.
        exits: The child ends as this program would: by sys.exit, which takes down an event loop that runs, and by all
            exit handlers. Not in a process of pytest.
    """
    library = sniffio.current_async_library() if inspect.iscoroutinefunction(work) else ""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads, from Python 3.12 on: that is what is tested
        pid = os.fork()
    if not pid:
        os.close(writing)
        if waits:
            os.read(reading, 1)
        if exits:
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)  # by code 1
            work()
            sys.exit(0)
        _be_a_child(work, library)
    os.close(reading)
    return Child(pid, writing)


def _be_a_child(work: Callable[[], Any], library: str) -> NoReturn:
    """Run it in a thread, where no event loop of the parent counts as running."""
    codes = [1]

    def run() -> None:
        try:
            codes[0] = (anyio.run(work, backend=library) if library else work()) or 0
        except BaseException:  # noqa: BLE001 - said, and told by the exit code
            traceback.print_exc()
            sys.stderr.flush()

    try:
        thread = threading.Thread(target=run)
        thread.start()
        # Not by faulthandler's own timer: where pytest has set one, it cannot even be cancelled in a child.
        thread.join(PATIENCE_S)
        if thread.is_alive():
            faulthandler.dump_traceback(2, all_threads=True)
    finally:
        os._exit(codes[0])
