"""What a client has on its event loop to reach slot hosts: connections, lanes, UCX, and where each host is."""

from __future__ import annotations

import asyncio
import importlib.util
from typing import TYPE_CHECKING, Any, cast

from asyncdp.errors import DataPlaneUnsupported, StaleSlotError
from asyncdp.transports.ucxx.access import Access, Door
from asyncdp.transports.ucxx.buffers import BufferPool
from asyncdp.transports.ucxx.engine import Engine
from asyncdp.transports.ucxx.handshake import Secret
from asyncdp.transports.ucxx.pool import Pool

if TYPE_CHECKING:
    from asyncdp.block import ObjectCodec
    from asyncdp.config import UcxxSettings
    from asyncdp.slots import HostRef
    from asyncdp.transports.ucxx.directory import Directory, HostInfo

__all__ = ["Place", "Reach"]


class Place:
    """Where a host is now, and which of its ports to take.

    Args:
        info: What the host last said of itself.
    """

    __slots__ = ("door", "info")

    def __init__(self, info: HostInfo) -> None:
        """Hold it."""
        self.info = info
        self.door = Door(info.address, info.boot_id, info.arena)

    def port(self, chosen: int | None) -> int | None:
        """Return the port chosen; where the host has others since it was started again, the one in its place."""
        ports = self.info.ports
        return chosen if chosen is None or chosen in ports or not ports else ports[chosen % len(ports)]


class _EngineOnDemand:
    """Makes the engine when it is first used: where the lane serves everything, UCX is never loaded."""

    def __init__(self, devices: str | None) -> None:
        self._devices = devices
        self.made: Engine | None = None

    def __getattr__(self, name: str) -> Any:
        if self.made is None:
            self.made = Engine(devices=self._devices)
        return getattr(self.made, name)


class Reach:
    """Finds and reaches slot hosts, from the running event loop.

    A client may be used from one loop after another; what belongs to the loop before is let go.

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
        self._places: dict[tuple[str, int], Place] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._access: Access | None = None
        self._engine: _EngineOnDemand | None = None

    @property
    def access(self) -> Access:
        """The way to slots from the running loop; to be asked for after :meth:`find`, which may learn the secret.

        Raises:
            DataPlaneUnsupported: It is not asyncio's.
        """
        loop = running_loop()
        if self._access is None or self._loop is not loop:
            # Sockets of another loop cannot be closed from here: the collector does it.
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
            )
            self._access = Access(pool, self._codec, self._buffers, lane=self._settings.lane == "auto")
        return self._access

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
        if place is None or (place.door.address, place.info.ports) == (before.door.address, before.info.ports):
            return None
        return place

    async def close(self) -> None:
        """Close everything that is the running loop's. Twice is fine."""
        access, engine = self._access, self._engine
        self._access = self._engine = None
        if self._loop is not asyncio.get_running_loop():
            return
        if access is not None:
            await access.close()
        if engine is not None and engine.made is not None:
            await engine.made.close()


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
