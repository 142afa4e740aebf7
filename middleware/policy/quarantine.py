"""Chooses the port to use next, and avoids ports that failed for a time.

`permit` has the state of one target; this module chooses among several. Healthy targets are used in turn, and a
half-open one gets its probe when its turn comes. If none is healthy, the least bad one is used (a resting one, else the
one whose quarantine ends first, then the one with fewest failures), so that no call is refused because earlier ones
failed.

Sans-IO: `now` is in seconds on any monotonic clock and never goes back. The random source only chooses where the
rotation begins, so that many clients that start together do not all begin at the first port.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Generic, TypeVar

from .permit import Permit, QuarantineRules, Target, TargetSnapshot

if TYPE_CHECKING:
    import random
    from collections.abc import Collection, Sequence

K = TypeVar("K")


class Quarantine(Generic[K]):
    """Rotates over targets and quarantines those that fail; one per client, shared by all its calls.

    A new target counts as healthy.
    """

    __slots__ = ("_next_sweep", "_rng", "_rules", "_states")

    def __init__(self, rng: random.Random, rules: QuarantineRules | None = None) -> None:
        self._rng = rng
        self._rules = QuarantineRules() if rules is None else rules
        self._states: dict[K, Target[K]] = {}
        self._next_sweep = -math.inf

    def __len__(self) -> int:
        """Return the number of targets that are remembered."""
        return len(self._states)

    def pick(self, targets: Sequence[K], now: float, exclude: Collection[K] = ()) -> Permit[K]:
        """Return a permit for the next target in turn, or for the least bad one if none is healthy.

        Each list of targets, identified by its first entry, has its own rotation. Targets in `exclude` (tried by this
        call already) are skipped unless there are no others; a caller that does not want them then compares lengths
        first. Raises ValueError if `targets` is empty.
        """
        if not targets:
            raise ValueError("no targets to pick from")
        states = self._states
        first = states.get(targets[0])
        if first is not None and not exclude:
            turn = first.turn
            if turn >= len(targets):
                turn = 0
            state = states.get(targets[turn])
            if state is not None and not state.needs_check:
                first.turn = turn + 1
                state.last_used = now
                state.in_flight += 1
                return Permit(state)
        return self._search(targets, now, exclude)

    def snapshot(self, now: float) -> dict[K, TargetSnapshot]:
        """Return the state of every remembered target, for metrics."""
        return {key: self._snapshot_one(state, now) for key, state in list(self._states.items())}

    def prune(self, now: float) -> int:
        """Forget targets that were not used for forget_s and are neither quarantined nor in use; return how many.

        Called by `pick` before it adds targets, at most every forget_s, so the number of remembered targets is bounded
        by those used within twice that time.
        """
        self._next_sweep = now + self._rules.forget_s
        oldest = now - self._rules.forget_s
        gone = [k for k, s in self._states.items() if s.last_used <= oldest and s.until <= now and not s.in_flight]
        for key in gone:
            del self._states[key]
        return len(gone)

    def _search(self, targets: Sequence[K], now: float, exclude: Collection[K]) -> Permit[K]:
        """Pick a target if the next one in turn is new, or cannot be used without further checks."""
        if now >= self._next_sweep:
            self.prune(now)
        first = self._state(targets[0], len(targets), now)
        least_bad: tuple[float, int] | None = None
        chosen = -1
        for step in range(len(targets)):
            index = (first.turn + step) % len(targets)
            key = targets[index]
            if key in exclude:
                continue
            state = self._state(key, len(targets), now)
            if not state.needs_check or state.wants_probe(now):
                return self._hand_out(first, state, index, now)
            rank = state.rank(now)
            if least_bad is None or rank < least_bad:
                least_bad = rank
                chosen = index
        if chosen < 0:  # all are excluded
            return self._search(targets, now, ())
        return self._hand_out(first, self._states[targets[chosen]], chosen, now)

    def _hand_out(self, first: Target[K], state: Target[K], index: int, now: float) -> Permit[K]:
        # The rotation goes on from the target that was chosen. If it went on from the one whose turn it was, the next
        # healthy target after a quarantined one would be used twice as often as others.
        first.turn = index + 1
        state.last_used = now
        state.in_flight += 1
        if state.unused:
            state.begin(now)
        permit = Permit(state)
        if state.needs_check and state.wants_probe(now):
            permit.probe = True
            state.probe = permit
        return permit

    def _state(self, key: K, count: int, now: float) -> Target[K]:
        state = self._states.get(key)
        if state is None:
            state = Target(key, self._rules, self._rng.randrange(count), now)
            self._states[key] = state
        return state

    def _snapshot_one(self, state: Target[K], now: float) -> TargetSnapshot:
        until = state.until if state.needs_check and not state.unused else None
        return TargetSnapshot(state.health(now), state.failures_left(now), until, state.in_flight)
