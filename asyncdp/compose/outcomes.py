"""What a cancelled or unanswered mutation left to be settled.

A cancel must not wait, so what needs I/O afterwards is written down here, synchronously, and settled before the next
mutation that touches the same ids, and in close(). An open outcome is a call to be sent: ``Resolve`` (did the put or
clear happen? if it has not arrived yet, it never will), ``AbandonClaim`` (give back what nobody got), ``Abort`` (free
the slots that were reserved).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncdp.calls import Call

__all__ = ["PendingOutcome", "PendingOutcomes"]


@dataclass(frozen=True, slots=True, eq=False)
class PendingOutcome:
    """One call that has to be sent.

    Attributes:
        call: What to send.
        op_id: Of the user call that left it; ``call`` is sent under it.
        deadline: When that user call ran out of time, by the client's clock.
        partition_id: The partition it concerns; None: it is resolved before any mutation.
        sample_ids: The ids it concerns; None: the whole partition.
        task_name: The task it concerns; None: any.
        on_refused: Calls to send as well where the answer is that the mutation never happened.
    """

    call: Call[Any]
    op_id: str
    deadline: float = 0.0
    partition_id: str | None = None
    sample_ids: frozenset[str] | None = None
    task_name: str | None = None
    on_refused: tuple[Call[Any], ...] = ()

    def concerns(self, partition_id: str | None, sample_ids: Iterable[str] | None, task_name: str | None) -> bool:
        """Whether a mutation of these ids, or of this task, has to wait until the outcome is resolved."""
        if self.partition_id is None or partition_id is None:
            return True
        if self.partition_id != partition_id:
            return False
        if self.task_name is not None and task_name is not None:
            return self.task_name == task_name
        if self.sample_ids is None or sample_ids is None:
            return True
        return not self.sample_ids.isdisjoint(sample_ids)


class PendingOutcomes:
    """The open outcomes of one client, oldest first."""

    __slots__ = ("_open", "_under_way")

    def __init__(self) -> None:
        """Begin with none."""
        self._open: dict[int, PendingOutcome] = {}
        self._under_way: set[str] = set()

    def __len__(self) -> int:
        """Return the number of open outcomes."""
        return len(self._open)

    def __iter__(self) -> Iterator[PendingOutcome]:
        """Iterate over a copy, oldest first."""
        return iter(list(self._open.values()))

    def record(self, outcome: PendingOutcome) -> PendingOutcome:
        """Keep an outcome until it is resolved."""
        self._open[id(outcome)] = outcome
        return outcome

    def resolved(self, outcome: PendingOutcome) -> None:
        """Forget an outcome; twice is fine."""
        self._open.pop(id(outcome), None)

    def due(
        self, partition_id: str | None, sample_ids: Iterable[str] | None, task_name: str | None
    ) -> list[PendingOutcome]:
        """Return the open outcomes that a mutation of these ids, or of this task, has to wait for."""
        ids = sample_ids if sample_ids is None else list(sample_ids)
        return [
            outcome
            for outcome in self._open.values()
            if outcome.op_id not in self._under_way and outcome.concerns(partition_id, ids, task_name)
        ]

    @contextmanager
    def under_way(self, op_id: str) -> Iterator[None]:
        """Let nobody else settle what a user call leaves open while it may still get its answer by asking again."""
        self._under_way.add(op_id)
        try:
            yield
        finally:
            self._under_way.discard(op_id)
