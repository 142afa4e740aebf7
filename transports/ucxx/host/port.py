"""The ports of a host: N equivalent listeners for control streams. A port number in use is skipped."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import structlog

from asyncdp.errors import DataPlaneUnavailable

if TYPE_CHECKING:
    from ..wire.control import Control
    from .limits.pending_connections import PendingConnections

__all__ = ["Port", "open_ports"]

_TRIES: Final = 256
#: Connections that a port accepts in one turn of the event loop (0.1 ms each, which every client waits for in
#: each turn), and those that may wait for it in the kernel: where these are too many, the kernel drops a client's
#: attempt, which it repeats after 1, 3 and 7 seconds.
_ACCEPTED_AT_ONCE: Final = 4
_PENDING: Final = 4096
#: Seconds after which a port accepts again where there was no descriptor or memory for a connection.
_AGAIN_S: Final = 1.0
_LAST: Final = 65535


class Port:
    """A listener for control streams.

    Args:
        server: The bound sockets.
        pending: Where peers wait until they have sent something.
        on_made: Called with each new stream.

    Attributes:
        number: TCP port number that it listens at.
    """

    def __init__(self, server: asyncio.Server, pending: PendingConnections, on_made: Callable[[Control], None]) -> None:
        """Listen."""
        self.number: int = server.sockets[0].getsockname()[1]
        self._server = server
        self._pending_connections = pending
        self._on_made = on_made
        self._streams: weakref.WeakSet[Control] = weakref.WeakSet()
        self._loop = asyncio.get_running_loop()
        self._made = self._add  # one object, by which clear() finds the connections of this port
        self._listening = [socket.socket(fileno=os.dup(bound.fileno())) for bound in server.sockets]
        for listening in self._listening:
            listening.settimeout(0.0)
            listening.listen(_PENDING)
            self._loop.add_reader(listening, self._accept, listening)

    @classmethod
    async def open(
        cls, bind: str, number: int, pending: PendingConnections, on_made: Callable[[Control], None]
    ) -> Port:
        """Listen at an address and port (0: any free port).

        Raises:
            OSError: The port is in use, or the address does not belong to this machine.
        """
        loop = asyncio.get_running_loop()
        server = await loop.create_server(asyncio.Protocol, bind, number, start_serving=False)
        try:
            return cls(server, pending, on_made)
        except OSError:
            server.close()
            raise

    def _add(self, control: Control) -> None:
        self._streams.add(control)
        self._on_made(control)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as err:
                structlog.get_logger("asyncdp.ucxx").warning("a connection cannot be accepted", why=str(err))
                self._loop.remove_reader(listening)
                self._loop.call_later(_AGAIN_S, self._accept_again, listening)
                return
            self._pending_connections.enter(sock, self._made, (str(address[0]), int(address[1])))

    def _accept_again(self, listening: socket.socket) -> None:
        if listening in self._listening:
            self._loop.add_reader(listening, self._accept, listening)

    def close(self) -> None:
        """Stop accepting connections; open streams stay open."""
        for listening in self._listening:
            self._loop.remove_reader(listening)
            listening.close()
        self._listening.clear()
        self._server.close()
        self._pending_connections.clear(self._made)

    def fail(self) -> None:
        """Simulate a failure: close all open streams and refuse new connections."""
        self.close()
        for stream in tuple(self._streams):
            if not stream.lost:
                stream.end()


async def open_ports(
    bind: str, first: int, count: int, pending: PendingConnections, on_made: Callable[[Control], None]
) -> list[Port]:
    """Open ``count`` ports, numbered from ``first`` upwards; 0: the system chooses the numbers.

    Raises:
        DataPlaneUnavailable: There are not enough free ports, or the address does not belong to this machine.
    """
    ports: list[Port] = []
    number = first
    for _ in range(count + _TRIES):
        if number > _LAST:
            break
        try:
            ports.append(await Port.open(bind, number, pending, on_made))
        except OSError as err:
            if err.errno != errno.EADDRINUSE:
                for port in ports:
                    port.close()
                raise DataPlaneUnavailable(
                    f"cannot listen at {bind}: {err}", host=bind, port=number, cause=err
                ) from err
        number += first != 0
        if len(ports) == count:
            return ports
    for port in ports:
        port.close()
    raise DataPlaneUnavailable(f"{count} free ports were not found at {bind} from {first} up", host=bind, port=first)
