"""Reconcile: finds out the outcome of a mutation that was cancelled or not answered, before the next one needs it."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls import (
    CallContext,
    ClearSamples,
    DropPartition,
    OpenWaits,
    PutSamples,
    ReleaseClaim,
    ReleaseClaims,
    handles,
)
from asyncdp.calls.slots import Abort, ClaimTry, Invalidate, Publish, Resolve, TryClaim
from asyncdp.compose.outcomes import PendingOutcome, clean_up_context
from asyncdp.errors import DataPlaneError
from asyncdp.service import Layer

from .pending_outcomes import record_claim, record_once

if TYPE_CHECKING:
    from asyncdp.calls import Call

__all__ = ["Reconcile"]

R = TypeVar("R")

#: Requests to a host on which no mutation depends: one frees reserved slots, the other tells of dead rows.
CLEAN_UPS = (Abort, Invalidate)
#: Seconds before one of them is sent again to a host that did not answer, so that a dead host delays mutations as
#: rarely as a quarantined port does.
CLEAN_UP_AGAIN_S = 30.0


class Reconcile(Layer):
    """Records each mutation with an unknown outcome, and resolves it before the next mutation of the same ids.

    For a put or clear that may have arrived, ``Resolve`` finds out whether it is done, or else has it refused for ever.
    A claim whose answer was not received is released with ``AbandonClaim``. Both need a backend that deduplicates
    mutations or claims; with others nothing more can be found out, and the error said ``ambiguous=True``. If an open
    outcome cannot be resolved, a mutation that depends on it raises the error of that attempt, since sending it could
    bring an old value back.

    Args:
        inner: The next layer.
        close_timeout_s: Seconds that close() may take to resolve open outcomes.
    """

    sees_reads = False

    def __init__(self, inner: Any, *, close_timeout_s: float = 5.0) -> None:
        """Store the limit."""
        super().__init__(inner)
        self.close_timeout_s = close_timeout_s
        self._silent: dict[str, float] = {}

    @handles(Publish, ClearSamples, PutSamples, DropPartition, ReleaseClaim, ReleaseClaims, TryClaim)
    async def mutate(self, call: Call[R], ctx: CallContext) -> R:
        """Resolve the outcomes that the call depends on, send it, and record its outcome if that stays unknown."""
        pending_outcomes = ctx.env.pending_outcomes
        try:
            if len(pending_outcomes):
                await self.resolve_due(call, ctx)
                await self._resolve_late(ctx)
            result = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if err.ambiguous:
                self._record(call, ctx)
            raise
        except BaseException:
            self._record(call, ctx)
            raise
        if isinstance(result, ClaimTry) and result.meta.size and len(pending_outcomes):
            for outcome in pending_outcomes:  # this answers an earlier poll of the same claim as well
                if outcome.op_id == ctx.op_id:
                    pending_outcomes.resolved(outcome)
        return result

    async def resolve_due(self, call: Call[Any], ctx: CallContext) -> None:
        """Resolve the open outcomes that concern the call, oldest first; raise the error if one cannot be resolved."""
        task = call.task_name if isinstance(call, TryClaim) else None
        ids = getattr(call, "sample_ids", None)
        for outcome in ctx.env.pending_outcomes.due(getattr(call, "partition_id", None), ids, task):
            if outcome.op_id != ctx.op_id:  # the next poll of the same claim gets the same batch as the earlier one
                await self._resolve(outcome, ctx)

    async def _resolve_late(self, ctx: CallContext) -> None:
        """Resolve one outcome that the call does not depend on: those of ids that never come again would add up.

        It changes nothing for the call, so an error leaves it to a later one.
        """
        outcome = ctx.env.pending_outcomes.late(ctx.env.clock.now(), ctx.op_id)
        within = None if outcome is None else clean_up_context(ctx)
        if outcome is not None and within is not None:
            with suppress(DataPlaneError):
                await self._resolve(outcome, within)

    def _is_silent(self, call: Call[Any], ctx: CallContext) -> bool:
        """Return whether the call is a clean-up at a host that did not answer one recently."""
        return isinstance(call, CLEAN_UPS) and self._silent.get(call.host.id, -math.inf) > ctx.env.clock.now()

    async def _resolve(self, outcome: PendingOutcome, ctx: CallContext) -> None:
        call = outcome.call
        if self._is_silent(call, ctx):
            return
        within = clean_up_context(ctx) if isinstance(call, CLEAN_UPS) else ctx
        if within is None:
            return
        if isinstance(call, Resolve):
            call = replace(call, age_s=max(0.0, ctx.env.clock.now() - outcome.deadline))
        try:
            answer = await self.inner.execute(call, within)
        except DataPlaneError as err:
            err.ambiguous = False  # the user's call, which raises this error, was not sent
            if isinstance(call, CLEAN_UPS):
                self._silent[call.host.id] = ctx.env.clock.now() + CLEAN_UP_AGAIN_S
                ctx.emit("unsettled", what=type(call).__name__, reason=type(err).__name__, host=call.host.id)
                return
            raise
        ctx.env.pending_outcomes.resolved(outcome)
        # An Abort frees what a put reserved and did not publish, so that this put did not happen.
        state = getattr(answer, "state", "refused" if isinstance(call, Abort) else "done")
        what = type(outcome.call).__name__
        ctx.emit("settled", what=what, state=state, partition_id=outcome.partition_id, op_id=outcome.op_id)
        if state != "done":  # a put that is done has published its slots; any other never will, so they are freed
            for call in outcome.on_refused:
                await self._resolve(ctx.env.pending_outcomes.record(PendingOutcome(call, outcome.op_id)), ctx)

    def _record(self, call: Call[Any], ctx: CallContext) -> None:
        capabilities = self.capabilities
        partition_id: str = call.partition_id  # type: ignore[attr-defined]
        if isinstance(call, TryClaim):
            if capabilities.claim_dedup:
                record_claim(call, ctx)
            return
        if not capabilities.mutation_dedup:
            return
        ids = getattr(call, "sample_ids", None)
        hosts = {ref.host.id: ref.host for ref in call.refs} if isinstance(call, Publish) else {}
        outcome = PendingOutcome(
            Resolve(ctx.op_id, partition_id, of=call),
            ctx.op_id,
            ctx.deadline,
            partition_id,
            None if ids is None else frozenset(ids),
            on_refused=tuple(Abort(host, ctx.op_id) for host in hosts.values()),
        )
        record_once(outcome, ctx)

    async def on_close(self) -> None:
        """Resolve open outcomes, within close_timeout_s, then close the wrapped service."""
        env = self.env
        self._silent.clear()
        waits, env.open_waits = env.open_waits, OpenWaits()  # close() has ended the waits of the old one
        try:
            if len(env.pending_outcomes):
                with anyio.move_on_after(self.close_timeout_s):
                    await self._resolve_all(CallContext(env, "", env.clock.now() + self.close_timeout_s, "close"))
        finally:
            env.open_waits = waits
            await self.inner.close()

    async def _resolve_all(self, ctx: CallContext) -> None:
        """Resolve what can be resolved; emit an event for each outcome that cannot."""
        tried: set[PendingOutcome] = set()
        while todo := [outcome for outcome in ctx.env.pending_outcomes if outcome not in tried]:
            for outcome in todo:  # to resolve a removal may leave something to be told to hosts
                tried.add(outcome)
                try:
                    await self._resolve(outcome, ctx)
                except DataPlaneError as err:
                    ctx.emit("unsettled", what=type(outcome.call).__name__, reason=type(err).__name__)
