"""Look-up of the slots that hold samples."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncdp.calls.slots import Located, SlotRef
from asyncdp.errors import DataPlaneError, SampleNotFound, StaleSlotError
from asyncdp.meta import RowHandle

from ...joined import Joined
from ...wire.messages import MOST_PICKED
from ..encoding.cells import RowLocations, SlotName, hint_of, slot_name
from ..encoding.msgpack_codec import load, pack
from ..encoding.rows import CELLS
from .hosts import LIST_AGE_S, Hosts

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ..encoding.schema import Schema
    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["Locating"]

#: What is missing where nothing is.
_NONE_MISSING: Final[Mapping[int, DataPlaneError]] = MappingProxyType({})


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
        names = tuple(fields)
        if handles is not None and self._settings.read_by_meta:
            by_hints = await self._by_hints(partition_id, names, handles)
            if by_hints is not None:
                return by_hints
        (rids, stored, schema), first = await self._joined.ask(partition_id, sample_ids)
        missing: dict[int, DataPlaneError] = {}
        found: list[RowHandle | None] = []
        cells: list[tuple[int, bytes | None]] = []
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
                cells.append((at, load(stored[first + at])[CELLS] or None))
        locations = RowLocations(names, [schema.numbers.get(name, 0) for name in names])
        for at, absent in locations.add(cells).items():
            msg = f"field {absent!r} of sample {sample_ids[at]!r} is not produced"
            missing[at] = SampleNotFound(msg, partition_id=partition_id, sample_ids=(sample_ids[at],), field=absent)
        return Located(await self._refs_of(locations), missing or _NONE_MISSING, found, schema.specs_of(names))

    async def _by_hints(
        self, partition_id: str, names: tuple[str, ...], handles: Sequence[RowHandle | None]
    ) -> Located | None:
        """Find rows by what a claim or a put said of them, without a request; None where one has to be made.

        The slots say themselves whether they still hold these rows. If not, or where a host was not told of all rows
        that were removed, the rows are looked up without hints.
        """
        schema = self._schemas.get(partition_id)
        numbers = [0] if schema is None else [schema.numbers.get(name, 0) for name in names]
        if schema is None or 0 in numbers:
            return None
        hints = [handle and handle.hint for handle in handles]
        if None in hints:
            return None
        locations = RowLocations(names, numbers, hint_of(schema.version, b""))
        try:
            if locations.add(enumerate(hints)):
                return None
            names_of_slots = [slot_name(key) for key, _ in locations.spots]
            if not await self._are_told({(name.host, name.epoch) for name in names_of_slots}):
                return None
            refs = await self._refs_of(locations, math.inf)
        except (ValueError, TypeError, LookupError, AttributeError):  # nothing that was said of this schema
            return None
        return Located(refs, _NONE_MISSING, handles, schema.specs_of(names))

    async def _refs_of(self, locations: RowLocations, age_s: float = LIST_AGE_S) -> tuple[SlotRef, ...]:
        names: dict[bytes, SlotName] = {key: slot_name(key) for key, _ in locations.spots}
        if not names:
            return ()
        hosts = await self._host_refs([(name.host, name.epoch) for name in names.values()], age_s)
        return tuple(
            SlotRef(
                hosts[names[key].host, names[key].epoch],
                names[key].slot,
                names[key].generation,
                fields,
                _some(index, first),
                _some(rows, first),
            )
            for (key, fields), (index, rows) in locations.spots.items()
            for first in range(0, len(index), MOST_PICKED)
        )


def _some(numbers: Sequence[int], first: int) -> Sequence[int]:
    """Return at most ``MOST_PICKED`` of these numbers; a range, which the garbage collector does not count, of one."""
    return range(numbers[0], numbers[0] + 1) if len(numbers) == 1 else numbers[first : first + MOST_PICKED]
