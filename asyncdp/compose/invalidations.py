"""Tells slot hosts which rows a mutation has removed or replaced, so that they serve them no more.

A clear, or a put that replaces rows, returns only after the hosts have marked the old rows as dead. From then on no
reader, however old its reference, gets the old bytes. What a cancellation or a fault keeps from a host stays among the
client's pending outcomes: the Reconcile layer sends it before the next mutation, or in close().
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from asyncdp.calls.slots import Invalidate, Send
from asyncdp.errors import DataPlaneError

from .outcomes import PendingOutcome
from .reads import fan_out

if TYPE_CHECKING:
    from asyncdp.calls import CallContext

__all__ = ["invalidate", "record"]

#: Number of slots per host for which an undelivered Invalidate is kept; the oldest are left to the host, which compares
#: its slots with the directory from time to time.
MOST_KEPT: Final = 10_000


def record(calls: Iterable[Invalidate], ctx: CallContext) -> None:
    """Record, for a transport, what the hosts have to be told about the mutation that has just happened."""
    for call in calls:
        ctx.env.pending_outcomes.record(PendingOutcome(call, ctx.op_id))


async def invalidate(send: Send, ctx: CallContext) -> None:
    """Tell the hosts what :func:`record` recorded for this call, and return once they have applied it.

    Hosts that were not reached by an earlier call are told about both at once.

    Raises:
        DataPlaneError: A host that may still serve the rows did not answer. It is ``ambiguous``: the mutation itself
            has happened, and the host is told later.
    """
    calls = _taken(ctx)
    if not calls:
        return

    async def one(call: Invalidate, ctx: CallContext) -> None:
        await send(call, ctx)
        del calls[_key(call)]

    todo = list(calls.values())
    try:
        if len(todo) == 1:
            await one(todo[0], ctx)
            return
        for problem in await fan_out(one, todo, ctx):
            if problem is not None:
                raise problem
    except DataPlaneError as err:
        err.ambiguous = True
        host = next(iter(calls.values())).host.id
        err.message = f"the rows are removed, but slot host {host!r} may still serve them: {err.message}"
        raise
    finally:
        for call in calls.values():
            _keep(call, ctx)


def _taken(ctx: CallContext) -> dict[tuple[str, int], Invalidate]:
    """Take this call's Invalidates out of the pending outcomes, and all others for the same hosts, one a host."""
    pending = ctx.env.pending_outcomes
    recorded = [(outcome, outcome.call) for outcome in pending if isinstance(outcome.call, Invalidate)]
    calls = {_key(call): replace(call, refs=()) for outcome, call in recorded if outcome.op_id == ctx.op_id}
    for outcome, call in recorded:
        key = _key(call)
        if key in calls:
            pending.resolved(outcome)
            calls[key] = replace(calls[key], refs=calls[key].refs + call.refs)
    return calls


def _keep(call: Invalidate, ctx: CallContext) -> None:
    """Record what a host was not told, for later."""
    if len(call.refs) > MOST_KEPT:
        ctx.emit("unsettled", what="Invalidate", reason="too_many", host=call.host.id)
        call = replace(call, refs=call.refs[-MOST_KEPT:])
    record((call,), ctx)


def _key(call: Invalidate) -> tuple[str, int]:
    return call.host.id, call.host.epoch
