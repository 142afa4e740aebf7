"""Decides which rows of a batch to read again.

A batch is read in rounds: the first requests every row, each further one only the rows whose error is retryable. Rows
are identified by their position in the request. Each position ends with exactly one outcome: its row, or an error.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

E = TypeVar("E")


class Rounds(Generic[E]):
    """Tracks the outcomes of positions 0..n-1 of one batch over at most `max_rounds` rounds.

    Errors are opaque: `record` is told which are retryable. The caller reads the rows in `pending()` and records the
    outcomes until nothing is pending; then either `done` or `give_up` is true, the latter with `errors`.

    Args:
        n: Number of rows in the batch.
        max_rounds: Number of rounds, the first included. 3 by default: each round makes attempts on several ports, so a
            row that fails in three rounds does not fail by chance.

    Raises:
        ValueError: n is negative or max_rounds is below 1.

    """

    __slots__ = ("_latest", "_pending", "max_rounds", "n", "used")

    def __init__(self, n: int, max_rounds: int = 3) -> None:
        if n < 0:
            raise ValueError(f"n must not be negative, not {n}")
        if max_rounds < 1:
            raise ValueError(f"max_rounds must be at least 1, not {max_rounds}")
        self.n = n
        self.max_rounds = max_rounds
        self.used = 0  # rounds recorded so far
        self._pending = tuple(range(n))
        self._latest: dict[int, E] = {}  # latest error of every position that was requested and has no row

    def pending(self) -> tuple[int, ...]:
        """Return the positions to request in the next round, in the order of the request; empty after the last one."""
        return self._pending

    def record(self, ok: Iterable[int], errors: Mapping[int, tuple[E, bool]]) -> tuple[int, ...]:
        """Record the outcomes of one round: positions of the rows read, and (error, retryable) of the others.

        Returns the positions that are pending now. Raises ValueError, and changes nothing, unless each pending position
        and no other is named exactly once: a row without an outcome would silently be missing from the result.
        """
        rows = list(ok)
        self._check(rows, errors)
        self.used += 1
        for position in rows:
            self._latest.pop(position, None)
        for position, (error, _) in errors.items():
            self._latest[position] = error
        if self.used < self.max_rounds:
            self._pending = tuple(p for p in self._pending if p in errors and errors[p][1])
        else:
            self._pending = ()
        return self._pending

    def latest(self, position: int) -> E:
        """Return the latest error of a position without a row; raise KeyError if there is none."""
        return self._latest[position]

    def stop(self) -> None:
        """End the rounds early, for lack of time or budget: pending positions end with their latest error.

        Raises ValueError before the first round, when there are no errors yet.
        """
        if self._pending and not self.used:
            raise ValueError("stopped before the first round")
        self._pending = ()

    @property
    def done(self) -> bool:
        """Whether every row was read."""
        return not self._pending and not self._latest

    @property
    def give_up(self) -> bool:
        """Whether rows failed for good: the rounds are used up or stopped, or no remaining error is retryable."""
        return not self._pending and bool(self._latest)

    @property
    def errors(self) -> dict[int, E]:
        """Errors of the positions that failed for good, in the order of the request; without pending positions."""
        asked_again = set(self._pending)
        return {position: self._latest[position] for position in sorted(self._latest) if position not in asked_again}

    def _check(self, rows: Collection[int], errors: Mapping[int, tuple[E, bool]]) -> None:
        if not self._pending:
            raise ValueError("nothing is pending: the batch is done or given up")
        answered = Counter(rows)
        answered.update(errors.keys())
        if strangers := answered.keys() - set(self._pending):
            raise ValueError(f"positions that were not pending: {sorted(strangers)}")
        if missing := set(self._pending) - answered.keys():
            raise ValueError(f"pending positions without an outcome: {sorted(missing)}")
        if twice := [position for position, times in answered.items() if times > 1]:
            raise ValueError(f"positions with more than one outcome: {sorted(twice)}")
