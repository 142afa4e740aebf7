"""The ports of a host: N equivalent listeners for control streams. A port number in use is skipped."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import weakref
from collections.abc import Callable
from typing import Final

from asyncdp.errors import DataPlaneUnavailable

from ..wire.control import Control

__all__ = ["Port", "open_ports"]

_TRIES: Final = 256
#: Connections that a port accepts in one turn of the event loop (0.1 ms each), and those that may wait for it in the
#: kernel: where these are too many, the kernel drops a client's attempt, which it repeats after 1, 3 and 7 seconds.
_ACCEPTED_AT_ONCE: Final = 8
_PENDING: Final = 4096
_LAST: Final = 65535


class Port:
    """A listener for control streams.

    Attributes:
        number: TCP port number that it listens at.
    """

    def __init__(self, server: asyncio.Server, number: int, streams: weakref.WeakSet[Control]) -> None:
        """Keep the listener, and the set of streams that it accepts."""
        self._server = server
        self._streams = streams
        self.number = number

    @classmethod
    async def open(cls, bind: str, number: int, on_made: Callable[[Control], None]) -> Port:
        """Listen at an address and port (0: any free port); ``on_made`` is called with each new stream.

        Raises:
            OSError: The port is in use, or the address does not belong to this machine.
        """
        streams: weakref.WeakSet[Control] = weakref.WeakSet()

        def made(control: Control) -> None:
            streams.add(control)
            on_made(control)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Control(made), bind, number, backlog=_ACCEPTED_AT_ONCE)
        for listening in server.sockets:
            with socket.socket(fileno=os.dup(listening.fileno())) as same:  # asyncio has one number for both
                same.listen(_PENDING)
        return cls(server, server.sockets[0].getsockname()[1], streams)

    def close(self) -> None:
        """Stop accepting connections; open streams stay open."""
        self._server.close()

    def fail(self) -> None:
        """Simulate a failure: close all open streams and refuse new connections."""
        self.close()
        for stream in tuple(self._streams):
            stream.end()


async def open_ports(bind: str, first: int, count: int, on_made: Callable[[Control], None]) -> list[Port]:
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
            ports.append(await Port.open(bind, number, on_made))
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
