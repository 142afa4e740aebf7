"""Look-up of the slots that hold samples."""

from __future__ import annotations

from contextlib import asynccontextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from asyncdp.calls.slots import Located, SlotRef
from asyncdp.errors import DataPlaneError, SampleNotFound, StaleSlotError
from asyncdp.meta import RowHandle

from ...joined import SMALL, Joined
from ...wire.messages import MOST_PICKED
from ..encoding.cells import RowLocations, SlotName, slot_name
from ..encoding.msgpack_codec import load, pack
from ..encoding.rows import CELLS
from .base import OK
from .hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from anyio import Semaphore

    from asyncdp.calls.slots import HostRef

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

    def noted(
        self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str], handles: Sequence[RowHandle | None]
    ) -> tuple[Located, bytes] | None:
        """Return where rows lay when they were claimed or put, by the hints of their handles, and when that was.

        None where it is not known of all rows, or they are so few that :meth:`locate` joins the request with others.
        :meth:`unmoved` tells whether they lie there still.
        """
        schema, names = self._schemas.get(partition_id), tuple(fields)
        if schema is None or len(sample_ids) <= SMALL:
            return None
        try:
            ids, marks, cells = zip(*[handle.hint for handle in handles], strict=True)  # type: ignore[union-attr]
            mark: bytes = marks[0]
            if len(set(marks)) > 1 or ids != tuple(sample_ids) or not mark.startswith(schema.version + b" "):
                return None
            locations = RowLocations(names, [schema.numbers[name] for name in names])
            if locations.add(enumerate(cells)):
                return None
            slots = _slots(locations)
        except (ValueError, TypeError, LookupError, AttributeError):  # there are no hints, or none of this schema
            return None
        hosts = {(slot.host, slot.epoch): self.host_ref(slot.host, slot.epoch) for slot in slots}
        return Located(_refs(locations, slots, hosts), _NONE_MISSING, handles, schema.specs_of(names)), mark

    @property
    def at_once(self) -> Semaphore:
        """Places of calls that ask :meth:`unmoved` while they read."""
        return self._link.at_once

    @asynccontextmanager
    async def unmoved(self, partition_id: str, mark: bytes) -> AsyncIterator[Callable[[], Awaitable[bool]]]:
        """Ask whether all rows of a partition, and all their fields, lie where they lay at ``mark``.

        The answer is awaited within the context, once, after other work that it may overlap with.
        """
        await self._open()
        version, moved = mark.split(b" ")
        command = self._link.call_of("unmoved", self._key(partition_id), "", 0, version, moved)
        async with self._link.asked([command]) as replies:

            async def answer() -> bool:
                (reply,) = await replies()
                return not isinstance(reply, Exception) and reply == [OK, b"1"]

            yield answer

    async def _refs_of(self, locations: RowLocations) -> tuple[SlotRef, ...]:
        slots = _slots(locations)
        return _refs(locations, slots, await self._host_refs([(one.host, one.epoch) for one in slots])) if slots else ()


def _slots(locations: RowLocations) -> list[SlotName]:
    """Return the slots of locations, in their order; those of one slot with different fields each have it."""
    return [slot_name(key) for key, _ in locations.spots]


def _refs(
    locations: RowLocations, slots: Sequence[SlotName], hosts: Mapping[tuple[str, int], HostRef]
) -> tuple[SlotRef, ...]:
    return tuple(
        SlotRef(hosts[one.host, one.epoch], one.slot, one.generation, fields, _some(index, first), _some(rows, first))
        for one, ((_, fields), (index, rows)) in zip(slots, locations.spots.items(), strict=True)
        for first in range(0, len(index), MOST_PICKED)
    )


def _some(numbers: Sequence[int], first: int) -> Sequence[int]:
    """Return at most ``MOST_PICKED`` of these numbers; a range, which the garbage collector does not count, of one."""
    return range(numbers[0], numbers[0] + 1) if len(numbers) == 1 else numbers[first : first + MOST_PICKED]
