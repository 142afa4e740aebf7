"""AttemptTimeout: limits the time of each attempt."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.calls import Resend
from asyncdp.calls.slots import TryClaim, TryPartition
from asyncdp.errors import DataPlaneClosed, DataPlaneTimeout
from asyncdp.metrics.observer import AttemptEnded
from asyncdp.service import Layer

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from asyncdp.calls import Call, CallContext
    from asyncdp.metrics.observer import Observers
    from asyncdp.service import Service

__all__ = ["AttemptTimeout"]

R = TypeVar("R")

#: An attempt that waited less than this many seconds never blames its port: a busy event loop is late by as much.
LEAST_S = 0.1

#: Calls that may wait in the backend; their waiting time is added to the limit of the attempt.
_WAITING = (TryClaim, TryPartition)


class AttemptTimeout(Layer):
    """Limits each attempt to ``attempt_timeout_s``, or to the time left of the call if that is less.

    A call that has no time left is not sent. A claim, or a wait for a partition, that the user called with
    ``timeout_s=0`` is an exception: it polls once, for up to ``attempt_timeout_s``.

    Args:
        inner: The next layer.
        attempt_timeout_s: Limit in seconds. 10 by default: long enough for a large payload on a busy machine, short
            enough that an unresponsive port costs a sixth of the default call timeout. Set by the config's
            ``ack_timeout_ms``.
        blame_after_s: An attempt that was cut short by the call's deadline still blames its port if there was no answer
            for this many seconds, or for half the time that the user gave the call, whichever is less: healthy ports
            begin to answer sooner.
    """

    sees_reads = False

    def __init__(self, inner: Service, *, attempt_timeout_s: float = 10.0, blame_after_s: float = 1.0) -> None:
        """Store the limits."""
        super().__init__(inner)
        self.attempt_timeout_s = attempt_timeout_s
        self.blame_after_s = blame_after_s

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Execute one attempt within its time limit, and tell observers how it ended, if there are any."""
        observers = ctx.env.observers
        return self._limited(call, ctx) if observers is None else self._observed(call, ctx, observers)

    async def _observed(self, call: Call[R], ctx: CallContext, observers: Observers) -> R:
        began = ctx.env.clock.now()
        outcome = "cancelled"
        try:
            result = await self._limited(call, ctx)
            outcome = "partial" if getattr(result, "errors", None) else "ok"
        except Exception as err:
            outcome = type(err).__name__
            raise
        else:
            return result
        finally:
            host, port = getattr(call, "host", None), getattr(call, "port", None) or 0
            where = ("" if host is None else host.id), port
            seconds = ctx.env.clock.now() - began
            observers.attempt_ended(AttemptEnded(ctx.op_id, type(call).__name__, ctx.attempt, *where, outcome, seconds))

    async def _limited(self, call: Call[R], ctx: CallContext) -> R:
        env = ctx.env
        waits = env.open_waits
        if waits.closed:
            raise DataPlaneClosed("the client is closed", op=ctx.verb)
        began = env.clock.now()
        limit = began + self.attempt_timeout_s
        if ctx.looks_once:
            ctx = replace(ctx, deadline=limit)
        elif began >= ctx.deadline:
            raise self._late(call, ctx, began, ctx.deadline, sent=False)
        if isinstance(call, _WAITING):
            limit += call.wait_s
        elif call.resend is Resend.NEVER:  # the backend executes the whole verb, waiting included
            limit = ctx.deadline
        scope = waits.scope(min(limit, ctx.deadline))
        try:
            with scope:
                return await self.inner.execute(call, ctx)
        finally:
            waits.scopes.pop(scope, None)
        if waits.closed:
            raise DataPlaneClosed("the client was closed while this call waited", op=ctx.verb, ambiguous=call.mutates)
        raise self._late(call, ctx, began, limit)

    def _late(
        self, call: Call[Any], ctx: CallContext, began: float, limit: float, *, sent: bool = True
    ) -> DataPlaneTimeout:
        host = getattr(call, "host", None)
        whole = limit >= ctx.deadline and not ctx.looks_once
        waited = ctx.env.clock.now() - began
        given = ctx.deadline - ctx.began
        text = "the call ran out of time" if whole else f"no answer within {self.attempt_timeout_s:g} s"
        return DataPlaneTimeout(
            f"{text}, waiting for {type(call).__name__}",
            op=ctx.verb,
            host=None if host is None else host.id,
            port=getattr(call, "port", None),
            # The attempt of a call that had almost no time left proves nothing about its port.
            blames_port=waited >= min(self.attempt_timeout_s, self.blame_after_s, max(LEAST_S, given / 2)),
            ambiguous=call.mutates and sent,
            cut_short=whole and waited < min(self.attempt_timeout_s, self.blame_after_s),
        )
