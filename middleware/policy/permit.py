"""One target, and the permits to use it once each.

A target (a port of a slot host) that fails is *quarantined*, that is not used, for a time. After that time it is
*half-open*: one call, the *probe*, may use it, and its outcome decides. Each call that uses a target holds a `Permit`
and ends it exactly once::

    healthy      failed          -> quarantined for base_s
    healthy      slow at first   -> resting
    resting      time is over    -> half-open
    quarantined  time is over    -> half-open
    half-open    probe failed    -> quarantined for twice as long, up to max_s
    half-open    probe released  -> half-open, the next call may probe
    any of them  succeeded       -> healthy (if the permit was taken since the quarantine began)
    healthy      outrun n times  -> resting

The decisions, and their reasons:

- **An outcome counts for the period in which its call was sent.** A permit has the period of its target; a quarantine,
  a failed probe and a recovery each begin a new one. So 256 calls that fail at the same moment count as one failure,
  and an old call neither lengthens nor lifts a quarantine that began after it.
- **Only a failed probe doubles the time.** If every target is quarantined, one is used all the same. If such a call
  fails, the quarantine starts over but does not get longer: otherwise a fault of one second under load would bring all
  ports to max_s, and all but the first one to recover would stay unused for minutes. While a probe is in flight, no
  other failure counts. A success of any call that was sent since the quarantine began lifts it, as a probe's would.
- **Failures are forgotten one by one**, one per decay_s without quarantine. So a target that fails again and again
  continues with long quarantines, and one that failed once an hour ago begins at base_s.
- **First contact is slow** (connections, memory registration). Until a target has answered once, being slow is no
  failure before first_contact_s have passed. But until then the target *rests*: it is used only if no other is
  healthy, since an unresponsive target would cost one attempt timeout after the other. After that time it gets a
  probe, and is quarantined if it is slow again. If it refuses a call, it is quarantined at once. A target that refused
  and was let back in is at its first contact again: if it is slow, its next probe waits for the end of that time.
- **A target that others outrun rests.** It is *outrun* if the same request was answered sooner by another target, to
  which it was sent later. Nobody waited long enough to know whether it is at fault, so that is no failure. But if it
  happens outruns times in a row without an answer in between, the target rests for rest_s, twice as long after each
  further time, up to base_s.

Sans-IO: `now` is in seconds on any monotonic clock and never goes back.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, fields
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K")


class Failure(enum.Enum):
    """How a target failed its caller."""

    REFUSED = "refused"
    """The target is certainly at fault: it refused or reset the connection, or sent a corrupt answer."""
    SLOW = "slow"
    """The target did not answer in time."""


class Change(enum.Enum):
    """How the end of a permit changed its target."""

    NONE = "none"
    QUARANTINED = "quarantined"
    """The target was quarantined, or its probe failed and it stays quarantined for longer."""
    EXTENDED = "extended"
    """The target was used while quarantined and failed again, so its quarantine starts over."""
    RECOVERED = "recovered"
    RESTS = "rests"
    """Other targets answered sooner several times in a row, so they are preferred for a time."""
    ENDED_TWICE = "ended_twice"
    """The permit had ended before, so nothing changed; this is a bug of the caller, which should log it."""


class Health(enum.Enum):
    """The state of a target."""

    HEALTHY = "healthy"
    RESTING = "resting"
    """Others are preferred for a time: the target has never answered and was slow, or others were faster several times
    in a row. Not a failure."""
    QUARANTINED = "quarantined"
    HALF_OPEN = "half_open"


class Verdict(NamedTuple):
    """Result of ending a permit; `for_s` is how long the target is quarantined from now, 0 if it is not."""

    change: Change
    failures: int = 0
    for_s: float = 0.0


class TargetSnapshot(NamedTuple):
    """State of one target, for metrics.

    `failures` is the number after decay; `until` is when the target may be probed, on the clock of `now`, or None.
    """

    health: Health
    failures: int
    until: float | None
    in_flight: int


_NOTHING = Verdict(Change.NONE)
_ENDED_TWICE = Verdict(Change.ENDED_TWICE)


@dataclass(frozen=True)
class QuarantineRules:
    """Times of a `Quarantine`, in seconds.

    Raises ValueError if one is not positive and finite, or max_s is below base_s.
    """

    base_s: float = 30.0
    """First quarantine: longer than a slot host takes to restart, and short enough to do without a healthy port."""
    max_s: float = 300.0
    """Longest quarantine: a probe every five minutes costs almost nothing, and finds a repaired port soon enough."""
    decay_s: float = 60.0
    """Time without a quarantine after which one failure is forgotten. The quarantines of 30, 60, 120, 240 and 300 s are
    five steps, so after max_s without failures all are forgotten: the longest quarantine and the memory of failures are
    equally long."""
    first_contact_s: float = 30.0
    """How long a target that has never answered may be slow. Connecting and registering memory take seconds, not
    minutes; a quarantine by mistake would cost base_s, so waiting for an unresponsive port costs no more than that."""
    forget_s: float = 900.0
    """Time after which an unused target is forgotten, so that memory does not grow with hosts that come and go."""
    outruns: int = 3
    """How often in a row a target is outrun before it rests. A healthy one is outrun by one request in twenty, where
    the second request is sent after the 95th percentile; by three in a row once in 8,000."""
    rest_s: float = 1.0
    """First rest of a target that is outrun: the request that ends it costs its caller one such delay."""

    def __post_init__(self) -> None:
        for field in fields(self):
            seconds = getattr(self, field.name)
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{field.name} must be positive and finite, not {seconds!r}")
        if self.max_s < self.base_s:
            raise ValueError(f"max_s ({self.max_s}) must not be below base_s ({self.base_s})")

    @property
    def max_failures(self) -> int:
        """Number of failures in a row that reaches max_s; counting more would only delay their decay."""
        return 1 + math.ceil(math.log2(self.max_s / self.base_s))

    def quarantine_s(self, failures: int) -> float:
        """Return the length of the quarantine after this many failures (at least 1)."""
        return min(self.max_s, math.ldexp(self.base_s, failures - 1))


class Target(Generic[K]):
    """The state of one target."""

    __slots__ = (
        "failures",
        "in_flight",
        "key",
        "known",
        "last_used",
        "needs_check",
        "outruns",
        "patient_until",
        "period",
        "probe",
        "quarantined",
        "rules",
        "turn",
        "until",
        "unused",
    )

    def __init__(self, key: K, rules: QuarantineRules, turn: int, now: float) -> None:
        self.key = key
        self.rules = rules
        self.turn = turn  # next index in the rotation over the list of targets that begins with this one
        self.known = False  # it has answered at least once
        self.unused = True  # it has not been used yet, so its first contact has not begun
        self.patient_until = -math.inf  # if not known: until then, being slow is no failure
        self.quarantined = False  # in quarantine, or half-open after one
        self.needs_check = True  # unused, quarantined or resting: cannot be picked without further checks
        self.until = -math.inf  # if it needs a check, when it may be probed; if healthy, since when, for decay
        self.failures = 0  # before decay
        self.outruns = 0  # in a row, without an answer
        self.period = 0
        self.probe: Permit[K] | None = None
        self.in_flight = 0
        self.last_used = now

    def begin(self, now: float) -> None:
        """Record that the target is used for the first time."""
        self.unused = self.needs_check = False
        self.patient_until = now + self.rules.first_contact_s

    def wants_probe(self, now: float) -> bool:
        """Return whether a target that needs a check may be probed: its time is over and no probe is in flight."""
        return self.until <= now and self.probe is None

    def rests(self, now: float) -> bool:
        """Return whether the target rests: it was slow at its first contact, or others have outrun it."""
        return self.needs_check and not self.quarantined and now < self.until

    def rank(self, now: float) -> tuple[float, int]:
        """Return the rank of a target that needs a check, for when none is healthy: lower is better, resting best."""
        return (-math.inf, 0) if self.rests(now) else (max(self.until, now), self.failures)

    def health(self, now: float) -> Health:
        """Return the state of the target."""
        if not self.needs_check or self.unused:
            return Health.HEALTHY
        if self.until <= now:
            return Health.HALF_OPEN
        return Health.QUARANTINED if self.quarantined else Health.RESTING

    def failures_left(self, now: float) -> int:
        """Return the number of failures after decay."""
        if self.quarantined or not self.failures:
            return self.failures
        forgotten = int((now - self.until) // self.rules.decay_s)  # negative while it rests
        return max(0, self.failures - max(0, forgotten))


class Permit(Generic[K]):
    """Permits one use of a target; has to be ended once with `succeeded`, `failed` or `released`.

    `target` is the key of the target; `probe` says whether this use is the probe of a half-open target. Ending a permit
    again changes nothing and returns `Change.ENDED_TWICE`. Made by `Quarantine.pick` only.
    """

    __slots__ = ("_period", "_state", "ended", "probe", "target")

    def __init__(self, state: Target[K]) -> None:
        self._state = state
        self.target = state.key
        self._period = state.period
        self.probe = False
        self.ended = False

    @property
    def outruns(self) -> int:
        """How often in a row others have outrun the target, without an answer in between."""
        return self._state.outruns

    @property
    def last_resort(self) -> bool:
        """Whether the target is used although it is quarantined or rests, since no other was better."""
        return self._state.needs_check and not self.probe

    def succeeded(self, now: float) -> Verdict:
        """End the permit: the target answered, possibly with an error that is not its fault."""
        if self.ended:
            return _ENDED_TWICE
        self.ended = True
        state = self._state
        state.in_flight -= 1
        state.outruns = 0
        if state.known and not state.needs_check and not self.probe:
            return _NOTHING
        self._give_probe_back()
        state.known = True
        if not state.needs_check or self._period != state.period:
            return _NOTHING
        state.needs_check = False
        state.until = now
        if not state.quarantined:
            return _NOTHING
        state.quarantined = False
        state.period += 1
        return Verdict(Change.RECOVERED, state.failures)

    def failed(self, failure: Failure, now: float) -> Verdict:
        """End the permit: the target is at fault."""
        if self.ended:
            return _ENDED_TWICE
        self.ended = True
        state = self._state
        state.in_flight -= 1
        self._give_probe_back()
        if self._period != state.period:
            return _NOTHING
        if failure is Failure.SLOW and not state.known and now < state.patient_until:
            if not state.quarantined or self.probe:
                state.needs_check = True
                state.until = state.patient_until
            return _NOTHING
        if not state.quarantined or self.probe:
            state.failures = min(state.failures_left(now) + 1, state.rules.max_failures)
            state.quarantined = state.needs_check = True
            state.period += 1
            return self._start_clock(failure, now, Change.QUARANTINED)
        if state.probe is not None:
            return _NOTHING
        # Starting the time over also makes the next call without a healthy target use another one.
        return self._start_clock(failure, now, Change.EXTENDED)

    def released(self) -> Verdict:
        """End the permit without a verdict: the call was cancelled, not sent, or failed for an unrelated reason."""
        if self.ended:
            return _ENDED_TWICE
        self.ended = True
        self._state.in_flight -= 1
        self._give_probe_back()
        return _NOTHING

    def outrun(self, now: float) -> Verdict:
        """End the permit: another target answered the same request sooner, although it was sent there later."""
        if self.ended:
            return _ENDED_TWICE
        state, rules = self._state, self._state.rules
        state.outruns += 1
        too_often = state.outruns - rules.outruns
        if too_often >= 0 and self._period == state.period and (self.probe or not state.quarantined):
            for_s = min(rules.base_s, math.ldexp(rules.rest_s, min(too_often, 64)))
            state.needs_check = True
            state.until = max(state.until, now + for_s)
            self.released()
            return Verdict(Change.RESTS, state.failures, for_s)
        return self.released()

    def _start_clock(self, failure: Failure, now: float, change: Change) -> Verdict:
        state, rules = self._state, self._state.rules
        for_s = rules.quarantine_s(state.failures)
        state.until = now + for_s
        if failure is Failure.REFUSED:
            state.patient_until = state.until + rules.first_contact_s
        return Verdict(change, state.failures, for_s)

    def _give_probe_back(self) -> None:
        if self.probe:
            self._state.probe = None
