"""Reconcile: finds out what became of a mutation that was cancelled or never answered, before it matters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls import CallContext, ClearSamples, DropPartition, PutSamples, ReleaseClaim, ReleaseClaims, handles
from asyncdp.calls.slots import Abort, ClaimTry, Publish, Resolve, TryClaim
from asyncdp.compose.outcomes import PendingOutcome
from asyncdp.errors import DataPlaneError
from asyncdp.service import Layer

from .pending_outcomes import record_claim, record_once

if TYPE_CHECKING:
    from asyncdp.calls import Call

__all__ = ["Reconcile"]

R = TypeVar("R")

#: Seconds after which a host that did not answer an Abort is told again: a dead host holds up a mutation as seldom as a
#: quarantined port does.
ABORT_AGAIN_S = 30.0


class Reconcile(Layer):
    """Writes down each mutation whose outcome nobody knows, and settles it before the next one on the same ids.

    A put or clear that may have arrived is resolved (``Resolve``: done, or refused for ever); a claim that nobody got
    is given back (``AbandonClaim``). Both where the backend remembers op_ids or claim tokens; elsewhere the error went
    up with ``ambiguous=True`` and nothing more can be known. An open outcome that cannot be settled holds up the
    mutation that depends on it, with the error that settling raised: anything else could bring an old value back.

    Args:
        inner: The next layer.
        close_timeout_s: How long close() may take to settle what is open, in seconds.
    """

    def __init__(self, inner: Any, *, close_timeout_s: float = 5.0) -> None:
        """Keep the limit."""
        super().__init__(inner)
        self.close_timeout_s = close_timeout_s
        self._silent: dict[str, float] = {}

    @handles(Publish, ClearSamples, PutSamples, DropPartition, ReleaseClaim, ReleaseClaims, TryClaim)
    async def mutate(self, call: Call[R], ctx: CallContext) -> R:
        """Settle what the call depends on, then send it, and record what a cancel or a lost answer leaves open."""
        pending_outcomes = ctx.env.pending_outcomes
        try:
            if len(pending_outcomes):
                await self.settle(call, ctx)
            result = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if err.ambiguous:
                self._owe(call, ctx)
            raise
        except BaseException:
            self._owe(call, ctx)
            raise
        if isinstance(result, ClaimTry) and result.meta.size and len(pending_outcomes):
            for outcome in pending_outcomes:  # an earlier look of this claim was not answered: this is its answer
                if outcome.op_id == ctx.op_id:
                    pending_outcomes.resolved(outcome)
        return result

    async def settle(self, call: Call[Any], ctx: CallContext) -> None:
        """Settle the open outcomes that concern the call, oldest first; a failure to do so is raised."""
        task = call.task_name if isinstance(call, TryClaim) else None
        ids = getattr(call, "sample_ids", None)
        for outcome in ctx.env.pending_outcomes.due(getattr(call, "partition_id", None), ids, task):
            if outcome.op_id != ctx.op_id:  # a claim's own earlier look: the next one asks for the same batch
                await self._settle_one(outcome, ctx)

    def _is_silent(self, call: Call[Any], ctx: CallContext) -> bool:
        """Whether an Abort would go to a host that did not answer a moment ago."""
        return isinstance(call, Abort) and self._silent.get(call.host.id, -math.inf) > ctx.env.clock.now()

    async def _settle_one(self, outcome: PendingOutcome, ctx: CallContext) -> None:
        call = outcome.call
        if self._is_silent(call, ctx):
            return
        if isinstance(call, Resolve):
            call = replace(call, age_s=max(0.0, ctx.env.clock.now() - outcome.deadline))
        try:
            answer = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            err.ambiguous = False  # the call that waits for this was not sent
            if isinstance(outcome.call, Abort):  # reserved space only: nothing depends on it, so nothing waits for it
                self._silent[outcome.call.host.id] = ctx.env.clock.now() + ABORT_AGAIN_S
                return
            raise
        ctx.env.pending_outcomes.resolved(outcome)
        state = getattr(answer, "state", "done")
        what = type(outcome.call).__name__
        ctx.emit("settled", what=what, state=state, partition_id=outcome.partition_id, op_id=outcome.op_id)
        if state != "done":  # what is done has no unpublished slots; of what is forgotten nobody will publish any
            for call in outcome.on_refused:
                await self._settle_one(ctx.env.pending_outcomes.record(PendingOutcome(call, outcome.op_id)), ctx)

    def _owe(self, call: Call[Any], ctx: CallContext) -> None:
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
            Resolve(ctx.op_id, partition_id),
            ctx.op_id,
            ctx.deadline,
            partition_id,
            None if ids is None else frozenset(ids),
            on_refused=tuple(Abort(host, ctx.op_id) for host in hosts.values()),
        )
        record_once(outcome, ctx)

    async def on_close(self) -> None:
        """Settle what is open, within close_timeout_s, then close what is inside."""
        env = self.env
        self._silent.clear()
        life, env.life = env.life, type(env.life)()  # close() ended every wait; these few begin after it
        try:
            if len(env.pending_outcomes):
                with anyio.move_on_after(self.close_timeout_s):
                    await self._settle_all(CallContext(env, "", env.clock.now() + self.close_timeout_s, "close"))
        finally:
            env.life = life
            await self.inner.close()

    async def _settle_all(self, ctx: CallContext) -> None:
        """Pay what can be paid."""
        for outcome in ctx.env.pending_outcomes:
            try:
                await self._settle_one(outcome, ctx)
            except DataPlaneError as err:
                ctx.emit("unsettled", what=type(outcome.call).__name__, reason=type(err).__name__)
