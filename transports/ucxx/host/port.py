"""The ports of a host: N equivalent listeners for control streams. A port number in use is skipped."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from typing import Final

from asyncdp.errors import DataPlaneUnavailable

from ..wire.control import Control

__all__ = ["Port", "open_ports"]

_TRIES: Final = 256
_LAST: Final = 65535


class Port:
    """A listener for control streams.

    Attributes:
        number: TCP port number that it listens at.
    """

    def __init__(self, server: asyncio.Server, number: int, streams: set[Control]) -> None:
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
        streams: set[Control] = set()

        def made(control: Control) -> None:
            streams.difference_update([stream for stream in streams if stream.lost])
            streams.add(control)
            on_made(control)

        loop = asyncio.get_running_loop()
        server = await loop.create_server(lambda: Control(made), bind, number)
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
