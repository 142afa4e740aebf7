"""Waiting: look for a batch, or for a partition, until it is there or time is up."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncdp.calls.slots import ClaimTry, Send, TryClaim, TryPartition
from asyncdp.errors import ClaimNotReady, DataPlaneError, DataPlaneTimeout

if TYPE_CHECKING:
    from asyncdp.calls import CallContext, ClaimMeta, WaitPartition
    from asyncdp.meta import KVBatchMeta

__all__ = ["claim_until", "partition_until"]


def _margin(timeout_s: float) -> float:
    """How long before the deadline the last look ends: its answer must be here in time, on a busy machine too."""
    return min(0.1 * timeout_s, 0.15)


async def claim_until(send: Send, call: ClaimMeta, ctx: CallContext) -> KVBatchMeta:
    """Serve ClaimMeta: look until a batch is ready or time is up.

    All looks of one claim share its op_id, which is the claim id: a look whose answer was lost gets the same batch when
    it is asked again. Faults that the layers below gave up on do not end a blocking claim before its time. Without time
    (``timeout_s=0``) it looks once.

    Raises:
        ClaimNotReady: Too few samples by the deadline, nothing was claimed.
        DataPlaneError: The last look was not answered, with its error.
    """
    need = call.batch_size if call.min_batch_size is None else call.min_batch_size
    look = TryClaim(
        call.partition_id,
        call.task_name,
        call.required_fields,
        call.batch_size,
        need if call.blocking else 1,
        dp_rank=call.dp_rank,
    )
    if not call.blocking:
        return (await send(look, ctx)).meta
    with ctx.env.pending_outcomes.under_way(ctx.op_id):
        return await _look_until(send, look, call, need, ctx)


async def _look_until(send: Send, look: TryClaim, call: ClaimMeta, need: int, ctx: CallContext) -> KVBatchMeta:
    """Look again and again until there is a batch, or no time for another look."""
    env = ctx.env
    margin = _margin(max(0.0, ctx.remaining()))
    unsure = False  # some look since the last answer may have claimed
    while True:
        began = env.clock.now()
        left = max(0.0, ctx.deadline - margin - began)
        wait = 0.0 if ctx.looks_once else min(env.long_poll_s, left)
        problem: DataPlaneError | None = None
        seen: ClaimTry | None = None
        try:
            seen = await send(replace(look, wait_s=wait, explain=ctx.looks_once or wait >= left), ctx)
            unsure = False
        except DataPlaneError as err:
            unsure = err.ambiguous = err.ambiguous or unsure
            if not err.retryable:
                raise
            problem = err
        if seen is not None and seen.meta.size:
            return seen.meta
        ended = env.clock.now()
        if ended < ctx.deadline - margin and not ctx.looks_once:
            if problem is not None or ended - began < wait:
                await ctx.pause(min(env.claim_poll_s, ctx.deadline - margin - ended))
            if ctx.remaining() > 0:  # else overslept: a look without time would only hide what the last one said
                continue
        if problem is not None:
            raise problem
        assert seen is not None  # noqa: S101 - there is a problem or an answer
        raise _not_ready(call, need, seen)


def _not_ready(call: ClaimMeta, need: int, seen: ClaimTry) -> ClaimNotReady:
    waits = "" if seen.oldest_wait_s is None else f"; the oldest has been waiting for {seen.oldest_wait_s:.3g} s"
    msg = (
        f"task {call.task_name!r} needs {need} samples with fields {list(call.required_fields)}: "
        f"{seen.ready} ready; waiting: {', '.join(map(repr, seen.waiting_ids[:4])) or 'none'}"
        f"{' and others' if len(seen.waiting_ids) > 4 else ''}{waits}"  # noqa: PLR2004 - enough to look at
    )
    if seen.missing_fields:
        lacking = ", ".join(f"{name!r} in {count}" for name, count in seen.missing_fields.items())
        msg += f"; fields missing in those that wait: {lacking}"
    return ClaimNotReady(
        msg,
        required_fields=call.required_fields,
        ready=seen.ready,
        requested=need,
        oldest_wait_s=seen.oldest_wait_s,
        waiting_ids=seen.waiting_ids,
        missing_fields=seen.missing_fields,
    )


async def partition_until(send: Send, call: WaitPartition, ctx: CallContext) -> None:
    """Serve WaitPartition: look until the partition is there or time is up.

    Raises:
        DataPlaneTimeout: Nobody registered it in time.
    """
    env = ctx.env
    margin = _margin(max(0.0, ctx.remaining()))
    while True:
        began = env.clock.now()
        wait = 0.0 if ctx.looks_once else min(env.long_poll_s, max(0.0, ctx.deadline - margin - began))
        problem: DataPlaneError | None = None
        try:
            if await send(TryPartition(call.partition_id, wait), ctx):
                return
        except DataPlaneError as err:
            if not err.retryable:
                raise
            problem = err
        ended = env.clock.now()
        if ended < ctx.deadline - margin and not ctx.looks_once:
            if ended - began < wait:
                await ctx.pause(min(env.claim_poll_s, ctx.deadline - margin - ended))
            if ctx.remaining() > 0:  # else overslept, as in a claim
                continue
        if problem is not None:
            raise problem
        msg = f"nobody registered partition {call.partition_id!r} in time"
        raise DataPlaneTimeout(msg, partition_id=call.partition_id, blames_port=False)
