"""The read requests of clients: rows of many slots are gathered into one reply."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from asyncdp.errors import DataPlaneError, DataPlaneNotReady, DataPlaneUnavailable

from ..payload.cooperative_copy import memory_for
from ..payload.gather import Gather, Selection, gathers
from ..payload.layout import schema_of, spans
from ..payload.payload import SUMMED_AT_ONCE, Payload
from ..wire.chunks import REPLY_BYTES
from ..wire.failures import describe
from ..wire.messages import PartHead, Read, Rows, SlotRows
from .field_lists import FieldLists
from .limits.memory_share import SMALL_BYTES
from .limits.reply_room import ASK_AGAIN, MOST_CELLS, REPEATED, ReplyRoom

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt

    from asyncdp.process.buffer_pool import BufferPool

    from ..slots.slot import ReadAttempt
    from ..slots.table import SlotTable
    from .limits.memory_share import MemoryShare
    from .limits.time_slices import TimeSlices, Work
    from .settings import HostSettings

    Bytes = npt.NDArray[np.uint8]

__all__ = ["ReadReply", "Reads"]

#: Most bytes copied at once on the event loop (0.1 ms).
_COPIED_AT_ONCE: Final = 256 << 10
#: Least size of a reply that is gathered while it is sent, and share of the arena whose slots such replies may keep.
_STREAMED_BYTES: Final = 6 << 20
_STREAMED_SHARE: Final = 0.5


def _nothing() -> None:
    """Do nothing."""


class ReadReply:
    """A reply to a read, as a context that ends once it was sent: ``with await reads.read(...) as (rows, payloads)``.

    Args:
        memory: Limit on the memory of all replies together, of which it holds a part.

    Attributes:
        rows: The reply itself.
        payloads: What is sent after it over UCX.
        nbytes: Length of all payloads, or of the payload in the reply.
        gathers: What is sent after it instead, by :meth:`messages`; the slots are kept until :meth:`release`.
    """

    __slots__ = ("_let_go", "_memory", "gathers", "held", "nbytes", "payloads", "rows")

    def __init__(self, memory: MemoryShare) -> None:
        self.rows: Rows
        self.payloads: list[Bytes] = []
        self.gathers: list[Gather] = []
        self.nbytes = 0
        self.held = 0
        self._memory = memory
        self._let_go: Callable[[], object] = _nothing

    def keep(self, gathers: list[Gather], let_go: Callable[[], object]) -> None:
        """Send what these gather, and call ``let_go`` once nothing reads their slots any more."""
        self.gathers, self._let_go = gathers, let_go

    def messages(self, buffers: BufferPool) -> Iterator[Bytes | None]:
        """Return the messages of the payloads, each copied when it is its turn, or a view of a slot.

        None is between two steps of a copy, and is no message.
        """
        for payload in self.payloads:
            for begin in range(0, len(payload), REPLY_BYTES):
                yield payload[begin : begin + REPLY_BYTES]
        for gather in self.gathers:
            yield from gather.messages(REPLY_BYTES, buffers.empty, _COPIED_AT_ONCE)

    async def hold(self, nbytes: int) -> None:
        """Hold so many bytes, and no longer those that it held before."""
        self.release()
        await self._memory.acquire(nbytes)
        self.held = nbytes

    def release(self) -> None:
        """Hold nothing, neither memory nor slots."""
        self._memory.release(self.held)
        self.held = 0
        let_go, self._let_go = self._let_go, _nothing
        let_go()

    def __enter__(self) -> tuple[Rows, list[Bytes]]:
        return self.rows, self.payloads

    def __exit__(self, *_: object) -> None:
        self.release()


class Reads:
    """Serves read requests on one slot table.

    Args:
        table: Table of the host's slots.
        settings: Configuration of the host.
        buffers: Pool of the buffers for replies.
        memory: Limit on the memory of all replies together.
        turns: The event loop's turns, which all long requests of all sessions share.
        served: Counters of what was served.
    """

    def __init__(
        self,
        table: SlotTable,
        settings: HostSettings,
        buffers: BufferPool,
        memory: MemoryShare,
        turns: TimeSlices,
        served: Counter[str],
    ) -> None:
        """Start with no requests running."""
        self._table = table
        self._settings = settings
        self._buffers = buffers
        self._memory = memory
        self._turns = turns
        self._served = served
        self._streamed = 0

    async def read(
        self,
        request: Read,
        *,
        in_frame: bool = False,
        stream: bool = False,
        gone: Callable[[], bool] = lambda: False,
    ) -> ReadReply:
        """Gather rows into a reply, whose memory is counted until it is released.

        All read attempts are finished before it returns, except those of a reply that is streamed.

        Args:
            request: The read request.
            in_frame: Whether the payload has to fit into the frame, because this connection cannot use UCX.
            stream: Whether a large reply may be gathered while it is sent. Its read attempts end with the reply.
            gone: Whether the client is gone; then the work ends, by ConnectionResetError.
        """
        errors: dict[int, DataPlaneError] = {}
        attempts: dict[int, ReadAttempt] = {}
        most = self._settings.inline_bytes if in_frame else self._settings.max_reply_bytes
        room = ReplyRoom(min(most, self._settings.held_bytes))
        work = self._turns.begin(gone)
        reply = ReadReply(self._memory)
        try:
            await self._picked(request, attempts, errors, room, work)
            made = await self._within_memory(reply, room, errors, most if in_frame else None, work)
            if stream and self._streams(reply, made):
                self._stream(reply, made, attempts, errors)
                self._served["reads"] += len(request.refs)
                return reply
            parts = []
            for gather in made:
                out = await memory_for(self._buffers, gather.layout.nbytes)
                for _ in gather.fill(out, _COPIED_AT_ONCE):
                    if work.over:
                        await work.next()
                await self._check(gather, attempts, errors, work)
                parts.append(await self._head(gather, out))
                reply.payloads.append(out)
            while attempts:
                if work.over:
                    await work.next()
                self._table.finish_read(attempts.popitem()[1])
            self._served["reads"] += len(request.refs)
            reply.rows, reply.payloads = self._without_failed(parts, reply.payloads, errors)
            reply.nbytes = sum(map(len, reply.payloads)) + len(reply.rows.inline or b"")
        except BaseException:
            reply.release()
            for attempt in attempts.values():
                self._table.finish_read(attempt)
            raise
        return reply

    def _streams(self, reply: ReadReply, made: list[Gather]) -> bool:
        """Return whether a reply is gathered while it is sent: not where checksums are to be sent before it.

        The slots of a reply that is streamed cannot be used for other rows as long as it is sent, so all of these
        together take a share of the arena.
        """
        reply.nbytes = sum(gather.layout.nbytes for gather in made)
        most = int(_STREAMED_SHARE * self._table.arena.nbytes)
        return _STREAMED_BYTES <= reply.nbytes <= most - self._streamed and not self._settings.checksum

    def _stream(
        self,
        reply: ReadReply,
        made: list[Gather],
        attempts: dict[int, ReadAttempt],
        errors: dict[int, DataPlaneError],
    ) -> None:
        """Make a reply that keeps the read attempts of what it sends, and end those of what it does not."""
        nbytes, kept = reply.nbytes, [pick.ref for gather in made for pick in gather.picks]
        kept_attempts = [attempts.pop(at) for at in kept]

        def let_go() -> None:
            self._streamed -= nbytes
            for attempt in kept_attempts:
                self._table.finish_read(attempt)

        self._streamed += nbytes
        reply.keep(made, let_go)
        while attempts:
            self._table.finish_read(attempts.popitem()[1])
        parts = [
            PartHead([pick.ref for pick in gather.picks], list(gather.nbytes), schema_of(gather.layout.metas),
                     gather.layout.nbytes, gather.layout.n)
            for gather in made
        ]  # fmt: skip
        reply.rows = Rows(parts, [(at, *describe(err)) for at, err in sorted(errors.items())])

    async def _within_memory(
        self, reply: ReadReply, room: ReplyRoom, errors: dict[int, DataPlaneError], most: int | None, work: Work
    ) -> list[Gather]:
        """Hold the memory that the reply needs, and return what to copy; ``most``: its limit where it is a frame."""
        await reply.hold(room.total)  # an estimate, since what is computed before the size is known takes memory too
        while True:
            work.check()
            made = self._gathered(room, errors)
            nbytes = sum(gather.layout.nbytes for gather in made)
            if most is not None and nbytes > most:
                made = self._within_frame(made, errors, most)
                nbytes = sum(gather.layout.nbytes for gather in made)
            if nbytes <= max(reply.held, SMALL_BYTES):
                return made
            made = []
            await reply.hold(nbytes)

    def _gathered(self, room: ReplyRoom, errors: dict[int, DataPlaneError]) -> list[Gather]:
        """Return what to copy; add an error for each selection that does not fit the reply, or lacks something."""
        made, unfit = gathers(room.kept)
        errors.update(unfit)
        if sum(gather.layout.nbytes for gather in made) > room.total and (refused := room.recheck(made)):
            errors.update(refused)
            made = gathers([pick for pick in room.kept if pick.ref not in errors])[0]
        return made

    async def _picked(
        self,
        request: Read,
        attempts: dict[int, ReadAttempt],
        errors: dict[int, DataPlaneError],
        room: ReplyRoom,
        work: Work,
    ) -> None:
        """Begin an attempt for each ref that can be read and fits the reply; an error for each other one."""
        lists = FieldLists(request.fields)
        for at, ref in enumerate(request.refs):
            if work.over:
                await work.next()
            fields = lists.of(ref)
            if not room.named(len(fields), len(ref.rows or ())):
                errors[at] = ASK_AGAIN
                continue
            if ref.rows and self._repeats(ref, len(fields)):
                errors[at] = REPEATED
                continue
            attempt = self._table.begin_read(ref.slot, ref.generation, fields, ref.index)
            if isinstance(attempt, DataPlaneError):
                errors[at] = attempt
                continue
            attempts[at] = attempt
            payload = self._table.payload(attempt, fields, ref.index)
            if isinstance(payload, DataPlaneError):
                errors[at] = payload
            elif (refused := room.take(Selection(at, payload, fields, ref.index), ref.slot)) is not None:
                errors[at] = refused

    def _repeats(self, ref: SlotRows, fields: int) -> bool:
        """Return whether a ref names more cells than its slot has, and more than may be named repeatedly."""
        slot = self._table.find(ref.slot, ref.generation)
        cells = 0 if slot is None else slot.header.rows * slot.header.cols
        return len(ref.rows or ()) * fields > max(MOST_CELLS, cells)

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

    async def _check(
        self, gather: Gather, attempts: dict[int, ReadAttempt], errors: dict[int, DataPlaneError], work: Work
    ) -> None:
        """Add an error for each ref of which rows were cleared during the copy."""
        for pick in gather.picks:
            if work.over:
                await work.next()
            cleared = self._table.cleared(attempts[pick.ref], pick.fields, pick.rows)
            if cleared is not None:
                errors[pick.ref] = cleared

    async def _head(self, gather: Gather, out: Bytes) -> PartHead:
        payload = Payload(gather.layout, out)
        counts, refs = gather.counts, [pick.ref for pick in gather.picks]
        sums = None
        if self._settings.checksum:
            at_once = len(out) <= SUMMED_AT_ONCE
            sums = _sums(payload, counts) if at_once else await asyncio.to_thread(_sums, payload, counts)
        return PartHead(refs, list(gather.nbytes), payload.schema(), gather.layout.nbytes, gather.layout.n, sums)

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
        if sum(map(len, bodies)) <= self._settings.inline_bytes:
            return Rows(kept, failed, b"".join(body.tobytes() for body in bodies)), []
        return Rows(kept, failed), bodies


def _sums(payload: Payload, counts: Sequence[int]) -> list[int]:
    """Return the checksum of each selection of a payload, by the number of rows of each."""
    return [payload.checksum(first, stop) for first, stop in spans(counts)]
