"""The recovery of a controller from an outage of the plane, as a state machine. Sans-IO: it neither waits nor calls.

Each state has one job, which the driver (:class:`~asyncdp.recovery.loop.RecoveryLoop`) does; how the job ended is an
event, and the table below says which state follows. The gate is open in OPEN only. ::

    WAITING --waited--> PINGING --done--> REBUILDING --done--> EVICTING --done--> RELEASING --done--> OPEN
       ^                   |                  |                   |                   |                |
       +---------- failed -+------------------+-------------------+-------------------+      fault ----+

    from every state but OPEN: expired, broken --> GIVEN_UP

A plane may answer pings and listings, and fail whenever data is asked for: then the gate opens and is closed again, for
ever. So outages that follow one another without progress in between count as one for the bound and for the story.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import random

    from asyncdp.middleware.policy.backoff import Backoff

__all__ = ["TRANSITIONS", "Event", "RecoveryMachine", "RecoveryStep", "State"]


class State(StrEnum):
    """Where a recovery is; the job of each state."""

    WAITING = "waiting"
    """Wait before the next ping."""
    PINGING = "pinging"
    """Ask whether the plane answers."""
    REBUILDING = "rebuilding"
    """Declare partitions anew, and count the capacity that is taken from a listing."""
    EVICTING = "evicting"
    """Remove groups that were trained, and evict those that can never be: incomplete, stale, lost."""
    RELEASING = "releasing"
    """Release the claims of owners that are gone."""
    OPEN = "open"
    """Nothing: the gate is open, until a fault is reported."""
    GIVEN_UP = "given_up"
    """Nothing: it does not recover any more."""


class Event(StrEnum):
    """How a job ended, or what happened meanwhile."""

    FAULT = "fault"
    """A call of the controller failed: the plane does not answer, or not as it should."""
    WAITED = "waited"
    """The wait is over."""
    DONE = "done"
    """The job is done."""
    FAILED = "failed"
    """The job failed: the plane is still away, or away again."""
    EXPIRED = "expired"
    """The outage, with those before it since the last progress, took longer than it may."""
    BROKEN = "broken"
    """The job failed for a reason that waiting does not mend."""


_JOBS: Final = (State.PINGING, State.REBUILDING, State.EVICTING, State.RELEASING)
#: The whole behaviour: {(state, event): next state}. A fault that is not listed is only noted.
TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.OPEN, Event.FAULT): State.WAITING,
    (State.WAITING, Event.WAITED): State.PINGING,
    (State.PINGING, Event.DONE): State.REBUILDING,
    (State.REBUILDING, Event.DONE): State.EVICTING,
    (State.EVICTING, Event.DONE): State.RELEASING,
    (State.RELEASING, Event.DONE): State.OPEN,
    **{(state, Event.FAILED): State.WAITING for state in _JOBS},
    **{(state, event): State.GIVEN_UP for state in (State.WAITING, *_JOBS) for event in (Event.EXPIRED, Event.BROKEN)},
}


@dataclass(frozen=True, slots=True)
class RecoveryStep:
    """One step of a recovery, as told to ``on_event`` and in the story of one that was given up.

    Attributes:
        outage: Number of the outage, from 0: the recovery with which a controller starts.
        after_s: Seconds since that outage began.
        state: State in which it happened.
        event: What happened.
        next_state: State that follows.
        detail: More about it: counts, or the text of an error.
    """

    outage: int
    after_s: float
    state: State
    event: Event
    next_state: State
    detail: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return one line."""
        more = "".join(f", {name}: {value}" for name, value in self.detail.items())
        return f"outage {self.outage}, {self.after_s:.2f} s: {self.state} -> {self.next_state}: {self.event}{more}"


class RecoveryMachine:
    """Carries one controller through one outage after another. It begins in PINGING: a start is a recovery as well.

    Args:
        backoff: Waits before pings; they grow until the gate has been open for ``settled_s``, so a plane that answers
            pings and refuses all else is not asked more and more.
        give_up_after_s: Seconds that outages may take together which follow one another without progress: each from
            the beginning of the call that failed to the open gate. The gate being open for so long counts as progress.
        settled_s: Seconds for which the gate has to be open before the next outage begins with short waits.
        rng: Source of randomness.
        now: Monotonic seconds.
        story_steps: Number of steps since the last progress that are kept: the first half and the last.

    Attributes:
        state: Where it is.
        outage: Number of the outage, from 0.
        first_outage: Number of the first outage since the last progress.
        recoveries: Number of times that the gate was opened.
    """

    def __init__(
        self,
        backoff: Backoff,
        rng: random.Random,
        now: float,
        *,
        give_up_after_s: float = 600.0,
        settled_s: float = 30.0,
        story_steps: int = 200,
    ) -> None:
        """Begin in PINGING at ``now``."""
        if not give_up_after_s > 0:
            raise ValueError(f"give_up_after_s must be positive, but is {give_up_after_s}")
        self.state = State.PINGING
        self.outage = 0
        self.first_outage = 0
        self.recoveries = 0
        self._backoff = backoff
        self._rng = rng
        self._give_up_after_s = give_up_after_s
        self._settled_s = settled_s
        self._story_steps = story_steps
        self._began = now
        self._opened = now
        self._spent_s = 0.0  # by earlier outages since the last progress, and by the call that failed
        self._attempt = 0
        self._wait_until = now
        self._first: list[RecoveryStep] = []
        self._last: list[RecoveryStep] = []
        self._left_out = 0

    @property
    def gate_is_open(self) -> bool:
        """Whether calls may be made."""
        return self.state is State.OPEN

    @property
    def expires(self) -> float:
        """When the recovery has to be over, in monotonic seconds; meaningless while the gate is open."""
        return self._began + self._give_up_after_s - self._spent_s

    @property
    def wait_until(self) -> float:
        """When the wait of WAITING is over, in monotonic seconds."""
        return self._wait_until

    @property
    def story(self) -> tuple[RecoveryStep, ...]:
        """The steps of the newest outage, and of those before it since the last progress: the first and the last."""
        return (*self._first, *self._last)

    def progressed(self) -> None:
        """Note that a group was made or trained: outages that are over count no more for the bound."""
        self._spent_s = 0.0
        self.first_outage = self.outage + (self.state is State.OPEN)
        steps = [step for step in self.story if step.outage >= self.first_outage]
        if len(steps) < len(self._first) + len(self._last):
            half = self._story_steps // 2
            self._first, self._last, self._left_out = steps[:half], steps[half:], 0

    def handle(
        self,
        event: Event,
        now: float,
        detail: dict[str, Any] | None = None,
        *,
        retry_after_s: float | None = None,
        took_s: float = 0.0,
    ) -> RecoveryStep:
        """Go to the next state, and return the step.

        Args:
            event: What happened.
            now: Monotonic seconds.
            detail: More about it, for the story.
            retry_after_s: Seconds for which a backend that answers wants to be left alone; None: it said nothing.
            took_s: Of a fault: seconds that the call took which failed.

        Raises:
            ValueError: The event cannot happen in this state.
        """
        at = self.state
        following = TRANSITIONS.get((at, event))
        if following is None:
            if event is not Event.FAULT:
                raise ValueError(f"{event} cannot happen while {at}")
            following = at
        if at is State.OPEN and following is not State.OPEN:
            self._begin(now, max(0.0, min(took_s, now - self._opened)))
        if following is State.WAITING and at is not State.WAITING:
            self._attempt += 1
            self._wait_until = now + self._backoff.not_ready_s(retry_after_s, self._attempt, self._rng)
        if following is State.OPEN and at is not State.OPEN:
            self.recoveries += 1
            self._opened = now
            self._spent_s += now - self._began
        self.state = following
        step = RecoveryStep(self.outage, now - self._began, at, event, following, detail or {})
        self._note(step)
        return step

    def _begin(self, now: float, took_s: float) -> None:
        """Begin a new outage, ``took_s`` after the call began that failed."""
        calm_s = now - took_s - self._opened
        if calm_s >= self._give_up_after_s:
            self.progressed()
        self.outage += 1
        self._began = now
        self._spent_s += took_s
        if calm_s >= self._settled_s:
            self._attempt = 0

    def _note(self, step: RecoveryStep) -> None:
        half = self._story_steps // 2
        if len(self._first) < half:
            self._first.append(step)
            return
        self._last.append(step)
        if len(self._last) > half:
            del self._last[0]
            self._left_out += 1

    @property
    def left_out(self) -> int:
        """Number of steps that the story leaves out, between its first and its last half."""
        return self._left_out
