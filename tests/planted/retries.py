"""Broken retries."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from asyncdp import (
    BatchRetry,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    PartialReadError,
    SlotRetry,
)
from asyncdp.calls import Call, CallContext, ClearSamples, GetSamples, handles
from asyncdp.calls.slots import ReadResult, ReadSlots, TryClaim
from asyncdp.errors import StaleSlotError
from asyncdp.middleware.policy.budget import RetryBudget


class DenyList(SlotRetry):
    """Retries whatever is not on a list of what not to retry: cancellation too."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Try three times."""
        for _ in range(2):
            try:
                return await self.inner.execute(call, ctx)
            except DataPlaneBadRequest:
                raise
            except BaseException:  # noqa: BLE001 - the mistake
                continue
        return await self.inner.execute(call, ctx)


class NewName(SlotRetry):
    """Calls are sent again under another op_id."""

    kind: type[Call[Any]] = Call

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Try, and try again as somebody else."""
        if isinstance(call, self.kind):
            try:
                return await self.inner.execute(call, ctx)
            except DataPlaneError as err:
                if not err.retryable:
                    raise
            await ctx.pause(0.15)
            ctx = replace(ctx, op_id=ctx.env.next_op_id())
        return await super().execute(call, ctx)


class ClaimsWithoutToken(NewName):
    """A claim is retried without its token."""

    kind = TryClaim


class ClearsWithoutOpId(NewName):
    """A clear is sent again without its op_id."""

    kind = ClearSamples


class NeverSpends(RetryBudget):
    """The budget is never spent."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Give."""
        return True


class AsksStaleAgain(SlotRetry):
    """A slot that is stale is asked again."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Ask twice."""
        result = await super().execute(call, ctx)
        if isinstance(result, ReadResult) and any(isinstance(e, StaleSlotError) for e in result.errors.values()):
            await ctx.pause(0.01)
            return await super().execute(call, ctx)
        return result


class NeverGivesUp(SlotRetry):
    """The ceiling of attempts is forgotten."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Allow any number."""
        super().__init__(*args, **settings)
        self.allowed = self.max_attempts

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Begin anew when the attempts are used up."""
        while True:
            try:
                result = await super().execute(call, ctx)
            except DataPlaneError as err:
                if not err.retryable or ctx.remaining() < 0.1:
                    raise
                await ctx.pause(0.01)
                continue
            if not isinstance(result, ReadResult) or not any(e.retryable for e in result.errors.values()):
                return result
            if ctx.remaining() < 0.1 or math.isinf(ctx.remaining()):
                return result
            await ctx.pause(0.01)


class MixesLives(BatchRetry):
    """Later rounds look rows up anew, whatever life they are in by then, and put columns of both together."""

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> Any:
        """Read field by field."""
        if len(call.fields) < 2:
            return await super().get(call, ctx)
        first = await super().get(replace(call, fields=call.fields[:1]), ctx)
        await ctx.pause(0.02)
        rest = await super().get(replace(call, fields=call.fields[1:]), ctx)
        return first.update(rest)


class ShortRead(BatchRetry):
    """Rows that did not come are dropped silently."""

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> Any:
        """Return what came."""
        try:
            return await super().get(call, ctx)
        except PartialReadError as err:
            if not err.ok.size:
                raise
            return err.rows


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


class Reckless(SlotRetry):
    """Sends a mutation again whatever happened to the same ids meanwhile."""

    async def _watched(self, call: Call[Any], ctx: CallContext) -> Any:
        try:
            return await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            return await self._again(call, ctx, err, lambda _: True)


class Vague(SlotRetry):
    """Says that the budget is spent instead of what went wrong."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Hide the error."""
        try:
            return await super().execute(call, ctx)
        except DataPlaneError as err:
            msg = "retry budget exhausted"
            raise DataPlaneUnavailable(msg) from err


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
