"""Arena recovery: a restarted host adopts the slots that its killed previous incarnation left in the arena."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import structlog

from ..slots.arena import PAGE, WORDS
from ..slots.header import (
    Header,
    Outcome,
    State,
    read_outcome,
    read_state,
    revoke,
    write_dead,
    write_state,
)
from ..slots.slot import Slot, live_at

if TYPE_CHECKING:
    from ..slots.arena import Arena
    from ..slots.table import SlotTable

__all__ = ["recover_slots"]


def recover_slots(table: SlotTable) -> dict[str, int]:
    """Restore the slots of an adopted arena into its table; to be called once, before anything is reserved.

    READY slots are kept. WRITING slots are kept while their lane writer runs, become READY where it has finished, and
    are freed where it is dead or where the previous host process was receiving. A slot whose header is damaged or
    overlaps another is freed.

    Returns:
        The number of slots that were ``kept``, ``freed`` and ``damaged``.
    """
    arena = table.arena
    used = np.frombuffer(arena.words, np.uint64).reshape(arena.units, WORDS)[:, 0] & np.uint64(0xFF)
    counts = {"kept": 0, "freed": 0, "damaged": 0}
    for number in np.flatnonzero(used).tolist():
        state, generation = read_state(arena, number)
        header = Header.read(arena, number, generation)
        if header is None or not _fits(arena, number, header) or state is State.FREE:
            outcome = "damaged"
        elif state is not State.READY and not _still_written(arena, number, generation, header):
            outcome = "freed"
        else:
            slot = Slot(number, generation, header)
            outcome = "kept" if table.restore(slot) else "damaged"
            if outcome == "kept":
                # A host that was killed while it marked rows as dead may not have updated their count yet.
                live = slot.live(arena)
                write_dead(arena, number, live.size - int(np.count_nonzero(live)))
                table.apply_outcome(slot)
                if table.find(number, generation) is not None and not slot.live(arena).any():
                    table.drop(number, generation, ())
        if outcome != "kept":
            write_state(arena, number, State.FREE, generation)
        counts[outcome] += 1
    structlog.get_logger("asyncdp.ucxx").info("adopted an arena", host=arena.host_id, epoch=arena.epoch, **counts)
    return counts


def _fits(arena: Arena, number: int, header: Header) -> bool:
    """Return whether a slot's payload and live bytes lie within its extent, and that within the arena."""
    end = live_at(arena, number, header.capacity) + header.rows * header.cols
    own_end = arena.data_at + (number + header.units) * arena.unit_bytes
    return header.units > 0 and end <= own_end <= arena.nbytes and header.capacity <= arena.nbytes - PAGE


def _still_written(arena: Arena, number: int, generation: int, header: Header) -> bool:
    """Return whether a slot that is not READY has a lane writer that has finished or still runs."""
    if header.writer is None:
        return False
    if revoke(arena, number, generation):  # a lease that was not begun, perhaps taken back when the host was killed
        return False
    return header.writer.is_alive() or read_outcome(arena, number, generation) is Outcome.WRITTEN
