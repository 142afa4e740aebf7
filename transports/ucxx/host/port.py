"""The doors of a host: N equal listeners for control streams. A taken number is left out and the next one tried."""

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
    """One listener.

    Attributes:
        number: Where it listens.
    """

    def __init__(self, server: asyncio.Server, number: int, streams: set[Control]) -> None:
        """Hold the listener, and the streams that came through it."""
        self._server = server
        self._streams = streams
        self.number = number

    @classmethod
    async def open(cls, bind: str, number: int, on_made: Callable[[Control], None]) -> Port:
        """Listen at an address and port (0: any); ``on_made`` gets each new stream.

        Raises:
            OSError: The port is taken, or the address is not this machine's.
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
        """Take no more; streams that are open stay so."""
        self._server.close()

    def fail(self) -> None:
        """Be dead from now on: whoever is connected is cut off, who connects is refused."""
        self.close()
        for stream in tuple(self._streams):
            stream.end()


async def open_ports(bind: str, first: int, count: int, on_made: Callable[[Control], None]) -> list[Port]:
    """Open ``count`` ports, from ``first`` up where that is not 0.

    Raises:
        DataPlaneUnavailable: There are not as many, or the address is not this machine's.
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
