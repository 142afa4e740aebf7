"""Composes ClaimMeta and WaitPartition of slot calls: poll until there is a result or the time is up."""

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
    """Return how long before the deadline the last poll ends, so that its answer arrives in time on a busy machine."""
    return min(0.1 * timeout_s, 0.15)


async def claim_until(send: Send, call: ClaimMeta, ctx: CallContext) -> KVBatchMeta:
    """Serve ClaimMeta: poll until a batch is ready or the time is up.

    All polls of one claim have the same op_id, which is the claim id: a poll whose answer was lost gets the same batch
    when it is repeated. A retryable error, on which the layers below have given up, does not end a blocking claim
    before its deadline. With ``timeout_s=0`` there is one poll.

    Raises:
        ClaimNotReady: Too few samples were ready by the deadline; nothing was claimed.
        DataPlaneError: The last poll failed with this error.
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
    """Poll until there is a batch, or no time for another poll."""
    env = ctx.env
    margin = _margin(max(0.0, ctx.remaining()))
    unsure = False  # a poll since the last answer may have claimed
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
            if ctx.remaining() > 0:  # after the deadline, a poll would fail and hide the result of the last one
                continue
        if problem is not None:
            raise problem
        assert seen is not None  # noqa: S101 - there is an error or an answer
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
    if not seen.ready and not seen.waiting_ids:
        msg += " (what the task has claimed does not count: list_claims)"
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
    """Serve WaitPartition: poll until the partition is registered or the time is up.

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
            if ctx.remaining() > 0:  # as in a claim
                continue
        if problem is not None:
            raise problem
        msg = f"nobody registered partition {call.partition_id!r} in time"
        raise DataPlaneTimeout(msg, partition_id=call.partition_id, blames_port=False)
