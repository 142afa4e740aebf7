"""Notices that a server of TransferQueue died or fell silent, without sending it a request.

One idle socket per server. libzmq heartbeats on it and reports every change of the connection: a killed process is seen
as soon as the kernel resets the connection (measured: 22 ms), a stopped one when it misses its heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from zmq.constants import Event, Flag, SocketOption, SocketType
from zmq.error import Again, ZMQError
from zmq.sugar.socket import Socket
from zmq.utils.monitor import recv_monitor_message

from asyncdp.errors import DataPlaneClosed, DataPlaneTimeout, DataPlaneUnavailable

__all__ = ["Heartbeat"]

R = TypeVar("R")

#: Milliseconds between two attempts to reach a server that is down.
RECONNECT_MS = 100
#: Events that are read at most before a monitor is ended; its queue holds a thousand.
DRAINED = 10_000

_EVENTS = (
    Event.CONNECTED
    | Event.CONNECT_DELAYED
    | Event.CLOSED
    | Event.DISCONNECTED
    | Event.HANDSHAKE_SUCCEEDED
    | Event.HANDSHAKE_FAILED_NO_DETAIL
)


class Heartbeat:
    """Watches one server and ends the calls that wait for it when it goes.

    Args:
        context: Where to open the socket.
        name: What the server is called in errors.
        address: ZMQ address of one of its request ports.
        interval_s, timeout_s: Heartbeats: how often, and after how much silence the server counts as gone.

    Attributes:
        down: The server does not answer. Nothing is sent to it then.
        refused: Nothing listens at its address any more: the process is gone, and all that it held.
    """

    def __init__(self, context: Any, name: str, address: str, *, interval_s: float, timeout_s: float) -> None:
        """Begin to watch, in the running event loop; until the first news the server counts as up.

        No news in ``timeout_s`` is news as well: of a machine that is off, TCP itself would tell after minutes.
        """
        self.name = name
        self.address = address
        self.down = False
        self.refused = False
        self.closed = False
        self._scopes: set[anyio.CancelScope] = set()
        self._reached = False
        self._news = anyio.Event()
        # Plain sockets: their news is read in a callback, no task has to wait for it. On the client's context, which
        # closes them with itself, should the client be left unclosed.
        socket = context.socket(SocketType.DEALER, socket_class=Socket)
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.setsockopt(SocketOption.HEARTBEAT_IVL, max(1, int(interval_s * 1e3)))
        socket.setsockopt(SocketOption.HEARTBEAT_TIMEOUT, max(1, int(timeout_s * 1e3)))
        socket.setsockopt(SocketOption.HANDSHAKE_IVL, max(100, int(timeout_s * 1e3)))
        socket.setsockopt(SocketOption.RECONNECT_IVL, RECONNECT_MS)
        if address.startswith("tcp://["):
            socket.setsockopt(SocketOption.IPV6, 1)
        self._socket = socket
        socket.monitor(f"inproc://canary-{id(self)}", _EVENTS)
        self._monitor = context.socket(SocketType.PAIR, socket_class=Socket)
        self._monitor.setsockopt(SocketOption.LINGER, 0)
        self._monitor.connect(f"inproc://canary-{id(self)}")
        self._loop = asyncio.get_running_loop()
        self._fd: int = self._monitor.getsockopt(SocketOption.FD)
        self._loop.add_reader(self._fd, self._read)
        self._patience = self._loop.call_later(timeout_s, self._heard_nothing)
        socket.connect(address)
        self._read()

    def _read(self) -> None:
        """Take all the news there is: the descriptor tells only of what comes after."""
        while not self.closed:
            try:
                event = recv_monitor_message(self._monitor, flags=Flag.DONTWAIT)["event"]
            except Again:
                return
            self._take(event)

    def _take(self, event: int) -> None:
        """Take one piece of news."""
        if event == Event.HANDSHAKE_SUCCEEDED:
            self.down = self.refused = False
            self._news.set()
        elif event == Event.CONNECT_DELAYED:
            self._reached = False
        elif event == Event.CONNECTED:
            self._reached = True
            self.refused = False
        elif event == Event.CLOSED:
            if not self._reached:
                self.refused = True
                self._fall()
        else:
            self._fall()

    def _heard_nothing(self) -> None:
        if not self._news.is_set():
            self._fall()

    async def heard(self) -> None:
        """Wait for the first news: whether the server answers."""
        await self._news.wait()

    def _fall(self) -> None:
        self.down = True
        self._news.set()
        for scope in list(self._scopes):
            scope.cancel()

    async def guard(self, send: Callable[[], Awaitable[R]], deadline: float, **context: Any) -> R:
        """Await ``send()``, but no longer than until the deadline, and no longer than the server lives.

        Args:
            send: Makes the request; it is not called where the server is down.
            deadline: By the event loop's clock.
            **context: Attributes for the error.

        Raises:
            DataPlaneUnavailable: The server is down (nothing was sent), or went down (``ambiguous``).
            DataPlaneTimeout: The deadline passed.
            DataPlaneClosed: The client was closed meanwhile.
        """
        if self._lost():
            raise self._gone(sent=False, **context)
        scope = anyio.CancelScope(deadline=deadline)
        self._scopes.add(scope)
        try:
            with scope:
                return await send()
        finally:
            self._scopes.discard(scope)
        if self._lost():
            raise self._gone(sent=True, **context)
        msg = f"{self.name} did not answer in time"
        raise DataPlaneTimeout(msg, ambiguous=True, **context)

    def _lost(self) -> bool:
        return self.down or self.closed

    def _gone(self, *, sent: bool, **context: Any) -> DataPlaneUnavailable | DataPlaneClosed:
        if self.closed:
            return DataPlaneClosed("the client was closed while this call waited", ambiguous=sent, **context)
        how = "is gone" if self.refused else "does not answer"
        msg = f"{self.name} at {self.address} {how}" if not sent else f"{self.name} at {self.address} went silent"
        return DataPlaneUnavailable(msg, ambiguous=sent, **context)

    async def is_gone(self) -> bool:
        """Whether the process is gone, not only silent; waits as long as a connection that was reset needs to tell."""
        for _ in range(6):
            if self.refused or not self.down:
                break
            await anyio.sleep(RECONNECT_MS / 2e3)
        return self.refused

    def _drain(self) -> None:
        """Read what the monitor still has: with its queue full, ending it would wait for ever for a place in it."""
        try:
            for _ in range(DRAINED):
                self._monitor.recv_multipart(Flag.DONTWAIT)
        except ZMQError:
            return

    def close(self) -> None:
        """Stop watching; calls that still wait end with DataPlaneClosed."""
        self.closed = True
        self._patience.cancel()
        self._news.set()
        for scope in list(self._scopes):
            scope.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
        self._drain()
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
