"""The fault plan: the rules of a test and the faults that they have injected so far."""

from __future__ import annotations

import json
import os
import random
import uuid
import warnings
from collections import Counter
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

from .effects import Effects, On, When, given
from .layer import Faults
from .rule import LiveRule, Rule, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from asyncdp.client import Client

    from .injected import Injected

__all__ = ["FaultPlan"]

#: The plans of this process by the name in their ticket, so that all clients of a plane use the same plan object.
_PLANS: WeakValueDictionary[str, FaultPlan] = WeakValueDictionary()

#: Number of faults that a report lists: half of them are the first ones, half the last ones before the failure.
REPORTED = 20


#: Prefix by which a config names a plan, as an attribute of this module; the plan's ticket follows.
_TICKET = f"{__name__}:"


def __getattr__(name: str) -> Any:
    if name.startswith("{"):
        return plan_of(name).layer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class FaultPlan(Effects):
    """Decides reproducibly which faults the requests of a stack meet.

    ::

        plan = (
            FaultPlan(seed=7)
            .on("get_samples", port=2).silent(after=3, for_s=10)
            .lose_reply("claim_meta", times=1)
            .delay(p50_s=0.01, p99_s=0.5)
        )
        client = faulty_stack(MemoryTransport(), plan)
        ...
        assert plan.counts["lose_reply"] == 1

    The same seed and the same requests in the same order give the same faults. Each rule has its own random source,
    so that another rule does not change what the present ones do. A plan records the faults that it injected
    (``injected``, ``counts``): use one plan per test, or ``fresh()``.

    Args:
        seed: Seed of all random choices of the plan.
        rules: Initial rules, in the order in which they apply.

    Attributes:
        injected: The faults injected so far, in order.
        began: Time of the first request under the plan, by the clock of the stack; None before it.
    """

    def __init__(self, seed: int = 0, rules: Iterable[Rule] = ()) -> None:
        """Start with no faults injected."""
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(f"seed: must be a whole number, not {seed!r:.80}")  # noqa: TRY004 - as all of a plan
        self.seed = seed
        self._rules: list[LiveRule] = []
        self.injected: list[Injected] = []
        self.began: float | None = None
        self._checks: list[Callable[[Rule], None]] = []
        self._name = f"{os.getpid()}-{uuid.uuid4().hex[:12]}"
        _PLANS[self._name] = self
        for rule in rules:
            self.add(rule)

    @property
    def rules(self) -> tuple[Rule, ...]:
        """The rules, in the order in which they apply."""
        return tuple(live.rule for live in self._rules)

    @property
    def live(self) -> list[LiveRule]:
        """The rules with their counters; for :class:`~asyncdp.testing.faults.layer.Faults`."""
        return self._rules

    @property
    def counts(self) -> Counter[str]:
        """Number of faults injected so far, by kind."""
        return Counter(fault.kind for fault in self.injected)

    @property
    def idle(self) -> tuple[Rule, ...]:
        """The rules that injected nothing so far; ``assert not plan.idle`` checks that a test met all its faults."""
        return tuple(live.rule for live in self._rules if not (live.struck or live.stage))

    def report(self) -> str:
        """Describe the seed, the rules and the injected faults in a few lines, for the report of a failed test."""
        lines = [f"{self!r}", f"{len(self.injected)} fault(s) injected: {dict(self.counts)}"]
        left_out = max(0, len(self.injected) - REPORTED)
        first = self.injected[: REPORTED // 2]
        lines += [f"  {fault!r}" for fault in first]
        if left_out:
            lines.append(f"  ... {left_out} more ...")
        lines += [f"  {fault!r}" for fault in self.injected[len(first) + left_out :]]
        lines += [f"never struck: {rule.to_dict()}" for rule in self.idle]
        return "\n".join(lines)

    def checked_by(self, check: Callable[[Rule], None]) -> None:
        """Validate the present rules and all that are added later with ``check``; called by the fault layer."""
        for rule in self.rules:
            check(rule)
        self._checks.append(check)

    def add(self, rule: Rule) -> FaultPlan:
        """Append a rule; allowed while the plan is in use.

        Raises:
            ValueError: A stack that uses the plan does not have the host or port that the rule names.
        """
        for check in self._checks:
            check(rule)
        self._rules.append(LiveRule(rule, random.Random(f"{self.seed}:{len(self._rules)}")))  # noqa: S311
        return self

    def add_fault(self, kind: str, options: Mapping[str, Any], when: When, **where: str | None) -> FaultPlan:
        """Add a rule of this kind that applies to all requests."""
        return On(self, Where()).add_fault(kind, options, when, **where)

    def on(
        self,
        verb: str | None = None,
        *,
        call: str | None = None,
        host: str | None = None,
        port: int | None = None,
        sample: str | None = None,
        partition: str | None = None,
    ) -> On:
        """Select the requests that the next fault applies to: ``plan.on("put_samples", host="host-0").refuse()``.

        The selection holds for that one fault; later faults apply to all requests, or to those that another ``on()``
        selects. A verb selects every request that is made for it: for a get the look-up as well as the reads. The
        arguments are those of :class:`~asyncdp.testing.faults.rule.Where`; None means any.

        Raises:
            ValueError: The verb or the call does not exist.
        """
        return On(self, Where(verb, call, host, port, sample, partition))

    def cut(self, host: str, *, at_s: float | None = None, for_s: float | None = None) -> FaultPlan:
        """Cut a host off the network: no request reaches it and no reply leaves it.

        Args:
            host: Id of the host.
            at_s: Start, in seconds since the first request under the plan; None: at once.
            for_s: Duration in seconds; None: until the end.
        """
        return self.add(Rule("cut", Where(host=host), at_s=at_s, for_s=for_s))

    def crash_host(
        self, host: str, *, at_s: float = 0.0, restart_at_s: float | None = None, adopt: bool = True
    ) -> FaultPlan:
        """Kill a slot host at ``at_s`` and start it again at ``restart_at_s`` (None: never).

        Needs a transport whose hosts run in this process (memory). The times are checked at each request.

        Args:
            host: Id of the host.
            at_s: Seconds since the first request under the plan.
            restart_at_s: Seconds since the first request under the plan; None: the host stays down.
            adopt: Whether the restarted host recovers its slots; otherwise it is empty and in a new epoch.
        """
        return self.add(
            Rule("crash_host", Where(host=host), at_s=at_s, options=given(restart_at_s=restart_at_s, adopt=adopt))
        )

    def layer(self, inner: Client) -> Faults:
        """Return the fault layer around ``inner``; list ``plan.layer`` among the layers of a stack to use it."""
        return Faults(inner, self)

    layer.innermost = True  # type: ignore[attr-defined]  # stack() and build_data_plane_client() keep it at the transport

    def among(self, layers: Iterable[Any]) -> list[Any]:
        """Return the layers of a config with this plan, and no other, as the last of them."""
        others = [one for one in layers if not (isinstance(one, str) and one.startswith(_TICKET))]
        return [*others, _TICKET + self.ticket()]

    def ticket(self) -> str:
        """Return a text by which :func:`plan_of` finds this plan; it includes the rules, for another process."""
        return json.dumps({"of": self._name, **json.loads(self.to_json())})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as a ticket: unpickled in this process it is the same object, so that all clients share its counts."""
        return plan_of, (self.ticket(),)

    def stop(self) -> None:
        """Inject no further faults; crashed hosts are still restarted at their time."""
        self._rules = [live for live in self._rules if live.stage == 1]

    def fresh(self) -> FaultPlan:
        """Return a new plan with the same seed and rules and no faults injected."""
        return FaultPlan(self.seed, self.rules)

    # -- text

    def to_json(self) -> str:
        """Return the seed and the rules as JSON."""
        return json.dumps({"seed": self.seed, "rules": [rule.to_dict() for rule in self.rules]})

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Parse a plan from JSON in the form of :meth:`to_json`.

        Raises:
            ValueError: The text is not JSON, has an unknown key, or has an invalid value.
        """
        try:
            read = json.loads(text)
        except json.JSONDecodeError as err:
            raise ValueError(f"a fault plan as text is JSON, not {text!r:.80}: {err}") from None
        if not isinstance(read, dict):
            raise ValueError(f"a fault plan is an object with seed and rules, not {read!r:.80}")  # noqa: TRY004
        if unknown := read.keys() - {"seed", "rules"}:
            raise ValueError(f"{min(unknown)}: a fault plan has seed and rules only")
        rules = read.get("rules", [])
        if not isinstance(rules, list):
            raise ValueError(f"rules: must be a list, not {rules!r:.80}")  # noqa: TRY004
        return cls(read.get("seed", 0), [Rule.from_dict(rule) for rule in rules])

    def __repr__(self) -> str:
        """Show the rules."""
        return f"FaultPlan(seed={self.seed}, rules={[rule.to_dict() for rule in self.rules]})"


def plan_of(ticket: str) -> FaultPlan:
    """Return the plan of a ticket; in a process other than the plan's, a copy of it that has its own counts.

    Warns:
        RuntimeWarning: The ticket is from another process, and the plan has rules.
    """
    read = json.loads(ticket)
    name: str = read.pop("of")
    there, here = int(name.partition("-")[0]), os.getpid()
    key = name if there == here else f"{name}@{here}"
    plan = _PLANS.get(key)
    if plan is None:
        plan = _PLANS[key] = FaultPlan.from_json(json.dumps(read))
        if there != here and plan.rules:
            text = f"the fault plan of process {there} reaches this one as a copy, whose counts that test does not see"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
    return plan
