"""The shared-memory lane: a process on the host's machine reads and writes the host's arena without requests to it.

A reader checks before and after its copy that each slot still holds its generation and that each row is still live; a
change in between is StaleSlotError, never another sample's bytes. A writer copies into slots that the host reserved for
it and records its end in the slot's header. The host reuses such a slot only after that, or after the writer's death,
so even a writer that was paused for hours never overwrites other rows.

A read may borrow rows rather than copy them: their tensors are on a private mapping of the slot, which the host does
not reuse for as long as the mapping lives (see ``slots/borrows.py``). The slot is checked once that holds.
"""

from __future__ import annotations

import os
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from asyncdp.calls.slots import Part, ReadResult
from asyncdp.errors import (
    CorruptPayload,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneWriteError,
    StaleSlotError,
)

from ..payload.blocks import block_of, layout_of, pack, rows_of
from ..payload.cooperative_copy import copy_cooperatively, memory_for
from ..payload.gather import Gather, Selection, gathers, span_of
from ..payload.layout import OBJECTS, Layout, read_layout, schema_of, spans
from ..payload.payload import Payload
from ..slots.arena import PAYLOAD_AT, WORDS
from ..slots.header import (
    DEAD,
    DONE,
    STATE,
    Header,
    Outcome,
    State,
    begin,
    read_outcome,
    read_state,
    write_outcome,
)
from ..slots.slot import live_at
from .small_reads import SmallReads

if TYPE_CHECKING:
    from asyncdp.calls.slots import SlotRef
    from asyncdp.process.buffer_pool import BufferPool
    from asyncdp.process.private_mapping import PrivateMapping
    from asyncdp.rows.block import Block, ObjectCodec

    from ..slots.arena import Arena

__all__ = ["Lane"]

#: Heads of payloads up to this many bytes are cached during a read: those of a few columns with rows of equal length.
_HEAD: Final = 256
_STATE_BITS: Final = np.uint64(8)
_OUTCOME_BITS: Final = np.uint64(2)
#: Layouts by the length of the payload's head, and by the head itself.
Heads = dict[int, dict[bytes, Layout]]


class Lane:
    """Reads and writes one arena that a client has mapped.

    Args:
        arena: The host's arena, attached and not owned.
        buffers: Pool of the buffers for results.
        codec: Decodes values that are no tensors.
        borrow_share: Share of the arena that slots may take that this lane's readers borrow at a time.
    """

    def __init__(self, arena: Arena, buffers: BufferPool, codec: ObjectCodec, *, borrow_share: float = 0.5) -> None:
        """Keep the arena, and view its slot headers as an array."""
        self.arena = arena
        self._most_borrowed = int(borrow_share * arena.units)
        self._borrowed = 0
        #: Units of borrows that ended; appended to by any thread, at any time.
        self._given_back: deque[int] = deque()
        self._buffers = buffers
        self._codec = codec
        self._pid = os.getpid()
        self._table = np.frombuffer(arena.words, np.uint64).reshape(arena.units, WORDS)
        self._small = SmallReads(arena)

    @property
    def usable(self) -> bool:
        """Whether the arena is still in use; False once its host or a newer incarnation of it removed it."""
        return not self.arena.given_up

    # -- reading

    async def read(self, refs: Sequence[SlotRef], *, borrow: bool = False) -> ReadResult:
        """Copy rows out of slots; return an error for each ref that could not be read, as the host itself would.

        With ``borrow``, fields of which all rows lie in one slot, one after the other, are borrowed and not copied.
        """
        if len(refs) == 1 and not borrow and self._known(refs[0]):
            result = self._small.read(refs[0])
            if result is not None:
                return result
        return await self._read(refs, borrow=borrow)

    async def _read(self, refs: Sequence[SlotRef], *, borrow: bool) -> ReadResult:
        errors: dict[int, DataPlaneError] = {}
        foreign = [at for at, ref in enumerate(refs) if not self._known(ref)]
        for at in foreign:
            errors[at] = _stale(refs[at])
        asked = [at for at in range(len(refs)) if at not in errors]
        self._check(refs, asked, errors)
        picks: list[Selection] = []
        heads: Heads = {}
        for at in asked:
            if at in errors:
                continue
            try:
                picks.append(Selection(at, self._look(refs[at], heads), refs[at].fields, refs[at].index))
            except CorruptPayload as err:
                errors[at] = self._state_problem(refs[at]) or err
        parts: list[Part] = []
        if borrow:
            picks = self._borrow_some(picks, refs, parts, errors)
        made, unfit = gathers(picks)
        for at, error in unfit.items():
            errors[at] = self._state_problem(refs[at]) or error
        for gather in made:
            out = await memory_for(self._buffers, gather.layout.nbytes)
            await copy_cooperatively(gather.fill(out))
            part = self._part(gather, Payload(gather.layout, out), refs, errors)
            if part is not None:
                parts.append(part)
        return ReadResult(tuple(parts), errors, through_port=False)

    def _known(self, ref: SlotRef) -> bool:
        return ref.host.epoch == self.arena.epoch and 0 <= ref.slot < self.arena.units

    def _look(self, ref: SlotRef, heads: Heads) -> Payload:
        """Return a slot's payload with its layout, cached in ``heads``: slots of one shape begin with equal bytes."""
        data = self.arena.data[self.arena.payload_at(ref.slot) :]
        head = data[:_HEAD].tobytes()
        for size, known in heads.items():
            layout = known.get(head[:size])
            if layout is not None:
                return Payload(layout, data)
        layout = read_layout(data)
        if layout.head_bytes <= _HEAD:
            heads.setdefault(layout.head_bytes, {})[head[: layout.head_bytes]] = layout
        return Payload(layout, data)

    def _part(
        self, gather: Gather, copied: Payload, refs: Sequence[SlotRef], errors: dict[int, DataPlaneError]
    ) -> Part | None:
        """Check the slots after the copy and return the part without refs that became stale; None if all did."""
        numbers = [pick.ref for pick in gather.picks]
        self._check(refs, numbers, errors)
        try:
            block = block_of(copied, self._codec)
        except DataPlaneReadError as err:  # what one writer has put does not keep the other rows from their reader
            for at in numbers:
                if at not in errors:
                    errors[at] = type(err)(err.message, host=refs[at].host.id, field=err.field, cause=err)
            return None
        sizes = gather.nbytes
        if any(at in errors for at in numbers):
            kept = [place for place, at in enumerate(numbers) if at not in errors]
            if not kept:
                return None
            marks = spans(gather.counts)
            block = block.take([row for place in kept for row in range(*marks[place])])
            numbers, sizes = [numbers[place] for place in kept], tuple(sizes[place] for place in kept)
        return Part(tuple(numbers), block, sizes, copied.schema())

    def _borrow_some(
        self,
        picks: list[Selection],
        refs: Sequence[SlotRef],
        parts: list[Part],
        errors: dict[int, DataPlaneError],
    ) -> list[Selection]:
        """Add a part for each selection that can be borrowed; return those that have to be copied."""
        named = Counter(name for pick in picks for name in pick.fields)
        rest = []
        for pick in picks:
            # Rows of a field that come in several pieces would be joined by a copy in any case.
            part = self._borrow(pick, refs, errors) if all(named[name] == 1 for name in pick.fields) else None
            if part is not None:
                parts.append(part)
            elif pick.ref not in errors:
                rest.append(pick)
        return rest

    def _borrow(self, pick: Selection, refs: Sequence[SlotRef], errors: dict[int, DataPlaneError]) -> Part | None:
        """Borrow a selection; return None where it has to be copied, or has an error."""
        ref, layout, span = refs[pick.ref], pick.payload.layout, span_of(pick.rows)
        metas = {meta.name: meta for meta in layout.metas}
        if span is None or not 0 <= span[0] < span[1] <= layout.n or not metas.keys() >= set(pick.fields):
            return None
        asked = tuple(metas[name] for name in pick.fields)
        mapping = None if all(meta.kind == OBJECTS for meta in asked) else self._hold(ref, layout.nbytes)
        if mapping is None:
            return None
        self._check(refs, [pick.ref], errors)
        if pick.ref in errors:
            return None
        payload = Payload(layout, mapping.array()[PAYLOAD_AT:])
        try:
            block = block_of(payload, self._codec, fields=pick.fields, rows=range(*span))
        except DataPlaneReadError as err:
            errors[pick.ref] = type(err)(err.message, host=ref.host.id, field=err.field, cause=err)
            return None
        return Part((pick.ref,), block, (block.nbytes,), schema_of(asked))

    def _hold(self, ref: SlotRef, nbytes: int) -> PrivateMapping | None:
        """Map a slot with a payload of ``nbytes``, which it has to be checked for; None where that cannot be."""
        header = Header.read(self.arena, ref.slot, ref.generation)
        while self._given_back:
            self._borrowed -= self._given_back.popleft()
        if header is None or nbytes > header.capacity or self._borrowed + header.units > self._most_borrowed:
            return None
        on_end = partial(self._given_back.append, header.units)
        mapping = self.arena.borrow(ref.slot, header.units, PAYLOAD_AT + nbytes, on_end)
        if mapping is not None:
            self._borrowed += header.units
        return mapping

    def _check(self, refs: Sequence[SlotRef], numbers: Sequence[int], errors: dict[int, DataPlaneError]) -> None:
        """Add an error for each ref whose slot does not hold its generation, or of which a row is dead.

        Rows are checked before the state, because a slot that is reused first stops being READY.
        """
        if self.arena.given_up:
            errors.update({at: _stale(refs[at]) for at in numbers})
            return
        slots = [refs[at].slot for at in numbers]
        dead = self._table[slots, DEAD].nonzero()[0].tolist()
        for place in dead:
            ref = refs[numbers[place]]
            if not self._live(ref):
                errors[numbers[place]] = StaleSlotError(
                    f"slot {ref.slot} does not hold these rows any more", host=ref.host.id
                )
        generations = np.asarray([refs[at].generation for at in numbers], np.uint64)
        state = self._table[slots, STATE]
        good = state == generations << _STATE_BITS | np.uint64(State.READY)
        if not good.all():  # a finished lane write is valid before the host has made the slot READY
            written = self._table[slots, DONE] == generations << _OUTCOME_BITS | np.uint64(Outcome.WRITTEN)
            good |= written & (state == generations << _STATE_BITS | np.uint64(State.WRITING))
        for place in (~good).nonzero()[0].tolist():
            problem = self._state_problem(refs[numbers[place]])
            if problem is not None:
                errors[numbers[place]] = problem

    def _state_problem(self, ref: SlotRef) -> DataPlaneError | None:
        """Return why a slot does not hold a finished payload of this generation, or None where it does."""
        arena = self.arena
        state, generation = read_state(arena, ref.slot)
        if generation != ref.generation or state not in (State.READY, State.WRITING):
            return _stale(ref)
        if state is State.READY or read_outcome(arena, ref.slot, generation) is Outcome.WRITTEN:
            return None
        # It may have become READY between the two reads.
        if read_state(arena, ref.slot) == (State.READY, ref.generation):
            return None
        return DataPlaneNotReady(f"slot {ref.slot} is still being written", host=ref.host.id, retry_after_s=0.01)

    def _live(self, ref: SlotRef) -> bool:
        """Return whether all rows and fields of a ref are live."""
        header = Header.read(self.arena, ref.slot, ref.generation)
        if header is None or live_at(self.arena, ref.slot, header.capacity) > self.arena.nbytes:
            return False
        try:
            layout = self._look(ref, {}).layout
        except CorruptPayload:
            return False
        begin = live_at(self.arena, ref.slot, header.capacity)
        live = self.arena.slice(begin, header.rows * header.cols).reshape(header.rows, header.cols)
        columns = [at for name in ref.fields if (at := layout.column(name)) is not None and at < header.cols]
        rows = [row for row in ref.index if 0 <= row < header.rows]
        return bool(live[rows][:, columns].all())

    # -- writing

    def fits(self, ref: SlotRef, columns: int, nbytes: int) -> bool:
        """Return whether a payload of this length, of the rows of ``ref`` and so many columns, fits a leased slot."""
        header = Header.read(self.arena, ref.slot, ref.generation)
        if header is None:  # the lease was revoked, and the slot is used anew
            return True
        return (header.rows, header.cols) == (len(ref.rows), columns) and nbytes <= header.capacity

    def begin(self, ref: SlotRef) -> bool:
        """Begin to use a leased slot; return False where it was taken back, and for a child of its owner."""
        return self._mine(ref, State.WRITING) and begin(self.arena, ref.slot, ref.generation)

    def may_write(self, ref: SlotRef) -> bool:
        """Return whether a slot that was begun is still reserved, or written."""
        return self._mine(ref, State.WRITING) or self._mine(ref, State.READY)

    def stop(self, slot: int, generation: int) -> None:
        """Record that this process writes a slot no more; one that it has written stays so."""
        state, current = read_state(self.arena, slot)
        unfinished = current == generation and state in (State.WRITING, State.GIVEN_UP) and self._pid == os.getpid()
        if unfinished and read_outcome(self.arena, slot, generation) is Outcome.NONE:
            write_outcome(self.arena, slot, generation, Outcome.STOPPED)

    async def write(self, refs: Sequence[SlotRef], block: Block) -> None:
        """Copy rows into slots that were reserved for this process; ``block`` holds the rows of all refs in order.

        A write that is cut off leaves the slots reserved, so it may be retried, or its put aborted. A retry of a
        finished write does nothing.

        Raises:
            DataPlaneWriteError: A slot is not reserved for this write any more; the put must not be published.
        """
        if sum(len(ref.rows) for ref in refs) != block.n:
            raise DataPlaneWriteError(f"{block.n} rows do not fit the slots that were reserved for them")
        if all(self._known(ref) and self._state_problem(ref) is None for ref in refs):
            return
        finished = False
        try:
            first = 0
            for ref in refs:
                stop = first + len(ref.rows)
                await copy_cooperatively(self._copy_in(ref, rows_of(block, first, stop)))
                first = stop
            finished = True
        finally:
            for ref in refs:
                if self._mine(ref, State.WRITING) and finished:
                    write_outcome(self.arena, ref.slot, ref.generation, Outcome.WRITTEN)
                elif self._mine(ref, State.GIVEN_UP):
                    write_outcome(self.arena, ref.slot, ref.generation, Outcome.STOPPED)

    def _copy_in(self, ref: SlotRef, block: Block) -> Iterator[int]:
        header = Header.read(self.arena, ref.slot, ref.generation) if self._mine(ref, State.WRITING) else None
        layout = layout_of(block)
        if header is None or header.rows != block.n or header.capacity < layout.nbytes:
            raise DataPlaneWriteError(f"slot {ref.slot} is not reserved for this write any more", host=ref.host.id)
        out = self.arena.slice(self.arena.payload_at(ref.slot), layout.nbytes)
        for copied in pack(block, layout, out):
            yield copied
            if not self._mine(ref, State.WRITING):
                raise DataPlaneWriteError("this write was given up while it was under way", host=ref.host.id)

    def _mine(self, ref: SlotRef, state: State) -> bool:
        """Return whether a slot is in this state and generation, and is written by this process.

        It is False in a child that was forked during a copy, because the parent still writes the slot.
        """
        if self._pid != os.getpid():
            return False
        return self._known(ref) and read_state(self.arena, ref.slot) == (state, ref.generation)


def _stale(ref: SlotRef) -> StaleSlotError:
    return StaleSlotError(f"slot {ref.slot} no longer holds the requested data", host=ref.host.id)
