"""Detects without requests that a server of TransferQueue died or does not respond.

There is one idle socket per server. libzmq sends heartbeats on it and reports every change of the connection: a killed
process is detected when the kernel resets the connection (measured: 22 ms), a stopped one when it misses heartbeats.
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

#: Milliseconds between two attempts to connect to a server that is down.
RECONNECT_MS = 100
#: Maximum number of events that are read before a monitor is closed; its queue holds a thousand.
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
    """Monitors one server and ends the calls that wait for it when it goes down.

    Args:
        context: ZMQ context of the socket.
        name: Name of the server in errors.
        address: ZMQ address of one of its request ports.
        interval_s, timeout_s: Seconds between heartbeats, and seconds without an answer after which the server is down.

    Attributes:
        down: Whether the server does not answer. No request is sent to it while it is down.
        refused: Whether nothing listens at its address any more: the process has ended, with all data that it held.
    """

    def __init__(self, context: Any, name: str, address: str, *, interval_s: float, timeout_s: float) -> None:
        """Start monitoring in the running event loop; until the first event the server counts as up.

        A server without any event in ``timeout_s`` counts as down, since TCP needs minutes to detect a machine that is
        off.
        """
        self.name = name
        self.address = address
        self.down = False
        self.refused = False
        self.closed = False
        self._scopes: set[anyio.CancelScope] = set()
        self._reached = False
        self._news = anyio.Event()
        # Plain sockets, because their events are read in a callback and no task has to wait. They are on the client's
        # context, which closes them as well if the client is never closed.
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
        """Read all pending events; the descriptor is edge-triggered and signals only later ones."""
        while not self.closed:
            try:
                event = recv_monitor_message(self._monitor, flags=Flag.DONTWAIT)["event"]
            except Again:
                return
            self._take(event)

    def _take(self, event: int) -> None:
        """Handle one event of the monitor."""
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
        """Wait for the first event, after which it is known whether the server answers."""
        await self._news.wait()

    def _fall(self) -> None:
        self.down = True
        self._news.set()
        for scope in list(self._scopes):
            scope.cancel()

    async def guard(self, send: Callable[[], Awaitable[R]], deadline: float, **context: Any) -> R:
        """Await ``send()`` until the deadline, as long as the server is up.

        Args:
            send: Makes the request; not called if the server is down.
            deadline: Deadline by the event loop's clock.
            **context: Attributes of the errors.

        Raises:
            DataPlaneUnavailable: The server was down (nothing was sent), or went down meanwhile (``ambiguous``).
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
        """Whether the process has ended; waits the time that a reset connection takes to be refused."""
        for _ in range(6):
            if self.refused or not self.down:
                break
            await anyio.sleep(RECONNECT_MS / 2e3)
        return self.refused

    def _drain(self) -> None:
        """Read the remaining events: closing a monitor whose queue is full would block for ever."""
        try:
            for _ in range(DRAINED):
                self._monitor.recv_multipart(Flag.DONTWAIT)
        except ZMQError:
            return

    def close(self) -> None:
        """Stop monitoring; calls that still wait raise DataPlaneClosed."""
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
