"""Settle: finds out what became of a mutation that was cancelled or never answered, before it matters."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls import CallContext, ClearSamples, DropPartition, PutSamples, ReleaseClaim, ReleaseClaims, handles
from asyncdp.calls.slots import Abort, ClaimTry, Publish, Resolve, TryClaim
from asyncdp.compose.outcomes import Debt
from asyncdp.errors import DataPlaneError
from asyncdp.service import Layer

from .open_outcomes import owe_claim, owe_once

if TYPE_CHECKING:
    from asyncdp.calls import Call

__all__ = ["Settle"]

R = TypeVar("R")

#: Seconds after which a host that did not answer an Abort is told again: a dead host holds up a mutation as seldom as a
#: quarantined port does.
ABORT_AGAIN_S = 30.0


class Settle(Layer):
    """Writes down each mutation whose outcome nobody knows, and settles it before the next one on the same ids.

    A put or clear that may have arrived is resolved (``Resolve``: done, or refused for ever); a claim that nobody got
    is given back (``AbandonClaim``). Both where the backend remembers op_ids or claim tokens; elsewhere the error went
    up with ``ambiguous=True`` and nothing more can be known. A debt that cannot be settled holds up the mutation that
    depends on it, with the error that settling raised: anything else could bring an old value back.

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
        """Settle what the call depends on, then send it, and write down what a cancel or a lost answer leaves open."""
        ledger = ctx.env.ledger
        try:
            if len(ledger):
                await self.settle(call, ctx)
            result = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if err.ambiguous:
                self._owe(call, ctx)
            raise
        except BaseException:
            self._owe(call, ctx)
            raise
        if isinstance(result, ClaimTry) and result.meta.size and len(ledger):
            for debt in ledger:  # an earlier look of this claim was not answered: this is its answer
                if debt.op_id == ctx.op_id:
                    ledger.paid(debt)
        return result

    async def settle(self, call: Call[Any], ctx: CallContext) -> None:
        """Pay the debts that concern the call, oldest first; a failure to do so is raised."""
        task = call.task_name if isinstance(call, TryClaim) else None
        ids = getattr(call, "sample_ids", None)
        for debt in ctx.env.ledger.due(getattr(call, "partition_id", None), ids, task):
            if debt.op_id != ctx.op_id:  # a claim's own earlier look: the next one asks for the same batch
                await self._pay(debt, ctx)

    def _is_silent(self, call: Call[Any], ctx: CallContext) -> bool:
        """Whether an Abort would go to a host that did not answer a moment ago."""
        return isinstance(call, Abort) and self._silent.get(call.host.id, -math.inf) > ctx.env.clock.now()

    async def _pay(self, debt: Debt, ctx: CallContext) -> None:
        call = debt.call
        if self._is_silent(call, ctx):
            return
        if isinstance(call, Resolve):
            call = replace(call, age_s=max(0.0, ctx.env.clock.now() - debt.deadline))
        try:
            answer = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            err.ambiguous = False  # the call that waits for this was not sent
            if isinstance(debt.call, Abort):  # reserved space only: nothing depends on it, so nothing waits for it
                self._silent[debt.call.host.id] = ctx.env.clock.now() + ABORT_AGAIN_S
                return
            raise
        ctx.env.ledger.paid(debt)
        state = getattr(answer, "state", "done")
        what = type(debt.call).__name__
        ctx.emit("settled", what=what, state=state, partition_id=debt.partition_id, op_id=debt.op_id)
        if state != "done":  # what is done has no unpublished slots; of what is forgotten nobody will publish any
            for call in debt.on_refused:
                await self._pay(ctx.env.ledger.owe(Debt(call, debt.op_id)), ctx)

    def _owe(self, call: Call[Any], ctx: CallContext) -> None:
        capabilities = self.capabilities
        partition_id: str = call.partition_id  # type: ignore[attr-defined]
        if isinstance(call, TryClaim):
            if capabilities.claim_dedup:
                owe_claim(call, ctx)
            return
        if not capabilities.mutation_dedup:
            return
        ids = getattr(call, "sample_ids", None)
        hosts = {ref.host.id: ref.host for ref in call.refs} if isinstance(call, Publish) else {}
        debt = Debt(
            Resolve(ctx.op_id, partition_id),
            ctx.op_id,
            ctx.deadline,
            partition_id,
            None if ids is None else frozenset(ids),
            on_refused=tuple(Abort(host, ctx.op_id) for host in hosts.values()),
        )
        owe_once(debt, ctx)

    async def on_close(self) -> None:
        """Settle what is open, within close_timeout_s, then close what is inside."""
        env = self.env
        self._silent.clear()
        life, env.life = env.life, type(env.life)()  # close() ended every wait; these few begin after it
        try:
            if len(env.ledger):
                with anyio.move_on_after(self.close_timeout_s):
                    await self._settle_all(CallContext(env, "", env.clock.now() + self.close_timeout_s, "close"))
        finally:
            env.life = life
            await self.inner.close()

    async def _settle_all(self, ctx: CallContext) -> None:
        """Pay what can be paid."""
        for debt in ctx.env.ledger:
            try:
                await self._pay(debt, ctx)
            except DataPlaneError as err:
                ctx.emit("unsettled", what=type(debt.call).__name__, reason=type(err).__name__)
