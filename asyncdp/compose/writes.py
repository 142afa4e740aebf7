"""Composes PutSamples of slot calls: place, reserve, write, publish."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from asyncdp.calls.answers import written
from asyncdp.calls.slots import Abort, HostRef, Place, Publish, Reserve, Send, SlotRef, WriteSlots
from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
)
from asyncdp.rows.block import Block, FieldSpec, field_names, raw_leaf
from asyncdp.rows.device_memory import on_host

from .invalidations import invalidate
from .outcomes import PendingOutcome, clean_up_context

if TYPE_CHECKING:
    from asyncdp.calls import CallContext, PutSamples
    from asyncdp.calls.slots import Placement
    from asyncdp.meta import KVBatchMeta

__all__ = ["write_rows"]


class _Stored(NamedTuple):
    """The slots that were written and have to be published."""

    refs: tuple[SlotRef, ...]
    specs: Mapping[str, FieldSpec]
    nbytes: Mapping[str, tuple[int, ...]]


async def write_rows(send: Send, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
    """Serve PutSamples: place, reserve, write, publish. Nothing is visible before publish, which is atomic.

    If a host fails or is full, a spare one is used. The slots that a failed put reserved are freed at once, those of a
    cancelled one before the client's next mutation.
    """
    names = field_names(call.fields)
    reserved: list[PendingOutcome] = []
    try:
        stored = await _store(send, call, names, reserved, ctx) if names else _Stored((), {}, {})
    except BaseException as err:
        # Not recorded earlier, since another mutation of this client would have freed the slots of a put in flight.
        for outcome in reserved:
            ctx.env.pending_outcomes.record(outcome)
        if isinstance(err, DataPlaneError):
            err.ambiguous = False  # nothing is visible before publish
            await _give_back(send, reserved, ctx)
        raise
    try:
        publish = Publish(
            call.sample_ids,
            call.partition_id,
            stored.refs,
            call.tags,
            stored.specs,
            stored.nbytes,
            only=call.only,
            lives=call.lives,
            skip_stale=call.skip_stale,
        )
        done = await send(publish, ctx)
    except DataPlaneError as err:
        if not err.ambiguous:  # else the outcome is open, and the one recorded for the Publish includes the slots
            for outcome in reserved:
                ctx.env.pending_outcomes.record(outcome)
            await _give_back(send, reserved, ctx)
        raise
    used = {ref.host.id for ref in stored.refs}
    for outcome in reserved:  # hosts that were skipped, and could not be told to free what they had reserved
        if isinstance(outcome.call, Abort) and outcome.call.host.id not in used:
            ctx.env.pending_outcomes.record(outcome)
    if len(ctx.env.pending_outcomes):
        await invalidate(send, call, ctx)
    return written(call, names, done)


async def _store(
    send: Send, call: PutSamples, names: tuple[str, ...], reserved: list[PendingOutcome], ctx: CallContext
) -> _Stored:
    """Place the rows and write them into reserved slots; append an Abort for each host used to ``reserved``."""
    n = len(call.sample_ids)
    placed, block = await _place(send, call, names, ctx)
    by_field = {name: column.row_nbytes() for name, column in block.columns.items()}
    sizes = tuple(sum(by_field.values(), np.zeros(n, np.int64)).tolist())
    refs: list[SlotRef] = []
    first = 0
    for host, count in placed.shares:
        part = block if count == n else block.take(range(first, first + count))
        share = (first, sizes[first : first + count])
        refs += await _write_share(send, (host, *placed.spare), names, part, share, reserved, ctx)
        first += count
    nbytes = {name: tuple(sizes_.tolist()) for name, sizes_ in by_field.items()}
    return _Stored(tuple(refs), block.observed(), nbytes)


async def _place(send: Send, call: PutSamples, names: tuple[str, ...], ctx: CallContext) -> tuple[Placement, Block]:
    """Return the hosts of a put, and its rows as a block."""
    n, fields = len(call.sample_ids), call.fields
    assert fields is not None  # noqa: S101 - there are names
    by_specs = not all(isinstance(raw_leaf(fields, name), torch.Tensor) for name in names)
    place = Place(call.sample_ids, call.partition_id, names, call.only, by_specs)
    placed = await send(place, ctx)
    leaves = await on_host(fields, ctx.env)
    try:
        return placed, Block.from_fields(leaves, n, placed.specs, ctx.env.codec)
    except DataPlaneBadRequest:
        if placed.current:
            raise
    # The partition may have other specs by now.
    placed = await send(replace(place, by_specs=True), ctx)
    return placed, Block.from_fields(leaves, n, placed.specs, ctx.env.codec)


async def _write_share(
    send: Send,
    hosts: Sequence[HostRef],
    names: tuple[str, ...],
    block: Block,
    share: tuple[int, tuple[int, ...]],
    reserved: list[PendingOutcome],
    ctx: CallContext,
) -> tuple[SlotRef, ...]:
    """Reserve and write the rows of one share on the first host that accepts them; wait for the last one only."""
    problem: DataPlaneError | None = None
    for host in hosts:
        # Appended before anything is sent, so that a cancel at any await leaks no slot.
        outcome = PendingOutcome(Abort(host, ctx.op_id), ctx.op_id)
        reserved.append(outcome)
        try:
            refs = await _write_at(send, host, names, block, share, ctx, spare=host is not hosts[-1])
        except DataPlaneError as err:
            if isinstance(err, DataPlaneBadRequest) or not err.retryable or ctx.remaining() <= 0:
                raise
            # Errors of other hosts are more informative than a host being full.
            if problem is None or isinstance(problem, DataPlaneNotReady):
                problem = err
            ctx.emit("host_skipped", host=host.id, reason=type(err).__name__)
            if await _give_back(send, [outcome], ctx):
                reserved.remove(outcome)
            continue
        return refs
    if problem is None:
        msg = "no slot host accepts rows"
        raise DataPlaneNotReady(msg)
    raise problem


async def _write_at(
    send: Send,
    host: HostRef,
    names: tuple[str, ...],
    block: Block,
    share: tuple[int, tuple[int, ...]],
    ctx: CallContext,
    *,
    spare: bool,
) -> tuple[SlotRef, ...]:
    """Reserve and write the rows of one share on a host; ``spare`` says whether another host can take them."""
    first_row, sizes = share
    reserve = Reserve(host, names, sizes, first_row, spare=spare)
    refs = await send(reserve, ctx)
    try:
        await send(WriteSlots(host, refs, block, spare=spare), ctx)
    except (DataPlaneUnavailable, DataPlaneTimeout) as err:
        if not (err.may_reserve_again and err.retryable and ctx.remaining() > 0):
            raise
        # The host may have restarted in between and lost the reservation, so space is reserved again.
        refs = await send(reserve, ctx)
        await send(WriteSlots(host, refs, block), ctx)
    return refs


async def _give_back(send: Send, unresolved: Sequence[PendingOutcome], ctx: CallContext) -> bool:
    """Resolve the outcomes as far as time and the backend allow; return whether all are. The others stay recorded."""
    done = 0
    for outcome in unresolved:
        within = clean_up_context(ctx)
        if within is None:
            break
        try:
            await send(outcome.call, within)
        except DataPlaneError:
            continue
        ctx.env.pending_outcomes.resolved(outcome)
        done += 1
    return done == len(unresolved)
