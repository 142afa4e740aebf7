"""Which port to use next, and which ones to leave alone for a while.

What happens to one target is in `permit`; this is the choice among several. Healthy targets are used in turn, a
half-open one gets its probe when its turn comes, and if none is healthy the least bad one is used (one that only rests,
else the soonest to be released, then the one with fewest failures): no call starves because of what earlier ones saw.

Sans-IO: `now` is in seconds on any monotonic clock and never goes back; the random source only chooses where rotation
begins, so that many clients that start together do not all begin at the first port.
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
    """Rotates over targets, leaves the broken ones out, lets them back in; one per client, shared by all its calls.

    A target that nothing is known about is healthy.
    """

    __slots__ = ("_next_sweep", "_rng", "_rules", "_states")

    def __init__(self, rng: random.Random, rules: QuarantineRules | None = None) -> None:
        self._rng = rng
        self._rules = QuarantineRules() if rules is None else rules
        self._states: dict[K, Target[K]] = {}
        self._next_sweep = -math.inf

    def __len__(self) -> int:
        """Count the targets that are remembered."""
        return len(self._states)

    def pick(self, targets: Sequence[K], now: float, exclude: Collection[K] = ()) -> Permit[K]:
        """Choose the next target in turn, or the least bad one; never refuses.

        Rotation is per list of targets, told apart by their first entry. Targets in `exclude` (tried by this call
        already) are passed over unless nothing else is there; a caller that wants *another* target or none compares
        lengths first. ValueError if there are no targets at all.
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
            if state is not None and not state.aside:
                first.turn = turn + 1
                state.last_used = now
                state.in_flight += 1
                return Permit(state)
        return self._search(targets, now, exclude)

    def next_release(self, targets: Sequence[K], now: float) -> float | None:
        """How long until one of the targets takes a call again, in seconds; 0 if one does now.

        None if that depends only on probes that are out (or if there are no targets).
        """
        waits = [self._wait_s(key, now) for key in targets]
        return min((wait for wait in waits if wait is not None), default=None)

    def snapshot(self, now: float) -> dict[K, TargetSnapshot]:
        """Every remembered target's state, for metrics."""
        return {key: self._snapshot_one(state, now) for key, state in self._states.items()}

    def prune(self, now: float) -> int:
        """Forget targets that nobody used for forget_s and that are neither out nor in use; returns how many.

        Runs by itself before new targets are added, at most every forget_s, so memory is bounded by the number of
        targets used within twice that time.
        """
        self._next_sweep = now + self._rules.forget_s
        oldest = now - self._rules.forget_s
        gone = [k for k, s in self._states.items() if s.last_used <= oldest and s.until <= now and not s.in_flight]
        for key in gone:
            del self._states[key]
        return len(gone)

    def _search(self, targets: Sequence[K], now: float, exclude: Collection[K]) -> Permit[K]:
        """Pick when the next in turn will not do, or is new."""
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
            if not state.aside or state.wants_probe(now):
                return self._hand_out(first, state, index, now)
            badness = state.badness(now)
            if least_bad is None or badness < least_bad:
                least_bad = badness
                chosen = index
        if chosen < 0:  # all are excluded
            return self._search(targets, now, ())
        return self._hand_out(first, self._states[targets[chosen]], chosen, now)

    def _hand_out(self, first: Target[K], state: Target[K], index: int, now: float) -> Permit[K]:
        # From the one chosen, not from the one whose turn it was: else the healthy neighbour of a broken target would
        # get the turns of both.
        first.turn = index + 1
        state.last_used = now
        state.in_flight += 1
        if state.unused:
            state.begin(now)
        permit = Permit(state)
        if state.aside and state.wants_probe(now):
            permit.probe = True
            state.probe = permit
        return permit

    def _state(self, key: K, count: int, now: float) -> Target[K]:
        state = self._states.get(key)
        if state is None:
            state = Target(key, self._rules, self._rng.randrange(count), now)
            self._states[key] = state
        return state

    def _wait_s(self, key: K, now: float) -> float | None:
        state = self._states.get(key)
        if state is None or not state.aside or state.wants_probe(now) or state.rests(now):
            return 0.0
        return state.until - now if state.until > now else None

    def _snapshot_one(self, state: Target[K], now: float) -> TargetSnapshot:
        until = state.until if state.aside and not state.unused else None
        return TargetSnapshot(state.health(now), state.failures_left(now), until, state.in_flight)
