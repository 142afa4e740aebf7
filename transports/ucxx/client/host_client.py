"""Requests to slot hosts: over the shared-memory lane where the host's arena can be mapped, else over the network."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncdp.calls.slots import SlotRef
from asyncdp.errors import DataPlaneError, DataPlaneUnavailable, DataPlaneUnsupported, StaleSlotError

from ..slots.arena import Arena
from ..slots.writer_process import this_machine
from .joined_reads import JoinedReads
from .lane import Lane
from .leases import Leases

if TYPE_CHECKING:
    from asyncdp.calls.slots import HostRef, ReadResult
    from asyncdp.process.buffer_pool import BufferPool
    from asyncdp.rows.block import Block, ObjectCodec

    from .connection import Connection, Dropped
    from .connection_pool import Pool

__all__ = ["HostClient", "Route"]

#: Processor architectures that keep stores in order and loads in order. The lane's checks before and after a copy rely
#: on it; on others payload goes over the network.
_ORDERED: Final = frozenset({"x86_64", "AMD64", "i686", "i386"})
#: Most hosts and ports for which it is remembered which small reads are on the way.
_MOST_WAYS: Final = 1024
#: Lanes by host id and epoch; None: the arena cannot be mapped.
Lanes = dict[tuple[str, int], Lane | None]


@dataclass(frozen=True, slots=True)
class Route:
    """The network address of a host, and its shared memory.

    Attributes:
        address: Address that its ports listen at.
        boot_id, arena: Boot id of its machine and name of its shared-memory segment, as the host registered them.
    """

    address: str
    boot_id: str = ""
    arena: str = ""


class HostClient:
    """Reads, reserves and writes slots of any host.

    Args:
        pool: Pool of connections.
        codec, buffers: Codec and buffer pool for reads over the lane.
        lane: Whether to use the lane where it is available.
        lanes: Lanes that are mapped already, by host and epoch; they do not depend on an event loop.
        leases: Slots that hosts leased to the client; those that are in use do not depend on an event loop either.
        borrow_share: As for a lane.
    """

    def __init__(
        self,
        pool: Pool,
        codec: ObjectCodec,
        buffers: BufferPool,
        *,
        lane: bool = True,
        lanes: Lanes | None = None,
        leases: Leases | None = None,
        borrow_share: float = 0.5,
    ) -> None:
        """Start with ``lanes``, and without requests."""
        self._pool = pool
        self._codec = codec
        self._buffers = buffers
        self._lanes: Lanes = {} if lanes is None else lanes
        self._leases = Leases() if leases is None else leases
        self._borrow_share = borrow_share
        self._machine = this_machine() if lane and os.uname().machine in _ORDERED else None
        #: Small reads that are joined, by where they go.
        self._reads: dict[tuple[HostRef, Route, int | None], JoinedReads] = {}
        #: Number of running lane copies, by op_id.
        self._copying: dict[str, int] = {}
        #: Op_ids of the slots granted for the lane, by (host id, epoch, slot, generation).
        self._granted: dict[tuple[str, int, int, int], str] = {}

    def lane_of(self, host: HostRef, route: Route) -> Lane | None:
        """Return the lane to a host; None where the host is on another machine or its arena cannot be mapped."""
        key = (host.id, host.epoch)
        if key in self._lanes:
            lane = self._lanes[key]
            if lane is None or lane.usable:
                return lane
            del self._lanes[key]
        if self._machine is None or not route.arena:
            return None
        self._let_go()
        lane = None
        if route.boot_id == self._machine.boot_id:
            arena = Arena.attach(route.arena, host.id, host.epoch)
            if arena is not None:
                lane = Lane(arena, self._buffers, self._codec, borrow_share=self._borrow_share)
        self._lanes[key] = lane
        return lane

    def _let_go(self) -> None:
        """Unmap arenas of ended incarnations: their memory is freed only when no process maps it."""
        for key, lane in list(self._lanes.items()):
            if lane is not None and not lane.usable:
                del self._lanes[key]

    @asynccontextmanager
    async def _use(self, host: HostRef, route: Route, port: int | None) -> AsyncIterator[Connection]:
        chosen = port if port is not None else (host.ports[0] if host.ports else None)
        if chosen is None:
            raise DataPlaneUnavailable(f"host {host.id!r} has no ports", host=host.id)
        try:
            async with self._pool.use(route.address, chosen) as connection:
                if connection.welcome.host_id != host.id:  # slot numbers are not unique among hosts
                    msg = f"{connection.welcome.host_id!r} answers where slot host {host.id!r} was"
                    raise StaleSlotError(msg, host=host.id, port=chosen)
                yield connection
        except DataPlaneError as err:
            if err.host == route.address:  # the pool does not know the name, by which layers and users know the host
                err.host = host.id
            raise

    def read(
        self, host: HostRef, route: Route, refs: Sequence[SlotRef], port: int | None = None, *, borrow: bool = False
    ) -> Coroutine[Any, Any, ReadResult]:
        """Read rows of slots, over the lane or through ``port`` (None: the host's first port).

        With ``borrow`` the lane borrows rows where it can.
        """
        lane = self.lane_of(host, route)
        if lane is not None:
            return lane.read(refs, borrow=borrow)
        way = host, route, port
        joined = self._reads.get(way)
        if joined is None:
            if len(self._reads) >= _MOST_WAYS:
                self._reads.clear()
            joined = self._reads[way] = JoinedReads(partial(self._read_over, *way))
        return joined.read(refs)

    async def _read_over(self, host: HostRef, route: Route, port: int | None, refs: Sequence[SlotRef]) -> ReadResult:
        async with self._use(host, route, port) as connection:
            return await connection.read(host, refs)

    async def reserve(
        self,
        host: HostRef,
        route: Route,
        op_id: str,
        fields: tuple[str, ...],
        sizes: Sequence[int],
        first_row: int,
        *,
        ttl_s: float,
        wait_s: float = 1.0,
        port: int | None = None,
    ) -> tuple[SlotRef, ...]:
        """Reserve slots for rows of a put; the same op_id gets the same slots again.

        Args:
            host: Host that reserves the slots.
            route: Route to that host.
            op_id: Id of the put.
            fields: Field names, in the order of the block that will be written.
            sizes: Data bytes of each row.
            first_row: Position of the first row in the put.
            ttl_s: Seconds from now for which the put may still publish.
            wait_s: Seconds that a full host may wait for free space (where its ``on_full`` is ``wait``); well below the
                timeout of an attempt, so that a full host is DataPlaneNotReady and no port is blamed.
            port: Port number to use; None: the host's first port.

        Returns:
            One ref per slot; their ``rows`` count from ``first_row`` upwards.
        """
        lane = self.lane_of(host, route)
        ahead = 0
        if lane is not None:
            leased = self._leases.take(lane, host, op_id, fields, sizes, first_row, ttl_s)
            ahead, ttl_s = self._leases.wanted(host, fields, sizes, ttl_s)
            if leased is not None:
                self._granted[host.id, host.epoch, leased[0].slot, leased[0].generation] = op_id
                return leased
        told: dict[str, Any] = {"ttl_s": ttl_s, "wait_s": wait_s, "lane": lane is not None, "ahead": ahead}
        async with self._use(host, route, port) as connection:
            sent_at = time.monotonic()
            granted = await connection.reserve(host, op_id, fields, sizes, first_row, **told)
            given: dict[str, Any] = {"op_id": op_id, "connection": connection, "sent_at": sent_at, "ttl_s": ttl_s}
            self._leases.add(host, fields, len(sizes), granted.leases, **given)
        refs = tuple(
            SlotRef(host, slot, generation, fields, range(rows), range(first, first + rows))
            for slot, generation, rows, first in granted.grants
        )
        if granted.lane:
            for ref in refs:
                self._granted[host.id, host.epoch, ref.slot, ref.generation] = op_id
        return refs

    async def write(
        self,
        host: HostRef,
        route: Route,
        op_id: str,
        refs: Sequence[SlotRef],
        block: Block,
        *,
        port: int | None = None,
        checksum: bool = False,
    ) -> bool:
        """Write rows into reserved slots; ``block`` holds the rows of all refs in order.

        Returns whether they went through a port, not over the lane.
        """
        names = [(host.id, host.epoch, ref.slot, ref.generation) for ref in refs]
        lane = self.lane_of(host, route) if all(self._granted.get(name) == op_id for name in names) else None
        if lane is None:
            async with self._use(host, route, port) as connection:
                try:
                    await connection.write(host, op_id, refs, block, checksum=checksum)
                except DataPlaneUnsupported as err:
                    if self.lane_of(host, route) is None:
                        raise
                    # The host could not find out that this process owns the connection; over a new one it may.
                    msg = "the slot host granted no shared memory for a put that needs it"
                    told: dict[str, Any] = {"host": host.id, "port": port, "blames_port": False, "cause": err}
                    raise DataPlaneUnavailable(msg, **told) from err
            return True
        self._copying[op_id] = self._copying.get(op_id, 0) + 1
        try:
            await lane.write(refs, block)
        finally:
            self._copying[op_id] -= 1
            if not self._copying[op_id]:
                del self._copying[op_id]
        for name in names:
            self._granted.pop(name, None)
        return False

    def stop(self, host: HostRef, op_id: str) -> None:
        """Record in shared memory that no row of a put is copied any more, for a host that cannot be told."""
        if op_id in self._copying:
            return
        for (name, epoch, slot, generation), op in list(self._granted.items()):
            lane = self._lanes.get((name, epoch)) if (name, op) == (host.id, op_id) else None
            if lane is not None:
                lane.stop(slot, generation)
                del self._granted[name, epoch, slot, generation]
        self._leases.given_back(host, op_id)

    async def abort(self, host: HostRef, route: Route, op_id: str, port: int | None = None) -> int:
        """Abort a put; return how many of its slots stay occupied for now."""
        async with self._use(host, route, port) as connection:
            idle = op_id not in self._copying
            left = 0
            for reserved in (op_id, *self._leases.ids(host, op_id)):
                occupied = await connection.abort(reserved, idle=idle)
                if occupied and not idle and op_id not in self._copying:  # the copy ended during the request
                    occupied = await connection.abort(reserved, idle=True)
                left += occupied
            self._leases.given_back(host, op_id)
        for name in [name for name, op in self._granted.items() if op == op_id and name[0] == host.id]:
            del self._granted[name]
        return left

    async def drop(self, host: HostRef, route: Route, cells: Sequence[Dropped], port: int | None = None) -> int:
        """End the life of rows; return how many were found, once the host has done it."""
        async with self._use(host, route, port) as connection:
            return await connection.drop(host, cells)

    async def ask(self, host: HostRef, route: Route, port: int | None = None) -> Mapping[str, int | float | str]:
        """Return a host's identity, its size and counters."""
        async with self._use(host, route, port) as connection:
            return await connection.ask()

    async def close(self) -> None:
        """Unmap all arenas and close the connections. Idempotent."""
        self._pool.close()
        self._lanes.clear()
        self._reads.clear()
        await asyncio.sleep(0)
