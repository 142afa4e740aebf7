"""Slot hosts: who serves slots, where, with how much room; heartbeats and reaping by the server's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from asyncdp.calls.slots import HostRef
from asyncdp.errors import DataPlaneUnavailable

from .base import OK, Base
from .msgpack_codec import load, pack, text

if TYPE_CHECKING:
    from .link import Link
    from .settings import DirectorySettings

__all__ = ["HostInfo", "Hosts"]

#: How old the list of hosts may be where ports are filled in, in seconds. The ports of a living host do not change.
LIST_AGE_S = 1.0


@dataclass(frozen=True, slots=True)
class HostInfo:
    """What a slot host says about itself in each heartbeat, and what the server knows beside.

    Attributes:
        id, epoch: Which host, and which life of its slots (from :meth:`Hosts.next_epoch`).
        address, ports: Where it listens.
        free_bytes: What still fits into its arena.
        load: Any measure of how busy it is, in one unit for all hosts; the least goes first.
        boot_id: Of its machine, to find out whether that is this one.
        arena: Name of its shared-memory segment.
        draining: It serves what it has and takes no more.
        extra: Anything else, of plain values.
        age_s: Seconds since its last heartbeat, by the server's clock.
        alive: Whether that is recent; just after a restart of the server, when all are old, everybody is.
    """

    id: str
    epoch: int
    address: str = ""
    ports: tuple[int, ...] = ()
    free_bytes: int = 0
    load: float = 0.0
    boot_id: str = ""
    arena: str = ""
    draining: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    age_s: float = 0.0
    alive: bool = True

    @property
    def supervised(self) -> bool:
        """Whether somebody starts it again when it dies."""
        return bool(self.extra.get("supervised"))

    @property
    def ref(self) -> HostRef:
        """The host as slot calls name it."""
        return HostRef(self.id, self.epoch, self.ports)

    def words(self) -> bytes:
        """Pack what the host says."""
        told = (self.address, self.ports, self.free_bytes, self.load, self.boot_id, self.arena, self.draining)
        packed: bytes = msgpack.packb((*told, dict(self.extra)))
        return packed

    @classmethod
    def heard(cls, host_id: str, epoch: int, words: bytes, age_s: float, *, alive: bool) -> HostInfo:
        """Read what :meth:`words` packed."""
        address, ports, free, load_, boot, arena, draining, extra = msgpack.unpackb(words)
        return cls(host_id, epoch, address, tuple(ports), free, load_, boot, arena, draining, extra, age_s, alive)


class Hosts(Base):
    """The registry of slot hosts."""

    def __init__(self, link: Link, settings: DirectorySettings) -> None:
        """Know no host."""
        super().__init__(link, settings)
        self._listed_at = float("-inf")
        self._refs: dict[tuple[str, int], HostRef] = {}
        self._alive: set[tuple[str, int]] = set()

    async def _host_call(self, verb: str, payload: Any) -> list[Any]:
        await self._open()
        # "hosts" outside the braces: no partition's keys begin like this.
        key = f"{self._settings.namespace}:hosts:{{hosts}}:"
        reply: list[Any] = await self._link.function(verb, key, "", 0, b"", pack(payload))
        return reply

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no life of this host has had, nor one of the same name in a plane that was lost."""
        return int((await self._host_call("next_epoch", host_id))[1])

    async def beat(self, host: HostInfo) -> float:
        """Register a host, or say that it still lives.

        Returns:
            Unix seconds by the server's clock.

        Raises:
            DataPlaneUnavailable: Another life of this host has registered; this one has to end.
        """
        reply = await self._host_call("beat", (host.id, host.epoch, host.words()))
        if reply[0] != OK:
            msg = f"host {host.id!r} of epoch {host.epoch} has been replaced by epoch {load(reply[1])[1]}"
            raise DataPlaneUnavailable(msg, host=host.id, retryable=False, blames_port=False)
        return int(reply[1]) / 1e6

    async def leave(self, host_id: str, epoch: int) -> None:
        """Strike a host off, unless another life of it has registered."""
        await self._host_call("leave_host", (host_id, epoch))

    async def reap(self) -> tuple[str, ...]:
        """Strike off hosts that have been silent for ``host_forget_s``, but not before the server is up that long."""
        gone = load((await self._host_call("reap", int(self._settings.host_forget_s * 1e6)))[1])
        return tuple(text(raw) for raw in gone)

    async def hosts(self) -> tuple[HostInfo, ...]:
        """List all hosts that are registered, by id."""
        now, up, flat = load((await self._host_call("hosts", 0))[1])
        limit = self._settings.host_timeout_s
        found = []
        for name, blob in zip(flat[::2], flat[1::2], strict=True):
            at, epoch, words = load(blob)
            age = max(0.0, (now - at) / 1e6)
            found.append(HostInfo.heard(text(name), epoch, words, age, alive=age <= limit or up / 1e6 <= limit))
        found.sort(key=lambda host: host.id)
        for host in found:
            known = self._refs.get((host.id, host.epoch))
            if known is None or known.ports != host.ports:
                self._refs[host.id, host.epoch] = host.ref
        self._alive = {(host.id, host.epoch) for host in found if host.alive}
        self._listed_at = self._link.now()
        return tuple(found)

    async def _host_refs(self, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], HostRef]:
        """Return hosts as slot calls name them; one object per host. Of a life that is over the ports are unknown."""
        missing = any(name not in self._refs for name in wanted)
        if missing or self._link.now() - self._listed_at > LIST_AGE_S:
            await self.hosts()
        out = {}
        for name in wanted:
            ref = self._refs.get(name)
            if ref is None:
                ref = self._refs[name] = HostRef(*name, ())
            out[name] = ref
        return out
