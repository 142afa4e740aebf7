"""SlotRetry: asks again for what failed, and only for that."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import AsyncRetrying, RetryCallState, retry_if_exception

from asyncdp.calls import Call, CallContext, Resend
from asyncdp.calls.slots import Part, ReadResult, ReadSlots, TryClaim, WriteSlots
from asyncdp.errors import (
    ClaimNotReady,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PortQuarantined,
)
from asyncdp.service import Layer
from asyncdp.settings.names import named

from .outage_wait import OutageWait
from .pending_outcomes import record_claim
from .policy.backoff import Backoff
from .policy.overlapping_mutations import OverlappingMutations

if TYPE_CHECKING:
    from asyncdp.meta import DataPlaneCapabilities
    from asyncdp.service import Service

__all__ = ["SlotRetry", "may_resend", "out_of_time"]

R = TypeVar("R")


def may_resend(call: Call[Any], err: DataPlaneError, capabilities: DataPlaneCapabilities) -> bool:
    """Whether the same call may be sent again after this error, as far as the backend can tell it apart."""
    return _may_resend(call, capabilities, unsure=err.ambiguous)


def out_of_time(err: DataPlaneError) -> bool:
    """Whether it only says that the call had no time left for the attempt: an earlier error tells more."""
    return isinstance(err, DataPlaneTimeout) and err.cut_short


def _may_resend(call: Call[Any], capabilities: DataPlaneCapabilities, *, unsure: bool) -> bool:
    """Whether a call may be sent again; ``unsure``: some attempt at it may have acted."""
    if call.resend is Resend.ALWAYS or not unsure:
        return call.resend is not Resend.NEVER
    return (call.resend is Resend.DEDUP and capabilities.mutation_dedup) or (
        call.resend is Resend.CLAIM and capabilities.claim_dedup
    )


class SlotRetry(Layer):
    """Retries slot calls and all calls that may be sent again, with full-jitter backoff, within deadline and budget.

    The first attempt goes straight through; tenacity takes over after a retryable failure. Of a read of many slots only
    those that failed are asked for again; a StaleSlotError goes up at once. A mutation without mutation_dedup whose
    answer is missing is sent again only if nothing else of this client touched the same ids meanwhile, a claim only
    with claim_dedup; the error of what must not be sent again is not ``retryable``, for the layers above either.

    Attempts bound what fails. A backend that answers that it cannot serve now (DataPlaneUnavailable with
    ``retry_after_s``) is asked again until the call's time is over, at no cost to the budget; only a ping says so soon.
    What does not answer, and is known to come back, is waited for after the last attempt, for up to
    ``outage_patience_s``: all callers of a client share one probe per host, and the call is sent again when it answers.
    Not for a ping, nor for the verbs with which a controller recovers. At the end the first error goes up.

    Args:
        inner: The next layer.
        max_attempts: Attempts in all, the first included. Four: three retries cure what is not lasting, and BatchRetry
            comes back for rows that failed all the same.
        backoff_base_s: Ceiling of the first wait, see :class:`~asyncdp.middleware.policy.backoff.Backoff`.
        backoff_cap_s: Ceiling of all waits.
        outage_patience_s: How long one user call may wait, in all, for hosts or a directory that do not answer; 0:
            never. Ten seconds: a supervised process is back in three.
    """

    def __init__(
        self,
        inner: Service,
        *,
        max_attempts: int = 4,
        backoff_base_s: float = 0.05,
        backoff_cap_s: float = 2.0,
        outage_patience_s: float = 10.0,
    ) -> None:
        """Check and keep the settings."""
        super().__init__(inner)
        if max_attempts < 1:
            msg = f"max_attempts must be at least 1, not {max_attempts}"
            raise ValueError(msg)
        self.max_attempts = max_attempts
        with named(base_s="backoff_base_s", cap_s="backoff_cap_s"):
            self.backoff = Backoff(backoff_base_s, backoff_cap_s)
        with named(seconds="outage_patience_s"):
            self._outages = OutageWait(outage_patience_s)
        self.outage_patience_s = outage_patience_s
        self._touches = OverlappingMutations()

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Send the call; drive retries only if it fails."""
        if call.mutates and call.resend is Resend.DEDUP and not self.capabilities.mutation_dedup:
            return await self._watched(call, ctx)
        try:
            result = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if not err.retryable:
                raise
            return await self._again(call, ctx, err, lambda unsure: _may_resend(call, self.capabilities, unsure=unsure))
        if isinstance(call, ReadSlots) and result.errors:  # type: ignore[attr-defined]
            return await self._reread(call, ctx, result)  # type: ignore[arg-type,return-value]
        return result

    async def _watched(self, call: Call[R], ctx: CallContext) -> R:
        """Send a mutation that the backend could not tell from a newer one.

        A put that is bound to lives is decided anew each time, and would not know its own rows: once only, if unsure.
        """
        once = getattr(call, "only", None) is not None
        with self._touches.watch(call) as watch:
            try:
                return await self.inner.execute(call, ctx)
            except DataPlaneError as err:
                if not err.retryable:
                    raise
                return await self._again(call, ctx, err, lambda unsure: not unsure or not (watch.touched or once))

    async def _again(self, call: Call[R], ctx: CallContext, err: DataPlaneError, allowed: Callable[[bool], bool]) -> R:
        """Drive the retries of a call that failed as a whole; ``allowed`` is told whether it may have acted already."""
        unsure = err.ambiguous

        async def attempt(number: int, before: DataPlaneError) -> R:
            return await self.inner.execute(call, ctx.for_attempt(number, _tried(before)))

        def again(later: DataPlaneError) -> bool:
            nonlocal unsure
            unsure = unsure or later.ambiguous
            return allowed(unsure)

        try:
            result = await self._drive(call, ctx, err, attempt, again)
        except DataPlaneError as last:
            unsure = unsure or last.ambiguous
            last.ambiguous = unsure and call.mutates
            last.retryable = last.retryable and allowed(unsure)
            raise
        if unsure and isinstance(call, TryClaim) and not result.meta.size:  # type: ignore[attr-defined]
            record_claim(call, ctx)  # it found nothing, but the attempt before it may still arrive, and find something
        return result

    async def _drive(
        self,
        call: Call[Any],
        ctx: CallContext,
        err: DataPlaneError,
        attempt: Callable[[int, DataPlaneError], Awaitable[R]],
        allowed: Callable[[DataPlaneError], bool],
    ) -> R:
        """Go on from a first attempt that has already failed with ``err``: attempts, then waits for an outage to end.

        After a wait the call is sent once; that costs no token, since who did not answer has just shown that he does.
        There are as many of these as attempts, so that a host that answers a probe and nothing else is not asked for
        ever.
        """
        try:
            return await self._attempts(ctx, err, attempt, allowed)
        except DataPlaneError as last:
            first = latest = last
        number = first.attempts
        may = self.max_attempts > 1 and allowed(latest)
        if isinstance(call, WriteSlots):
            first.may_reserve_again = may and not call.spare and await self._may_reserve_again(call, ctx, first)
            raise first from first.__cause__
        for turn in range(1, self.max_attempts + 1):
            if not may or not await self._outages.outlast(self.inner.execute, call, latest, ctx):
                break
            await ctx.pause(self.backoff.delay_s(turn, ctx.env.rng))  # all who waited are told at once
            number += 1
            try:
                return await attempt(number, latest)
            except DataPlaneError as later:
                if not out_of_time(later):
                    latest = later
                first.attempts = later.attempts = max(number, later.attempts)
                may = allowed(later)
                if not _may_pass(later):
                    raise
        raise first from first.__cause__

    async def _may_reserve_again(self, call: WriteSlots, ctx: CallContext, err: DataPlaneError) -> bool:
        """Whether the writer may reserve space once more, and write into that.

        A host that died has forgotten what was reserved, so it is not sent the same again when it is back. Where
        nothing was waited for, that is a retry like any other, of two requests.
        """
        if not isinstance(err, (DataPlaneUnavailable, DataPlaneTimeout)):
            return False
        if await self._outages.outlast(self.inner.execute, call, err, ctx):
            await ctx.pause(self.backoff.delay_s(1, ctx.env.rng))
            return True
        if ctx.env.budget.withdraw(ctx.env.clock.now(), 2):
            return True
        ctx.emit("budget_refused", verb=ctx.verb, what="slot_retry")
        return False

    async def _attempts(
        self,
        ctx: CallContext,
        err: DataPlaneError,
        attempt: Callable[[int, DataPlaneError], Awaitable[R]],
        allowed: Callable[[DataPlaneError], bool],
    ) -> R:
        """Let tenacity go on from a first attempt that has already failed with ``err``."""
        latest = err

        async def step() -> R:
            nonlocal latest
            number = retrying.statistics["attempt_number"]
            if number == 1 or not allowed(latest):  # what happened during the wait may forbid it
                raise latest
            try:
                return await attempt(number, latest)
            except DataPlaneError as later:
                later.attempts = max(later.attempts, number)
                if not out_of_time(later):
                    latest = later
                raise

        def again(failed: BaseException) -> bool:
            return isinstance(failed, DataPlaneError) and _may_pass(failed) and allowed(failed)

        retrying = AsyncRetrying(
            retry=retry_if_exception(again),
            wait=lambda state: self._wait_s(_error(state), state.attempt_number, ctx),
            stop=lambda state: self._stop(state, ctx),
            sleep=ctx.pause,
            reraise=True,
        )
        try:
            return await retrying(step)
        except DataPlaneError as last:
            if last is latest or not out_of_time(last):
                raise
            latest.attempts = last.attempts
            raise latest from latest.__cause__

    def _stop(self, state: RetryCallState, ctx: CallContext) -> bool:
        """Whether there is no attempt, no time or no budget left."""
        failed = _error(state)
        passing = _passing(failed)
        used_up = state.attempt_number >= self.max_attempts and not (passing and self.max_attempts > 1 and _lasts(ctx))
        if used_up or state.upcoming_sleep >= ctx.remaining():
            return True
        free = passing or isinstance(failed, DataPlaneNotReady)
        if not free and not ctx.env.budget.withdraw(ctx.env.clock.now()):
            ctx.emit("budget_refused", verb=ctx.verb, what="slot_retry")
            return True
        ctx.emit("retry", reason=type(failed).__name__, verb=ctx.verb, host=failed.host, port=failed.port)
        return False

    def _wait_s(self, err: DataPlaneError, attempt: int, ctx: CallContext) -> float:
        if isinstance(err, DataPlaneNotReady) or _passing(err):
            return self.backoff.not_ready_s(getattr(err, "retry_after_s", None), attempt, ctx.env.rng)
        return self.backoff.delay_s(attempt, ctx.env.rng)

    async def _reread(self, call: ReadSlots, ctx: CallContext, result: ReadResult) -> ReadResult:
        """Drive the retries of the refs that failed; what came stays."""
        parts = list(result.parts)
        errors = dict(result.errors)

        def failing() -> dict[int, DataPlaneError]:
            return {at: err for at, err in errors.items() if err.retryable}

        async def attempt(number: int, before: DataPlaneError) -> None:
            todo = list(failing())
            refs = tuple(call.refs[at] for at in todo)
            got = await self.inner.execute(replace(call, refs=refs), ctx.for_attempt(number, _tried(before)))
            for at in todo:
                del errors[at]
            errors.update({todo[at]: err for at, err in got.errors.items()})
            parts.extend(_renumbered(part, todo) for part in got.parts)
            left = failing()
            if left:
                raise _first(left)

        left = failing()
        if left and self.max_attempts > 1:
            try:
                await self._drive(call, ctx, _first(left), attempt, lambda _: True)
            except DataPlaneError as err:
                for at in failing():
                    errors[at].attempts = max(errors[at].attempts, err.attempts)
                if not err.retryable and not any(e is err for e in errors.values()):
                    errors.update(dict.fromkeys(failing(), err))
        return ReadResult(tuple(parts), errors, verified=result.verified)


def _may_pass(err: DataPlaneError) -> bool:
    return err.retryable and not isinstance(err, ClaimNotReady)


def _passing(err: DataPlaneError) -> bool:
    """Whether the backend itself said that it cannot serve now: it is loading, busy, failing over, read-only."""
    if not isinstance(err, DataPlaneUnavailable) or isinstance(err, PortQuarantined):
        return False
    return err.retry_after_s is not None


def _lasts(ctx: CallContext) -> bool:
    """Whether a call may be sent until its time is over; a ping asks how the plane is now."""
    return ctx.verb != "ping"


def _error(state: RetryCallState) -> DataPlaneError:
    assert state.outcome is not None  # noqa: S101 - tenacity asks only after an outcome
    err = state.outcome.exception()
    assert isinstance(err, DataPlaneError)  # noqa: S101 - the predicate let nothing else through
    return err


def _tried(err: DataPlaneError) -> tuple[tuple[str, int], ...]:
    """The port that an attempt failed through: the next one had better take another."""
    return () if err.host is None or err.port is None or not err.blames_port else ((err.host, err.port),)


def _first(errors: dict[int, DataPlaneError]) -> DataPlaneError:
    return next(iter(errors.values()))


def _renumbered(part: Part, refs: list[int]) -> Part:
    return replace(part, refs=tuple(refs[at] for at in part.refs))
