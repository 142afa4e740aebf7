"""The event loop of a blocking client, in a thread of its own."""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import os
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import anyio
from anyio.from_thread import BlockingPortal

from asyncdp.errors import DataPlaneClosed, DataPlaneUnavailable

from .forks import on_fork_of_loop

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncdp.client import Client

__all__ = ["ClientLoop", "in_a_loop"]

#: Seconds that the end of the interpreter waits for a client that was not closed.
EXIT_S = 4.0
#: Seconds between two looks of a loop that ends at whether a thread is handing a call over to it.
HAND_OVER_S = 0.001


class ClientLoop:
    """The event loop of one client, in a thread that starts with the first call and ends when the client is closed."""

    def __init__(self, client: Client) -> None:
        """Start nothing yet."""
        self.client = client
        self.pid = os.getpid()
        self.ended = False
        self._lock = threading.Lock()
        self._counting = threading.Lock()
        self._handing_over = 0
        self._portal: BlockingPortal | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._started: concurrent.futures.Future[BlockingPortal] = concurrent.futures.Future()
        self._error: BaseException | None = None

    @property
    def inside(self) -> bool:
        """Whether the caller runs on this loop, where waiting for it would never end."""
        return self._thread is threading.current_thread()

    def portal(self) -> BlockingPortal:
        """Return the way onto the loop, which is started if it is not running.

        Raises:
            DataPlaneClosed: The client was closed.
            DataPlaneUnavailable: The thread or its loop cannot be started; the next call tries again.
        """
        portal = self._portal
        if portal is None:
            with self._lock:
                if self._portal is None and not self.ended:
                    self._start()
                portal = self._portal
        if portal is None or self.ended:
            msg = "the client is closed"
            raise DataPlaneClosed(msg)
        return portal

    @contextmanager
    def handing_over(self) -> Iterator[None]:
        """Keep the loop running while a thread hands a call over to it, also if it is closed meanwhile.

        A portal waits for the loop to take a call. If the loop ended between the portal's look at whether it runs and
        its request, that wait would have no end.
        """
        with self._counting:
            self._handing_over += 1
        try:
            yield
        finally:
            with self._counting:
                self._handing_over -= 1

    def _start(self) -> None:
        thread = self._thread
        if thread is None:  # else an interrupt has ended the wait for its loop
            self._started = concurrent.futures.Future()
            thread = threading.Thread(
                target=self._run, args=(self._started,), name="asyncdp blocking client", daemon=True
            )
            try:
                thread.start()
            except (OSError, RuntimeError, MemoryError) as err:
                raise _not_started(err) from err
            self._thread = thread
            atexit.register(self.end_at_exit)
        error = self._started.exception()
        if error is not None:
            atexit.unregister(self.end_at_exit)
            self._thread = self._loop = self._stop = None
            thread.join()
            raise _not_started(error) from error
        self._portal = self._started.result()

    def _run(self, started: concurrent.futures.Future[BlockingPortal]) -> None:
        """Run the loop; what goes wrong before it has started is raised to the caller that waits for it."""
        try:
            with asyncio.Runner() as runner:
                runner.run(self._serve(started))
        except BaseException as err:
            if started.done():
                raise
            started.set_exception(err)

    async def _serve(self, started: concurrent.futures.Future[BlockingPortal]) -> None:
        """Keep the loop until the client is to be closed; then close it."""
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        on_fork_of_loop(self._loop)
        try:
            async with BlockingPortal() as portal:
                started.set_result(portal)
                await self._stop.wait()
                try:
                    await self.client.close()
                except Exception as err:  # noqa: BLE001 - close() raises it to its caller
                    self._error = err
                await portal.stop(cancel_remaining=True)
        finally:
            while started.done() and self._handing_over:  # noqa: ASYNC110 - other threads count
                await asyncio.sleep(HAND_OVER_S)

    def end(self) -> None:
        """Begin to close the client, from any thread, without waiting. In a forked child it does nothing."""
        if self.pid != os.getpid() or self.ended:
            return
        self.ended = True
        atexit.unregister(self.end_at_exit)
        if self._loop is not None and self._stop is not None:
            try:
                self._loop.call_soon_threadsafe(self._stop.set)
            except RuntimeError:  # the loop has ended
                return

    def close(self) -> None:
        """Close the client, and return when that is done."""
        if self.pid != os.getpid():
            return
        with self._lock:
            never_ran = self._thread is None and not self.ended
            self.end()
        if never_ran and in_a_loop():
            with concurrent.futures.ThreadPoolExecutor(1) as elsewhere:
                elsewhere.submit(asyncio.run, self.client.close()).result()
        elif never_ran:
            asyncio.run(self.client.close())
        elif self._thread is not None and not self.inside:
            self._thread.join()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def end_at_exit(self) -> None:
        """Close a client that nobody closed, within EXIT_S seconds: its thread must not outlive the interpreter."""
        if self.pid == os.getpid():
            self.end()
            if self._thread is not None:
                self._thread.join(EXIT_S)


def _not_started(error: BaseException) -> DataPlaneUnavailable:
    """Return what a call raises whose loop could not be started."""
    return DataPlaneUnavailable(f"the client's event loop could not be started: {type(error).__name__}: {error}")


def in_a_loop() -> bool:
    """Return whether an event loop runs in this thread."""
    try:
        anyio.get_current_task()
    except RuntimeError:
        return False
    return True
