"""A fault plan: rules, and what they did so far."""

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
from .live import LiveRule
from .rule import Rule, Where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from asyncdp.client import Client

    from .injected import Injected
    from .layer import Faults

__all__ = ["FaultPlan", "plan_of"]

#: The plans of this process by their tickets, so that every client of a plane meets the same plan.
_PLANS: WeakValueDictionary[str, FaultPlan] = WeakValueDictionary()

#: Faults that a report lists: the first half of them and the last, just before the failure.
REPORTED = 20


class FaultPlan(Effects):
    """Which faults happen to the requests of a stack, reproducibly.

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

    The same seed and the same requests in the same order give the same faults; each rule has a random source of its
    own, so that one rule more does not change what the others do. A plan remembers what it did (``injected``,
    ``counts``): take one per test, or ``fresh()``.

    Args:
        seed: Of all its random choices.
        rules: Rules to begin with.
    """

    def __init__(self, seed: int = 0, rules: Iterable[Rule] = ()) -> None:
        """Begin with no faults done."""
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
        """The rules with their counts, for the layer."""
        return self._rules

    @property
    def counts(self) -> Counter[str]:
        """How many faults of each kind happened."""
        return Counter(fault.kind for fault in self.injected)

    @property
    def idle(self) -> tuple[Rule, ...]:
        """The rules that did nothing so far; where a test should have met all its faults: ``assert not plan.idle``."""
        return tuple(live.rule for live in self._rules if not (live.done or live.stage))

    def report(self) -> str:
        """Tell seed, rules and faults in a few lines, for a test that failed."""
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
        """Have each rule that is there, or is added later, checked against a stack; for the layer."""
        for rule in self.rules:
            check(rule)
        self._checks.append(check)

    def add(self, rule: Rule) -> FaultPlan:
        """Append a rule; may be done while the plan is in use.

        Raises:
            ValueError: The stack that the plan is in use in has no such host or port.
        """
        for check in self._checks:
            check(rule)
        self._rules.append(LiveRule(rule, random.Random(f"{self.seed}:{len(self._rules)}")))  # noqa: S311
        return self

    def add_fault(self, kind: str, options: Mapping[str, Any], when: When, **where: str | None) -> FaultPlan:
        """Add a rule of this kind for all requests."""
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
        """Choose requests; the fault follows: ``plan.on("put_samples", host="host-0").refuse()``.

        It chooses for the one fault that follows; faults after that are about all requests, or about what the next
        ``on()`` chooses. A verb chooses every request that is made for it: of a get the look-up as well as the reads.

        Raises:
            ValueError: There is no such verb or call.
        """
        return On(self, Where(verb, call, host, port, sample, partition))

    def cut(self, host: str, *, at_s: float | None = None, for_s: float | None = None) -> FaultPlan:
        """Cut a host off the network: nothing that is sent to it arrives, nothing answers."""
        return self.add(Rule("cut", Where(host=host), at_s=at_s, for_s=for_s))

    def crash_host(
        self, host: str, *, at_s: float = 0.0, restart_at_s: float | None = None, adopt: bool = True
    ) -> FaultPlan:
        """Kill a slot host at ``at_s`` and start it again at ``restart_at_s`` (None: never).

        Needs a transport whose hosts can be controlled from here (memory). Times are looked at with each request.

        Args:
            host: Its id.
            at_s: Seconds since the first request under the plan.
            restart_at_s: As ``at_s``.
            adopt: Whether it finds its slots again; else it comes back empty, in a new epoch.
        """
        return self.add(
            Rule("crash_host", Where(host=host), at_s=at_s, options=given(restart_at_s=restart_at_s, adopt=adopt))
        )

    def layer(self, inner: Client) -> Faults:
        """Make the fault layer, which stands just above the transport; to be used in a list of layers."""
        from .layer import Faults

        return Faults(inner, self)

    layer.innermost = True  # type: ignore[attr-defined]  # stack() and build_data_plane_client() keep it at the transport

    def ticket(self) -> str:
        """Return the text by which :func:`plan_of` finds this plan; with its rules, for another process."""
        return json.dumps({"of": self._name, **json.loads(self.to_json())})

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by ticket: unpickled in this process it is the same plan, so that its counts are those of all."""
        return plan_of, (self.ticket(),)

    def stop(self) -> None:
        """Let no further fault happen; hosts that are down still come back at their time."""
        self._rules = [live for live in self._rules if live.stage == 1]

    def fresh(self) -> FaultPlan:
        """Return a plan of the same rules that has done nothing yet."""
        return FaultPlan(self.seed, self.rules)

    # -- text

    def to_json(self) -> str:
        """Write seed and rules."""
        return json.dumps({"seed": self.seed, "rules": [rule.to_dict() for rule in self.rules]})

    @classmethod
    def from_json(cls, text: str) -> FaultPlan:
        """Read a plan that :meth:`to_json`, or a person, wrote.

        Raises:
            ValueError: It is no JSON, or something in it is unknown or makes no sense.
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
    """Return the plan of a ticket; in another process than the plan's one of the same rules, which counts by itself.

    Warns:
        RuntimeWarning: It is another process, and the plan has rules.
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
