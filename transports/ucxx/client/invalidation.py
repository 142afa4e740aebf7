"""Makes calls to slot hosts of the rows that the directory reports as dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.calls.slots import Invalidate, SlotRef

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..directory import DeadCells, Directory

__all__ = ["invalidations"]


def invalidations(cells: Sequence[DeadCells], directory: Directory) -> list[Invalidate]:
    """Return one call for each host that holds dead rows."""
    by_host: dict[tuple[str, int], list[DeadCells]] = {}
    for cell in cells:
        by_host.setdefault((cell.slot.host, cell.slot.epoch), []).append(cell)
    calls = []
    for name, dead in by_host.items():
        host = directory.host_ref(*name)
        refs = [SlotRef(host, cell.slot.slot, cell.slot.generation, cell.fields or (), cell.index, ()) for cell in dead]
        calls.append(Invalidate(host, tuple(refs)))
    return calls
