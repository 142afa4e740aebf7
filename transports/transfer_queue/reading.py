"""The part of the transport that reads rows from the storage units."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import anyio.to_thread
import torch

from asyncdp.calls import CallContext, handles
from asyncdp.calls import slots as s
from asyncdp.calls.answers import refusal
from asyncdp.errors import DataPlaneError, DataPlaneReadError, StaleSlotError
from asyncdp.meta import RowHandle

from .checksums import MARK, beside, check
from .lifecycle import POOLED_BYTES, Lifecycle
from .rows import Keys, Target, decode, spec_from_wire

if TYPE_CHECKING:
    from .connection.link import Link

__all__ = ["Reading", "maybe_in_a_thread", "nbytes_of"]

#: Minimum size in bytes from which copies and checksums are made in a thread.
BIG_BYTES = 16 << 20
#: Seconds after which idle memory of large reads is returned to the system.
IDLE_S = 10.0
#: Minimum size in bytes per unit from which rows are decoded directly into the buffer of the whole read.
DIRECT_BYTES = 256 << 10

R = TypeVar("R")


class Reading(Lifecycle):
    """Reads rows, with one request for the rows of a storage unit."""

    def _allocate(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return uninitialised memory, ``size`` bytes as one row of ``dtype``; large ones come from the pool."""
        if size < POOLED_BYTES:
            return torch.empty(size // dtype.itemsize, dtype=dtype)
        return torch.from_numpy(self._pool.empty(size)).view(dtype)

    @handles(s.Locate)
    async def _locate(self, call: s.Locate, ctx: CallContext) -> s.Located:
        meant = None if call.handles is None else [None if h is None else h.incarnation for h in call.handles]
        args = (call.partition_id, call.sample_ids, call.fields, meant)
        groups, missing, found, specs, layouts, version = await self._ask("locate", args, ctx, call.partition_id)
        link = await self._connection.link(ctx.deadline)
        epoch = int((link.epoch or "0")[:15], 16)
        for layout, forms in layouts.items():
            self._forms.setdefault((epoch, layout), dict(forms))
        ports = {unit.id: (unit.ports["put_get_socket"],) for unit in link.endpoints.units}
        hosts = {unit: s.HostRef(unit, epoch, ports.get(unit, (0,))) for unit in {group[0] for group in groups}}
        target = Target(len(call.sample_ids), self._allocate) if len(groups) > 1 else None
        if self._suspects:
            groups = [one for group in groups for one in self._apart(group)]
        refs = [
            s.SlotRef(hosts[unit], layout, version, fields, keys if target is None else Keys(keys, target), rows)
            for unit, layout, fields, keys, rows in groups
        ]
        errors: dict[int, DataPlaneError] = {
            at: refusal(kind, message, partition_id=call.partition_id, **info)
            for at, (kind, message, info) in missing.items()
        }
        handles_ = [None if incarnation is None else RowHandle(incarnation) for incarnation in found]
        known = {name: spec_from_wire(spec) for name, spec in specs.items()}
        return s.Located(tuple(refs), errors, handles_, known)

    def _apart(self, group: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Split a group into single rows if a checksum of it did not match, so that only the damaged row fails."""
        unit, layout, fields, keys, rows = group
        if self._suspects.isdisjoint(keys):
            return [group]
        self._suspects.difference_update(keys)
        return [(unit, layout, fields, [key], (row,)) for key, row in zip(keys, rows, strict=True)]

    @handles(s.ReadSlots)
    async def _read(self, call: s.ReadSlots, ctx: CallContext) -> s.ReadResult:
        """Read rows of one unit, with one request per set of fields and per set of fields with checksums."""
        link = await self._connection.link(ctx.deadline)
        by_fields: dict[tuple[tuple[str, ...], ...], list[int]] = {}
        for at, ref in enumerate(call.refs):
            by_fields.setdefault((ref.fields, self._summed(ref)), []).append(at)
        parts: list[s.Part] = []
        errors: dict[int, DataPlaneError] = {}
        for ats in by_fields.values():
            try:
                parts += await self._read_group(link, call, ats, errors, ctx)
            except StaleSlotError as err:
                if link.endpoints.mooncake is not None:  # single rows may be lost there: find out which
                    self._suspects.update(
                        key for at in ats for key in call.refs[at].index if len(call.refs[at].index) > 1
                    )
                if len(ats) == 1:
                    errors[ats[0]] = err
                    continue
                for at in ats:  # one of the refs is stale: read each alone to find out which
                    try:
                        parts += await self._read_group(link, call, [at], errors, ctx)
                    except StaleSlotError as stale:
                        errors[at] = stale
        return s.ReadResult(tuple(parts), errors)

    def _summed(self, ref: s.SlotRef) -> tuple[str, ...]:
        """Return the fields of a ref that have checksums."""
        forms = self._forms.get((ref.host.epoch, ref.slot), {})
        return tuple(name for name in ref.fields if MARK in forms.get(name, ()))

    async def _read_group(
        self, link: Link, call: s.ReadSlots, ats: Sequence[int], errors: dict[int, DataPlaneError], ctx: CallContext
    ) -> list[s.Part]:
        refs = [call.refs[at] for at in ats]
        unit = call.host.id
        keys = [key for ref in refs for key in ref.index]
        heartbeat = link.unit(unit)
        summed = self._summed(refs[0])
        asked = [*refs[0].fields, *map(beside, summed)]
        values = await heartbeat.guard(lambda: link.client.get(unit, keys, asked), ctx.deadline, host=unit)
        parts, first = [], 0
        for at, ref in zip(ats, refs, strict=True):
            count = len(ref.index)
            forms = self._forms.get((call.host.epoch, ref.slot))
            if forms is None:
                errors[at] = StaleSlotError("the reference was made before the plane was started again", host=unit)
                continue
            rows = values if count == len(keys) else {f: values[f][first : first + count] for f in asked}
            first += count
            wanted = {name: forms[name] for name in ref.fields}
            target = ref.index.target if isinstance(ref.index, Keys) else None
            try:
                size = nbytes_of(rows)
                if size < DIRECT_BYTES:
                    target = None
                if summed:
                    await maybe_in_a_thread(size, check, rows, ref.index, summed)
                if size >= POOLED_BYTES:
                    self._pool.trim_in(link.loop, IDLE_S)
                args = (rows, wanted, count, self._allocate, target, ref.rows)
                block = await maybe_in_a_thread(size, decode, *args)
            except DataPlaneReadError as err:
                if summed and count > 1:
                    self._suspects.update(ref.index)
                err.host = unit
                errors[at] = err
                continue
            parts.append(s.Part((at,), block, (block.nbytes,), block.schema_hash()))
        return parts


async def maybe_in_a_thread(size: int, work: Callable[..., R], *args: Any) -> R:
    """Run work on ``size`` bytes; from ``BIG_BYTES`` on in a thread, where it does not block the event loop."""
    return await anyio.to_thread.run_sync(work, *args) if size >= BIG_BYTES else work(*args)


def nbytes_of(values: Mapping[str, Sequence[Any]]) -> int:
    """Return the size of encoded values in bytes."""
    total = 0
    for column in values.values():
        if column:
            one = column[0]
            total += len(column) * (one.nbytes if isinstance(one, torch.Tensor) else len(one))
    return total
