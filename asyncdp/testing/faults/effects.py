"""The faults that can be planned: one method each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .rule import Rule, Where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .plan import FaultPlan

__all__ = ["Effects", "On", "When", "given"]


class When(TypedDict, total=False):
    """When a rule strikes; see :class:`~asyncdp.testing.faults.rule.Rule`."""

    p: float
    times: int | None
    after: int
    at_s: float | None
    for_s: float | None


def given(**options: Any) -> dict[str, Any]:
    """Keep the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _name(error: str | type[Exception] | None) -> str | None:
    return error.__name__ if isinstance(error, type) else error


class Effects:
    """The faults that can be planned. Each method adds one rule and returns the plan, so that calls can be chained.

    All take ``p`` (how likely), ``times`` (how often at most), ``after`` (how many matching requests are spared first),
    ``at_s`` (from when, in seconds since the first request under the plan) and ``for_s`` (for how long).
    """

    def add_fault(self, kind: str, options: Mapping[str, Any], when: When, **where: str | None) -> FaultPlan:
        """Add a rule of this kind."""
        raise NotImplementedError

    def delay(
        self,
        seconds: float | None = None,
        *,
        p50_s: float | None = None,
        p99_s: float | None = None,
        reply: bool = False,
        **when: Unpack[When],
    ) -> FaultPlan:
        """Make requests slow: by ``seconds``, or by a log-normal time with this median and 99th percentile.

        ``reply``: the request is executed at once and its reply comes late.
        """
        if seconds is None and p50_s is not None and p99_s is None:
            p99_s = p50_s
        return self.add_fault("delay", given(seconds=seconds, p50_s=p50_s, p99_s=p99_s, reply=reply or None), when)

    def error(
        self,
        error: str | type[Exception],
        message: str | None = None,
        *,
        attributes: Mapping[str, Any] | None = None,
        **when: Unpack[When],
    ) -> FaultPlan:
        """Fail requests with an error, without executing them.

        Args:
            error: A built-in exception (as the backend would raise it) or an error of asyncdp, by type or name. Where a
                ``sample`` was chosen, a read of many slots fails for its slot only.
            message: Its text.
            attributes: Keyword arguments of the error: ``{"retryable": False}``.
            **when: See :class:`Effects`.
        """
        return self.add_fault("error", given(error=_name(error), message=message, attributes=attributes), when)

    def refuse(self, **when: Unpack[When]) -> FaultPlan:
        """Refuse connections: ConnectionRefusedError at once, nothing was sent."""
        return self.add_fault("refuse", {}, when)

    def reset(self, **when: Unpack[When]) -> FaultPlan:
        """Reset connections: ConnectionResetError, the request was not executed but nobody can know."""
        return self.add_fault("reset", {}, when)

    def silent(self, **when: Unpack[When]) -> FaultPlan:
        """Accept requests and never answer, until they are cancelled; they are not executed."""
        return self.add_fault("silent", {}, when)

    def not_ready(self, retry_after_s: float | None = None, **when: Unpack[When]) -> FaultPlan:
        """Answer DataPlaneNotReady: full, or still starting."""
        return self.add_fault("not_ready", given(retry_after_s=retry_after_s), when)

    def lose_request(
        self,
        verb: str | None = None,
        *,
        raises: str | type[Exception] | None = "ConnectionResetError",
        **when: Unpack[When],
    ) -> FaultPlan:
        """Lose requests on their way: not executed; ``raises``, or silence (None) until cancelled.

        Of a verb that is made of several requests the deciding one is lost: of a put the Publish, of a get the
        ReadSlots, of a claim the TryClaim; ``on(call=...)`` chooses another.
        """
        return self.add_fault("lose_request", given(raises=_name(raises)), when, verb=verb)

    def lose_reply(
        self,
        verb: str | None = None,
        *,
        raises: str | type[Exception] | None = "ConnectionResetError",
        **when: Unpack[When],
    ) -> FaultPlan:
        """Lose replies: the request is executed; ``raises``, or silence (None) until cancelled. See `lose_request`."""
        return self.add_fault("lose_reply", given(raises=_name(raises)), when, verb=verb)

    def truncate(self, **when: Unpack[When]) -> FaultPlan:
        """Cut the last row off the payload of slots that are read."""
        return self.add_fault("truncate", {}, when)

    def corrupt(self, *, schema: bool = False, **when: Unpack[When]) -> FaultPlan:
        """Flip one bit in the payload of slots that are read (seen only where checksums are on), or in its schema."""
        return self.add_fault("corrupt", given(schema=schema or None), when)

    def stale(self, sample: str | None = None, **when: Unpack[When]) -> FaultPlan:
        """Answer StaleSlotError for slots that are read: all of them, or those that hold ``sample``."""
        return self.add_fault("stale", {}, when, sample=sample)

    def recycle(self, sample: str | None = None, *, how: str = "cleared", **when: Unpack[When]) -> FaultPlan:
        """Recycle slots under their reader, really: between look-up and read their samples go, others move in.

        Needs a transport whose slots are in this process (memory).

        Args:
            sample: Only slots that hold it.
            how: ``"cleared"``: the samples are gone. ``"reborn"``: they were cleared and put anew, same values.
                ``"moved"``: they were put again and lie elsewhere; the reader should get them all the same.
            **when: See :class:`Effects`.
        """
        return self.add_fault("recycle", {"how": how}, when, sample=sample)


class On(Effects):
    """The faults of some requests; made by :meth:`FaultPlan.on`."""

    def __init__(self, plan: FaultPlan, where: Where) -> None:
        """Choose the requests."""
        self._plan = plan
        self._where = where

    def add_fault(self, kind: str, options: Mapping[str, Any], when: When, **where: str | None) -> FaultPlan:
        """Add a rule of this kind for the requests chosen."""
        chosen = self._where
        for name, value in where.items():
            if value is not None:
                if getattr(chosen, name) not in (None, value):
                    raise ValueError(f"{name}: on() chose {getattr(chosen, name)!r} already, not {value!r}")
                changed: dict[str, Any] = {name: value}
                chosen = replace(chosen, **changed)
        return self._plan.add(Rule(kind, chosen, options=options, **when))
