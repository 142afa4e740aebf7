"""Broken slot hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from asyncdp import DataPlaneError, StaleSlotError
from asyncdp.transports.memory.host import Host, ReadAttempt, Slot, State

if TYPE_CHECKING:
    from asyncdp.calls.slots import SlotRef
    from asyncdp.rows.block import Block


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
