"""The requests of clients, executed on the slot table; without sockets."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneNotReady,
    StaleSlotError,
)

from ..payload.payload import SUMMED_AT_ONCE
from ..slots.header import State
from ..slots.slot_split import Split
from ..wire.messages import (
    LEASE_S,
    LONGEST_PUT_S,
    Abort,
    Drop,
    Read,
    Reserve,
    WireError,
    Write,
)
from .field_lists import FieldLists, refuse_twice
from .limits.memory_share import MemoryShare
from .limits.time_slices import TimeSlices
from .reads import ReadReply, Reads

if TYPE_CHECKING:
    import numpy.typing as npt

    from asyncdp.process.buffer_pool import BufferPool

    from ..payload.payload import Payload
    from ..slots.slot import Grant, Slot
    from ..slots.table import SlotTable
    from ..slots.writer_process import Process
    from .registration import HostDirectory
    from .settings import HostSettings

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Service"]

#: Rows of a put up to which they are split into slots on the event loop (0.1 us each); beyond that a thread does it.
_SPLIT_AT_ONCE: Final = 4096
#: Most cells (rows x fields) of a put for whose like slots are leased ahead.
_LEASED_CELLS: Final = 1 << 15
#: Most cells (rows x fields) of one put: each takes a byte in the arena, and eight where its length differs.
_MOST_CELLS: Final = 1 << 22


class Service:
    """Executes requests on one slot table.

    Args:
        table: Table of the host's slots.
        settings: Configuration of the host.
        directory: Directory that says which rows are published.
        buffers: Pool of the buffers for payloads that are sent or received.
        clock: Returns unix seconds by the directory's clock.
    """

    def __init__(
        self,
        table: SlotTable,
        settings: HostSettings,
        directory: HostDirectory,
        buffers: BufferPool,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Start with no requests running."""
        self.table = table
        self.settings = settings
        self.directory = directory
        self.clock = clock
        self.draining = False
        self.served: Counter[str] = Counter()
        self.buffers = buffers
        #: Clients, by what they show to nobody else, with the process of each that was seen to own a connection.
        self.proved: dict[tuple[str, Process], None] = {}
        self.memory = MemoryShare(settings.held_bytes)
        #: For requests that are decoded: those that reserve slots, and all others.
        self.reserving, self.requests = (MemoryShare(settings.held_bytes // 2) for _ in range(2))
        #: The event loop's turns, which all long requests of all sessions share.
        self.turns = TimeSlices()
        self._reads = Reads(table, settings, buffers, self.memory, self.turns, self.served)
        self._sweeping: asyncio.Future[None] | None = None
        self._listing = asyncio.Lock()
        self._reserving: set[tuple[str, int]] = set()
        self._freed = asyncio.Event()

    async def sweep(self) -> None:
        """Free slots whose writers are gone or late; one look at all slots at a time, in slices between other work."""
        if self._sweeping is not None:
            await asyncio.shield(self._sweeping)
            return
        self._sweeping = asyncio.get_running_loop().create_future()
        try:
            self.table.revoke(before=self.clock() - LEASE_S)
            await self._in_slices(self.table.sweep_in_steps(self.clock()))
        finally:
            self._sweeping.set_result(None)
            self._sweeping = None

    async def _in_slices(self, steps: Iterable[bool]) -> int:
        """Carry out all steps, in slices between other work; return how many of them yielded True."""
        work, count = self.turns.begin(), 0
        for step in steps:
            count += step
            if work.over:
                await work.next()
        return count

    def space_came_back(self) -> None:
        """Wake the requests that wait for free space."""
        self._freed.set()

    def _own(self, epoch: int) -> None:
        if epoch != self.table.arena.epoch:
            raise StaleSlotError(
                f"this host is in epoch {self.table.arena.epoch}; the slots were of epoch {epoch} and are gone"
            )

    async def read(
        self,
        request: Read,
        *,
        in_frame: bool = False,
        stream: bool = False,
        gone: Callable[[], bool] = lambda: False,
    ) -> ReadReply:
        """Gather rows into a reply; as :meth:`.reads.Reads.read`, of this epoch."""
        self._own(request.epoch)
        return await self._reads.read(request, in_frame=in_frame, stream=stream, gone=gone)

    # -- writing

    def _refuse_unfit(self, request: Reserve) -> None:
        """Refuse a reservation that this host never takes, or not any more."""
        self._own(request.epoch)
        if self.draining:
            raise DataPlaneNotReady("this slot host is shutting down and takes no more", retry_after_s=1.0)
        if not request.fields or not request.sizes:
            raise DataPlaneBadRequest("a put of no rows or no fields reserves nothing")
        refuse_twice(request.fields)
        if len(request.fields) * len(request.sizes) > _MOST_CELLS:
            raise DataPlaneBadRequest(f"a put of {len(request.sizes)} rows x {len(request.fields)} fields is too large")

    async def reserve(self, request: Reserve, writer: Process | None, owner: str = "") -> list[Grant]:
        """Reserve slots; wait for free space where ``on_full`` is ``wait``."""
        self._refuse_unfit(request)
        until = time.monotonic() + min(request.wait_s, request.ttl_s)
        table, fields, sizes = self.table, request.fields, request.sizes
        least = table.least_units(fields, sizes)
        if least > table.extents.free_units:
            table.revoke()
        split, swept = Split((), (), least), False
        while True:
            self._freed.clear()
            # Once, however long it waits for space, and not before there may be enough.
            if not split.shares and (table.overwrite_oldest or least <= table.extents.free_units):
                at_once = len(sizes) <= _SPLIT_AT_ONCE
                split = table.split(fields, sizes) if at_once else await asyncio.to_thread(table.split, fields, sizes)
            try:
                grants = await self._reserve(request, split, writer, owner)
            except DataPlaneNotReady:
                left = until - time.monotonic()
                waits = self.settings.on_full == "wait" and left > 0
                if not waits and (swept or (request.op_id, request.first_row) in self._reserving):
                    raise
                # What a lane writer has finished counts as unwritten, and what a gone one has left as used, until a
                # sweep has looked at it.
                await self.sweep()
                swept = True
                if waits:
                    await _set_or_over(self._freed, min(left, 0.2))
            else:
                self.served["reserved"] += len(grants)
                return grants

    def lease(
        self, request: Reserve, op_ids: Sequence[str], writer: Process, owner: str, holder: object
    ) -> list[Grant]:
        """Lease slots for puts to come, as far as there is space enough for everybody; ``holder`` gets the leases.

        What would take long for many rows is not done for puts that may never come.
        """
        if len(request.sizes) > _SPLIT_AT_ONCE or len(request.sizes) * len(request.fields) > _LEASED_CELLS:
            return []
        most_units = int(self.settings.writing_share * self.table.arena.units)
        now = self.clock()
        return self.table.lease(
            op_ids,
            request.fields,
            request.sizes,
            now + min(request.ttl_s, LONGEST_PUT_S) + 2 * LEASE_S,
            writer,
            owner=owner,
            holder=holder,
            now=now,
            most_units=most_units,
        )

    def _within_share(self, owner: str, units: int) -> None:
        """Refuse a reservation by which a client's unwritten slots would exceed its share of the arena.

        Where the arena has no space for it, return: the reservation itself then fails with that error.
        """
        arena, table = self.table.arena, self.table
        if units > table.extents.free_units and not table.overwrite_oldest:
            return
        held = table.unwritten.get(owner, 0)
        if held + units > self.settings.writing_share * arena.units and table.revoke(owner=owner):
            held = table.unwritten.get(owner, 0)
        if held and held + units > self.settings.writing_share * arena.units:
            msg = f"this client holds {held * arena.unit_bytes} bytes that it has not written yet (writing_share)"
            raise DataPlaneNotReady(msg, retry_after_s=0.05)

    async def _reserve(self, request: Reserve, split: Split, writer: Process | None, owner: str) -> list[Grant]:
        """Reserve in steps that yield to the event loop; refuse a concurrent reservation for the same put."""
        key = (request.op_id, request.first_row)
        if key in self._reserving:
            raise DataPlaneNotReady("an earlier request still reserves slots for this put", retry_after_s=0.01)
        not_after = self.clock() + min(request.ttl_s, LONGEST_PUT_S)
        self._reserving.add(key)
        try:
            steps = self.table.reserve_in_steps(
                request.op_id,
                request.fields,
                request.sizes,
                request.first_row,
                not_after,
                writer,
                split=split,
                admit=partial(self._within_share, owner),
                owner=owner,
            )
            work = self.turns.begin()
            with closing(steps):
                for grants in steps:
                    if grants is not None:
                        return grants
                    if work.over:
                        await work.next()
        finally:
            self._reserving.discard(key)
        raise AssertionError("the last step gives the grants")

    def is_written(self, request: Write) -> bool:
        """Return whether an earlier attempt of this write has succeeded already, so that only its reply was lost."""
        self._own(request.epoch)
        if not request.slots:
            raise DataPlaneBadRequest("a write of no slots writes nothing")
        return all(self.table.is_written(number, generation, request.op_id) for number, generation, _ in request.slots)

    def begin_write(self, request: Write) -> list[tuple[Slot, Bytes]]:
        """Return the slots and the memory for each payload; mark the slots as receiving."""
        self._own(request.epoch)
        places: list[tuple[Slot, Bytes]] = []
        if request.checksums is not None and len(request.checksums) != len(request.slots):
            raise DataPlaneBadRequest("the numbers of checksums and of slots differ")
        named: set[int] = set()
        for number, generation, size in request.slots:
            slot = self.table.writable(number, generation, request.op_id)
            if size > slot.header.capacity or slot.header.writer is not None or number in named:
                raise DataPlaneBadRequest(f"{size} bytes are not what slot {number} was reserved for")
            named.add(number)
            places.append((slot, self.table.arena.slice(self.table.arena.payload_at(number), size)))
        for slot, place in places:
            self.table.unlook(slot)
            slot.receiving, slot.size = True, len(place)
        return places

    async def verify(self, request: Write, places: Sequence[tuple[Slot, Bytes]], first: int, stop: int) -> None:
        """Look whether the payloads ``first`` to ``stop``, which were received, are whole.

        Raises:
            CorruptPayload: One is damaged, or not what its slot was reserved for.
        """
        sums, work = request.checksums, self.turns.begin()
        for at in range(first, stop):
            if work.over:
                await work.next()
            slot = places[at][0]
            payload = self.table.look(slot)
            if sums is not None and sums[at] != await _sum(payload):
                self.table.unlook(slot)
                raise CorruptPayload(f"the payload for slot {slot.number} does not match its checksum")

    def finish_write(self, places: Sequence[tuple[Slot, Bytes]]) -> None:
        """End the receive and make the slots READY, whose payloads are verified; raise where one was given up."""
        self.release(places)
        for slot, _ in places:
            if self.table.find(slot.number, slot.generation) is None or not self.table.seal(slot, self.clock()):
                raise StaleSlotError(f"slot {slot.number} was given up while it was written")
        self.served["written"] += len(places)

    def release(self, places: Sequence[tuple[Slot, Bytes]]) -> None:
        """Mark that these slots are not being received into any more."""
        for slot, _ in places:
            self.table.received(slot)

    async def write_inline(self, request: Write) -> None:
        """Write the payloads contained in the request itself."""
        data = np.frombuffer(request.inline or b"", np.uint8)
        if len(data) != sum(size for _, _, size in request.slots):
            raise WireError("the payload's length differs from the sum of the sizes in the request")
        places = self.begin_write(request)
        begin = 0
        for _, out in places:
            out[:] = data[begin : begin + len(out)]
            begin += len(out)
        try:
            await self.verify(request, places, 0, len(places))
        except BaseException:
            self.release(places)
            raise
        self.finish_write(places)

    async def abort(self, request: Abort, client: Process | None) -> int:
        """Free the slots that a put reserved and has not published; return how many stay occupied for now."""
        table = self.table
        table.refuse(request.op_id, self.clock())  # before the first await, so that a late write is refused
        slots = table.of_op(request.op_id)
        keep: Container[tuple[int, int]] = ()
        if await self._in_slices(table.apply_outcome(slot) is State.READY for slot in slots):
            async with self._listing:  # written, so it may have been published; this names all rows of this host
                keep = await self.directory.live(table.arena.host_id, table.arena.epoch)
        others = await self._in_slices(slot.header.writer not in (None, client) for slot in slots)
        idle = request.idle and not others
        return await self._in_slices(table.abort_in_steps(request.op_id, self.clock(), idle=idle, keep=keep))

    async def drop(self, request: Drop) -> int:
        """End the life of rows; return how many were found."""
        self._own(request.epoch)
        found, work = 0, self.turns.begin()
        lists = FieldLists(request.fields)
        for ref in request.refs:
            if work.over:
                await work.next()
            fields = lists.of(ref)
            for step in self.table.drop_in_steps(ref.slot, ref.generation, ref.index, fields or None):
                found += step
                if work.over:
                    await work.next()
        return found

    # -- statistics

    def facts(self) -> dict[str, int | float | str]:
        """Return the host's identity, its size and counters, for diagnosis and tests."""
        arena = self.table.arena
        return {
            "host_id": arena.host_id,
            "epoch": arena.epoch,
            "units": arena.units,
            "draining": int(self.draining),
            **self.table.counts(),
            **self.served,
        }


async def _sum(payload: Payload) -> int:
    if payload.layout.nbytes <= SUMMED_AT_ONCE:
        return payload.checksum()
    return await asyncio.to_thread(payload.checksum)


async def _set_or_over(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
