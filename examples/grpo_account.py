"""The account of the example: what became of every sample, so that none can be lost, or trained on twice, unnoticed.

Each role writes down what it knows at the moment it knows it: a worker that its put was acknowledged, the trainer what
it trained on, whoever evicts what was evicted. At the end all of it is compared, by sample id, with what the plane
still holds. Nothing is computed as a remainder, so a sample that vanished shows.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Account", "Balance"]


@dataclass(frozen=True)
class Balance:
    """The account at the end; all numbers count samples.

    Attributes:
        produced: Puts that were acknowledged, or whose samples were seen in the plane.
        trained, evicted, left: What became of them; ``left`` is what the plane says it holds.
        lost: Produced, and neither trained, evicted nor left.
        trained_twice: Trained on more than once.
        contradictory: In two of trained, evicted and left.
        unheard_of: Trained, evicted or left, though nobody produced them.
    """

    produced: int
    trained: int
    evicted: int
    left: int
    lost: int
    trained_twice: int
    contradictory: int
    unheard_of: int

    @property
    def adds_up(self) -> bool:
        """Whether every sample that was produced had exactly one fate, and nothing else had any."""
        wrong = self.lost + self.trained_twice + self.contradictory + self.unheard_of
        return wrong == 0 and self.produced == self.trained + self.evicted + self.left

    def lines(self) -> list[str]:
        """Say it in words."""
        wrong = {"contradictory": self.contradictory, "unheard of": self.unheard_of}
        return [
            f"produced {self.produced} = trained {self.trained} + evicted {self.evicted} + left {self.left}",
            f"lost {self.lost}, trained twice {self.trained_twice}",
            *(f"{what} {count}" for what, count in wrong.items() if count),
            "the account adds up" if self.adds_up else "THE ACCOUNT DOES NOT ADD UP",
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


class Account:
    """Collects sample ids by what became of them."""

    def __init__(self) -> None:
        self._produced: set[str] = set()
        self._unanswered: dict[str, tuple[str, ...]] = {}
        self._given_up = 0
        self._trained: Counter[str] = Counter()
        self._evicted: dict[str, str] = {}

    def unanswered(self, sample_ids: Iterable[str]) -> None:
        """Note a put of which nobody knows whether it arrived: each one is, from before it is sent until its answer.

        So a worker that dies in between leaves nothing out. A put is whole or absent: once one of its samples turns up
        all of them count as produced.
        """
        put = tuple(sample_ids)
        self._unanswered.update(dict.fromkeys(put, put))

    def produced(self, sample_ids: Iterable[str]) -> None:
        """Note a put that was acknowledged."""
        ids = list(sample_ids)
        self._produced.update(ids)
        self._answered(ids)

    def given_up(self, sample_ids: Iterable[str]) -> None:
        """Note samples whose put failed for certain: they never were in the plane, and are no part of the balance."""
        ids = list(sample_ids)
        self._given_up += len(ids)
        self._answered(ids)

    def _answered(self, sample_ids: Iterable[str]) -> None:
        for sample_id in sample_ids:
            self._unanswered.pop(sample_id, None)

    def seen(self, sample_ids: Iterable[str]) -> None:
        """Note samples that the plane holds: a put that brought them did arrive, answered or not."""
        for sample_id in self._unanswered.keys() & set(sample_ids):
            self._produced.update(self._unanswered[sample_id])

    def trained(self, sample_ids: Iterable[str]) -> None:
        """Note samples that a training step was taken on."""
        ids = list(sample_ids)
        self.seen(ids)
        self._trained.update(ids)

    def evicted(self, sample_ids: Iterable[str], reason: str) -> None:
        """Note samples that were evicted, and why; the first reason counts."""
        ids = list(sample_ids)
        self.seen(ids)
        for sample_id in ids:
            self._evicted.setdefault(sample_id, reason)

    @property
    def counts(self) -> dict[str, int]:
        """How many samples were produced, trained and evicted so far."""
        return {"produced": len(self._produced), "trained": len(self._trained), "evicted": len(self._evicted)}

    @property
    def evicted_by_reason(self) -> dict[str, int]:
        """How many samples were evicted so far, and why."""
        return dict(Counter(self._evicted.values()))

    @property
    def puts(self) -> dict[str, int]:
        """How many samples were given up, were never acknowledged, and of those turned up all the same."""
        arrived = len(self._unanswered.keys() & self._produced)
        return {"given_up": self._given_up, "unanswered": len(self._unanswered), "arrived_unanswered": arrived}

    def balance(self, left: Iterable[str]) -> Balance:
        """Compare everything with the ids that the plane still holds, once no producer has a put under way."""
        still_there = set(left)
        trained, evicted = set(self._trained), set(self._evicted)
        accounted = trained | evicted | still_there
        self.seen(accounted)  # once more: a worker's entry may have come later than the trainer's about the same sample
        return Balance(
            produced=len(self._produced),
            trained=len(trained),
            evicted=len(evicted),
            left=len(still_there),
            lost=len(self._produced - accounted),
            trained_twice=sum(times > 1 for times in self._trained.values()),
            contradictory=len(trained & evicted | trained & still_there | evicted & still_there),
            unheard_of=len(accounted - self._produced),
        )
