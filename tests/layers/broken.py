"""Layers and hosts with one guard taken out each, to prove that a test would notice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncdp import (
    AttemptTimeout,
    BatchRetry,
    CallContext,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    GetSamples,
    PartialReadError,
    PortRotation,
    Reconcile,
    SlotRetry,
    StaleSlotError,
    TypedErrors,
    handles,
)
from asyncdp.calls.slots import Abort, ReadResult, ReadSlots, Reserve, SlotRef, WriteSlots
from asyncdp.middleware.policy.budget import RetryBudget
from asyncdp.middleware.policy.permit import Failure
from asyncdp.transports.memory.host import Host, ReadAttempt, Slot

if TYPE_CHECKING:
    from asyncdp.calls import Call
    from asyncdp.middleware.policy.permit import Permit


# --- ports


class LonePort(PortRotation):
    """Tries no other port."""

    @handles(ReadSlots, Reserve, WriteSlots, Abort)
    async def rotate(self, call: ReadSlots | Reserve | WriteSlots | Abort, ctx: CallContext) -> Any:
        """Send the call through one port."""
        return await super().rotate(call, replace(ctx, env=replace(ctx.env, budget=_Broke())))


class _Broke:
    """Has no token."""

    def deposit(self, now: float) -> None:
        """Take nothing."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Give nothing."""
        return False


class Forgiving(PortRotation):
    """Never quarantines."""

    def _judge(self, permit: Permit[Any], err: DataPlaneError, ctx: CallContext) -> None:
        permit.released()


class Hasty(PortRotation):
    """Has no patience at first contact."""

    def _judge(self, permit: Permit[Any], err: DataPlaneError, ctx: CallContext) -> None:
        if not err.blames_port:
            super()._judge(permit, err, ctx)
            return
        verdict = permit.failed(Failure.REFUSED, ctx.env.clock.now())
        if verdict.for_s:
            ctx.emit("quarantine", host=permit.target[0], port=permit.target[1])


class Grudging(PortRotation):
    """Blames the port for whatever goes wrong."""

    def _judge(self, permit: Permit[Any], err: DataPlaneError, ctx: CallContext) -> None:
        err.blames_port = True
        super()._judge(permit, err, ctx)


# --- retries


class StaleRetry(SlotRetry):
    """Asks again for stale slots."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Ask twice."""
        result = await super().execute(call, ctx)
        if isinstance(result, ReadResult) and any(isinstance(e, StaleSlotError) for e in result.errors.values()):
            return await super().execute(call, ctx)
        return result


class WholeRetry(SlotRetry):
    """Asks again for all slots where one failed."""

    async def _reread(self, call: ReadSlots, ctx: CallContext, result: ReadResult) -> ReadResult:
        for number in range(2, self.max_attempts + 1):
            if not any(e.retryable for e in result.errors.values()):
                break
            ctx.env.budget.withdraw(ctx.env.clock.now())
            await ctx.pause(0.01)
            result = await self.inner.execute(call, ctx.for_attempt(number))
        return result


class PayPerSlot(SlotRetry):
    """Pays a token for each slot that failed."""

    async def _reread(self, call: ReadSlots, ctx: CallContext, result: ReadResult) -> ReadResult:
        for _ in range(len(result.errors) - 1):
            ctx.env.budget.withdraw(ctx.env.clock.now())
        return await super()._reread(call, ctx, result)


class PayForPatience(SlotRetry):
    """Pays for waiting on a busy backend, and does not wait as long as it was asked to."""

    def _wait_s(self, err: DataPlaneError, attempt: int, ctx: CallContext) -> float:
        if isinstance(err, DataPlaneNotReady):
            ctx.env.budget.withdraw(ctx.env.clock.now())
        return self.backoff.delay_s(attempt, ctx.env.rng)


class Impatient(SlotRetry):
    """Does not wait between attempts."""

    def _wait_s(self, err: DataPlaneError, attempt: int, ctx: CallContext) -> float:
        return 0.0


class NewNameRetry(SlotRetry):
    """Sends a mutation again under another op_id."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Try, and try again as somebody else."""
        try:
            return await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if not err.retryable:
                raise
        await ctx.pause(0.01)
        return await super().execute(call, replace(ctx, op_id=ctx.env.next_op_id()))


class Reckless(SlotRetry):
    """Sends a mutation again whatever happened to the same ids meanwhile."""

    async def _watched(self, call: Call[Any], ctx: CallContext) -> Any:
        try:
            return await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            return await self._again(call, ctx, err, lambda _: True)


class Spendthrift(RetryBudget):
    """Never runs out."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Give."""
        return True


class Vague(SlotRetry):
    """Says that the budget is spent instead of what went wrong."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Hide the error."""
        try:
            return await super().execute(call, ctx)
        except DataPlaneError as err:
            msg = "retry budget exhausted"
            raise DataPlaneUnavailable(msg) from err


# --- batches


class WholeRounds(BatchRetry):
    """Asks for all rows again."""

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> Any:
        """Ask up to three times."""
        for _ in range(self.max_rounds - 1):
            try:
                return await self.inner.execute(call, ctx)
            except PartialReadError as err:
                if not err.retryable:
                    raise
        return await self.inner.execute(call, ctx)


class ManyLives(WholeRounds):
    """Looks all rows up anew in a later round, whatever life they are in by then."""

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> Any:
        """Ask, wait, ask."""
        try:
            return await self.inner.execute(call, ctx)
        except PartialReadError:
            await ctx.pause(1.0)
        return await self.inner.execute(call, ctx)


# --- time


class Endless(AttemptTimeout):
    """Has no limit."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Wait."""
        return await self.inner.execute(call, ctx)


class LookingAtTheClock(AttemptTimeout):
    """Throws a reply away that was there in time, because the clock says it is late by now."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Look at the clock afterwards."""
        result = await super().execute(call, ctx)
        if ctx.remaining() < 0:
            msg = "too late"
            raise DataPlaneTimeout(msg)
        return result


# --- errors


class Swallowing(TypedErrors):
    """Translates cancellation as well."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Translate everything."""
        try:
            return await super().execute(call, ctx)
        except DataPlaneError:
            raise
        except BaseException as err:
            raise self.typed(err, call, ctx) from err


class Trusting(TypedErrors):
    """Takes every payload for what was announced."""

    async def read(self, call: ReadSlots, ctx: CallContext) -> ReadResult:
        """Check nothing."""
        result = await self.inner.execute(call, ctx)
        return replace(result, verified=True)


# --- what a cancel leaves


class Heedless(Reconcile):
    """Writes nothing down."""

    def _owe(self, call: Call[Any], ctx: CallContext) -> None:
        pass


class Careless(Reconcile):
    """Settles nothing before the next mutation."""

    async def settle(self, call: Call[Any], ctx: CallContext) -> None:
        """Do nothing."""


class Meddling(Reconcile):
    """Settles what other calls of the client may still be asking for."""

    async def settle(self, call: Call[Any], ctx: CallContext) -> None:
        """Pay everything."""
        for outcome in ctx.env.pending_outcomes:
            if outcome.op_id != ctx.op_id:
                await self._pay(outcome, ctx)


# --- hosts


class NoGeneration(Host):
    """Reads whatever is in the slot now."""

    def slot(self, ref: SlotRef) -> Slot | None:
        """Find the slot, not its use."""
        if ref.host.epoch != self.ref.epoch or ref.slot >= len(self.slots):
            return None
        return self.slots[ref.slot]

    def begin_read(self, ref: SlotRef) -> ReadAttempt | DataPlaneError:
        """Read it."""
        return super().begin_read(replace(ref, generation=self.slots[ref.slot].generation))


class FreesUnderReaders(Host):
    """Frees a slot whose rows died although somebody reads it."""

    def kill(self, cell: Any) -> None:
        """End the life of a row."""
        super().kill(cell)
        slot = cell.place.slot
        if slot.readers and not slot.live:
            self._free(slot)


class BelievesLateFinishes(Host):
    """Lets a late finish end somebody else's reading."""

    def finish_read(self, attempt: ReadAttempt) -> bool:
        """End the reading of whatever is in the slot."""
        attempt.slot.readers.clear()
        return True


class OneReaderBlocksAll(Host):
    """Has no room for writers while any slot is being read."""

    def reserve(self, *args: Any, **kwargs: Any) -> Sequence[SlotRef]:  # type: ignore[override]
        """Refuse while somebody reads."""
        if any(slot.readers for slot in self.slots):
            msg = "busy"
            raise DataPlaneNotReady(msg)
        return super().reserve(*args, **kwargs)
