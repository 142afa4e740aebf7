"""PortRotation: chooses a port for each request and quarantines ports that fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.calls import CallContext, handles
from asyncdp.calls.slots import Abort, HostRef, Invalidate, ReadSlots, Reserve, WriteSlots
from asyncdp.errors import DataPlaneError, DataPlaneTimeout
from asyncdp.service import Layer
from asyncdp.settings.names import named

from .policy.permit import Change, Failure, Permit, QuarantineRules, TargetSnapshot
from .policy.quarantine import Quarantine
from .slot_retry import may_resend, out_of_time

if TYPE_CHECKING:
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

    Args:
        inner: The next layer.
        quarantine_s: Length of the first quarantine, in seconds.
        quarantine_max_s: Length of the longest quarantine, in seconds; each failed probe doubles the length up to this.
        quarantine_decay_s: Seconds without a quarantine after which one failure is forgotten.
        first_contact_s: Seconds for which a port that has never answered may be slow without being quarantined.
    """

    def __init__(
        self,
        inner: Service,
        *,
        quarantine_s: float = 30.0,
        quarantine_max_s: float = 300.0,
        quarantine_decay_s: float = 60.0,
        first_contact_s: float = 30.0,
    ) -> None:
        """Check and store the settings."""
        super().__init__(inner)
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
        try:
            return await self._through(permit, call, ctx)
        except DataPlaneError as err:
            if not (err.blames_port and err.retryable and len(targets) > 1):
                raise
            if not may_resend(call, err, self.capabilities):
                raise
            now = ctx.env.clock.now()
            if now >= ctx.deadline:
                raise
            if not ctx.env.budget.withdraw(now):
                ctx.emit("budget_refused", verb=ctx.verb, what="port_rotation")
                raise
            used = permit.target
            permit = quarantine.pick(targets, now, (*ctx.tried, used))
            if permit.target == used:
                permit.released()
                raise
            ctx.emit("rotation", reason=type(err).__name__, host=used[0], port=used[1])
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
