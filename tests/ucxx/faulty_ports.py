"""Proxies before the ports of a slot host, which can be made to fail as ports do."""

from __future__ import annotations

import asyncio
import socket
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from asyncdp.transports.ucxx.client.directory_entry import HostEntry

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory
    from asyncdp.transports.ucxx.host.registration import HostReport

__all__ = ["Behind", "FaultyPort", "Mood"]

#: good: passes everything on; slow: after a while; refuses: nobody listens; resets: takes a connection and ends it;
#: mute: takes one and says nothing; truncates: passes on half a frame and ends; babbles: says what is no frame.
Mood = Literal["good", "slow", "refuses", "resets", "mute", "truncates", "babbles"]
LOCAL = "127.0.0.1"


class FaultyPort:
    """A proxy before one port, which is set later.

    Attributes:
        port: Where it is.
        target: Which port lies behind it.
        mood: What it does with who comes.
        came: How many have come.
    """

    def __init__(self) -> None:
        self.port = 0
        self.target = 0
        self.mood: Mood = "good"
        self.came = 0
        self.slow_s = 0.0
        self.inside: set[Half] = set()
        self._server: asyncio.Server | None = None

    async def open(self) -> None:
        """Listen."""
        self._server = await asyncio.get_running_loop().create_server(lambda: Half(self), LOCAL, self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def become(self, mood: Mood) -> None:
        """Change; who is inside is thrown out."""
        self.mood = mood
        await self.close()
        if mood != "refuses":
            await self.open()

    async def close(self) -> None:
        """Listen no more, and throw out who is inside."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
        for half in list(self.inside):
            half.end()
        await asyncio.sleep(0)


class Half(asyncio.Protocol):
    """One side of a connection through a proxy; what comes here goes out at the other."""

    def __init__(self, proxy: FaultyPort, other: Half | None = None) -> None:
        self._port = proxy
        self._other = other
        self._transport: Any = None
        self._early = bytearray()
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Do what the proxy's mood is."""
        self._transport = transport
        self._port.inside.add(self)
        if self._other is not None:
            return
        proxy = self._port
        proxy.came += 1
        if proxy.mood == "resets":
            linger = struct.pack("ii", 1, 0)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            self._transport.abort()
        elif proxy.mood == "babbles":
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        elif proxy.mood != "mute":
            self._task = asyncio.get_running_loop().create_task(self._go_on())

    async def _go_on(self) -> None:
        if self._port.mood == "slow":
            await asyncio.sleep(self._port.slow_s)
        other = Half(self._port, self)
        await asyncio.get_running_loop().create_connection(lambda: other, LOCAL, self._port.target)
        other.write(bytes(self._early))
        self._other = other

    def data_received(self, data: bytes) -> None:
        """Pass it on, or half of it."""
        if self._other is None:
            self._early += data
        elif self._port.mood == "truncates":
            self._other.write(data[:7])
            self.end()
        else:
            self._other.write(data)

    def write(self, data: bytes) -> None:
        """Send it out on this side."""
        self._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the other side too."""
        self._port.inside.discard(self)
        if self._task is not None:
            self._task.cancel()
        if self._other is not None:
            self._other.end()

    def end(self) -> None:
        """End this side, after what was sent."""
        self._transport.close()


class Behind(HostEntry):
    """The directory as a host sees it that stands behind faulty_ports: these are what it publishes.

    Args:
        directory: A client of it.
        faulty_ports: One per port of the host.
    """

    def __init__(self, directory: Directory, faulty_ports: list[FaultyPort]) -> None:
        super().__init__(directory)
        self._ports = faulty_ports

    async def beat(self, report: HostReport) -> float:
        """Publish the faulty_ports."""
        for proxy, port in zip(self._ports, report.ports, strict=True):
            proxy.target = port
        return await super().beat(replace(report, ports=tuple(proxy.port for proxy in self._ports)))
