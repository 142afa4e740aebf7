"""The open outcomes of mutations that were cancelled or not answered.

A cancelled call must not wait for I/O, so its open outcome is recorded here, synchronously, and resolved before the
next mutation that concerns the same ids, after its deadline by any other one, or in close(). An open outcome is a call
to be sent: ``Resolve`` finds out whether a put or clear happened, and has it refused if it arrives later;
``AbandonClaim`` releases a claim that was not received; ``Abort`` frees reserved slots; ``Invalidate`` tells a host
which of its rows were removed or replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from asyncdp.calls.slots import Invalidate

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext

__all__ = ["PendingOutcome", "PendingOutcomes", "clean_up_context"]

#: Limits of the time for a request that cleans up after an earlier one: a share of the time that the call has left, and
#: seconds. No result depends on it, so a host that does not answer must not take up the time of the call.
CLEAN_UP_SHARE: Final = 0.2
CLEAN_UP_S: Final = 1.0
#: Seconds that it has at least: a healthy host on a busy machine answers within them. A call with less time leaves the
#: clean-up to a later one.
LEAST_CLEAN_UP_S: Final = 0.05


def clean_up_context(ctx: CallContext) -> CallContext | None:
    """Return the context of a request that cleans up after an earlier one: ``ctx`` with less time; None: too little.

    A close has nothing else to do, so that there each of them gets half of the time that is left. A call that looks
    once has no time of its own, and does not wait for anything else.
    """
    left_s = CLEAN_UP_S if ctx.looks_once else ctx.remaining()
    if ctx.verb == "close":
        limit_s = left_s / 2
    elif left_s < LEAST_CLEAN_UP_S:
        return None
    else:
        limit_s = CLEAN_UP_S if ctx.looks_once else max(min(left_s * CLEAN_UP_SHARE, CLEAN_UP_S), LEAST_CLEAN_UP_S)
    return replace(ctx, deadline=ctx.env.clock.now() + limit_s, looks_once=False)


@dataclass(frozen=True, slots=True, eq=False)
class PendingOutcome:
    """An open outcome, with the call that resolves it.

    Attributes:
        call: Call to send.
        op_id: op_id of the user call that left the outcome open.
        deadline: Deadline of that user call, on the client's clock.
        partition_id: Partition concerned; None: the outcome is resolved before any mutation. An Invalidate is sent
            before any mutation as well, but only a mutation of the ids concerned fails if the host cannot be told.
        sample_ids: Ids concerned; None: the whole partition.
        task_name: Task concerned; None: any.
        on_refused: Further calls to send if the mutation turns out not to have happened.
    """

    call: Call[Any]
    op_id: str
    deadline: float = 0.0
    partition_id: str | None = None
    sample_ids: frozenset[str] | None = None
    task_name: str | None = None
    on_refused: tuple[Call[Any], ...] = ()

    def concerns(self, partition_id: str | None, sample_ids: Iterable[str] | None, task_name: str | None) -> bool:
        """Return whether a mutation of these ids, or of this task, has to wait until the outcome is resolved."""
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
        """Start without open outcomes."""
        self._open: dict[int, PendingOutcome] = {}
        self._under_way: set[str] = set()

    def __len__(self) -> int:
        """Return the number of open outcomes."""
        return len(self._open)

    def __iter__(self) -> Iterator[PendingOutcome]:
        """Iterate over a copy, oldest first."""
        return iter(list(self._open.values()))

    def record(self, outcome: PendingOutcome) -> PendingOutcome:
        """Add an outcome, which is kept until it is resolved, and return it."""
        self._open[id(outcome)] = outcome
        return outcome

    def resolved(self, outcome: PendingOutcome) -> None:
        """Remove an outcome; does nothing if it was removed before."""
        self._open.pop(id(outcome), None)

    def due(
        self, partition_id: str | None, sample_ids: Iterable[str] | None, task_name: str | None
    ) -> list[PendingOutcome]:
        """Return the open outcomes that a mutation of these ids, or of this task, has to wait for."""
        ids = sample_ids if sample_ids is None else list(sample_ids)
        return [
            outcome
            for outcome in self._open.values()
            if outcome.op_id not in self._under_way
            and (isinstance(outcome.call, Invalidate) or outcome.concerns(partition_id, ids, task_name))
        ]

    def late(self, now: float, op_id: str) -> PendingOutcome | None:
        """Return an open outcome of a user call, other than ``op_id``, whose deadline has passed, if there is one."""
        for outcome in self._open.values():
            if 0.0 < outcome.deadline < now and outcome.op_id != op_id and outcome.op_id not in self._under_way:
                return outcome
        return None

    @contextmanager
    def under_way(self, op_id: str) -> Iterator[None]:
        """Keep other calls from resolving the outcomes of a user call while it may still get its answer by a retry."""
        self._under_way.add(op_id)
        try:
            yield
        finally:
            self._under_way.discard(op_id)
