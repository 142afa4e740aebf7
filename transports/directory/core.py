"""Base of the directory: its partitions, its clocks, and mutations that happen once per op_id."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from .partition import Partition, Refused

__all__ = ["KEEP_S", "Core"]

R = TypeVar("R")

#: Seconds for which the outcome of a mutation is kept after the deadline of its call. No attempt is sent after the
#: deadline, so this only has to exceed the time that a message may be in transit.
KEEP_S = 600.0


class Record:
    """Outcome of one mutation; ``refused`` if it must not happen any more."""

    __slots__ = ("keep_until", "refused", "result")

    def __init__(self, keep_until: float, result: Any = None, *, refused: bool = False) -> None:
        """Keep the outcome until ``keep_until`` on the directory's monotonic clock."""
        self.keep_until = keep_until
        self.result = result
        self.refused = refused


class Core:
    """The state of a directory. Its methods are synchronous, and the caller has to ensure that calls do not overlap.

    Args:
        capacity: Maximum number of samples in the plane.
        group_pattern: Regular expression that matches a sample id; its named group ``group`` is the sample's group.
        strict_schema: Whether puts of undeclared fields are refused.
        auto_register: Whether a put to an unknown partition declares it.

    Attributes:
        error: Makes the exception for a refused request; takes the arguments of :class:`Refused`.
    """

    error: ClassVar[Callable[..., Exception]] = Refused

    def __init__(self, capacity: int, group_pattern: str, *, strict_schema: bool, auto_register: bool) -> None:
        """Start empty, in a new random epoch."""
        self.epoch = uuid.uuid4().hex
        self.capacity = capacity
        self.pattern = re.compile(group_pattern)
        self.strict_schema = strict_schema
        self.auto_register = auto_register
        self.partitions: dict[str, Partition] = {}
        self.samples = 0
        self.sequence = 0
        # The first incarnation is random, so that no reference to a former plane refers to a row of this one.
        self.incarnations = int(self.epoch[:15], 16)
        self._records: dict[str, Record] = {}
        self._next_prune = 0.0

    def monotonic(self) -> float:
        """Return the time in seconds of the clock by which deadlines are given."""
        return time.monotonic()

    def time(self) -> float:
        """Return the wall-clock time in unix seconds."""
        return time.time()

    def changed(self) -> None:
        """Handle that samples may have become ready; a hook for subclasses."""

    # -- mutations that happen once

    def once(self, op_id: str, not_after: float, act: Callable[[], tuple[R, bool]]) -> R:
        """Run a mutation once per op_id: repeated, it returns the first result; abandoned or too late, it is refused.

        Args:
            op_id: Id of the mutation.
            not_after: Its deadline, on the directory's monotonic clock.
            act: Executes it and returns its result and whether the result has to be recorded.
        """
        now = self.monotonic()
        if now >= self._next_prune:
            self._prune(now)
        record = self._records.get(op_id)
        if record is not None:
            if record.refused:
                raise self.error("DataPlaneWriteError", "this request was given up and is refused")
            return record.result  # type: ignore[no-any-return]
        if now > not_after:
            text = "the request came after its deadline and is refused"
            raise self.error("DataPlaneTimeout", text, blames_port=False)
        result, changed = act()
        if changed:
            self._records[op_id] = Record(min(not_after, now + 1e6) + KEEP_S, result)
        return result

    def resolve(self, op_id: str, age_s: float) -> str:
        """Return the outcome of a mutation: done, refused or forgotten; refuse it from now on if it has not arrived."""
        record = self._records.get(op_id)
        if record is not None:
            return "refused" if record.refused else "done"
        if age_s > KEEP_S:
            return "forgotten"
        self.refuse(op_id)
        return "refused"

    def refuse(self, op_id: str) -> None:
        """Refuse every later request with this op_id."""
        self._records[op_id] = Record(self.monotonic() + 2 * KEEP_S, refused=True)

    def _prune(self, now: float) -> None:
        self._next_prune = now + KEEP_S / 10
        for op_id in [op_id for op_id, record in self._records.items() if record.keep_until < now]:
            del self._records[op_id]
        for partition in self.partitions.values():
            for key in [key for key, since in partition.lost.items() if since < now - KEEP_S]:
                del partition.lost[key]

    # -- partitions

    def partition(self, partition_id: str) -> Partition:
        """Return a partition; refuse the request if it is unknown."""
        found = self.partitions.get(partition_id)
        if found is None:
            text = f"no partition {partition_id!r} is registered"
            info = {"partition_id": partition_id, "field": "partition_id", "unknown_partition": True}
            raise self.error("DataPlaneBadRequest", text, **info)
        return found

    def has(self, partition_id: str) -> bool:
        """Whether a partition is registered."""
        return partition_id in self.partitions

    def check_task(self, part: Partition, task: str) -> None:
        """Refuse the request if the task is not declared."""
        if task not in part.tasks:
            text = f"partition {part.id!r} has no task {task!r}; it has {list(part.tasks)}"
            raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field="task_name")
