"""Forks of a test process, and control of the children."""

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

#: Seconds after which a child prints its stack and ends, and its test fails.
PATIENCE_S = 90.0


class Child:
    """Handle of a forked child.

    Attributes:
        pid: Process id of the child.
    """

    def __init__(self, pid: int, go: int) -> None:
        self.pid = pid
        self._go = go
        self._code: int | None = None

    def go_on(self) -> None:
        """Let a child continue that was forked with ``waits``."""
        if self._go >= 0:
            os.close(self._go)
            self._go = -1

    async def code(self) -> int:
        """Wait for the child without blocking the event loop; return its exit code, or the negative signal number."""
        self.go_on()
        with anyio.fail_after(2 * PATIENCE_S):
            while (code := self.poll()) is None:  # noqa: ASYNC110 - a process sets no event
                await anyio.sleep(0.005)
        return code

    def wait(self) -> int:
        """Wait for the child, blocking, and return the same as :meth:`code`."""
        self.go_on()
        until = time.monotonic() + 2 * PATIENCE_S
        while (code := self.poll()) is None:
            if time.monotonic() > until:
                self.kill()
                raise AssertionError("the child hangs")
            time.sleep(0.005)
        return code

    def poll(self) -> int | None:
        """Return the exit code of the child; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def kill(self) -> None:
        """Kill the child if it still runs."""
        self.go_on()
        if self._code is None:
            os.kill(self.pid, signal.SIGKILL)
            self._code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@asynccontextmanager
async def forked(work: Callable[[], Any], *, waits: bool = False) -> AsyncIterator[Child]:
    """Fork a child that runs ``work`` and ends by os._exit; fail at the end of the block if its exit code is not 0.

    Args:
        work: A function, or a coroutine function, which runs in a new event loop. The exit code is its return value,
            or 0.
        waits: Whether the child starts the work only after ``go_on()``, or at the end of the block.
    """
    child = fork(work, waits=waits)
    try:
        yield child
        assert await child.code() == 0
    finally:
        child.kill()


def fork(work: Callable[[], Any], *, waits: bool = False, exits: bool = False) -> Child:
    """Fork a child as :func:`forked` does; the caller has to wait for it.

    Args:
        work: As in :func:`forked`; with ``exits``, a plain function.
        waits: As in :func:`forked`.
        exits: Whether the child ends by sys.exit, which closes a running event loop and runs all exit handlers. Must
            not be used in a process of pytest.
    """
    library = sniffio.current_async_library() if inspect.iscoroutinefunction(work) else ""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks of multithreaded processes, from Python 3.12 on
        pid = os.fork()
    if not pid:
        os.close(writing)
        _unlock_trio()
        if waits:
            os.read(reading, 1)
        if exits:
            faulthandler.dump_traceback_later(PATIENCE_S, exit=True)  # exits with code 1
            work()
            sys.exit(0)
        _be_a_child(work, library)
    os.close(reading)
    return Child(pid, writing)


def _unlock_trio() -> None:
    """Give the child's copy of trio's run a lock of its own.

    A worker thread of the parent may hold the lock at the fork; then the finalizer of an async generator, such as one
    of the rig's, would wait for ever.
    """
    trio: Any = sys.modules.get("trio")
    if trio is not None and trio.lowlevel.in_trio_run():
        trio.lowlevel.current_trio_token()._reentry_queue.lock = threading.RLock()


def _be_a_child(work: Callable[[], Any], library: str) -> NoReturn:
    """Run the work in a thread, where asyncio does not consider the parent's event loop to be running."""
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
        # faulthandler's timer cannot be used: one that pytest has set cannot even be cancelled in a child.
        thread.join(PATIENCE_S)
        if thread.is_alive():
            faulthandler.dump_traceback(2, all_threads=True)
    finally:
        os._exit(codes[0])
