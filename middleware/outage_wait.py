"""Waits, within a call, until a host or the directory that is expected to come back answers again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.calls.slots import Abort, Invalidate, Probe, Reserve, Send, WriteSlots
from asyncdp.errors import (
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
)

from .policy.outage import Answer, Outage, Patience, Waiter

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext

__all__ = ["OutageWait"]

#: Verbs for which waiting is better than failing. Ping and the verbs with which a controller recovers are not among
#: them, since their callers need to know soon.
PATIENT = frozenset(
    {
        "register_partition",
        "wait_partition",
        "claim_meta",
        "get_data",
        "get_samples",
        "put_samples",
        "clear_samples",
        "check_consumption_status",
    }
)
#: Seconds of patience that count as none: what rounding leaves of it. A wait for less than a clock can tell ends
#: at once, so that the call would wait again and again.
NO_TIME_S = 1e-6


class OutageWait:
    """Waits for hosts or a directory that do not answer, if the transport serves :class:`~asyncdp.calls.slots.Probe`.

    Args:
        patience_s: Seconds that one user call may wait in total; 0: it never waits.
    """

    def __init__(self, patience_s: float) -> None:
        """Start without outages."""
        self._patience = Patience(patience_s)
        self._outages: dict[str | None, Outage[anyio.Event]] = {}
        self._served = True

    async def wait_for_recovery(self, send: Send, call: Call[Any], err: DataPlaneError, ctx: CallContext) -> bool:
        """Wait for the end of an outage; return whether the call may be sent again, since the host answers by now.

        Returns False at once if the error is no outage, if the verb does not wait, or if the host is not expected back.

        Raises:
            DataPlaneClosed: The client was closed meanwhile.
        """
        if not self._served or ctx.verb not in PATIENT or not _silent(err) or not _waits(call):
            return False
        now = ctx.env.clock.now()
        if min(self._patience.left_s(ctx.op_id, now), ctx.remaining()) <= NO_TIME_S:
            return False
        host = getattr(call, "host", None)
        away = err.host if host is None else host.id  # err.host may be an address instead of an id
        outage = self._outages.get(away)
        if outage is None:
            outage = self._outages[away] = Outage(anyio.Event)
        waiter = outage.join()
        self._patience.begin(ctx.op_id, ctx.deadline, now)
        try:
            return await self._wait(outage, waiter, send, away, type(err).__name__, ctx)
        finally:
            self._patience.end(ctx.op_id, ctx.env.clock.now())
            outage.leave()
            if not outage.waiting:
                self._outages.pop(away, None)

    async def _wait(
        self, outage: Outage[anyio.Event], waiter: Waiter, send: Send, away: str | None, reason: str, ctx: CallContext
    ) -> bool:
        while True:
            left_s = min(self._patience.left_s(ctx.op_id, ctx.env.clock.now()), ctx.remaining())
            if left_s <= NO_TIME_S:
                return False
            if outage.lead():
                await self._ask(outage, send, away, left_s, ctx)
            else:
                await _until(outage.turn, left_s, ctx)
            known = waiter.waited
            verdict = outage.verdict(waiter)
            if verdict is Answer.UNEXPECTED:
                return False
            if verdict is Answer.BACK:
                ctx.emit("outage_over", verb=ctx.verb, host=away)
                return True
            if verdict is Answer.NOT_YET and not known:
                ctx.emit("outage", verb=ctx.verb, host=away, reason=reason)

    async def _ask(
        self, outage: Outage[anyio.Event], send: Send, host_id: str | None, left_s: float, ctx: CallContext
    ) -> None:
        """Probe once on behalf of all waiting callers, after the pause that is due."""
        answer: Answer | None = None
        try:
            pause_s = outage.pause_s(ctx.env.rng)
            await ctx.pause(min(pause_s, left_s))
            if pause_s < left_s:
                answer = await self._probe(outage, send, host_id, ctx)
        finally:
            outage.probed(answer).set()

    async def _probe(
        self, outage: Outage[anyio.Event], send: Send, host_id: str | None, ctx: CallContext
    ) -> Answer | None:
        """Send one probe, for one token of the budget."""
        outage.asked += 1
        if not ctx.env.budget.withdraw(ctx.env.clock.now()):
            ctx.emit("budget_refused", verb=ctx.verb, what="outage_probe")
            return None
        try:
            answers = await send(Probe(host_id), replace(ctx, attempt=1, tried=()))
        except DataPlaneUnsupported:
            self._served = False
            return Answer.UNEXPECTED
        except DataPlaneClosed:
            raise
        except DataPlaneError as err:
            if isinstance(err, DataPlaneTimeout) and err.cut_short:
                return None
            return Answer.NOT_YET if err.retryable else Answer.UNEXPECTED
        return Answer.BACK if answers else Answer.UNEXPECTED


def _silent(err: DataPlaneError) -> bool:
    """Return whether an error means that there was no answer, as opposed to an answer that is an error."""
    if not isinstance(err, (DataPlaneUnavailable, DataPlaneTimeout)):
        return False
    return err.retryable and err.blames_port and getattr(err, "retry_after_s", None) is None


def _waits(call: Call[Any]) -> bool:
    """Return whether a call has to wait: a put can use another host instead, and a clean-up can be done later."""
    return not isinstance(call, (Abort, Invalidate)) and not (isinstance(call, (Reserve, WriteSlots)) and call.spare)


async def _until(turn: anyio.Event, seconds: float, ctx: CallContext) -> None:
    """Wait for an event, for ``seconds`` at most; a close of the client ends the wait."""
    waits = ctx.env.open_waits
    scope = waits.scope(ctx.env.clock.now() + seconds)
    try:
        with scope:
            await turn.wait()
    finally:
        waits.scopes.pop(scope, None)
    if waits.closed:
        raise DataPlaneClosed("the client was closed while this call waited", op=ctx.verb)
