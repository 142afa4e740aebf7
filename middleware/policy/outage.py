"""Who waits for a host, or the directory, that does not answer; who asks whether it answers again, and when.

A process that died under a supervisor is back within seconds. Attempts do not bridge that: four of them are over
before it has started, and more would only let every call ask on its own. So the callers wait together. Of all that wait
for one host one asks, the *leader*; whatever it learns counts for all, and where it gives up (its time is over, it is
cancelled) another takes its place. However many wait, the host is asked once per pause.

How long a call may wait is its *patience*: seconds over the whole user call, whatever it waits for, so that a call with
many rounds over many hosts does not wait once for each of them.

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

__all__ = ["Answer", "Outage", "Patience", "Seat"]

E = TypeVar("E")

#: Longest pause between two questions, in seconds: by so much a call may notice late that a host is back.
PAUSE_S = 0.5
#: The pause before the second question; it doubles from there.
FIRST_PAUSE_S = 0.1


class Answer(Enum):
    """What came of asking whether a host answers again."""

    BACK = "back"
    NOT_YET = "not yet"  # it is known to come back
    UNEXPECTED = "unexpected"  # nothing says that it will come back


@dataclass(slots=True)
class Seat:
    """One caller that waits; ``seen`` answers had come when he came or when he last looked."""

    seen: int
    waited: bool = False


@dataclass(slots=True)
class Outage(Generic[E]):
    """One host, or the directory, that does not answer, and those who wait for it.

    Attributes:
        make_event: Makes what the others wait for while one of them asks.
        waiting: How many wait; when it is 0 again the outage may be forgotten.
        asked: How many times it was asked, all callers together.
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
        """Begin with nobody asking."""
        self.turn = self.make_event()

    def join(self) -> Seat:
        """Wait from now on."""
        self.waiting += 1
        return Seat(self._answers)

    def leave(self) -> None:
        """Wait no more."""
        self.waiting -= 1

    def lead(self) -> bool:
        """Become the one that asks, unless somebody is; then wait for ``turn``. Who leads ends it with :meth:`told`."""
        if self._led:
            return False
        self._led = True
        return True

    def pause_s(self, rng: random.Random) -> float:
        """How long the leader waits before it asks: not at all at first, then longer each time, at most ``PAUSE_S``.

        At least half of the ceiling, so that there is a least pause: that bounds how many requests an outage costs.
        """
        if not self.asked:
            return 0.0
        ceiling = min(PAUSE_S, FIRST_PAUSE_S * 2.0 ** min(self.asked - 1, 16))
        return rng.uniform(ceiling / 2, ceiling)

    def told(self, answer: Answer | None) -> E:
        """End leading, with what was learnt (None: nothing); returns the event to set, for all who wait for it."""
        self._led = False
        if answer is not None:
            self._answers += 1
            self._latest = answer
            self._missed = self._missed or answer is Answer.NOT_YET
        turn, self.turn = self.turn, self.make_event()
        return turn

    def verdict(self, seat: Seat) -> Answer | None:
        """What a caller makes of the answers since it looked last; None: none came.

        A host that was expected when somebody began to wait for it is waited for until his patience ends, also when it
        stops being expected meanwhile: what it was expected by, its last heartbeat, grows old while one waits. One that
        answers the very first question was not away: it answers wrongly, and for that there are attempts.
        """
        if self._answers == seat.seen:
            return None
        seat.seen = self._answers
        answer = self._latest
        if answer is Answer.BACK and not self._missed:
            answer = Answer.UNEXPECTED
        elif answer is Answer.UNEXPECTED and seat.waited:
            answer = Answer.NOT_YET
        seat.waited = True
        return answer


@dataclass(slots=True)
class _Spent:
    """What a user call has waited so far, in seconds, and since when it waits; its waits may overlap."""

    deadline: float
    total_s: float = 0.0
    waits: int = 0
    since: float = 0.0


class Patience:
    """How long each user call may wait in all.

    Args:
        seconds: The limit, 0: nobody waits.
    """

    #: Calls are forgotten at their deadline, when this many are remembered.
    REMEMBERED = 256

    __slots__ = ("_calls", "seconds")

    def __init__(self, seconds: float) -> None:
        """Remember no call."""
        if not (math.isfinite(seconds) and seconds >= 0):
            raise ValueError(f"seconds must be finite and not negative, not {seconds!r}")
        self.seconds = seconds
        self._calls: dict[str, _Spent] = {}

    def left_s(self, op_id: str, now: float) -> float:
        """Seconds that a call may still wait."""
        spent = self._calls.get(op_id)
        if spent is None:
            return self.seconds
        return self.seconds - spent.total_s - (now - spent.since if spent.waits else 0.0)

    def begin(self, op_id: str, deadline: float, now: float) -> None:
        """Let one wait of a call begin; the call ends at ``deadline`` at the latest."""
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
