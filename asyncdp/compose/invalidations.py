"""Tells slot hosts which rows a mutation has removed or replaced, so that they serve them no more.

A clear, or a put that replaces rows, returns only after the hosts have marked the old rows as dead. From then on no
reader, however old its reference, gets the old bytes. What a cancellation or a fault keeps from a host stays among the
client's pending outcomes: the Reconcile layer sends it before the next mutation, or in close(). A mutation of the same
rows, such as the removal that is made again since the first one failed, returns only after the host was told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from asyncdp.calls.slots import Invalidate, Send
from asyncdp.errors import DataPlaneError

from .outcomes import PendingOutcome
from .reads import fan_out

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext

__all__ = ["invalidate", "record"]

#: Number of slots per host and partition for which an undelivered Invalidate is kept; the oldest are left to the host,
#: which compares its slots with the directory from time to time. Of more ids than that it stands for all of them.
MOST_KEPT: Final = 10_000


def record(calls: Iterable[Invalidate], ctx: CallContext, mutation: Call[Any]) -> None:
    """Record, for a transport, what the hosts have to be told about a mutation that has happened.

    Args:
        calls: One call per host.
        ctx: Context of the request that was answered.
        mutation: The mutation whose answer it was.
    """
    partition_id, ids = _rows_of(mutation)
    named = None if ids is None else frozenset(ids)
    for call in calls:
        ctx.env.pending_outcomes.record(PendingOutcome(call, ctx.op_id, partition_id=partition_id, sample_ids=named))


async def invalidate(send: Send, mutation: Call[Any], ctx: CallContext) -> None:
    """Tell the hosts what :func:`record` recorded for a mutation, and return once they have applied it.

    What an earlier call could not tell them of the same rows is told as well, and so is all else that the same hosts
    have to know of this partition.

    Raises:
        DataPlaneError: A host that may still serve the rows did not answer. It is ``ambiguous``: the mutation itself
            has happened, and the host is told later.
    """
    untold = _taken(mutation, ctx)
    if not untold:
        return

    async def one(outcome: PendingOutcome, ctx: CallContext) -> None:
        await send(outcome.call, ctx)
        untold.remove(outcome)

    todo = list(untold)
    try:
        if len(todo) == 1:
            await one(todo[0], ctx)
            return
        for problem in await fan_out(one, todo, ctx):
            if problem is not None:
                raise problem
    except DataPlaneError as err:
        err.ambiguous = True
        host = _call_of(untold[0]).host.id
        err.message = f"the rows are removed, but slot host {host!r} may still serve them: {err.message}"
        raise
    finally:
        for outcome in untold:
            ctx.env.pending_outcomes.record(_bounded(outcome, ctx))


def _taken(mutation: Call[Any], ctx: CallContext) -> list[PendingOutcome]:
    """Take what hosts have to be told of a mutation's rows out of the pending outcomes, joined to one a host."""
    pending = ctx.env.pending_outcomes
    partition_id, ids = _rows_of(mutation)
    undelivered = [outcome for outcome in pending if isinstance(outcome.call, Invalidate)]
    due = {
        _key(outcome)
        for outcome in undelivered
        if outcome.op_id == ctx.op_id or outcome.concerns(partition_id, ids, None)
    }
    taken: dict[tuple[str, int, str | None], PendingOutcome] = {}
    for outcome in undelivered:
        key = _key(outcome)
        if key in due:
            pending.resolved(outcome)
            taken[key] = _joined(taken[key], outcome) if key in taken else outcome
    return list(taken.values())


def _joined(one: PendingOutcome, other: PendingOutcome) -> PendingOutcome:
    """Return one outcome for two of one host and partition."""
    ids = None if one.sample_ids is None or other.sample_ids is None else one.sample_ids | other.sample_ids
    call = _call_of(one)
    return replace(one, call=replace(call, refs=call.refs + _call_of(other).refs), sample_ids=ids)


def _bounded(outcome: PendingOutcome, ctx: CallContext) -> PendingOutcome:
    """Return what is kept of an outcome for later."""
    call, ids = _call_of(outcome), outcome.sample_ids
    if len(call.refs) > MOST_KEPT:
        ctx.emit("unsettled", what="Invalidate", reason="too_many", host=call.host.id)
        call = replace(call, refs=call.refs[-MOST_KEPT:])
    return replace(outcome, call=call, sample_ids=None if ids is not None and len(ids) > MOST_KEPT else ids)


def _rows_of(mutation: Call[Any]) -> tuple[str | None, Sequence[str] | None]:
    """Return the partition and the ids that a mutation names; None: all."""
    return getattr(mutation, "partition_id", None), getattr(mutation, "sample_ids", None)


def _call_of(outcome: PendingOutcome) -> Invalidate:
    assert isinstance(outcome.call, Invalidate)  # noqa: S101 - no others come here
    return outcome.call


def _key(outcome: PendingOutcome) -> tuple[str, int, str | None]:
    host = _call_of(outcome).host
    return host.id, host.epoch, outcome.partition_id
