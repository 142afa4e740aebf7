"""Writing down what an unanswered mutation leaves open."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.calls.slots import AbandonClaim
from asyncdp.compose.outcomes import Debt

if TYPE_CHECKING:
    from asyncdp.calls import CallContext
    from asyncdp.calls.slots import TryClaim

__all__ = ["owe_claim", "owe_once"]


def owe_once(debt: Debt, ctx: CallContext) -> None:
    """Write a debt down unless an earlier look of the same claim did."""
    ledger = ctx.env.ledger
    if not any(d.op_id == debt.op_id and type(d.call) is type(debt.call) for d in ledger):
        ledger.owe(debt)
    ctx.emit("ambiguous", verb=ctx.verb, partition_id=debt.partition_id)


def owe_claim(call: TryClaim, ctx: CallContext) -> None:
    """Write down that a look may have claimed, or may yet claim, what nobody will get."""
    claim = AbandonClaim(ctx.op_id, call.partition_id, call.task_name)
    owe_once(Debt(claim, ctx.op_id, ctx.deadline, call.partition_id, task_name=call.task_name), ctx)
