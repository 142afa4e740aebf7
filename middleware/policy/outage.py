"""Coordinates the calls that wait for a host, or the directory, that does not answer.

A supervised process that died is back within seconds. Retries do not bridge that time: four attempts are over before it
has started, and more attempts would let every call probe on its own. So the calls wait together. One of the calls that
wait for a host, the *leader*, probes it; the answer counts for all, and if the leader stops (it is out of time or
cancelled), another call takes its place. However many calls wait, the host is probed once per pause.

The *patience* of a user call is the number of seconds that it may wait in total, for whatever hosts, so that a call
with many rounds over many hosts does not wait for each of them in turn.

Sans-IO: `now` is in seconds on any monotonic clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

__all__ = ["Answer", "Outage", "Patience", "Waiter"]

E = TypeVar("E")

#: Longest pause between two probes, in seconds; a call notices at most this much late that a host is back.
PAUSE_S = 0.5
#: Pause before the second probe, in seconds; each further pause is twice as long.
FIRST_PAUSE_S = 0.1


class Answer(Enum):
    """Result of probing whether a host answers again."""

    BACK = "back"
    NOT_YET = "not yet"  # it does not answer, but is expected to come back
    UNEXPECTED = "unexpected"  # it does not answer, and is not expected to come back


@dataclass(slots=True)
class Waiter:
    """One waiting call; ``seen`` is the number of answers that it has taken into account."""

    seen: int
    waited: bool = False


@dataclass(slots=True)
class Outage(Generic[E]):
    """One host, or the directory, that does not answer, with the calls that wait for it.

    Attributes:
        make_event: Makes the event on which the other calls wait while the leader probes.
        waiting: Number of waiting calls; when it is 0 again the outage may be forgotten.
        asked: Number of probes, of all calls together.
        turn: Event that is to be set when the leader has finished.
    """

    make_event: Callable[[], E]
    waiting: int = 0
    asked: int = 0
    _led: bool = False
    _answers: int = 0
    _latest: Answer = Answer.NOT_YET
    _missed: bool = False
    turn: E = field(init=False)

    def __post_init__(self) -> None:
        """Start without a leader."""
        self.turn = self.make_event()

    def join(self) -> Waiter:
        """Add a waiting call."""
        self.waiting += 1
        return Waiter(self._answers)

    def leave(self) -> None:
        """Remove a waiting call."""
        self.waiting -= 1

    def lead(self) -> bool:
        """Become the leader and return True; return False if there is one: then wait for ``turn``.

        The leader has to call :meth:`probed` when it has finished.
        """
        if self._led:
            return False
        self._led = True
        return True

    def pause_s(self, rng: random.Random) -> float:
        """Return how long the leader waits before its probe: 0 for the first, then longer each time, up to ``PAUSE_S``.

        Each pause is at least half of its ceiling, which limits the number of probes during an outage.
        """
        if not self.asked:
            return 0.0
        ceiling = min(PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.asked - 1, 16))
        return rng.uniform(ceiling / 2, ceiling)

    def probed(self, answer: Answer | None) -> E:
        """End leading, with the answer to the probe (None: no answer); return the event to set for the other calls."""
        self._led = False
        if answer is not None:
            self._answers += 1
            self._latest = answer
            self._missed = self._missed or answer is Answer.NOT_YET
        turn, self.turn = self.turn, self.make_event()
        return turn

    def verdict(self, waiter: Waiter) -> Answer | None:
        """Return what the answers since a call last looked mean for it, or None if there were none.

        A host that was expected back when a call began to wait is waited for until the call's patience ends, even if it
        is not expected any more: the reason to expect it, its last heartbeat, becomes outdated during the wait. A host
        that answers the first probe was not away, so the call failed for another reason, for which there are attempts:
        the result is UNEXPECTED.
        """
        if self._answers == waiter.seen:
            return None
        waiter.seen = self._answers
        answer = self._latest
        if answer is Answer.BACK and not self._missed:
            answer = Answer.UNEXPECTED
        elif answer is Answer.UNEXPECTED and waiter.waited:
            answer = Answer.NOT_YET
        waiter.waited = True
        return answer


@dataclass(slots=True)
class _Spent:
    """The time that a user call has waited so far, in seconds, and its current waits, which may overlap."""

    deadline: float
    total_s: float = 0.0
    waits: int = 0
    since: float = 0.0


class Patience:
    """Limits how long each user call may wait in total.

    Args:
        seconds: The limit in seconds; 0: no call waits.
    """

    #: Number of calls above which those past their deadline are forgotten.
    REMEMBERED = 256

    __slots__ = ("_calls", "seconds")

    def __init__(self, seconds: float) -> None:
        """Start without calls; raise ValueError if ``seconds`` is negative or not finite."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds must be finite and not negative, not {seconds!r}")
        self.seconds = seconds
        self._calls: dict[str, _Spent] = {}

    def left_s(self, op_id: str, now: float) -> float:
        """Return the seconds that a call may still wait."""
        spent = self._calls.get(op_id)
        if spent is None:
            return self.seconds
        return self.seconds - spent.total_s - (now - spent.since if spent.waits else 0.0)

    def begin(self, op_id: str, deadline: float, now: float) -> None:
        """Begin one wait of a call, whose deadline is ``deadline``."""
        spent = self._calls.get(op_id)
        if spent is None:
            if len(self._calls) >= self.REMEMBERED:
                for other in [other for other, s in self._calls.items() if s.deadline < now and not s.waits]:
                    del self._calls[other]
            spent = self._calls[op_id] = _Spent(deadline)
        if not spent.waits:
            spent.since = now
        spent.waits += 1

    def end(self, op_id: str, now: float) -> None:
        """End one wait of a call."""
        spent = self._calls[op_id]
        spent.waits -= 1
        if not spent.waits:
            spent.total_s += now - spent.since
