"""The registry of slot hosts: their addresses, free space and heartbeats, by the server's clock."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgpack

from asyncdp.calls.slots import HostRef
from asyncdp.errors import DataPlaneUnavailable

from ..encoding.msgpack_codec import load, pack, text
from .base import OK, Base

if TYPE_CHECKING:
    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["HostInfo", "Hosts"]

#: Seconds for which the list of hosts is cached for the ports of refs. The ports of a running host do not change.
LIST_AGE_S = 1.0
#: Age in seconds up to which a listing serves to place a put; hosts renew what it says of them once a second.
PLACE_AGE_S = 0.25


@dataclass(frozen=True, slots=True)
class HostInfo:
    """The entry of a slot host: what it reports in each heartbeat, and the heartbeat's age.

    Attributes:
        id, epoch: Name of the host, and epoch of its slots (from :meth:`Hosts.next_epoch`).
        address, ports: Address and TCP port numbers that clients connect to.
        free_bytes: Free bytes in its arena.
        load: A measure of its load, in the same unit for all hosts; the least loaded host comes first.
        boot_id: Boot id of its machine, by which a client detects that it runs on the same one.
        arena: Name of its shared-memory segment.
        draining: Whether it only serves what it has and accepts no new rows.
        extra: Further plain values by name.
        age_s: Seconds since its last heartbeat, by the server's clock.
        alive: Whether the heartbeat is recent; shortly after a restart of the server, all hosts count as alive.
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
        """Whether a supervisor restarts the host when it dies."""
        return bool(self.extra.get("supervised"))

    @property
    def slots(self) -> dict[str, int]:
        """Number of its slots by state; empty where a host of an earlier release does not report them."""
        return dict(self.extra.get("slots", {}))

    @property
    def ref(self) -> HostRef:
        """Reference to the host for slot calls."""
        return HostRef(self.id, self.epoch, self.ports)

    def words(self) -> bytes:
        """Encode what the host reports in a heartbeat."""
        told = (self.address, self.ports, self.free_bytes, self.load, self.boot_id, self.arena, self.draining)
        packed: bytes = msgpack.packb((*told, dict(self.extra)))
        return packed

    @classmethod
    def heard(cls, host_id: str, epoch: int, words: bytes, age_s: float, *, alive: bool) -> HostInfo:
        """Decode what :meth:`words` encoded."""
        address, ports, free, load_, boot, arena, draining, extra = msgpack.unpackb(words)
        return cls(host_id, epoch, address, tuple(ports), free, load_, boot, arena, draining, extra, age_s, alive)


class Hosts(Base):
    """Sends the requests that register and list slot hosts."""

    def __init__(self, link: DirectoryLink, settings: DirectorySettings) -> None:
        """Start with no cached hosts."""
        super().__init__(link, settings)
        self._listed_at = float("-inf")
        self._found: tuple[HostInfo, ...] = ()
        self._refs: dict[tuple[str, int], HostRef] = {}
        self._alive: set[tuple[str, int]] = set()

    async def _host_call(self, verb: str, payload: Any) -> list[Any]:
        await self._open()
        # No partition's keys begin like this, because "hosts" precedes the braces.
        key = f"{self._settings.namespace}:hosts:{{hosts}}:"
        reply: list[Any] = await self._link.function(verb, key, "", 0, b"", pack(payload))
        return reply

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no host of this name has had, even in a plane whose data was lost."""
        return int((await self._host_call("next_epoch", host_id))[1])

    async def beat(self, host: HostInfo) -> float:
        """Register a host, or renew its heartbeat.

        Returns:
            Unix seconds by the server's clock.

        Raises:
            DataPlaneUnavailable: Another incarnation of this host has registered; this one has to stop.
        """
        reply = await self._host_call("beat", (host.id, host.epoch, host.words()))
        if reply[0] != OK:
            msg = f"host {host.id!r} of epoch {host.epoch} has been replaced by epoch {load(reply[1])[1]}"
            raise DataPlaneUnavailable(msg, host=host.id, retryable=False, blames_port=False)
        return int(reply[1]) / 1e6

    async def leave(self, host_id: str, epoch: int) -> None:
        """Remove a host's registration, unless another incarnation of it has registered."""
        await self._host_call("leave_host", (host_id, epoch))

    async def reap(self) -> tuple[str, ...]:
        """Remove hosts without a heartbeat for ``host_forget_s``; return their names.

        No host is removed before the server has been up for that long.
        """
        gone = load((await self._host_call("reap", int(self._settings.host_forget_s * 1e6)))[1])
        return tuple(text(raw) for raw in gone)

    async def hosts(self, age_s: float = -1.0) -> tuple[HostInfo, ...]:
        """List all registered hosts, sorted by id; a list that is at most ``age_s`` seconds old will do."""
        if self._link.now() - self._listed_at <= age_s:
            return self._found
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
        self._found = tuple(found)
        return self._found

    def forget_hosts(self) -> None:
        """Have the next listing ask the server: a host did not do what the last one says of it."""
        self._listed_at = float("-inf")

    def host_ref(self, host_id: str, epoch: int) -> HostRef:
        """Return a HostRef as far as it is known without a request; the ports are empty where they are not."""
        return self._refs.get((host_id, epoch)) or HostRef(host_id, epoch, ())

    async def _host_refs(self, wanted: Sequence[tuple[str, int]]) -> dict[tuple[str, int], HostRef]:
        """Return one HostRef per (host, epoch); without ports where that incarnation is not registered any more.

        A list of hosts that is older than ``LIST_AGE_S``, or lacks one of them, is replaced by a request.
        """
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
