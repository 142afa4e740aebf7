"""Faults: the layer that executes a fault plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel

from asyncdp.calls.slots import ReadResult, ReadSlots
from asyncdp.compose.composition import SlotMapping
from asyncdp.errors import DataPlaneError, DataPlaneNotReady, StaleSlotError
from asyncdp.factory import layers_of
from asyncdp.service import Layer

from .damage import damaged
from .injected import Injected
from .plan import FaultPlan, plan_of
from .recycling import Recycled, recycle
from .request_tracker import RequestTracker, Subject
from .rule import SLOT_KINDS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.calls import Call, CallContext
    from asyncdp.client import Client
    from asyncdp.service import Service

    from .rule import Rule

__all__ = ["Faults"]

R = TypeVar("R")

#: 99th percentile of the standard normal distribution.
Z99 = 2.3263478740408408


#: Prefix by which a config names a plan, as a layer of this module; the plan's ticket follows.
_TICKET = f"{__name__}:"


def __getattr__(name: str) -> Any:
    if name.startswith("{"):
        return plan_of(name).layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True, slots=True)
class _Hit:
    """A rule that hits a request; ``slots`` are the indexes of the hit slots for rules that hit single slots."""

    rule: Rule
    draw: float
    slots: tuple[int, ...] = ()


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
        self._witness = RequestTracker()
        plan.checked_by(self._check)

    def attach_config(self) -> dict[str, Any]:
        """Return the transport's config with the plan among its layers, so that all clients of the plane use it."""
        config = self.inner.attach_config()
        told = config.get("layers") or []
        layers = [told] if isinstance(told, Mapping) else list(told)
        others = [one for one in layers if not (isinstance(one, str) and one.startswith(_TICKET))]
        return {**config, "layers": [*others, _TICKET + self.plan.ticket()]}

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
        request = self._witness.describe(call, ctx)
        hits = self._hits(request, now)
        for hit in hits:
            self._record(hit, request, now, ctx)
        before = sum(hit.draw for hit in hits if hit.rule.kind == "delay" and not hit.rule.options.get("reply"))
        if before:
            await ctx.env.clock.sleep(before)
            self._move_hosts(ctx.env.clock.now() - plan.began, ctx)
        last = hits[-1].rule if hits else None
        if last is not None and _stops(last, call):
            await self._fail(last)
        if last is not None and last.kind == "lose_reply":
            await self._lose(call, ctx, last)
        if isinstance(call, ReadSlots) and any(hit.slots for hit in hits):
            result: Any = await self._read(call, ctx, hits)
        else:
            result = await self.inner.execute(call, ctx)
        self._witness.learn(call, result, ctx)
        late = sum(hit.draw for hit in hits if hit.rule.kind == "delay" and hit.rule.options.get("reply"))
        if late:
            await ctx.env.clock.sleep(late)
        return result  # type: ignore[no-any-return]

    # -- selection of faults

    def _hits(self, request: Subject, now: float) -> list[_Hit]:
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
                    hits.append(_Hit(rule, live.rng.random(), struck))
                continue
            if not live.strikes(now):
                continue
            hits.append(_Hit(rule, _delay_s(rule, live.rng.gauss(0.0, 1.0)) if rule.kind == "delay" else 0.0))
            if rule.kind != "delay":
                break
        return hits

    def _record(self, hit: _Hit, request: Subject, now: float, ctx: CallContext) -> None:
        ids = request.ids
        if hit.slots:
            ids = tuple(i for at in hit.slots for i in request.by_slot[at])
        fault = Injected(hit.rule.kind, request.verb, request.call, request.host, request.port, ids, now)
        self.plan.injected.append(fault)
        ctx.emit("fault", what=fault.kind, verb=fault.verb, host=fault.host, port=fault.port)

    async def _lose(self, call: Call[Any], ctx: CallContext, rule: Rule) -> None:
        """Execute the request, discard its reply or error, and fail as the rule says."""
        with suppress(Exception):
            await self.inner.execute(call, ctx)
        await self._fail(rule)

    @staticmethod
    async def _fail(rule: Rule) -> Any:
        """Raise the rule's exception, or wait until cancelled."""
        if rule.kind == "refuse":
            raise ConnectionRefusedError("injected: connection refused")
        if rule.kind == "reset":
            raise ConnectionResetError("injected: connection reset")
        if rule.kind == "not_ready":
            raise DataPlaneNotReady("injected: not ready", retry_after_s=rule.options.get("retry_after_s"))
        error = rule.make_error()
        if error is not None:
            raise error
        await anyio.Event().wait()  # the event is never set, so that this waits without a timer

    # -- reads of many slots

    async def _read(self, call: ReadSlots, ctx: CallContext, hits: Sequence[_Hit]) -> ReadResult:
        """Read the slots that no rule fails, then damage the payload of those that a rule damages."""
        errors: dict[int, DataPlaneError] = {}
        ghosts: list[Recycled] = []
        try:
            for hit in hits:
                for at in hit.slots:
                    if hit.rule.kind == "stale":
                        errors.setdefault(at, StaleSlotError("injected: stale slot", host=call.host.id, port=call.port))
                    elif hit.rule.kind == "error":
                        errors.setdefault(at, hit.rule.make_error())  # type: ignore[arg-type]
                    elif hit.rule.kind == "recycle":
                        ghosts += recycle(self.inner, call.refs[at], hit.rule.options["how"], ctx)
            keep = [at for at in range(len(call.refs)) if at not in errors]
            if keep:
                part = call if len(keep) == len(call.refs) else replace(call, refs=tuple(call.refs[at] for at in keep))
                result = await self.inner.execute(part, ctx)
            else:
                await anyio.lowlevel.checkpoint()
                result = ReadResult(())
        finally:
            for ghost in ghosts:
                ghost.leave()
        errors.update({keep[at]: err for at, err in result.errors.items()})
        parts = [replace(part, refs=tuple(keep[at] for at in part.refs)) for part in result.parts]
        for hit in hits:
            if hit.rule.kind in ("corrupt", "truncate"):
                schema = bool(hit.rule.options.get("schema"))
                parts = [damaged(part, call, hit.slots, hit.rule.kind, hit.draw, schema=schema) for part in parts]
        return ReadResult(tuple(parts), errors)

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


def _stops(rule: Rule, call: Call[Any]) -> bool:
    """Whether the request is not executed at all."""
    if rule.kind == "error" and rule.where.sample is not None and isinstance(call, ReadSlots):
        return False
    return rule.kind not in SLOT_KINDS and rule.kind not in ("delay", "lose_reply")


def _delay_s(rule: Rule, normal: float) -> float:
    options = rule.options
    if "seconds" in options:
        return float(options["seconds"])
    p50 = float(options["p50_s"])
    return p50 * math.exp(normal / Z99 * math.log(options["p99_s"] / p50))
