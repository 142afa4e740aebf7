"""What a client has on its event loop to reach slot hosts: connections, lanes, UCX, and where each host is."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

from redis.exceptions import RedisError

from asyncdp.errors import DataPlaneClosed, DataPlaneUnavailable, DataPlaneUnsupported, StaleSlotError
from asyncdp.process.forks import on_fork, on_fork_of_loop
from asyncdp.process.loop_end import at_loop_end

from ..wire.buffers import BufferPool
from ..wire.engine import Engine
from ..wire.handshake import Secret
from .connection_pool import Pool
from .greeting import greets
from .host_client import HostClient, Lanes, Route

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from asyncdp.calls.slots import HostRef
    from asyncdp.config import UcxxSettings
    from asyncdp.rows.block import ObjectCodec

    from ..directory import Directory, HostInfo

__all__ = ["HostResolver", "Place"]


#: How long the directory may take to answer a probe, in seconds.
DIRECTORY_S: Final = 1.0


class Place:
    """Where a host is now, and which of its ports to take.

    Args:
        info: What the host last said of itself.
    """

    __slots__ = ("info", "route")

    def __init__(self, info: HostInfo) -> None:
        """Hold it."""
        self.info = info
        self.route = Route(info.address, info.boot_id, info.arena)

    def port(self, chosen: int | None) -> int | None:
        """Return the port chosen; where the host has others since it was started again, the one in its place."""
        ports = self.info.ports
        return chosen if chosen is None or chosen in ports or not ports else ports[chosen % len(ports)]


class _EngineOnDemand:
    """Makes the engine when it is first used: where the lane serves everything, UCX is never loaded."""

    next_tag = staticmethod(Engine.next_tag)  # of each request; what fits into a frame needs no UCX

    def __init__(self, devices: str | None) -> None:
        self._devices = devices
        self.made: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        if self.made is None:
            self.made = Engine(devices=self._devices)
        return getattr(self.made, name)


class HostResolver:
    """Finds and reaches slot hosts, from the running event loop.

    A client may be used from one loop after another: connections end with their loop, lanes stay.

    Args:
        directory: Knows where hosts are.
        settings: See there.
        secret: What hosts want to know; none: it is asked of the directory.
        codec: Of values that are no tensors.
    """

    def __init__(self, directory: Directory, settings: UcxxSettings, secret: Secret, codec: ObjectCodec) -> None:
        """Reach nothing yet."""
        self._directory = directory
        self._settings = settings
        self._secret = secret
        self._asked = bool(secret)
        self._codec = codec
        self._buffers = BufferPool()
        self._client = os.urandom(16)
        self._places: dict[tuple[str, int], Place] = {}
        self._lanes: Lanes = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host_client: HostClient | None = None
        self._pool: Pool | None = None
        self._engine: _EngineOnDemand | None = None
        self._end: AsyncGenerator[None, None] | None = None
        self._closed = False
        on_fork(self)

    @property
    def host_client(self) -> HostClient:
        """The way to slots from the running loop; to be asked for after :meth:`find`, which may learn the secret.

        Raises:
            DataPlaneUnsupported: It is not asyncio's.
            DataPlaneClosed: The client was closed.
        """
        loop = running_loop()
        if self._host_client is None or self._loop is not loop or self._pool is None or self._pool.closed:
            if self._closed:
                raise DataPlaneClosed("the client is closed")
            self._leave()
            self._loop = loop
            self._engine = None
            if importlib.util.find_spec("ucxx") is not None:
                self._engine = _EngineOnDemand(self._settings.devices)
            pool = Pool(
                cast("Engine | None", self._engine),
                self._secret,
                self._codec,
                self._buffers,
                per_port=self._settings.connections_per_port,
                client=self._client,
            )
            told: dict[str, Any] = {"lane": self._settings.lane == "auto", "lanes": self._lanes}
            self._pool, self._host_client = pool, HostClient(pool, self._codec, self._buffers, **told)
            self._end = at_loop_end(partial(_end, pool, self._engine))
            on_fork_of_loop(loop)
        return self._host_client

    def _leave(self) -> None:
        """Close what a loop before left open: it was closed without its end, or another one runs meanwhile."""
        pool, engine, loop = self._pool, self._engine, self._loop
        self._host_client = self._pool = self._engine = self._loop = self._end = None
        if pool is None or loop is None:
            return
        if loop.is_closed():
            _end_now(pool, engine)
        else:
            loop.call_soon_threadsafe(_end_now, pool, engine)

    async def find(self, host: HostRef) -> Place | None:
        """Return where a host is; None where it is not registered.

        Raises:
            StaleSlotError: Another life of it has begun: what its slots held is gone.
        """
        if not self._asked:  # whoever told where hosts are, a ping for one, did not ask for it
            shared = await self._directory.shared_secret()
            self._asked = True
            if shared is not None:
                self._secret = Secret(shared)
        place = self._places.get((host.id, host.epoch))
        if place is not None:
            return place
        self.know(await self._directory.hosts())
        place = self._places.get((host.id, host.epoch))
        if place is None and any(name == host.id and epoch > host.epoch for name, epoch in self._places):
            raise StaleSlotError(f"host {host.id!r} began anew; what its slots held is gone", host=host.id)
        return place

    async def answers(self, host_id: str | None) -> bool:
        """Whether a host, or the directory, answers again; False where it does not and is not known to come back.

        Raises:
            DataPlaneUnavailable: A host does not answer yet.
            RedisError, OSError: The directory does not, and is known to come back.
        """
        try:
            async with asyncio.timeout(DIRECTORY_S):
                hosts = await self._directory.hosts()
        except (RedisError, OSError):
            if self._directory.expected:
                raise
            return False
        self.know(hosts)
        if host_id is None:
            return True
        info = next((info for info in hosts if info.id == host_id), None)
        if info is None:
            return False
        if await greets(info.address, info.ports):
            return True
        if info.alive or info.supervised:
            raise DataPlaneUnavailable(f"slot host {host_id!r} does not answer yet", host=host_id)
        return False

    def know(self, hosts: tuple[HostInfo, ...]) -> None:
        """Take what the directory says of hosts."""
        self._places = {(info.id, info.epoch): Place(info) for info in hosts}

    def forget(self, host: HostRef) -> None:
        """Ask the directory anew where a host is: it did not answer, and may have other ports by now."""
        self._places.pop((host.id, host.epoch), None)

    async def moved(self, host: HostRef, before: Place) -> Place | None:
        """Return where a host is by now, at whose door somebody else answers; None where it is nowhere else.

        A host that was killed and adopted its arena again may have other ports, and another host those that it had.
        """
        self.forget(host)
        try:
            place = await self.find(host)
        except StaleSlotError:
            return None
        if place is None or (place.route.address, place.info.ports) == (before.route.address, before.info.ports):
            return None
        return place

    async def close(self) -> None:
        """Close everything; what belongs to another loop as far as that is possible from here. Twice is fine."""
        self._closed = True
        end = self._end
        if end is not None and self._loop is asyncio.get_running_loop():
            self._host_client = self._pool = self._engine = self._loop = self._end = None
            await end.aclose()
        self._leave()
        self._lanes.clear()
        self._buffers.clear()

    def after_fork(self) -> None:
        """Let the parent's arenas go: their memory is only free when nobody maps it."""
        self._lanes.clear()


async def _end(pool: Pool, engine: _EngineOnDemand | None) -> None:
    """Close what belongs to the running loop."""
    pool.close()
    if engine is not None and engine.made is not None:
        await engine.made.close()
    await asyncio.sleep(0)  # asyncio closes the sockets


def _end_now(pool: Pool, engine: _EngineOnDemand | None) -> None:
    """Close it without the loop."""
    pool.close()
    if engine is not None and engine.made is not None:
        engine.made.end()


def on_asyncio() -> bool:
    """Whether the running loop is asyncio's."""
    try:
        running_loop()
    except DataPlaneUnsupported:
        return False
    return True


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop.

    Raises:
        DataPlaneUnsupported: It is not asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        msg = "the UCXX transport runs on asyncio: redis-py and ucxx are its libraries; it does not run under trio"
        raise DataPlaneUnsupported(msg, capability="trio") from None
