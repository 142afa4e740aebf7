"""Methods that add faults to a plan, one for each kind of fault."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from .rule import Rule, Where

if TYPE_CHECKING:
    from collections.abc import Mapping

    from .plan import FaultPlan

__all__ = ["Effects", "On", "When", "given"]


class When(TypedDict, total=False):
    """Conditions under which a rule applies; see :class:`~asyncdp.testing.faults.rule.Rule`."""

    p: float
    times: int | None
    after: int
    at_s: float | None
    for_s: float | None


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None."""
    return {name: value for name, value in options.items() if value is not None}


def _name(error: str | type[Exception] | None) -> str | None:
    return error.__name__ if isinstance(error, type) else error


class Effects:
    """Methods that add faults to a plan. Each adds one rule and returns the plan, so that calls can be chained.

    All take ``p`` (probability), ``times`` (maximum number of hits), ``after`` (matching requests that pass before the
    first hit), ``at_s`` (start, in seconds since the first request under the plan) and ``for_s`` (duration in seconds).
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
        """Delay requests by ``seconds``, or by a log-normal time with this median and 99th percentile.

        With ``reply``, the request is executed at once and its reply is delayed.
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
            error: A built-in exception (as the backend would raise it) or an error of asyncdp, by type or name. If
                ``on()`` selected a ``sample``, a read of many slots fails for the slot of this sample only.
            message: Text of the error.
            attributes: Keyword arguments of the error, such as ``{"retryable": False}``.
            **when: See :class:`Effects`.
        """
        return self.add_fault("error", given(error=_name(error), message=message, attributes=attributes), when)

    def refuse(self, **when: Unpack[When]) -> FaultPlan:
        """Refuse connections: raise ConnectionRefusedError at once; the request is not executed."""
        return self.add_fault("refuse", {}, when)

    def reset(self, **when: Unpack[When]) -> FaultPlan:
        """Reset connections: raise ConnectionResetError; the request is not executed, but the client cannot tell."""
        return self.add_fault("reset", {}, when)

    def silent(self, **when: Unpack[When]) -> FaultPlan:
        """Accept requests without executing or ever answering them; the caller waits until it is cancelled."""
        return self.add_fault("silent", {}, when)

    def not_ready(self, retry_after_s: float | None = None, **when: Unpack[When]) -> FaultPlan:
        """Answer DataPlaneNotReady, as a plane does that is full or still starting."""
        return self.add_fault("not_ready", given(retry_after_s=retry_after_s), when)

    def lose_request(
        self,
        verb: str | None = None,
        *,
        raises: str | type[Exception] | None = "ConnectionResetError",
        **when: Unpack[When],
    ) -> FaultPlan:
        """Lose requests on the way to the backend, so that they are not executed.

        The caller gets the exception ``raises``, or no answer until it is cancelled (None). If a verb is made of
        several requests, the one that decides its outcome is lost: Publish for a put, ReadSlots for a get, TryClaim
        for a claim; ``on(call=...)`` selects another.
        """
        return self.add_fault("lose_request", given(raises=_name(raises)), when, verb=verb)

    def lose_reply(
        self,
        verb: str | None = None,
        *,
        raises: str | type[Exception] | None = "ConnectionResetError",
        **when: Unpack[When],
    ) -> FaultPlan:
        """Lose replies: the request is executed; the rest is as in :meth:`lose_request`."""
        return self.add_fault("lose_reply", given(raises=_name(raises)), when, verb=verb)

    def truncate(self, **when: Unpack[When]) -> FaultPlan:
        """Cut the last row off the payload of slots that are read."""
        return self.add_fault("truncate", {}, when)

    def corrupt(self, *, schema: bool = False, **when: Unpack[When]) -> FaultPlan:
        """Flip one bit in the payload of slots that are read (detected only with checksums), or damage its schema."""
        return self.add_fault("corrupt", given(schema=schema or None), when)

    def stale(self, sample: str | None = None, **when: Unpack[When]) -> FaultPlan:
        """Answer StaleSlotError for slots that are read: all of them, or those that hold ``sample``."""
        return self.add_fault("stale", {}, when, sample=sample)

    def recycle(self, sample: str | None = None, *, how: str = "cleared", **when: Unpack[When]) -> FaultPlan:
        """Recycle slots between the look-up and the read: remove their samples and write other payload into them.

        This changes the state of the plane; it needs a transport whose slots are in this process (memory).

        Args:
            sample: Id of a sample; only slots that hold it are recycled. None: all.
            how: ``"cleared"``: the samples are removed. ``"reborn"``: they are cleared and put anew with the same
                values. ``"moved"``: they are put again and lie in another slot; the read should still return them.
            **when: See :class:`Effects`.
        """
        return self.add_fault("recycle", {"how": how}, when, sample=sample)


class On(Effects):
    """Adds faults for the requests that :meth:`FaultPlan.on` selected."""

    def __init__(self, plan: FaultPlan, where: Where) -> None:
        """Keep the plan and the selection."""
        self._plan = plan
        self._where = where

    def add_fault(self, kind: str, options: Mapping[str, Any], when: When, **where: str | None) -> FaultPlan:
        """Add a rule of this kind for the selected requests."""
        chosen = self._where
        for name, value in where.items():
            if value is not None:
                if getattr(chosen, name) not in (None, value):
                    raise ValueError(f"{name}: on() chose {getattr(chosen, name)!r} already, not {value!r}")
                changed: dict[str, Any] = {name: value}
                chosen = replace(chosen, **changed)
        return self._plan.add(Rule(kind, chosen, options=options, **when))
