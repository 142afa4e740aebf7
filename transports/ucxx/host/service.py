"""The requests of clients, executed on the slot table; without sockets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    StaleSlotError,
)

from ..payload.cooperative_copy import copy_cooperatively
from ..payload.gather import Gather, Selection, gathers
from ..payload.payload import Payload
from ..slots.header import State
from ..slots.slot_split import cut
from ..wire.failures import describe
from ..wire.messages import (
    LONGEST_PUT_S,
    Abort,
    Drop,
    PartHead,
    Read,
    Reserve,
    Rows,
    SlotRows,
    WireError,
    Write,
)
from .memory_share import MemoryShare

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..slots.slot import Grant, ReadAttempt, Slot
    from ..slots.table import SlotTable
    from ..slots.writer_process import Process
    from ..wire.buffers import BufferPool
    from .registration import HostDirectory
    from .settings import HostSettings

    Bytes = npt.NDArray[np.uint8]

__all__ = ["Service"]

#: Refs examined or slots reserved before the event loop runs other sessions (5-10 us each).
_AT_ONCE: Final = 64
#: Most bytes of one reply for rows that the read names repeatedly; unbounded, a reply could be far larger than what is
#: stored.
_REPEATED_BYTES: Final = 64 << 20
#: Most cells (rows x fields) of one put: each takes a byte in the arena, and eight where its length differs.
_MOST_CELLS: Final = 1 << 24


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
        self.served: dict[str, int] = {}
        self.buffers = buffers
        self.memory = MemoryShare(settings.held_bytes)
        self.crowd = asyncio.Semaphore(1)
        self._reserving: set[tuple[str, int]] = set()
        self._writing: dict[str, set[str]] = {}
        self._freed = asyncio.Event()

    def space_came_back(self) -> None:
        """Wake the requests that wait for free space."""
        self._freed.set()

    def _own(self, epoch: int) -> None:
        if epoch != self.table.arena.epoch:
            raise StaleSlotError(f"this host lives in epoch {self.table.arena.epoch}, not {epoch}")

    # -- reading

    @asynccontextmanager
    async def read(self, request: Read, *, in_frame: bool = False) -> AsyncIterator[tuple[Rows, list[Bytes]]]:
        """Gather rows; yield the reply and its payloads, whose memory is counted until the context ends.

        All read attempts are finished before the reply is yielded.

        Args:
            request: The read request.
            in_frame: Whether the payload has to fit into the frame, because this connection cannot use UCX.
        """
        self._own(request.epoch)
        errors: dict[int, DataPlaneError] = {}
        attempts: dict[int, ReadAttempt] = {}
        picks: list[Selection] = []
        try:
            for at, ref in enumerate(request.refs):
                if at % _AT_ONCE == _AT_ONCE - 1:
                    await asyncio.sleep(0)
                fields = _fields(request.fields, ref)
                attempt = self.table.begin_read(ref.slot, ref.generation, fields, ref.index)
                if isinstance(attempt, DataPlaneError):
                    errors[at] = attempt
                    continue
                attempts[at] = attempt
                payload = self.table.payload(attempt, fields, ref.index)
                if isinstance(payload, DataPlaneError):
                    errors[at] = payload
                else:
                    picks.append(Selection(at, payload, fields, ref.index))
            most = self.settings.inline_bytes if in_frame else self.settings.max_reply_bytes
            kept = self._within_reply(picks, errors, most)
            made, unfit = gathers(kept)
            errors.update(unfit)
            nbytes = sum(gather.layout.nbytes for gather in made)
            if in_frame and nbytes > most:
                made = self._within_frame(made, errors, most)
            async with self.memory.hold(nbytes):
                parts, payloads = [], []
                for gather in made:
                    out = self.buffers.empty(gather.layout.nbytes)
                    await copy_cooperatively(gather.fill(out))
                    self._check(gather, attempts, errors)
                    parts.append(self._head(gather, out))
                    payloads.append(out)
                while attempts:
                    self.table.finish_read(attempts.popitem()[1])
                self._count("reads", len(request.refs))
                yield self._without_failed(parts, payloads, errors)
        finally:
            for attempt in attempts.values():
                self.table.finish_read(attempt)

    def _within_reply(self, picks: list[Selection], errors: dict[int, DataPlaneError], most: int) -> list[Selection]:
        """Drop refs that exceed the reply's limit or repeat too many rows, with an error that tells so for each."""
        total, repeated = 0, 0
        kept: list[Selection] = []
        seen: dict[int, int] = {}
        for pick in picks:
            layout = pick.payload.layout
            size = int(layout.nbytes * len(pick.rows) / max(1, layout.n)) + 64
            named = seen.get(id(pick.payload), 0)
            seen[id(pick.payload)] = named + len(pick.rows)
            total += size
            again = min(1.0, max(0, named + len(pick.rows) - layout.n) / max(1, len(pick.rows)))
            repeated += int(size * again)
            if repeated <= _REPEATED_BYTES and (total <= most or not kept):
                kept.append(pick)
            elif kept:
                errors[pick.ref] = DataPlaneNotReady("the reply would be too long: ask again", retry_after_s=0.0)
            else:
                errors[pick.ref] = DataPlaneBadRequest("rows that are asked for again and again do not fit a reply")
            if pick.ref in errors:
                total, repeated = total - size, repeated - int(size * again)
        return kept

    def _within_frame(self, made: list[Gather], errors: dict[int, DataPlaneError], most: int) -> list[Gather]:
        """Drop the refs that do not fit into the frame, the only way to send payload without UCX."""
        fit: list[Gather] = []
        left = most
        for whole in made:
            gather, picks = whole, whole.picks
            while gather.layout.nbytes > left and len(picks) > 1:
                picks = picks[: len(picks) // 2]
                (gather,) = gathers(picks)[0]
            if gather.layout.nbytes <= left:
                fit.append(gather)
                left -= gather.layout.nbytes
            elif not fit:
                msg = f"{gather.layout.nbytes} bytes do not fit into a frame (inline_bytes={most}), and there is no UCX"
                errors[picks[0].ref] = DataPlaneUnavailable(msg, blames_port=False)
            kept = {pick.ref for pick in gather.picks} if any(gather is one for one in fit) else set()
            for pick in whole.picks:
                if pick.ref not in kept and pick.ref not in errors:
                    errors[pick.ref] = DataPlaneNotReady("the frame is full: ask again", retry_after_s=0.0)
        return fit

    def _check(self, gather: Gather, attempts: dict[int, ReadAttempt], errors: dict[int, DataPlaneError]) -> None:
        """Add an error for each ref of which rows were cleared during the copy."""
        for pick in gather.picks:
            still = self.table.payload(attempts[pick.ref], pick.fields, pick.rows)
            if isinstance(still, DataPlaneError):
                errors[pick.ref] = still

    def _head(self, gather: Gather, out: Bytes) -> PartHead:
        payload = Payload(gather.layout, out)
        sums = None
        if self.settings.checksum:
            sums, first = [], 0
            for count in gather.counts:
                sums.append(payload.checksum(first, first + count))
                first += count
        refs = [pick.ref for pick in gather.picks]
        rows = gather.layout.n
        return PartHead(refs, list(gather.nbytes), payload.schema(), gather.layout.nbytes, rows, sums)

    def _without_failed(
        self, parts: list[PartHead], payloads: list[Bytes], errors: dict[int, DataPlaneError]
    ) -> tuple[Rows, list[Bytes]]:
        """Build the reply without parts of which a row was cleared; the other refs of those have to be read again."""
        kept, bodies = [], []
        for part, payload in zip(parts, payloads, strict=True):
            if not any(at in errors for at in part.refs):
                kept.append(part)
                bodies.append(payload)
                continue
            for at in part.refs:
                if at not in errors:
                    errors[at] = DataPlaneNotReady(
                        "a row beside it was cleared meanwhile: ask again", retry_after_s=0.0
                    )
        failed = [(at, *describe(err)) for at, err in sorted(errors.items())]
        if sum(map(len, bodies)) <= self.settings.inline_bytes:
            return Rows(kept, failed, b"".join(body.tobytes() for body in bodies)), []
        return Rows(kept, failed), bodies

    # -- writing

    async def reserve(self, request: Reserve, writer: Process | None, owner: str = "") -> list[Grant]:
        """Reserve slots; wait for free space where ``on_full`` is ``wait``."""
        self._own(request.epoch)
        if self.draining:
            raise DataPlaneNotReady("this slot host is shutting down and takes no more", retry_after_s=1.0)
        if not request.fields or not request.sizes:
            raise DataPlaneBadRequest("a put of no rows or no fields reserves nothing")
        if len(request.fields) * len(request.sizes) > _MOST_CELLS:
            raise DataPlaneBadRequest(f"a put of {len(request.sizes)} rows x {len(request.fields)} fields is too large")
        until = time.monotonic() + min(request.wait_s, request.ttl_s)
        while True:
            self._freed.clear()
            try:
                grants = await self._reserve(request, writer, owner)
            except DataPlaneNotReady:
                left = until - time.monotonic()
                if self.settings.on_full != "wait" or left <= 0:
                    raise
                self.table.sweep(self.clock())
                await _set_or_over(self._freed, min(left, 0.2))
            else:
                self._count("reserved", len(grants))
                self._writing.setdefault(owner, set()).add(request.op_id)
                return grants

    def _within_share(self, owner: str, units: int) -> None:
        """Refuse a reservation by which a client's unwritten slots would exceed its share of the arena.

        Where the arena has no space for it, return: the reservation itself then fails with that error.
        """
        arena, table = self.table.arena, self.table
        if units > table.extents.free_units and not table.overwrite_oldest:
            return
        held = self._unwritten_units(owner)
        if held and held + units > self.settings.writing_share * arena.units:
            msg = f"this client holds {held * arena.unit_bytes} bytes that it has not written yet (writing_share)"
            raise DataPlaneNotReady(msg, retry_after_s=0.05)

    def _unwritten_units(self, owner: str) -> int:
        """Count the units that a client has reserved and not written; forget puts that have no such units."""
        table, held = self.table, 0
        ops = self._writing.get(owner, set())
        for op_id in list(ops):
            units = sum(table.slots[number].header.units for number, _ in table.of_op(op_id, unwritten=True))
            held += units
            if not units:
                ops.discard(op_id)
        if not ops:
            self._writing.pop(owner, None)
        return held

    def forget_writers(self) -> None:
        """Forget clients without unwritten reservations."""
        for owner in list(self._writing):
            self._unwritten_units(owner)

    async def _reserve(self, request: Reserve, writer: Process | None, owner: str) -> list[Grant]:
        """Reserve in steps that yield to the event loop; refuse a concurrent reservation for the same put."""
        key = (request.op_id, request.first_row)
        if key in self._reserving:
            raise DataPlaneNotReady("this put is being given its slots", retry_after_s=0.01)
        not_after = self.clock() + min(request.ttl_s, LONGEST_PUT_S)
        table, fields, sizes = self.table, request.fields, request.sizes
        shares = None
        self._reserving.add(key)
        try:
            if len(sizes) > _AT_ONCE * _AT_ONCE:
                shares = await asyncio.to_thread(cut, fields, sizes, table.max_slot_bytes, table.rows_per_slot)
            steps = table.reserve_in_steps(
                request.op_id,
                fields,
                sizes,
                request.first_row,
                not_after,
                writer,
                shares=shares,
                admit=partial(self._within_share, owner),
            )
            with closing(steps):
                for number, grants in enumerate(steps, 1):
                    if grants is not None:
                        return grants
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)
        finally:
            self._reserving.discard(key)
        raise AssertionError("the last step gives the grants")

    def is_written(self, request: Write) -> bool:
        """Return whether an earlier attempt of this write has succeeded already, so that only its reply was lost."""
        self._own(request.epoch)
        done = [self.table.is_written(number, generation, request.op_id) for number, generation, _ in request.slots]
        return all(done)

    def begin_write(self, request: Write) -> list[tuple[Slot, Bytes]]:
        """Return the slots and the memory for each payload; mark the slots as receiving."""
        self._own(request.epoch)
        places: list[tuple[Slot, Bytes]] = []
        if request.checksums is not None and len(request.checksums) != len(request.slots):
            raise DataPlaneBadRequest("another number of checksums than of slots")
        named: set[int] = set()
        for number, generation, size in request.slots:
            slot = self.table.writable(number, generation, request.op_id)
            if size > slot.header.capacity or slot.header.writer is not None or number in named:
                raise DataPlaneBadRequest(f"{size} bytes are not what slot {number} was reserved for")
            named.add(number)
            places.append((slot, self.table.arena.slice(self.table.arena.payload_at(number), size)))
        for slot, _ in places:
            slot.receiving = True
        return places

    def finish_write(self, request: Write, places: Sequence[tuple[Slot, Bytes]]) -> None:
        """End the receive and make the slots READY; raise where a payload is damaged or a slot was given up."""
        self.release(places)
        for at, (slot, _) in enumerate(places):  # all are verified before any is READY: a put is whole or absent
            payload = self.table.look(slot)
            if request.checksums is not None and payload.checksum() != request.checksums[at]:
                slot.payload = None
                raise CorruptPayload(f"the payload for slot {slot.number} does not match its checksum")
        for slot, _ in places:
            if self.table.find(slot.number, slot.generation) is None or not self.table.seal(slot, self.clock()):
                raise StaleSlotError(f"slot {slot.number} was given up while it was written")
        self._count("written", len(places))

    def release(self, places: Sequence[tuple[Slot, Bytes]]) -> None:
        """Mark that these slots are not being received into any more."""
        for slot, _ in places:
            self.table.received(slot)

    def write_inline(self, request: Write) -> None:
        """Write the payloads contained in the request itself."""
        data = np.frombuffer(request.inline or b"", np.uint8)
        if len(data) != sum(size for _, _, size in request.slots):
            raise WireError("the frame holds another number of bytes than it says")
        places = self.begin_write(request)
        begin = 0
        for _, out in places:
            out[:] = data[begin : begin + len(out)]
            begin += len(out)
        self.finish_write(request, places)

    async def abort(self, request: Abort, client: Process | None) -> int:
        """Free the slots that a put reserved and has not published; return how many stay occupied for now."""
        table = self.table
        table.refuse(request.op_id, self.clock())  # before the first await, so that a late write is refused
        slots = [table.slots[number] for number, _ in table.of_op(request.op_id)]
        keep: set[tuple[int, int]] = set()
        if any(table.settle(slot) is State.READY for slot in slots):  # written, so it may have been published
            live = await self.directory.live(table.arena.host_id, table.arena.epoch)
            keep = {(slot.number, slot.generation) for slot in slots} & set(live)
        own = all(slot.header.writer in (None, client) for slot in slots)
        return table.abort(request.op_id, self.clock(), idle=request.idle and own, keep=keep)

    async def drop(self, request: Drop) -> int:
        """End the life of rows; return how many were found."""
        self._own(request.epoch)
        found = 0
        for at, ref in enumerate(request.refs, 1):
            if at % _AT_ONCE == 0:
                await asyncio.sleep(0)
            fields = _fields(request.fields, ref)
            found += self.table.drop(ref.slot, ref.generation, ref.index, fields or None)
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

    def _count(self, what: str, by: int) -> None:
        self.served[what] = self.served.get(what, 0) + by


def _fields(lists: Sequence[tuple[str, ...]], ref: SlotRows) -> tuple[str, ...]:
    if ref.fields >= len(lists):
        raise WireError(f"field list {ref.fields} of {len(lists)}")
    return lists[ref.fields]


async def _set_or_over(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        return
