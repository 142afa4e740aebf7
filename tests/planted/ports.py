"""Broken ways to choose ports."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from asyncdp import DataPlaneError, PortRotation
from asyncdp.calls import CallContext, handles
from asyncdp.calls.slots import Abort, ReadSlots, Reserve, WriteSlots
from asyncdp.middleware.policy.permit import Failure, Permit, Target, Verdict
from asyncdp.middleware.policy.quarantine import Quarantine


class LeaksProbes(PortRotation):
    """A call that is cancelled keeps its permit, and with it the probe."""

    async def _through(self, permit: Permit[Any], call: Any, ctx: CallContext) -> Any:
        host, port = permit.target
        if permit.probe:
            ctx.emit("probe", host=host, port=port)
        try:
            result = await self.inner.execute(call.through(port), ctx)
        except DataPlaneError as err:
            self._judge(permit, err, ctx)
            raise
        permit.succeeded(ctx.env.clock.now())
        return result


class _Rotation(PortRotation):
    """Rotates over targets by a quarantine of another class."""

    quarantine: type[Quarantine[Any]]

    @handles(ReadSlots, Reserve, WriteSlots, Abort)
    async def rotate(self, call: Any, ctx: CallContext) -> Any:
        """Take the other quarantine."""
        if self._quarantine is None:
            self._quarantine = self.quarantine(ctx.env.rng, self.rules)
        return await super().rotate(call, ctx)


class _EagerTarget(Target[Any]):
    def wants_probe(self, now: float) -> bool:
        """Want one also while another is out."""
        return self.until <= now


class _TwoProbes(Quarantine[Any]):
    def _state(self, key: Any, count: int, now: float) -> Target[Any]:
        if key not in self._states:
            self._states[key] = _EagerTarget(key, self._rules, self._rng.randrange(count), now)
        return super()._state(key, count, now)


class TwoProbes(_Rotation):
    """A half-open port gets a second probe while the first is out."""

    quarantine = _TwoProbes


class _Unforgiving(Quarantine[Any]):
    def pick(self, *args: Any) -> Permit[Any]:
        """Give a permit that does not lift a quarantine."""
        permit = super().pick(*args)
        if permit._state.quarantined:
            permit.__class__ = _WithoutMercy
        return permit


class _WithoutMercy(Permit[Any]):
    __slots__ = ()

    def succeeded(self, now: float) -> Verdict:
        """Be told, and do nothing."""
        return self.released()


class NeverHeals(_Rotation):
    """An answer does not lift the quarantine of a port."""

    quarantine = _Unforgiving


class _First(Quarantine[Any]):
    def pick(self, targets: Sequence[Any], now: float, exclude: Collection[Any] = ()) -> Permit[Any]:
        """Begin at the first each time."""
        permit = super().pick(targets, now, exclude)
        self._states[targets[0]].turn = 0
        return permit


class Starves(_Rotation):
    """Always takes the first port that works: the others starve."""

    quarantine = _First


class _Broke:
    """Has no token."""

    def deposit(self, now: float) -> None:
        """Take nothing."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Give nothing."""
        return False


class LonePort(PortRotation):
    """Tries no other port."""

    @handles(ReadSlots, Reserve, WriteSlots, Abort)
    async def rotate(self, call: ReadSlots | Reserve | WriteSlots | Abort, ctx: CallContext) -> Any:
        """Send the call through one port."""
        return await super().rotate(call, replace(ctx, env=replace(ctx.env, budget=_Broke())))


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
