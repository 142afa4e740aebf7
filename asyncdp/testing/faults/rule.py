"""A rule of a fault plan: which requests it applies to, when, and which fault they meet."""

from __future__ import annotations

import builtins
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from asyncdp import errors
from asyncdp.calls import Call, slots

from ..verbs import VERBS
from .trigger import Trigger

__all__ = ["KINDS", "LiveRule", "Rule", "Where"]

Check = Callable[[Any], bool]

#: Requests that look up where samples lie or may be placed. Rules for one sample do not apply to them, since they name
#: other samples as well.
LOOKUPS = ("Locate", "Place")
#: Requests that reconcile the pending outcome of an earlier call; they carry the verb of the call that waits for them.
RECONCILING = ("Abort", "AbandonClaim", "Invalidate", "Resolve")
#: Verbs that a rule may select: those that make requests, and ``close``, which reconciles pending outcomes.
SELECTABLE = (*sorted(VERBS), "close")


def _number(least: float = 0.0) -> Check:
    return lambda v: isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and v >= least


def _whole(least: int) -> Check:
    return lambda v: isinstance(v, int) and not isinstance(v, bool) and v >= least


def _text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


#: The options of each kind of fault: {kind: {option: predicate that accepts valid values}}.
KINDS: Mapping[str, Mapping[str, Check]] = {
    "delay": {"seconds": _number(), "p50_s": _number(1e-9), "p99_s": _number(1e-9), "reply": _flag},
    "error": {"error": _text, "message": lambda v: isinstance(v, str), "attributes": _mapping},
    "lose_request": {"raises": _text},
    "lose_reply": {"raises": _text},
    "refuse": {},
    "reset": {},
    "silent": {},
    "not_ready": {"retry_after_s": _number()},
    "truncate": {},
    "corrupt": {"schema": _flag},
    "stale": {},
    "recycle": {"how": lambda v: v in ("cleared", "reborn", "moved")},
    "cut": {},
    "crash_host": {"restart_at_s": _number(), "adopt": _flag},
}
#: Kinds that hit the payload of single slots; their ``p``, ``after`` and ``times`` count slots instead of requests.
SLOT_KINDS = frozenset({"corrupt", "recycle", "stale", "truncate"})
#: Kinds that apply to one host and require its id.
HOST_KINDS = frozenset({"crash_host", "cut"})


def error_named(name: str) -> type[Exception]:
    """Return the exception type of this name, from asyncdp.errors or the built-in ones.

    Raises:
        ValueError: No exception type has this name.
    """
    found = getattr(errors, name, None) if name in errors.__all__ else getattr(builtins, name, None)
    if isinstance(found, type) and issubclass(found, Exception):
        return found
    raise ValueError(f"error: {name!r} is neither an error of asyncdp nor a built-in exception")


def call_names() -> set[str]:
    """Return the names of all call types, including the slot calls."""
    assert issubclass(slots.ReadSlots, Call)  # noqa: S101 - and so they are defined by now
    found: set[str] = set()
    todo: list[type[Any]] = [Call]
    while todo:
        for kind in todo.pop().__subclasses__():
            found.add(kind.__name__)
            todo.append(kind)
    return found


@dataclass(frozen=True, slots=True)
class Where:
    """Selects the requests that a rule applies to; None means any.

    Attributes:
        verb: User's verb that the request is made for, such as ``"get_samples"``.
        call: Name of the request's type, such as ``"ReadSlots"``, or of a base class of it.
        host, port: Id of the slot host that the request goes to, and the number of the port.
        sample: Id of a sample that the request names. Only this sample fails where the kind allows it: look-ups and
            the other slots of a read are not hit.
        partition: Id of the partition that the request concerns.
    """

    verb: str | None = None
    call: str | None = None
    host: str | None = None
    port: int | None = None
    sample: str | None = None
    partition: str | None = None

    def __post_init__(self) -> None:
        """Check that the verb and the call exist and that the other values have the right type."""
        if self.verb is not None and self.verb not in SELECTABLE:
            raise ValueError(f"verb: {self.verb!r} is not one of {list(SELECTABLE)}")
        if self.call is not None and self.call not in (known := call_names()):
            raise ValueError(f"call: {self.call!r} is not one of {sorted(known)}")
        if self.port is not None and not _whole(0)(self.port):
            raise ValueError(f"port: must be a port number, not {self.port!r}")
        for name in ("host", "sample", "partition"):
            if getattr(self, name) is not None and not _text(getattr(self, name)):
                raise ValueError(f"{name}: must be a non-empty string, not {getattr(self, name)!r}")


#: The errors of kinds that have no option for it: {kind: function of the options}.
_RAISED: Mapping[str, Callable[[Mapping[str, Any]], Exception]] = {
    "refuse": lambda _: ConnectionRefusedError("injected: connection refused"),
    "reset": lambda _: ConnectionResetError("injected: connection reset"),
    "not_ready": lambda options: errors.DataPlaneNotReady(
        "injected: not ready", retry_after_s=options.get("retry_after_s")
    ),
}
_WHEN: Mapping[str, Check] = {
    "p": lambda v: _number()(v) and v <= 1,
    "times": _whole(1),
    "after": _whole(0),
    "at_s": _number(),
    "for_s": lambda v: _number()(v) and v > 0,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """Describes one kind of fault: which requests meet it, and when.

    Attributes:
        kind: One of :data:`KINDS`.
        where: Selects the requests that it applies to.
        p: Probability that a matching request is hit.
        times: Maximum number of hits; None: no limit.
        after: Number of matching requests that pass before the first hit.
        at_s: Start, in seconds since the first request under the plan; None: the rule starts with its first fault.
        for_s: Duration in seconds from the start; None: until the end.
        options: Options of the kind, see :data:`KINDS`.

    Raises:
        ValueError: A value is invalid; the message names it.
    """

    kind: str
    where: Where = field(default_factory=Where)
    p: float = 1.0
    times: int | None = None
    after: int = 0
    at_s: float | None = None
    for_s: float | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every value."""
        if self.kind not in KINDS:
            raise ValueError(f"kind: {self.kind!r} is not one of {sorted(KINDS)}")
        for name, fine in _WHEN.items():
            value = getattr(self, name)
            if not fine(value) and not (value is None and name in ("times", "at_s", "for_s")):
                raise ValueError(f"{name}: {value!r} makes no sense for a rule of kind {self.kind!r}")
        for name, value in self.options.items():
            if name not in KINDS[self.kind]:
                raise ValueError(f"{name}: a rule of kind {self.kind!r} has no such option")
            if not KINDS[self.kind][name](value):
                raise ValueError(f"{name}: {value!r} makes no sense for a rule of kind {self.kind!r}")
        self._check_kind()

    def _check_kind(self) -> None:
        """Check the conditions that involve several values."""
        options = self.options
        if self.kind == "delay" and ("seconds" in options) == ("p50_s" in options):
            raise ValueError("seconds: a delay is either seconds or p50_s and p99_s")
        if self.kind == "delay" and options.get("p99_s", math.inf) < options.get("p50_s", 0.0):
            raise ValueError(f"p99_s: {options['p99_s']!r} is below p50_s")
        if self.kind in HOST_KINDS and self.where.host is None:
            raise ValueError(f"host: a rule of kind {self.kind!r} is about one host")
        if self.kind == "crash_host":
            if options.get("restart_at_s", math.inf) <= (self.at_s or 0.0):
                raise ValueError(f"restart_at_s: {options['restart_at_s']!r} is not after at_s")
            if self.where != Where(host=self.where.host) or (self.p, self.times, self.after) != (1.0, None, 0):
                raise ValueError("crash_host: it happens at its time to one host; it has no other conditions")
        if self.kind == "error" or "raises" in options:
            self.make_error()

    def make_error(self) -> Exception | None:
        """Return a new exception of the type that this rule raises; None where it leaves the request unanswered."""
        options = self.options
        if self.kind in _RAISED:
            return _RAISED[self.kind](options)
        name = options.get("error", options.get("raises"))
        if name is None:
            return None
        message = options.get("message", f"injected: {self.kind}")
        try:
            return error_named(name)(message, **options.get("attributes", {}))
        except TypeError as err:
            raise ValueError(f"error: {name} cannot be made of {dict(options)}: {err}") from err

    def wants(self, kinds: frozenset[str], verb: str) -> bool:
        """Whether the rule applies to requests of this type and verb; host, port and ids are not checked here.

        Args:
            kinds: Names of the request's type and of its base classes.
            verb: User's verb that the request is made for.
        """
        where = self.where
        if where.verb is not None and where.verb != verb:
            return False
        if where.call is not None:
            return where.call in kinds
        if self.kind in SLOT_KINDS:
            return "ReadSlots" in kinds
        if self.kind in ("lose_reply", "lose_request") and where.verb is not None:
            decided_by = {kind.__name__ for kind in VERBS[verb].decided_by} if verb in VERBS else set()
            return not kinds.isdisjoint(decided_by) if decided_by else kinds.isdisjoint(RECONCILING)
        return where.sample is None or kinds.isdisjoint(LOOKUPS)

    def to_dict(self) -> dict[str, Any]:
        """Return a flat dict of the values that differ from their defaults."""
        flat: dict[str, Any] = {"kind": self.kind}
        for f in fields(Where):
            if (value := getattr(self.where, f.name)) is not None:
                flat[f.name] = value
        for name, default in (("p", 1.0), ("times", None), ("after", 0), ("at_s", None), ("for_s", None)):
            if (value := getattr(self, name)) != default:
                flat[name] = value
        return {**flat, **self.options}

    @classmethod
    def from_dict(cls, flat: Mapping[str, Any]) -> Rule:
        """Make a rule from a dict in the form of :meth:`to_dict`.

        Raises:
            ValueError: A key is unknown or a value is invalid; the message names it.
        """
        if not isinstance(flat, Mapping):
            raise ValueError(f"a rule is an object with a kind, not {flat!r:.80}")  # noqa: TRY004
        rest = dict(flat)
        if "kind" not in rest:
            raise ValueError(f"kind: missing in {rest}")
        kind = rest.pop("kind")
        where = Where(**{f.name: rest.pop(f.name) for f in fields(Where) if f.name in rest})
        when = {name: rest.pop(name) for name in _WHEN if name in rest}
        return cls(kind, where, options=rest, **when)


class LiveRule(Trigger):
    """A rule in use, with its trigger and random source."""

    rng: random.Random

    def __init__(self, rule: Rule, rng: random.Random) -> None:
        """Start with no hits."""
        super().__init__(rule.times, rule.after, p=rule.p, at_s=rule.at_s, for_s=rule.for_s, rng=rng)
        self.rule = rule
        self.stage = 0  # for crash_host: 0 up, 1 crashed, 2 restarted
