"""Resolution of slot hosts to addresses, and the connections, lanes and UCX engine of a client on its event loop."""

from __future__ import annotations

import asyncio
import importlib.util
import os
from functools import partial
from typing import TYPE_CHECKING, Any, Final, cast

import anyio
from redis.exceptions import RedisError

from asyncdp.errors import (
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    StaleSlotError,
)
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.process.forks import on_fork, on_fork_of_loop
from asyncdp.process.loop_end import at_loop_end

from ..wire.engine import Engine, load_ucx
from ..wire.handshake import Secret
from .connection_pool import Pool
from .greeting import accepts, greets
from .host_client import HostClient, Lanes, Route
from .leases import Leases

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable

    from asyncdp.calls.slots import HostRef
    from asyncdp.config import UcxxSettings
    from asyncdp.rows.block import ObjectCodec

    from ..directory import Directory, HostInfo

__all__ = ["HostAddress", "HostResolver"]


#: Seconds that the directory may take to answer a probe.
DIRECTORY_S: Final = 1.0
#: Seconds between two looks at whether a host that does not answer is alive. Most answer within a millisecond, and then
#: nobody looks.
LOOK_S: Final = 0.5
#: Seconds after which memory of large results that nobody used again is returned to the system.
IDLE_S: Final = 10.0


class HostAddress:
    """The current route to a host, and its current ports.

    Args:
        info: The host's entry in the directory.
    """

    __slots__ = ("info", "route")

    def __init__(self, info: HostInfo) -> None:
        """Derive the route from the entry."""
        self.info = info
        self.route = Route(info.address, info.boot_id, info.arena)

    def port(self, chosen: int | None) -> int | None:
        """Return the chosen port, or a current one in its place where the host has other ports since a restart."""
        ports = self.info.ports
        return chosen if chosen is None or chosen in ports or not ports else ports[chosen % len(ports)]


class _EngineOnDemand:
    """Creates the UCX engine when it is first used: UCX is not loaded where the lane serves all requests."""

    next_tag = staticmethod(Engine.next_tag)  # every request draws one, also where it needs no UCX

    def __init__(self, devices: str | None) -> None:
        self._devices = devices
        self.made: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        if self.made is None:
            self.made = Engine(devices=self._devices)
        return getattr(self.made, name)


class HostResolver:
    """Resolves slot hosts by the directory and connects to them on the running event loop.

    A client may be used from one loop after another: connections end with their loop, lanes stay.

    Args:
        directory: Directory that hosts register with.
        settings: Configuration of the transport.
        secret: Shared secret of the hosts; where it is empty, the directory is asked for one.
        codec: Codec of values that are no tensors.
    """

    def __init__(self, directory: Directory, settings: UcxxSettings, secret: Secret, codec: ObjectCodec) -> None:
        """Start with no known hosts and no connections.

        UCX is loaded here where no lane can be used: that takes half a second, in which no thread of Python runs.
        """
        self._directory = directory
        self._settings = settings
        self._secret = secret
        self._asked = bool(secret)
        self._codec = codec
        self._buffers = BufferPool()
        self._client = os.urandom(16)
        self._addresses: dict[tuple[str, int], HostAddress] = {}
        self._lanes: Lanes = {}
        self.leases = Leases()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host_client: HostClient | None = None
        self._pool: Pool | None = None
        self._engine: _EngineOnDemand | None = None
        self._end: AsyncGenerator[None, None] | None = None
        self._closed = False
        if settings.lane == "off" and importlib.util.find_spec("ucxx") is not None:
            load_ucx()
        on_fork(self)

    @property
    def host_client(self) -> HostClient:
        """Client for requests from the running loop; to be used after :meth:`find`, which may fetch the secret.

        Raises:
            DataPlaneUnsupported: The running loop is not asyncio's.
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
            told: dict[str, Any] = {
                "lane": self._settings.lane == "auto",
                "lanes": self._lanes,
                "leases": self.leases,
                "borrow_share": self._settings.borrow_share,
            }
            self._pool, self._host_client = pool, HostClient(pool, self._codec, self._buffers, **told)
            self._end = at_loop_end(partial(_end, pool, self._engine))
            self._buffers.trim_in(loop, IDLE_S)
            on_fork_of_loop(loop)
        return self._host_client

    def _leave(self) -> None:
        """Close the connections of the previous loop, which was closed without cleanup or is not the running one."""
        pool, engine, loop = self._pool, self._engine, self._loop
        self._host_client = self._pool = self._engine = self._loop = self._end = None
        if pool is None or loop is None:
            return
        if loop.is_closed():
            _end_now(pool, engine)
        else:
            loop.call_soon_threadsafe(_end_now, pool, engine)

    @property
    def has_lanes(self) -> bool:
        """Whether the memory of any host is mapped."""
        return any(self._lanes.values())

    def known(self, host: HostRef) -> HostAddress | None:
        """Return the address of a host as far as it is cached, and the secret is known."""
        return self._addresses.get((host.id, host.epoch)) if self._asked else None

    async def find(self, host: HostRef) -> HostAddress | None:
        """Return the address of a host; None where it is not registered.

        Raises:
            StaleSlotError: A newer incarnation of the host is registered, so the contents of its slots are lost.
        """
        if not self._asked:  # hosts may be known (by a ping, for example) before the secret is
            shared = await self._directory.shared_secret()
            self._asked = True
            if shared is not None:
                self._secret = Secret(shared)
        address = self._addresses.get((host.id, host.epoch))
        if address is not None:
            return address
        self.know(await self._directory.hosts())
        address = self._addresses.get((host.id, host.epoch))
        if address is None and any(name == host.id and epoch > host.epoch for name, epoch in self._addresses):
            raise StaleSlotError(
                f"host {host.id!r} was started again with an empty arena; the data in its slots is lost", host=host.id
            )
        return address

    async def answers(self, host_id: str | None) -> bool:
        """Return whether a host answers again, or with None the directory; False where no restart is expected.

        Raises:
            DataPlaneUnavailable: The host does not answer yet, and a restart is expected.
            RedisError, OSError: The directory does not answer yet, and a restart is expected.
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
        """Replace the known addresses by the directory's current entries."""
        self._addresses = {(info.id, info.epoch): HostAddress(info) for info in hosts}

    def forget(self, host: HostRef) -> None:
        """Drop the cached address of a host that did not answer; it may have other ports by now."""
        self._addresses.pop((host.id, host.epoch), None)

    async def serves(self, host: HostRef) -> bool:
        """Return whether a host may serve its slots: as far as is cached, else as the directory and its ports say."""
        address = self._addresses.get((host.id, host.epoch))
        if address is not None and address.info.alive:
            return True
        self.forget(host)  # it may be alive again
        try:
            address = await self.find(host)
        except StaleSlotError:
            return False
        return address is not None and address.info.alive and await accepts(address.route.address, address.info.ports)

    async def while_alive(self, host: HostRef, request: Callable[[], Awaitable[None]]) -> bool:
        """Make a request to a host; return False if the directory counts the host as dead before it has answered.

        A host that is paused does not answer, and its connections do not break. No caller waits longer for it than
        until its heartbeats have been missing for ``host_timeout_s``.
        """

        async def watch() -> None:
            while True:
                await asyncio.sleep(LOOK_S)
                self.forget(host)
                try:
                    address = await self.find(host)
                except StaleSlotError:
                    address = None
                except (DataPlaneError, RedisError, OSError):
                    continue
                if address is None or not address.info.alive:
                    scope.cancel()
                    return

        tasks: list[asyncio.Task[None]] = []
        loop = asyncio.get_running_loop()
        late = loop.call_later(LOOK_S, lambda: tasks.append(loop.create_task(watch())))
        try:
            with anyio.CancelScope() as scope:
                await request()
        finally:
            late.cancel()
            for task in tasks:
                task.cancel()
        return not scope.cancelled_caught

    async def moved(self, host: HostRef, before: HostAddress) -> bool:
        """Return whether a host at whose port another host answers has another address by now.

        A host that was killed and started again may have new ports, and another host may have its old ones.
        """
        self.forget(host)
        try:
            address = await self.find(host)
        except StaleSlotError:
            return False
        known = (before.route.address, before.info.ports)
        return address is not None and (address.route.address, address.info.ports) != known

    async def close(self) -> None:
        """Close all connections, those of another loop as far as that is possible from here. Idempotent."""
        self._closed = True
        end = self._end
        if end is not None and self._loop is asyncio.get_running_loop():
            self._host_client = self._pool = self._engine = self._loop = self._end = None
            await end.aclose()
        self._leave()
        self._lanes.clear()
        self.leases.clear()
        self._buffers.clear()

    def after_fork(self) -> None:
        """Unmap the parent's arenas in the child: their memory is freed only when no process maps it."""
        self._lanes.clear()
        self.leases.clear()  # they are the parent's


async def _end(pool: Pool, engine: _EngineOnDemand | None) -> None:
    """Close the pool and the engine on their running loop."""
    pool.close()
    if engine is not None and engine.made is not None:
        await engine.made.close()
    await asyncio.sleep(0)  # one iteration of the loop, in which asyncio closes the sockets


def _end_now(pool: Pool, engine: _EngineOnDemand | None) -> None:
    """Close the pool and the engine without their loop."""
    pool.close()
    if engine is not None and engine.made is not None:
        engine.made.end()


def on_asyncio() -> bool:
    """Return whether the running loop is asyncio's."""
    try:
        running_loop()
    except DataPlaneUnsupported:
        return False
    return True


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running loop.

    Raises:
        DataPlaneUnsupported: The running loop is not asyncio's.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        msg = "the UCXX transport runs on asyncio: redis-py and ucxx are its libraries; it does not run under trio"
        raise DataPlaneUnsupported(msg, capability="trio") from None
