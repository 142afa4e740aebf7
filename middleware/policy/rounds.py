"""Which rows of a batch to ask for again.

One batch read over several rounds: the first asks for every row, each further one only for those whose error may go
away. Rows are named by their position in the request. Each position ends in exactly one outcome: its row is there, or
an error.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

E = TypeVar("E")


class Rounds(Generic[E]):
    """Positions 0..n-1 of one batch read, over at most `max_rounds` rounds.

    Errors are opaque: whoever records one says whether it is retryable. Ask for `pending()`, `record` what came, and go
    on until it is empty; then the batch is `done`, or has to `give_up` with `errors`.

    Args:
        n: rows in the batch.
        max_rounds: rounds in all, the first included. Three: below each round lie attempts on several ports already, so
            a row that fails three times over is not unlucky.

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
        self._latest: dict[int, E] = {}  # of every position whose row is not there, once it was asked for

    def pending(self) -> tuple[int, ...]:
        """Positions to ask for in the next round, in the order of the request; empty when done or given up."""
        return self._pending

    def record(self, ok: Iterable[int], errors: Mapping[int, tuple[E, bool]]) -> tuple[int, ...]:
        """Take in what came of one round: rows that are there, and (error, retryable) of those that are not.

        Returns what is pending now. ValueError, with nothing changed, unless every pending position and no other is
        named, each once: a row nobody answered for would be a silent short read.
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
        """Return the latest error of a position whose row is not there; KeyError where there is none."""
        return self._latest[position]

    def stop(self) -> None:
        """Ask no more, though rounds are left (no time, no budget): what is pending ends with its latest error.

        ValueError before the first round: there is no error yet to end with.
        """
        if self._pending and not self.used:
            raise ValueError("stopped before the first round")
        self._pending = ()

    @property
    def done(self) -> bool:
        """Every row is there."""
        return not self._pending and not self._latest

    @property
    def give_up(self) -> bool:
        """Some rows will not come: rounds are used up, stopped, or nothing that is left may be asked for again."""
        return not self._pending and bool(self._latest)

    @property
    def errors(self) -> dict[int, E]:
        """Positions that will not come and why, in the order of the request; what is pending is not among them."""
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
