"""Records the open outcomes of mutations that were not answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.calls.slots import AbandonClaim
from asyncdp.compose.outcomes import PendingOutcome

if TYPE_CHECKING:
    from asyncdp.calls import CallContext
    from asyncdp.calls.slots import TryClaim

__all__ = ["record_claim", "record_once"]


def record_once(outcome: PendingOutcome, ctx: CallContext) -> None:
    """Record an open outcome, unless an earlier poll of the same claim recorded it."""
    pending_outcomes = ctx.env.pending_outcomes
    if not any(d.op_id == outcome.op_id and type(d.call) is type(outcome.call) for d in pending_outcomes):
        pending_outcomes.record(outcome)
    ctx.emit("ambiguous", verb=ctx.verb, partition_id=outcome.partition_id)


def record_claim(call: TryClaim, ctx: CallContext) -> None:
    """Record that a poll may have claimed samples, or may still claim them, without its answer being received."""
    claim = AbandonClaim(ctx.op_id, call.partition_id, call.task_name)
    record_once(PendingOutcome(claim, ctx.op_id, ctx.deadline, call.partition_id, task_name=call.task_name), ctx)
