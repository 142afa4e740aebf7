"""Broken slot hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from asyncdp import DataPlaneError, DataPlaneNotReady, StaleSlotError
from asyncdp.rows.block import Block, Dense
from asyncdp.transports.memory.host import Host, ReadAttempt, Slot, State

if TYPE_CHECKING:
    from asyncdp.calls.slots import SlotRef


class NoGeneration(Host):
    """The generation of a slot is not checked."""

    def slot(self, ref: SlotRef) -> Slot | None:
        """Find the slot, not its use."""
        if ref.host.epoch != self.ref.epoch or ref.slot >= len(self.slots):
            return None
        slot = self.slots[ref.slot]
        return slot if slot.state is not State.FREE else None

    def begin_read(self, ref: SlotRef) -> ReadAttempt | DataPlaneError:
        """Read whatever it is."""
        slot = self.slot(ref)
        return super().begin_read(ref if slot is None else replace(ref, generation=slot.generation))


class NoEpoch(Host):
    """The epoch of a host is not checked."""

    def slot(self, ref: SlotRef) -> Slot | None:
        """Find the slot in this life."""
        found = self.slots[ref.slot] if ref.slot < len(self.slots) else None
        return found if found is not None and found.state is not State.FREE else None


class BusyIsStale(Host):
    """A slot that somebody else reads is reported as stale."""

    def begin_read(self, ref: SlotRef) -> ReadAttempt | DataPlaneError:
        """Refuse a second reader."""
        slot = self.slot(ref)
        if slot is not None and slot.readers:
            return StaleSlotError("busy")
        return super().begin_read(ref)


class ReclaimsByTime(Host):
    """A WRITING slot is taken back by time, while its writer copies into it as a lane writer does: unasked."""

    def sweep(self, now: float) -> None:
        """Take back what is older than a moment."""
        for refs in list(self.reserved.values()):
            for ref in refs:
                slot = self.slots[ref.slot]
                if slot.state is State.WRITING and slot.generation == ref.generation and slot not in self.free:
                    born = self.__dict__.setdefault("born", {}).setdefault((ref.slot, ref.generation), now)
                    if now - born > 0.01:
                        self.free.append(slot)

    def write(self, op_id: str, refs: Sequence[SlotRef], block: Block) -> None:
        """Copy into the memory that the reference names."""
        first = 0
        for ref in refs:
            self.slots[ref.slot].block = block.take(range(first, first + len(ref.rows)))
            self.slots[ref.slot].schemas.clear()
            first += len(ref.rows)


def _cast(column: Any) -> Any:
    is_small = isinstance(column, Dense) and column.values.dtype == torch.bfloat16
    return Dense(column.values.float()) if is_small else column


def _squeeze(column: Any) -> Any:
    is_wide = isinstance(column, Dense) and column.values.ndim == 2 and column.values.shape[1] == 1
    return Dense(column.values[:, 0]) if is_wide else column


def _reverse(column: Any) -> Any:
    return column.take(range(len(column))[::-1]) if len(column) > 1 else column


class _Rewriting(Host):
    """Changes columns when they are written."""

    change: Callable[[Any], Any]

    def write(self, op_id: str, refs: Sequence[SlotRef], block: Block) -> None:
        """Write something else."""
        columns = {name: type(self).change(column) for name, column in block.columns.items()}
        super().write(op_id, refs, Block(block.n, columns, block.specs, block.codec))


class Casts(_Rewriting):
    """Bfloat16 is stored as float32."""

    change = staticmethod(_cast)


class Squeezes(_Rewriting):
    """A column of width one is stored without its width."""

    change = staticmethod(_squeeze)


class Reverses(_Rewriting):
    """Rows are stored in the reverse order."""

    change = staticmethod(_reverse)


class SharesMemory(Host):
    """Hands out the stored tensor itself."""

    def payload(self, attempt: Any, ref: SlotRef) -> Any:
        """Return the block as it lies."""
        got = super().payload(attempt, ref)
        stored = attempt.slot.block
        if isinstance(got, tuple) and len(ref.index) == stored.n:
            return Block(stored.n, {name: stored.columns[name] for name in ref.fields}, stored.specs), got[1]
        return got


class IgnoresGenerations(Host):
    """Serves whatever lies in a slot."""

    def begin_read(self, ref: SlotRef) -> Any:
        """Do not look at the generation."""
        return super().begin_read(replace(ref, generation=self.slots[ref.slot].generation))

    def kill(self, cell: Any) -> None:
        """Free the slot, but keep what lies in it."""
        slot = cell.slot
        kept = slot.block, slot.state, set(slot.live)
        super().kill(cell)
        if slot.block is None:
            slot.block, slot.state, slot.live = kept


class LeavesSlots(Host):
    """Frees nothing that was reserved in vain."""

    def abort(self, op_id: str, now: float) -> None:
        """Do nothing."""


class FreesUnderReaders(Host):
    """Frees a slot whose rows died although somebody reads it."""

    def kill(self, cell: Any) -> None:
        """End the life of a row."""
        super().kill(cell)
        slot = cell.place.slot
        if slot.readers and not slot.live:
            self._free(slot)


class BelievesLateFinishes(Host):
    """Lets a late finish end somebody else's reading."""

    def finish_read(self, attempt: ReadAttempt) -> bool:
        """End the reading of whatever is in the slot."""
        attempt.slot.readers.clear()
        return True


class OneReaderBlocksAll(Host):
    """Has no room for writers while any slot is being read."""

    def reserve(self, *args: Any, **kwargs: Any) -> Sequence[SlotRef]:  # type: ignore[override]
        """Refuse while somebody reads."""
        if any(slot.readers for slot in self.slots):
            msg = "busy"
            raise DataPlaneNotReady(msg)
        return super().reserve(*args, **kwargs)
