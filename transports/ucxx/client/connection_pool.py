"""A pool of a client's connections: each is used by one request at a time, and spent or idle ones are replaced."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from asyncdp.errors import DataPlaneClosed, DataPlaneUnavailable

from .connection import Connection

if TYPE_CHECKING:
    from asyncdp.process.buffer_pool import BufferPool
    from asyncdp.rows.block import ObjectCodec

    from ..wire.engine import Engine
    from ..wire.handshake import Secret

__all__ = ["Pool"]

Address = tuple[str, int]


class Pool:
    """A pool of connections, by address and port.

    A connection that the host closed while it was idle is replaced without an error, since the port is not at fault. A
    connection that was idle for ``idle_share`` of the time that its host allows is replaced before the host closes it.
    Those that a burst of requests left behind are closed then too, at the next use of another one.

    Args:
        engine, secret, codec, buffers: Arguments of new connections; without an engine, payload travels in frames only.
        per_port: Maximum number of connections to one port; further requests wait.
        idle_share: Share of the host's ``idle_s`` after which an idle connection is replaced.
        client: Id of this client at hosts, 16 bytes that no other client knows; None: drawn at random.
    """

    def __init__(
        self,
        engine: Engine | None,
        secret: Secret,
        codec: ObjectCodec,
        buffers: BufferPool,
        *,
        per_port: int = 8,
        idle_share: float = 0.5,
        client: bytes | None = None,
    ) -> None:
        """Start with no connections."""
        self._client = os.urandom(16) if client is None else client
        self._engine = engine
        self._secret = secret
        self._codec = codec
        self._buffers = buffers
        self._per_port = per_port
        self._idle_share = idle_share
        self._idle: dict[Address, list[Connection]] = {}
        self._busy: dict[Address, set[Connection]] = {}
        self._places: dict[Address, asyncio.Semaphore] = {}
        self._closed = False
        self.opened = 0

    @asynccontextmanager
    async def use(self, host: str, port: int) -> AsyncIterator[Connection]:
        """Yield a connection to a port; at the end of the context it returns to the pool unless it is spent.

        Raises:
            DataPlaneUnavailable: The port does not answer.
            DataPlaneClosed: The pool was closed before or during the use.
        """
        address = (host, port)
        places = self._places.setdefault(address, asyncio.Semaphore(self._per_port))
        async with places:
            connection = self._take(address) or await self._open(address)
            busy = self._busy.setdefault(address, set())
            busy.add(connection)
            try:
                if self._closed:
                    raise DataPlaneClosed("the client was closed")
                yield connection
            except DataPlaneUnavailable as err:
                if self._closed:
                    raise DataPlaneClosed("the client was closed during this call", cause=err) from err
                raise
            finally:
                busy.discard(connection)
                if self._closed:
                    connection.spend()
                elif not connection.spent:
                    self._keep(address, connection)

    def _take(self, address: Address) -> Connection | None:
        """Return the most recently used idle connection that is still usable, or None."""
        if self._closed:
            raise DataPlaneClosed("the client is closed")
        idle = self._idle.get(address, [])
        while idle:
            connection = idle.pop()
            if not self._ended(connection):
                return connection
        return None

    def _keep(self, address: Address, connection: Connection) -> None:
        """Put a connection back; close those that nobody needed for long, which are the first: the last is taken."""
        idle = self._idle.setdefault(address, [])
        idle.append(connection)
        while idle and self._ended(idle[0]):
            del idle[0]

    def _ended(self, connection: Connection) -> bool:
        """Return whether a connection is closed; one that was idle for too long is closed now."""
        if time.monotonic() - connection.used_at > connection.welcome.idle_s * self._idle_share:
            connection.spend()
        return connection.spent

    async def _open(self, address: Address) -> Connection:
        self.opened += 1
        return await Connection.open(self._engine, self._secret, address, self._codec, self._buffers, self._client)

    def forget(self, host: str, port: int) -> None:
        """Close the idle connections to a port, for example because its host has another epoch."""
        for connection in self._idle.pop((host, port), []):
            connection.spend()

    def close(self) -> None:
        """Close all connections; requests that use one fail with DataPlaneClosed. Idempotent."""
        self._closed = True
        for connections in [*self._idle.values(), *self._busy.values()]:
            for connection in list(connections):
                connection.spend()
        self._idle.clear()

    @property
    def closed(self) -> bool:
        """Whether the pool was closed, with its client or with its event loop."""
        return self._closed

    @property
    def idle(self) -> int:
        """Number of idle connections."""
        return sum(map(len, self._idle.values()))
