"""Look-up of the slots that hold samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from asyncdp.calls.slots import Located, SlotRef
from asyncdp.errors import DataPlaneError, SampleNotFound, StaleSlotError
from asyncdp.meta import RowHandle

from ...joined import Joined
from ...wire.messages import MOST_PICKED
from ..encoding.cells import SlotName, pieces, slot_name
from ..encoding.msgpack_codec import load, pack
from ..encoding.rows import CELLS
from .hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..encoding.schema import Schema
    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["Locating"]

#: By slot key and fields to read: row indices in the slot, and positions in the request.
Spots = dict[tuple[bytes, tuple[str, ...]], tuple[list[int], list[int]]]


class Found(NamedTuple):
    """What the server found: per id its life and stored row, none where it is unknown; and the schema they refer to."""

    rids: Sequence[Any]
    rows: Sequence[Any]
    schema: Schema


class Locating(Hosts):
    """Sends the requests that look up samples by id; small ones of many callers together."""

    def __init__(self, link: DirectoryLink, settings: DirectorySettings) -> None:
        """Start with no requests."""
        super().__init__(link, settings)
        self._joined = Joined(self._look_up)

    async def _look_up(self, partition_id: str, sample_ids: Sequence[str]) -> Found:
        answer = await self._serve("locate", partition_id, lambda _: pack((tuple(sample_ids),)))
        rids, rows = load(answer.blob)
        if not len(rids) == len(rows) == len(sample_ids):
            msg = f"the directory answered for {len(rids)} of {len(sample_ids)} samples"
            raise DataPlaneError(msg, partition_id=partition_id)
        return Found(rids, rows, answer.schema)

    async def locate(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        handles: Sequence[RowHandle | None] | None = None,
    ) -> Located:
        """Find the slots of samples.

        Args:
            partition_id: Partition of the samples.
            sample_ids: Ids of the samples; an id may occur twice.
            fields: Fields to be read.
            handles: Per id the handle of the incarnation that is meant, or None for any; None: any, for all ids.

        Returns:
            Refs that cover all rows but the missing ones, and an error for each of those: SampleNotFound for an unknown
            id or a field that is not produced, StaleSlotError for another incarnation.

        Raises:
            DataPlaneBadRequest: The partition is unknown.
        """
        (rids, stored, schema), first = await self._joined.ask(partition_id, sample_ids)
        missing: dict[int, DataPlaneError] = {}
        found: list[RowHandle | None] = []
        spots: Spots = {}
        names = tuple(fields)
        numbers = [schema.numbers.get(name, 0) for name in names]
        for at, sample_id in enumerate(sample_ids):
            handle = None if handles is None else handles[at]
            rid = rids[first + at]
            there = int(rid) if rid else None
            if handle is not None and there != handle.incarnation:
                found.append(handle)
                what = "was cleared" if there is None else "was cleared and put anew"
                msg = f"sample {sample_id!r} of partition {partition_id!r} {what} since it was looked up"
                missing[at] = StaleSlotError(msg, partition_id=partition_id, sample_ids=(sample_id,))
            elif there is None:
                found.append(None)
                msg = f"no sample {sample_id!r} in partition {partition_id!r}"
                missing[at] = SampleNotFound(msg, partition_id=partition_id, sample_ids=(sample_id,))
            else:
                found.append(RowHandle(there))
                absent = _spot(at, load(stored[first + at])[CELLS] or None, names, numbers, spots)
                if absent is not None:
                    msg = f"field {absent!r} of sample {sample_id!r} is not produced"
                    missing[at] = SampleNotFound(msg, partition_id=partition_id, sample_ids=(sample_id,), field=absent)
        specs = {name: schema.fields[name] for name in fields if name in schema.fields}
        return Located(await self._refs_of(spots), missing, found, specs)

    async def _refs_of(self, spots: Spots) -> tuple[SlotRef, ...]:
        names: dict[bytes, SlotName] = {key: slot_name(key) for key, _ in spots}
        if not names:
            return ()
        hosts = await self._host_refs([(name.host, name.epoch) for name in names.values()])
        return tuple(
            SlotRef(
                hosts[names[key].host, names[key].epoch],
                names[key].slot,
                names[key].generation,
                fields,
                index[first : first + MOST_PICKED],
                rows[first : first + MOST_PICKED],
            )
            for (key, fields), (index, rows) in spots.items()
            for first in range(0, len(index), MOST_PICKED)
        )


def _spot(at: int, blob: bytes | None, names: tuple[str, ...], numbers: Sequence[int], spots: Spots) -> str | None:
    """Add the places of one row's fields to ``spots``; return the first field that is not produced, or None."""
    if not names:
        return None
    mine = pieces(blob)
    if len(mine) == 1 and set(numbers).issubset(mine[0][2]):
        by_piece = {0: names}
    else:
        where = {field: at for at, piece in enumerate(mine) for field in piece[2]}
        absent = next((name for name, number in zip(names, numbers, strict=True) if number not in where), None)
        if absent is not None:
            return absent
        found: dict[int, list[str]] = {}
        for name, number in zip(names, numbers, strict=True):
            found.setdefault(where[number], []).append(name)
        by_piece = {number: tuple(chosen) for number, chosen in found.items()}
    for number, chosen in by_piece.items():
        spot = spots.setdefault((mine[number][0], chosen), ([], []))
        spot[0].append(mine[number][1])
        spot[1].append(at)
    return None
