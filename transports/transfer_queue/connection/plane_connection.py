"""The connection of a client to planes: it connects to a plane, detects its end, and reconnects to the next one."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread

from asyncdp.errors import DataPlaneClosed, DataPlaneError, DataPlaneUnavailable, DataPlaneUnsupported
from asyncdp.process.forks import on_fork_of_loop
from asyncdp.process.loop_end import at_loop_end, end_at_once

from .link import Link

if TYPE_CHECKING:
    from asyncdp.config import TransferQueueSettings

    from ..endpoints import Endpoints

__all__ = ["PlaneConnection", "in_a_loop_of_its_own"]

R = TypeVar("R")

#: Seconds between two searches for a new controller after the old one ended.
SEARCH_PAUSE_S = 0.5


class PlaneConnection:
    """Holds the link of one client; opens it on first use and again after the controller has died.

    Args:
        settings: Settings of the transport.
        endpoints: Last known addresses of the servers; None if unknown.
        find: Asks Ray for the present addresses (blocking); None if there is no Ray.
        infos: Asks Ray for TransferQueue's descriptions of the servers (blocking).
    """

    def __init__(
        self,
        settings: TransferQueueSettings,
        endpoints: Endpoints | None,
        find: Callable[[], Endpoints] | None,
        infos: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Start unconnected."""
        self.settings = settings
        self.endpoints = endpoints
        self.closed = False
        self._find = find
        self.infos = infos
        self._link: Link | None = None
        self._finalizer: Callable[[], Any] = bool
        self._end: AsyncGenerator[None, None] | None = None
        self._lock: anyio.Lock | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._searched = float("-inf")
        #: Epoch of the directory in which each partition was last seen.
        self._known: dict[str, str | None] = {}

    # -- requests

    async def ask(self, op: str, args: Sequence[Any], deadline: float, partition_id: str | None = None) -> Any:
        """Send a request to the directory.

        Raises:
            DataPlaneUnavailable: No directory answers, or a restarted plane does not know a partition that it had.
        """
        link = await self.link(deadline)
        try:
            answer = await link.ask(op, args, deadline)
        except DataPlaneError as err:
            unknown = getattr(err, "unknown_partition", False) and partition_id is not None
            if unknown and self._known.get(str(partition_id), link.epoch) != link.epoch:
                msg = f"the plane was restarted and does not know partition {partition_id!r} any more"
                raise DataPlaneUnavailable(msg, partition_id=partition_id, blames_port=False) from None
            raise
        if partition_id is not None:
            self._known[partition_id] = link.epoch
        return answer

    def forget(self, partition_id: str) -> None:
        """Forget a partition that was dropped on purpose."""
        self._known.pop(partition_id, None)

    async def link(self, deadline: float) -> Link:
        """Return the link, after opening it if necessary; if its controller is gone, look for another controller."""
        link = self._link
        if link is not None and not link.directory.down and link.loop is asyncio.get_running_loop() and not link.closed:
            return link
        if self.closed:
            msg = "the client is closed"
            raise DataPlaneClosed(msg)
        return await self._renew(deadline)

    async def _renew(self, deadline: float) -> Link:
        loop = _running_loop()
        if self._link is not None and (self._link.loop is not loop or self._link.closed):
            self._let_go()
        if self._lock is None or self._loop is not loop:  # a holder in a closed loop never releases the lock
            self._lock, self._loop = anyio.Lock(), loop
        with anyio.CancelScope(deadline=deadline):
            async with self._lock:
                link = self._link
                if link is None:
                    if self.endpoints is None:
                        self.endpoints = await self._search()
                    self._hold(await self._open(self.endpoints))
                elif link.directory.down and anyio.current_time() >= self._searched + SEARCH_PAUSE_S:
                    self._searched = anyio.current_time()
                    await self._replace(link)
                assert self._link is not None  # noqa: S101 - set above
                return self._link
        msg = "the plane did not answer in time"
        raise DataPlaneUnavailable(msg)

    async def _replace(self, link: Link) -> None:
        """Connect to another controller if Ray has one; otherwise keep the link, whose calls raise the error."""
        beside = link.endpoints.directory is not None
        if self._find is None and not beside:
            return
        try:
            endpoints = replace(link.endpoints, directory=None) if self._find is None else await self._search()
            if endpoints.controller.id == link.endpoints.controller.id and not beside:
                return
            fresh = await self._open(endpoints)
        except DataPlaneError:
            return
        self._let_go()
        self._hold(fresh)

    async def _search(self) -> Endpoints:
        if self._find is None:
            msg = "neither endpoints nor controller_address say where the plane is"
            raise DataPlaneUnavailable(msg, retryable=False)
        return await anyio.to_thread.run_sync(self._find, abandon_on_cancel=True)

    async def _open(self, endpoints: Endpoints) -> Link:
        """Open a link and check that the plane exists."""
        link = await Link.open(endpoints, self.settings, self.infos)
        there = False
        try:
            there = await link.hello(anyio.current_time() + 5.0)
        finally:
            if not there:
                link.close()
        if not there:
            msg = f"the controller at {link.directory.address} has no asyncdp plane {self.settings.namespace!r}"
            raise DataPlaneUnavailable(msg, blames_port=False)
        return link

    def close(self) -> None:
        """End waiting calls and close all sockets."""
        self.closed = True
        self._let_go()

    def _hold(self, link: Link) -> None:
        """Store a link and have it closed even if this client is never closed.

        The garbage collector could end libzmq's context before its sockets, and the context would wait for them for
        ever. In a forked child nothing is closed, since the sockets belong to the parent.
        """
        self._link = link
        self.endpoints = link.endpoints
        self._finalizer = weakref.finalize(self, _close_in, os.getpid(), link)
        self._end = at_loop_end(partial(_close_at_the_end, os.getpid(), link))
        on_fork_of_loop(link.loop)

    def _let_go(self) -> None:
        if self._link is not None:
            self._finalizer()
            self._link = None
        if self._end is not None:
            end_at_once(self._end)
            self._end = None


def _close_in(process: int, link: Link) -> None:
    """Close a link if this is the process that opened it; in a forked child its threads do not exist."""
    if process == os.getpid():
        link.close()


async def _close_at_the_end(process: int, link: Link) -> None:
    _close_in(process, link)


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        msg = "TransferQueue is a library for asyncio: its transport does not run under trio"
        raise DataPlaneUnsupported(msg, capability="trio") from None


def in_a_loop_of_its_own(work: Callable[[], Any]) -> Any:
    """Run a coroutine function in an event loop in another thread, even if this thread runs a loop; blocks."""
    box: list[Any] = []

    def run() -> None:
        try:
            box.append(asyncio.run(work()))
        except BaseException as err:  # noqa: BLE001 - raised again below
            box.append(err)

    thread = threading.Thread(target=run, name="asyncdp-open")
    thread.start()
    thread.join()
    if isinstance(box[0], BaseException):
        raise box[0]
    return box[0]
