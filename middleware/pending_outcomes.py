"""Writing down what an unanswered mutation leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.calls.slots import AbandonClaim
from asyncdp.compose.outcomes import PendingOutcome

if TYPE_CHECKING:
    from asyncdp.calls import CallContext
    from asyncdp.calls.slots import TryClaim

__all__ = ["record_claim", "record_once"]


def record_once(outcome: PendingOutcome, ctx: CallContext) -> None:
    """Record an open outcome unless an earlier look of the same claim did."""
    pending_outcomes = ctx.env.pending_outcomes
    if not any(d.op_id == outcome.op_id and type(d.call) is type(outcome.call) for d in pending_outcomes):
        pending_outcomes.record(outcome)
    ctx.emit("ambiguous", verb=ctx.verb, partition_id=outcome.partition_id)


def record_claim(call: TryClaim, ctx: CallContext) -> None:
    """Write down that a look may have claimed, or may yet claim, what nobody will get."""
    claim = AbandonClaim(ctx.op_id, call.partition_id, call.task_name)
    record_once(PendingOutcome(claim, ctx.op_id, ctx.deadline, call.partition_id, task_name=call.task_name), ctx)
