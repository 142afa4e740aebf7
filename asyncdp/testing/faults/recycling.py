"""Recycles slots between the look-up and the read, on transports whose slots are in this process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.calls.slots import Publish

from .damage import flip_bit

if TYPE_CHECKING:
    from asyncdp.calls import CallContext
    from asyncdp.calls.slots import SlotRef
    from asyncdp.rows.block import Block

__all__ = ["Recycled", "recycle"]


class Recycled:
    """A slot that holds other payload until :meth:`leave` frees it."""

    def __init__(self, host: Any, ref: SlotRef, op_id: str) -> None:
        """Store the slot and the op_id that reserved it."""
        self._host, self._ref, self._op_id = host, ref, op_id

    def leave(self) -> None:
        """Free the slot."""
        slot = self._host.slot(self._ref)
        if slot is not None and slot.op_id == self._op_id:
            slot.live.clear()
            slot.readers.clear()
            self._host._free(slot)  # noqa: SLF001 - no call frees it


def _holders(plane: Any, slot: Any) -> list[tuple[Any, list[Any]]]:
    """Return the (partition, samples) whose content is in a slot."""
    found = []
    for part in plane.partitions.values():
        rows = [
            row
            for row in part.rows.values()
            if any(c.place.slot is slot and c.place.generation == slot.generation for c in row.cells.values())
        ]
        if rows:
            found.append((part, rows))
    return found


def recycle(transport: Any, ref: SlotRef, how: str, ctx: CallContext) -> list[Recycled]:
    """Remove the samples of a slot and write other payload into it, under the slot's next generation.

    Args:
        transport: A MemoryTransport.
        ref: The slot as the reader located it; nothing happens if the slot has been reused since.
        how: See :meth:`~asyncdp.testing.faults.plan.FaultPlan.recycle`.
        ctx: Context of the read.
    """
    plane = transport.plane
    with plane.lock:
        host = plane.hosts[ref.host.id]
        slot = host.slot(ref)
        if slot is None or slot.block is None:
            return []
        content: Block = slot.block.take(range(slot.size))
        for part, rows in _holders(plane, slot):
            ids = [row.id for row in rows]
            held = [
                (row, [name for name, c in row.cells.items() if c.place.slot is slot], dict(row.tags), row.owner)
                for row in rows
            ]
            indexes = {row.id: next(c.index for c in row.cells.values() if c.place.slot is slot) for row in rows}
            if how != "moved":
                plane.remove(part.id, ids, "", None)
            if how != "cleared":
                for row, names, tags, owner in held:
                    block = content.take([indexes[row.id]], names)
                    moved = _store(plane, host, block, f"{ctx.op_id}-{row.id}-again", ctx)
                    nbytes = {name: tuple(column.row_nbytes().tolist()) for name, column in block.columns.items()}
                    plane.publish(Publish((row.id,), part.id, moved, (tags,), block.observed(), nbytes), owner)
        if slot.state.value != "free" or slot not in host.free:
            return []
        host.free.remove(slot)
        host.free.appendleft(slot)
        flip_bit(content, range(content.n), 0.0)
        op_id = f"{ctx.op_id}-recycled"
        (ref_now,) = _store(plane, host, content, op_id, ctx)
        host.commit(ref_now)
        return [Recycled(host, ref_now, op_id)]


def _store(plane: Any, host: Any, block: Block, op_id: str, ctx: CallContext) -> tuple[SlotRef, ...]:
    """Write a block into a new slot."""
    now = plane.clock.time()
    per_slot, host.rows_per_slot = host.rows_per_slot, None
    try:
        refs: tuple[SlotRef, ...] = host.reserve(op_id, tuple(block.columns), block.n, 0, now + 60.0, now)
    finally:
        host.rows_per_slot = per_slot
    del ctx
    host.write(op_id, refs, block)
    return refs
