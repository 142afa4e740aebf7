"""SlotRetry: retries failed calls, and of a read of many slots only those that failed."""

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
    """Return whether the call may be sent again after this error without the risk of taking effect twice."""
    return _may_resend(call, capabilities, unsure=err.ambiguous)


def out_of_time(err: DataPlaneError) -> bool:
    """Return whether an error only says that the call had no time left; an earlier error is then more informative."""
    return isinstance(err, DataPlaneTimeout) and err.cut_short


def _may_resend(call: Call[Any], capabilities: DataPlaneCapabilities, *, unsure: bool) -> bool:
    """Return whether a call may be sent again; ``unsure`` says whether some attempt may have taken effect."""
    if call.resend is Resend.ALWAYS or not unsure:
        return call.resend is not Resend.NEVER
    return (call.resend is Resend.DEDUP and capabilities.mutation_dedup) or (
        call.resend is Resend.CLAIM and capabilities.claim_dedup
    )


class SlotRetry(Layer):
    """Retries all calls that may be sent again, with full-jitter backoff, within deadline and retry budget.

    The first attempt is passed straight through; tenacity drives the retries after a retryable failure. Of a read of
    many slots, only those that failed are read again; a StaleSlotError is never retried. Without mutation_dedup, a
    mutation that was not answered is sent again only if no other mutation of this client named the same ids
    meanwhile; a claim only with claim_dedup. The error of a call that must not be sent again has ``retryable=False``,
    which holds for the layers above too.

    ``max_attempts`` limits attempts that fail. It does not apply while the backend answers that it cannot serve now
    (DataPlaneUnavailable with ``retry_after_s``): the call is then sent again until its deadline, at no cost to the
    budget. For a ping it always applies. If a host does not answer but is expected to come back, the call waits for it
    after its last attempt, for up to ``outage_patience_s``, and is sent again when the host answers; all callers of a
    client share one probe per host. Ping, and the verbs with which a controller recovers, do not wait. If nothing
    helps, the first error is raised.

    Args:
        inner: The next layer.
        max_attempts: Number of attempts, the first included. 4 by default: three retries are enough for transient
            faults, and BatchRetry retries rows that still failed.
        backoff_base_s: Upper bound, in seconds, of the first wait, see
            :class:`~asyncdp.middleware.policy.backoff.Backoff`.
        backoff_cap_s: Upper bound of all waits, in seconds.
        outage_patience_s: Seconds that one user call may wait, in total, for hosts or a directory that do not answer;
            0: it never waits. Ten by default: a supervised process is back in three.
    """

    sees_reads = False

    def __init__(
        self,
        inner: Service,
        *,
        max_attempts: int = 4,
        backoff_base_s: float = 0.05,
        backoff_cap_s: float = 2.0,
        outage_patience_s: float = 10.0,
    ) -> None:
        """Check and store the settings."""
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
        self._overlaps = OverlappingMutations()

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Send the call and, if it fails, retry it."""
        if call.mutates and call.resend is Resend.DEDUP and not self.capabilities.mutation_dedup:
            return await self._watched(call, ctx)
        try:
            result = await self.inner.execute(call, ctx)
        except DataPlaneError as err:
            if not err.retryable:
                raise
            return await self._again(call, ctx, err, self._allowed(call))
        if isinstance(call, ReadSlots) and result.errors:  # type: ignore[attr-defined]
            return await self._reread(call, ctx, result)  # type: ignore[arg-type,return-value]
        return result

    def _allowed(self, call: Call[Any]) -> Callable[[bool], bool]:
        return lambda unsure: _may_resend(call, self.capabilities, unsure=unsure)

    async def _watched(self, call: Call[R], ctx: CallContext) -> R:
        """Send a mutation to a backend that cannot tell a repetition of it from a newer mutation.

        A put that is bound to lives is not sent again if an attempt may have taken effect: it would be decided anew,
        and find the rows that it wrote itself to be stale.
        """
        once = getattr(call, "only", None) is not None
        with self._overlaps.watch(call) as watch:
            try:
                return await self.inner.execute(call, ctx)
            except DataPlaneError as err:
                if not err.retryable:
                    raise
                return await self._again(call, ctx, err, lambda unsure: not unsure or not (watch.touched or once))

    async def _again(self, call: Call[R], ctx: CallContext, err: DataPlaneError, allowed: Callable[[bool], bool]) -> R:
        """Retry a call that failed as a whole; ``allowed`` is called with whether an attempt may have taken effect."""
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
            record_claim(call, ctx)  # this attempt claimed nothing, but an earlier one may still arrive and claim
        return result

    async def _drive(
        self,
        call: Call[Any],
        ctx: CallContext,
        err: DataPlaneError,
        attempt: Callable[[int, DataPlaneError], Awaitable[R]],
        allowed: Callable[[DataPlaneError], bool],
    ) -> R:
        """Retry after a first attempt that failed with ``err``: make the other attempts, then wait for outages to end.

        After a wait the call is sent once; that costs no token, since the host has just answered a probe. There are at
        most ``max_attempts`` waits, so that a host that answers probes only is not retried for ever.
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
            if not may or not await self._outages.wait_for_recovery(self.inner.execute, call, latest, ctx):
                break
            await ctx.pause(self.backoff.delay_s(turn, ctx.env.rng))  # all waiting callers are resumed at once
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
        """Return whether the writer may reserve space once more, and write into that.

        A host that restarted has lost its reservations, so the same write cannot succeed. After a wait for an outage
        this costs nothing; otherwise it costs two tokens of the retry budget, one for each request.
        """
        if not isinstance(err, (DataPlaneUnavailable, DataPlaneTimeout)):
            return False
        if await self._outages.wait_for_recovery(self.inner.execute, call, err, ctx):
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
        """Have tenacity make the attempts after a first one that failed with ``err``."""
        latest = err

        async def step() -> R:
            nonlocal latest
            number = retrying.statistics["attempt_number"]
            if number == 1 or not allowed(latest):  # another mutation during the wait may forbid a retry
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
        """Return whether no attempt, no time or no budget is left."""
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
        """Retry the refs that failed; keep those that were read."""
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
    """Return whether the backend answered that it cannot serve now: it is loading, busy, failing over or read-only."""
    return isinstance(err, DataPlaneUnavailable) and err.retry_after_s is not None


def _lasts(ctx: CallContext) -> bool:
    """Return whether a call may exceed max_attempts until its deadline; not a ping, which asks for the state now."""
    return ctx.verb != "ping"


def _error(state: RetryCallState) -> DataPlaneError:
    assert state.outcome is not None  # noqa: S101 - tenacity calls this only after an attempt
    err = state.outcome.exception()
    assert isinstance(err, DataPlaneError)  # noqa: S101 - `again` accepts no other exceptions
    return err


def _tried(err: DataPlaneError) -> tuple[tuple[str, int], ...]:
    """Return the (host id, port) through which an attempt failed, so that the next one can use another port."""
    return () if err.host is None or err.port is None or not err.blames_port else ((err.host, err.port),)


def _first(errors: dict[int, DataPlaneError]) -> DataPlaneError:
    return next(iter(errors.values()))


def _renumbered(part: Part, refs: list[int]) -> Part:
    return replace(part, refs=tuple(refs[at] for at in part.refs))
