"""PortRotation: chooses a port for each request and quarantines ports that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from asyncdp.calls import CallContext, handles
from asyncdp.calls.slots import Abort, HostRef, Invalidate, ReadSlots, Reserve, WriteSlots
from asyncdp.errors import DataPlaneError, DataPlaneTimeout
from asyncdp.service import Layer
from asyncdp.settings.names import named

from .policy.hedging import HedgeDelay
from .policy.permit import Change, Failure, Permit, QuarantineRules, TargetSnapshot
from .policy.quarantine import Quarantine
from .slot_retry import may_resend, out_of_time

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.service import Service

__all__ = ["PortRotation"]

R = TypeVar("R")
Key = tuple[str, int]
#: Number of hosts whose lists of ports are cached; then the cache is cleared, since hosts that are gone stay in it.
HOSTS_REMEMBERED = 1024


class PortRotation(Layer):
    """Sends each call that names a host through the next healthy port of that host.

    On an error that blames the port, the port is quarantined and the call is sent once more through another port, at
    once and without backoff; that costs one token of the retry budget. If all ports are quarantined, the least bad one
    is used, so that no call is starved.

    With ``hedge_after_s`` reads are hedged: one without an answer for so long is also sent through another healthy
    port, and the first good answer is the result. The other request is cancelled, and its port is not blamed; but where
    the second request was answered first three times in a row, other ports are preferred for a second, then two, and so
    on, up to ``quarantine_s``. A second request costs one token of the retry budget, and the connection of the one that
    is cancelled. With ``hedge_quantile`` too, the delay is that quantile of how long the latest reads of as many rows
    and of the same fields took, once 16 of them are known, at least twice their median, and never more than
    ``hedge_after_s``.

    Args:
        inner: The next layer.
        quarantine_s: Length of the first quarantine, in seconds.
        quarantine_max_s: Length of the longest quarantine, in seconds; each failed probe doubles the length up to this.
        quarantine_decay_s: Seconds without a quarantine after which one failure is forgotten.
        first_contact_s: Seconds for which a port that has never answered may be slow without being quarantined.
        hedge_after_s: Seconds without an answer after which a read is also sent through another port; 0: never. About
            what one read in twenty takes: then hedging costs few requests, and the slowest reads take twice as long.
        hedge_quantile: Part of the reads that are answered within the delay, such as 0.95; 0: the delay is
            ``hedge_after_s`` for every read.
    """

    sees_reads = False

    def __init__(
        self,
        inner: Service,
        *,
        quarantine_s: float = 30.0,
        quarantine_max_s: float = 300.0,
        quarantine_decay_s: float = 60.0,
        first_contact_s: float = 30.0,
        hedge_after_s: float = 0.0,
        hedge_quantile: float = 0.0,
    ) -> None:
        """Check and store the settings."""
        super().__init__(inner)
        if not 0.0 <= hedge_after_s < float("inf"):
            raise ValueError(f"hedge_after_s must be at least 0 and finite, not {hedge_after_s!r}")
        if hedge_quantile and not hedge_after_s:
            raise ValueError("hedge_quantile needs hedge_after_s, the longest delay")
        self.hedge_after_s = hedge_after_s
        self._hedge_delay = HedgeDelay(hedge_after_s, hedge_quantile)
        with named(base_s="quarantine_s", max_s="quarantine_max_s", decay_s="quarantine_decay_s"):
            self.rules = QuarantineRules(quarantine_s, quarantine_max_s, quarantine_decay_s, first_contact_s)
        self._quarantine: Quarantine[Key] | None = None
        self._targets: dict[tuple[str, tuple[int, ...]], tuple[Key, ...]] = {}

    @handles(ReadSlots, Reserve, WriteSlots, Abort, Invalidate)
    async def rotate(self, call: ReadSlots | Reserve | WriteSlots | Abort | Invalidate, ctx: CallContext) -> Any:
        """Send the call through one port, and, if that port is at fault, through another one."""
        if call.port is not None or not call.host.ports:
            return await self.inner.execute(call, ctx)
        targets = self._targets.get((call.host.id, call.host.ports)) or self._new_targets(call.host)
        quarantine = self._quarantine
        if quarantine is None:
            quarantine = self._quarantine = Quarantine(ctx.env.rng, self.rules)
        permit = quarantine.pick(targets, ctx.env.clock.now(), ctx.tried)
        first = permit.target
        tried: list[Key] | None = None
        try:
            if self.hedge_after_s and isinstance(call, ReadSlots):
                tried = [first]
                return await self._hedged(permit, targets, tried, call, ctx)
            return await self._through(permit, call, ctx)
        except DataPlaneError as err:
            now = ctx.env.clock.now()
            again = err.blames_port and err.retryable and len(targets) > 1 and now < ctx.deadline
            if not (again and may_resend(call, err, self.capabilities)):
                raise
            if not ctx.env.budget.withdraw(now):
                ctx.emit("budget_refused", verb=ctx.verb, what="port_rotation")
                raise
            tried = tried or [first]
            permit = quarantine.pick(targets, now, (*ctx.tried, *tried))
            if permit.target in tried:
                permit.released()
                raise
            ctx.emit("rotation", reason=type(err).__name__, host=first[0], port=first[1])
            try:
                return await self._through(permit, call, ctx)
            except DataPlaneError as second:
                told = err if out_of_time(second) else second
                told.attempts = max(second.attempts, 2)
                told.ambiguous = (err.ambiguous or second.ambiguous) and call.mutates
                raise told from told.__cause__

    async def _through(self, permit: Permit[Key], call: Any, ctx: CallContext) -> Any:
        """Send the call through the port of a permit, and end the permit exactly once, whatever happens."""
        host, port = permit.target
        if permit.probe:
            ctx.emit("probe", host=host, port=port)
        try:
            result = await self.inner.execute(call.through(port), ctx)
        except DataPlaneError as err:
            self._judge(permit, err, ctx)
            raise
        except BaseException:
            permit.released()
            raise
        if result is False or not getattr(result, "through_port", True):
            permit.released()  # over shared memory: nothing is known of the port
            return result
        errors = getattr(result, "errors", None)
        blamed = next((e for e in errors.values() if e.blames_port), None) if errors else None
        if blamed is None:
            verdict = permit.succeeded(ctx.env.clock.now())
            if verdict.change is Change.RECOVERED:
                ctx.emit("recovered", host=host, port=port)
        else:
            self._judge(permit, blamed, ctx)
        return result

    async def _hedged(
        self, permit: Permit[Key], targets: Sequence[Key], tried: list[Key], call: ReadSlots, ctx: CallContext
    ) -> Any:
        """Send a read through the port of a permit, and also through another one if that takes long.

        Returns the first answer without an error that blames its port, else the first answer; if there is none, raises
        the first error. Another port that was used is appended to ``tried``.
        """
        answers: list[Any] = []
        errors: list[Exception] = []
        permits = [permit]
        ended = anyio.Event()
        clock, began = ctx.env.clock, ctx.env.clock.now()
        kind = call.refs[0].fields if call.refs else (), sum(len(ref.rows) for ref in call.refs).bit_length()

        async def send(permit: Permit[Key]) -> None:
            try:
                result = await self._through(permit, call, ctx)
            except Exception as err:  # noqa: BLE001 - raised below, where it is the result
                errors.append(err)
            else:
                blamed = any(err.blames_port for err in result.errors.values())
                answers.insert(len(answers) if blamed else 0, result)
                if not blamed:
                    self._hedge_delay.took(kind, clock.now() - began)
                    if permit is not permits[0]:
                        self._outrun(permits[0], ctx)
                    group.cancel_scope.cancel()
            ended.set()

        try:
            async with anyio.create_task_group() as group:
                group.start_soon(send, permit)
                with anyio.move_on_after(self._hedge_delay.delay_s(kind, permit.outruns)):
                    await ended.wait()
                other = None if ended.is_set() else self._other(targets, tried, ctx)
                if other is not None:
                    permits.append(other)
                    tried.append(other.target)
                    group.start_soon(send, other)
        finally:
            for each in permits:  # a task that was cancelled before its first step has not ended its permit
                each.released()
        if answers:
            return answers[0]
        raise errors[0]

    def _outrun(self, permit: Permit[Key], ctx: CallContext) -> None:
        """End the permit of a port through which the same read was sent earlier than where it was answered first."""
        verdict = permit.outrun(ctx.env.clock.now())
        if verdict.change is Change.RESTS:
            ctx.emit("outrun", host=permit.target[0], port=permit.target[1], for_s=verdict.for_s)

    def _other(self, targets: Sequence[Key], tried: list[Key], ctx: CallContext) -> Permit[Key] | None:
        """Return a permit for a healthy port other than those that were tried; None if there is none to be had."""
        quarantine, now = self._quarantine, ctx.env.clock.now()
        assert quarantine is not None  # noqa: S101 - the first permit is one of it
        permit = quarantine.pick(targets, now, (*ctx.tried, *tried))
        if permit.target in tried or permit.last_resort:
            permit.released()
            return None
        if not ctx.env.budget.withdraw(now):
            permit.released()
            ctx.emit("budget_refused", verb=ctx.verb, what="hedge")
            return None
        ctx.emit("hedge", verb=ctx.verb, host=tried[0][0], port=tried[0][1])
        return permit

    def _judge(self, permit: Permit[Key], err: DataPlaneError, ctx: CallContext) -> None:
        host, port = permit.target
        now = ctx.env.clock.now()
        if not err.blames_port:
            # An error that is not retryable is an answer, so the port works. A retryable one says nothing about it.
            verdict = permit.released() if err.retryable else permit.succeeded(now)
        else:
            failure = Failure.SLOW if isinstance(err, DataPlaneTimeout) else Failure.REFUSED
            verdict = permit.failed(failure, now)
        if verdict.change is Change.QUARANTINED:
            ctx.emit("quarantine", reason=type(err).__name__, host=host, port=port, for_s=verdict.for_s)
        elif verdict.change is Change.RECOVERED:
            ctx.emit("recovered", host=host, port=port)

    def _new_targets(self, host: HostRef) -> tuple[Key, ...]:
        if len(self._targets) >= HOSTS_REMEMBERED:
            self._targets.clear()
        targets = self._targets[host.id, host.ports] = tuple((host.id, port) for port in host.ports)
        return targets

    def ports(self, now: float) -> dict[Key, TargetSnapshot]:
        """Return the health of each port used so far, by (host id, port); ``now`` is the time of the stack's clock."""
        return {} if self._quarantine is None else self._quarantine.snapshot(now)
