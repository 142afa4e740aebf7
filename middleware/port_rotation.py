"""PortRotation: chooses a port for each request, leaves broken ones alone, lets them back in."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.calls import CallContext, handles
from asyncdp.calls.slots import Abort, HostRef, ReadSlots, Reserve, WriteSlots
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
#: Hosts come and go; their lists of ports are made again when this many were seen.
HOSTS_REMEMBERED = 1024


class PortRotation(Layer):
    """Gives each call with a host the next healthy port.

    On an error that blames the port, the port is quarantined and one other port is tried at once, without backoff; that
    costs one token of the retry budget. If every port is out the least bad one is used: nothing starves.

    Args:
        inner: The next layer.
        quarantine_s: First quarantine.
        quarantine_max_s: Longest quarantine; each failed probe doubles up to it.
        quarantine_decay_s: Healthy seconds that forget one failure.
        first_contact_s: How long a port that has never answered may be slow without being quarantined.
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
        """Check and keep the settings."""
        super().__init__(inner)
        with named(base_s="quarantine_s", max_s="quarantine_max_s", decay_s="quarantine_decay_s"):
            self.rules = QuarantineRules(quarantine_s, quarantine_max_s, quarantine_decay_s, first_contact_s)
        self._quarantine: Quarantine[Key] | None = None
        self._targets: dict[tuple[str, tuple[int, ...]], tuple[Key, ...]] = {}

    @handles(ReadSlots, Reserve, WriteSlots, Abort)
    async def rotate(self, call: ReadSlots | Reserve | WriteSlots | Abort, ctx: CallContext) -> Any:
        """Send the call through one port, and through one other if the port is at fault."""
        if call.port is not None:
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
        """Send the call through one port and end its permit, whatever happens, exactly once."""
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
            # An answer that is an error of its own is an answer; nothing sent, or no verdict, is none.
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
        """Health of each port seen so far, by (host id, port); ``now`` by the stack's clock."""
        return {} if self._quarantine is None else self._quarantine.snapshot(now)
