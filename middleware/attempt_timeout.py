"""AttemptTimeout: no attempt outlives its time, whatever the backend does."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls import Resend
from asyncdp.calls.slots import TryClaim, TryPartition
from asyncdp.errors import DataPlaneClosed, DataPlaneTimeout
from asyncdp.service import Layer

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext
    from asyncdp.service import Service

__all__ = ["AttemptTimeout"]

R = TypeVar("R")

#: Silence of less than this many seconds is nobody's fault: a busy event loop is late by as much.
LEAST_S = 0.1

#: Calls that may wait in the backend; they get their waiting time on top.
_WAITING = (TryClaim, TryPartition)


class AttemptTimeout(Layer):
    """Bounds each attempt by ``attempt_timeout_s``, or by what is left of the call, whichever is less.

    An attempt of a call that has no time left is not sent, but for a claim (or a wait for a partition) that the user
    gave no time to: it looks once, and that look has ``attempt_timeout_s``.

    Args:
        inner: The next layer.
        attempt_timeout_s: Seconds; 10 by default: long enough for a large payload on a busy machine, short enough that
            a silent port costs a sixth of the default call timeout. ``ack_timeout_ms`` of the config sets it.
        blame_after_s: Silence of this many seconds, or of half the time that the user gave the call, is the port's
            fault even if the attempt's limit was not reached: the slowest healthy answers begin sooner.
    """

    def __init__(self, inner: Service, *, attempt_timeout_s: float = 10.0, blame_after_s: float = 1.0) -> None:
        """Keep the limits."""
        super().__init__(inner)
        self.attempt_timeout_s = attempt_timeout_s
        self.blame_after_s = blame_after_s

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Open the one scope of this attempt."""
        env = ctx.env
        life = env.life
        if life.closed:
            raise DataPlaneClosed("the client is closed", op=ctx.verb)
        began = env.clock.now()
        limit = began + self.attempt_timeout_s
        if ctx.looks_once:
            ctx = replace(ctx, deadline=limit)
        elif began >= ctx.deadline:
            raise self._late(call, ctx, began, ctx.deadline, sent=False)
        if isinstance(call, _WAITING):
            limit += call.wait_s
        elif call.resend is Resend.NEVER:  # the backend serves the whole verb, waiting included
            limit = ctx.deadline
        scope = anyio.CancelScope(deadline=min(limit, ctx.deadline))
        scopes = life.scopes
        scopes.add(scope)
        try:
            with scope:
                return await self.inner.execute(call, ctx)
        finally:
            scopes.discard(scope)
        if life.closed:
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
            # A call that had next to no time left says nothing about its port.
            blames_port=waited >= min(self.attempt_timeout_s, self.blame_after_s, max(LEAST_S, given / 2)),
            ambiguous=call.mutates and sent,
            cut_short=whole and waited < min(self.attempt_timeout_s, self.blame_after_s),
        )
