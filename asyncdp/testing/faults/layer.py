"""Faults: the layer that executes a fault plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.compose.composition import SlotMapping
from asyncdp.errors import DataPlaneError
from asyncdp.factory import layers_of
from asyncdp.service import Layer

from .fault import Fault, through
from .hits import Hit, OnSlots, fault_of
from .injected import Injected
from .request_tracker import RequestTracker, Subject
from .rule import SLOT_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.calls import Call, CallContext
    from asyncdp.client import Client
    from asyncdp.service import Service

    from .plan import FaultPlan
    from .rule import Rule

__all__ = ["Faults"]

R = TypeVar("R")

#: 99th percentile of the standard normal distribution.
Z99 = 2.3263478740408408


class Faults(Layer):
    """Injects the faults of a plan. It is placed just above the transport, so that all other layers see real errors.

    ::

        plan = FaultPlan(seed=7).on("get_samples").refuse(times=1)
        client = stack(transport, [*default_layers(), plan.layer])  # or faulty_stack(transport, plan)

    Args:
        inner: The transport.
        plan: The fault plan; several clients may share one.

    Raises:
        ValueError: A rule needs hosts or slots that this transport does not have; the message names the rule.
    """

    def __init__(self, inner: Service | Client, plan: FaultPlan) -> None:
        """Check that the transport supports the rules of the plan."""
        super().__init__(inner)
        self.plan = plan
        self._tracker = RequestTracker()
        plan.checked_by(self._check)

    def attach_config(self) -> dict[str, Any]:
        """Return the transport's config with the plan among its layers, so that all clients of the plane use it."""
        config = self.inner.attach_config()
        given = config.get("layers") or []
        return {**config, "layers": self.plan.among([given] if isinstance(given, Mapping) else list(given))}

    def _hosts(self) -> Mapping[str, Any] | None:
        """Return the slot hosts within this process by id; None if the transport has none."""
        try:
            return getattr(getattr(self.inner, "plane", None), "hosts", None)
        except DataPlaneError:  # the plane to attach to does not exist yet
            return None

    def _check(self, rule: Rule) -> None:
        hosts = self._hosts()
        if rule.kind in ("crash_host", "recycle") and hosts is None:
            raise ValueError(f"{rule.kind}: the hosts of a {type(self.inner).__name__} cannot be controlled from here")
        where = rule.where
        slots = rule.kind in SLOT_KINDS or where.host is not None or where.port is not None
        if slots and rule.kind != "crash_host" and not self._sees_slots():
            what = rule.kind if rule.kind in SLOT_KINDS else "host" if where.host is not None else "port"
            raise ValueError(f"{what}: no request for a slot passes here; put the faults just above the transport")
        if hosts is None:
            return
        if where.host is not None and where.host not in hosts:
            raise ValueError(f"host: there is no {where.host!r}; there are {sorted(hosts)}")
        ports = sorted(p for name, h in hosts.items() if where.host in (None, name) for p in h.ref.ports)
        if where.port is not None and where.port not in ports:
            raise ValueError(f"port: there is no {where.port}; there are {ports}")

    def _sees_slots(self) -> bool:
        """Whether this layer receives slot calls: the transport has slots, and SlotMapping is above this layer."""
        inner = self.inner
        return inner.get_capabilities().slot_addressable and not any(
            isinstance(layer, SlotMapping) for layer in layers_of(inner)
        )

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Execute the call with the faults that the plan injects."""
        plan = self.plan
        if not plan.live:
            return await self.inner.execute(call, ctx)
        now = ctx.env.clock.now()
        if plan.began is None:
            plan.began = now
        if now < plan.began:
            raise RuntimeError("this fault plan began under another clock: take one per event loop, or plan.fresh()")
        now -= plan.began
        self._move_hosts(now, ctx)
        request = self._tracker.describe(call, ctx)
        hits = self._hits(request, now)
        for hit in hits:
            self._record(hit, request, now, ctx)
        result: R = await through(self._faults(hits), call, ctx, self._send)
        return result

    async def _send(self, call: Call[Any], ctx: CallContext) -> Any:
        """Send a request that no fault stopped."""
        self._move_hosts(ctx.env.clock.now() - (self.plan.began or 0.0), ctx)
        result = await self.inner.execute(call, ctx)
        self._tracker.learn(call, result, ctx)
        return result

    # -- selection of faults

    def _hits(self, request: Subject, now: float) -> list[Hit]:
        """Return the rules that hit a request, up to the first one that ends it."""
        hits = []
        for live in self.plan.live:
            rule = live.rule
            if rule.kind == "crash_host" or not request.fits(rule):
                continue
            if _by_slot(rule, request):
                sample = rule.where.sample
                slots = [at for at, ids in enumerate(request.by_slot) if sample is None or sample in ids]
                struck = tuple(at for at in slots if live.strikes(now))
                if struck:
                    hits.append(Hit(rule, live.rng.random(), struck))
                continue
            if not live.strikes(now):
                continue
            hits.append(Hit(rule, _delay_s(rule, live.rng.gauss(0.0, 1.0)) if rule.kind == "delay" else 0.0))
            if rule.kind != "delay":
                break
        return hits

    def _record(self, hit: Hit, request: Subject, now: float, ctx: CallContext) -> None:
        ids = request.ids
        if hit.slots:
            ids = tuple(i for at in hit.slots for i in request.by_slot[at])
        fault = Injected(hit.rule.kind, request.verb, request.call, request.host, request.port, ids, now)
        self.plan.injected.append(fault)
        ctx.emit("fault", what=fault.kind, verb=fault.verb, host=fault.host, port=fault.port)

    def _faults(self, hits: Sequence[Hit]) -> list[Fault]:
        """Return what the rules do to the request; those that hit single slots are the innermost."""
        faults = [fault_of(hit.rule, hit.draw) for hit in hits if not hit.slots]
        by_slot = [hit for hit in hits if hit.slots]
        return [*faults, OnSlots(by_slot, self.inner)] if by_slot else faults

    # -- hosts

    def _move_hosts(self, now: float, ctx: CallContext) -> None:
        """Crash and restart the hosts whose time has been reached."""
        for live in self.plan.live:
            rule = live.rule
            if rule.kind != "crash_host":
                continue
            host = (self._hosts() or {}).get(rule.where.host or "")
            back = rule.options.get("restart_at_s", math.inf)
            for stage, at, name in ((0, rule.at_s or 0.0, "crash_host"), (1, back, "restart_host")):
                if host is None or live.stage != stage or now < at:
                    continue
                live.stage += 1
                if stage:
                    host.restart(adopt=rule.options.get("adopt", True))
                else:
                    host.crash()
                self.plan.injected.append(Injected(name, host=rule.where.host, at=now))
                ctx.emit("fault", what=name, host=rule.where.host)


def _by_slot(rule: Rule, request: Subject) -> bool:
    """Whether a rule hits single slots of a read instead of the request."""
    if rule.kind in SLOT_KINDS:
        return True
    return rule.kind == "error" and rule.where.sample is not None and "ReadSlots" in request.kinds


def _delay_s(rule: Rule, normal: float) -> float:
    options = rule.options
    if "seconds" in options:
        return float(options["seconds"])
    p50 = float(options["p50_s"])
    return p50 * math.exp(normal / Z99 * math.log(options["p99_s"] / p50))
