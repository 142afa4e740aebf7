"""The shared-memory lane: a process on the host's own machine reads and writes its arena without asking it.

A reader copies out and checks before and after that each slot still holds its generation and each row still lives; what
changed in between is StaleSlotError, never another sample's bytes. A writer copies into slots that the host reserved
for it and says in the header when it is done; the host uses a slot for something else only after that, or after the
writer's death, so that a writer that was paused for hours still hurts nobody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from asyncdp.errors import CorruptPayload, DataPlaneError, DataPlaneNotReady, DataPlaneWriteError, StaleSlotError
from asyncdp.slots import Part, ReadResult
from asyncdp.transports.ucxx.gather import Gather, Selection, gathers
from asyncdp.transports.ucxx.layout import Layout
from asyncdp.transports.ucxx.payload import PIECE_BYTES, Payload, pack, rows_of
from asyncdp.transports.ucxx.slot import live_at
from asyncdp.transports.ucxx.slot_header import (
    Header,
    Outcome,
    State,
    read_dead,
    read_outcome,
    read_state,
    write_outcome,
)

if TYPE_CHECKING:
    from asyncdp.block import Block, ObjectCodec
    from asyncdp.slots import SlotRef
    from asyncdp.transports.ucxx.arena import Arena
    from asyncdp.transports.ucxx.buffers import BufferPool

__all__ = ["Lane"]


class _Seen(NamedTuple):
    """A slot as it was before the copy."""

    header: Header
    payload: Payload


class Lane:
    """One arena, mapped by a client.

    Args:
        arena: Attached, not owned.
        buffers: Where results go.
        codec: Decodes objects of results.
    """

    def __init__(self, arena: Arena, buffers: BufferPool, codec: ObjectCodec) -> None:
        """Hold them."""
        self.arena = arena
        self._buffers = buffers
        self._codec = codec

    @property
    def usable(self) -> bool:
        """False once the host removed the arena, or another life of it began."""
        return not self.arena.given_up

    def close(self) -> None:
        """Let go of the arena; results that were read from it stay."""
        self.arena.close()

    # -- reading

    async def read(self, refs: Sequence[SlotRef]) -> ReadResult:
        """Copy rows out of slots; an error per ref that could not be read, as from the host itself."""
        errors: dict[int, DataPlaneError] = {}
        picks: list[Selection] = []
        headers: dict[int, Header] = {}
        for at, ref in enumerate(refs):
            seen = self._look(ref)
            if isinstance(seen, DataPlaneError):
                errors[at] = seen
            else:
                headers[at] = seen.header
                picks.append(Selection(at, seen.payload, ref.fields, ref.index))
        made, unfit = gathers(picks)
        errors.update(unfit)
        parts = []
        for gather in made:
            out = self._buffers.empty(gather.layout.nbytes)
            await _in_turns(gather.fill(out))
            part = self._part(gather, Payload(gather.layout, out), refs, headers, errors)
            if part is not None:
                parts.append(part)
        return ReadResult(tuple(parts), errors)

    def _part(
        self,
        gather: Gather,
        copied: Payload,
        refs: Sequence[SlotRef],
        headers: dict[int, Header],
        errors: dict[int, DataPlaneError],
    ) -> Part | None:
        """Check after the copy; what is stale by now goes."""
        numbers = [pick.ref for pick in gather.picks]
        for at in numbers:
            problem = self._problem(refs[at], headers[at], copied.layout)
            if problem is not None:
                errors[at] = problem
        block = copied.block(self._codec)
        sizes = gather.nbytes
        if any(at in errors for at in numbers):
            kept = [place for place, at in enumerate(numbers) if at not in errors]
            if not kept:
                return None
            firsts = [0]
            for count in gather.counts:
                firsts.append(firsts[-1] + count)
            block = block.take([row for place in kept for row in range(firsts[place], firsts[place + 1])])
            numbers, sizes = [numbers[place] for place in kept], tuple(sizes[place] for place in kept)
        return Part(tuple(numbers), block, sizes, copied.schema())

    def _look(self, ref: SlotRef) -> _Seen | DataPlaneError:
        """See where the rows of a ref lie."""
        arena = self.arena
        if ref.host.epoch != arena.epoch or not 0 <= ref.slot < arena.units:
            return _stale(ref)
        problem = self._state_problem(ref)
        if problem is not None:
            return problem
        header = Header.read(arena, ref.slot, ref.generation)
        if header is None or live_at(arena, ref.slot, header.capacity) > arena.nbytes:
            return self._state_problem(ref) or CorruptPayload(f"the header of slot {ref.slot} is damaged")
        at = arena.payload_at(ref.slot)
        try:
            payload = Payload.read(arena.slice(at, header.capacity), header.rows)
        except CorruptPayload as err:
            return self._state_problem(ref) or err
        return self._problem(ref, header, payload.layout) or _Seen(header, payload)

    def _state_problem(self, ref: SlotRef) -> DataPlaneError | None:
        """Why a slot does not hold a finished payload of this generation, or None."""
        arena = self.arena
        state, generation = read_state(arena, ref.slot)
        if generation != ref.generation or arena.given_up:
            return _stale(ref)
        if state is State.READY:
            return None
        if state is not State.WRITING:
            return _stale(ref)
        if read_outcome(arena, ref.slot, generation) is Outcome.WRITTEN:
            return None
        # It may have become READY between the two looks.
        if read_state(arena, ref.slot) == (State.READY, ref.generation):
            return None
        return DataPlaneNotReady(f"slot {ref.slot} is still being written", host=ref.host.id, retry_after_s=0.01)

    def _problem(self, ref: SlotRef, header: Header, layout: Layout) -> DataPlaneError | None:
        """Why rows of a slot are not somebody's content, or None. Rows first: a freed slot's state goes before them."""
        if read_dead(self.arena, ref.slot) and not self._live(ref, header, layout):
            return self._state_problem(ref) or StaleSlotError(
                f"slot {ref.slot} does not hold these rows any more", host=ref.host.id
            )
        return self._state_problem(ref)

    def _live(self, ref: SlotRef, header: Header, layout: Layout) -> bool:
        begin = live_at(self.arena, ref.slot, header.capacity)
        live = self.arena.slice(begin, header.rows * header.cols).reshape(header.rows, header.cols)
        columns = [at for name in ref.fields if (at := layout.column(name)) is not None and at < header.cols]
        rows = [row for row in ref.index if 0 <= row < header.rows]
        return bool(live[rows][:, columns].all())

    # -- writing

    async def write(self, refs: Sequence[SlotRef], block: Block) -> None:
        """Copy rows into slots that were reserved for this process; ``block`` holds the rows of all refs in order.

        Raises:
            DataPlaneWriteError: A slot is not reserved for this any more; nothing of the put may be published.
        """
        finished = False
        if sum(len(ref.rows) for ref in refs) != block.n:
            raise DataPlaneWriteError(f"{block.n} rows do not fit the slots that were reserved for them")
        try:
            first = 0
            for ref in refs:
                stop = first + len(ref.rows)
                await _in_turns(self._copy_in(ref, rows_of(block, first, stop)))
                first = stop
            finished = True
        finally:
            for ref in refs:
                if self._mine(ref):
                    outcome = Outcome.WRITTEN if finished else Outcome.STOPPED
                    write_outcome(self.arena, ref.slot, ref.generation, outcome)

    def _copy_in(self, ref: SlotRef, block: Block) -> Iterator[int]:
        header = Header.read(self.arena, ref.slot, ref.generation) if self._mine(ref) else None
        layout = Layout.of(block)
        if header is None or header.rows != block.n or header.capacity < layout.nbytes:
            raise DataPlaneWriteError(f"slot {ref.slot} is not reserved for this write any more", host=ref.host.id)
        out = self.arena.slice(self.arena.payload_at(ref.slot), layout.nbytes)
        for copied in pack(block, layout, out):
            yield copied
            if read_state(self.arena, ref.slot) != (State.WRITING, ref.generation):
                raise DataPlaneWriteError("this write was given up while it was under way", host=ref.host.id)

    def _mine(self, ref: SlotRef) -> bool:
        """Whether a slot is still this writer's: also where the put was given up, the word in the header is its own."""
        if not 0 <= ref.slot < self.arena.units or ref.host.epoch != self.arena.epoch:
            return False
        state, generation = read_state(self.arena, ref.slot)
        return generation == ref.generation and state in (State.WRITING, State.GIVEN_UP)


def _stale(ref: SlotRef) -> StaleSlotError:
    return StaleSlotError(f"slot {ref.slot} holds another generation", host=ref.host.id)


async def _in_turns(copies: Iterator[int]) -> None:
    """Copy, and let the loop run after each so many bytes."""
    done = 0
    for copied in copies:
        done += copied
        if done >= PIECE_BYTES:
            done = 0
            await asyncio.sleep(0)
