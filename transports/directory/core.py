"""What all parts of a directory share: its partitions, its clocks, mutations that happen once."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from .partition import Partition, Refused

__all__ = ["KEEP_S", "Core"]

R = TypeVar("R")

#: Seconds that outcomes are remembered after the call that they belong to ran out of time. No attempt of a call is sent
#: later than its deadline, so this only has to outlast a message under way.
KEEP_S = 600.0


class Record:
    """What became of one mutation; ``refused`` where it never may happen."""

    __slots__ = ("keep_until", "refused", "result")

    def __init__(self, keep_until: float, result: Any = None, *, refused: bool = False) -> None:
        """Keep them; the time is the directory's monotonic clock."""
        self.keep_until = keep_until
        self.result = result
        self.refused = refused


class Core:
    """The state of a directory. All of it is synchronous: whoever calls it sees to it that calls do not overlap.

    Args:
        capacity: Samples that the plane holds at most.
        group_pattern: Regular expression that reads a sample's group off its id, as its group named ``group``.
        strict_schema: Whether fields must be declared.
        auto_register: Whether a put declares an unknown partition.

    Attributes:
        error: Makes what is raised where a request is refused, as :class:`Refused` takes it.
    """

    error: ClassVar[Callable[..., Exception]] = Refused

    def __init__(self, capacity: int, group_pattern: str, *, strict_schema: bool, auto_register: bool) -> None:
        """Begin empty, in an epoch of its own."""
        self.epoch = uuid.uuid4().hex
        self.capacity = capacity
        self.pattern = re.compile(group_pattern)
        self.strict_schema = strict_schema
        self.auto_register = auto_register
        self.partitions: dict[str, Partition] = {}
        self.samples = 0
        self.sequence = 0
        # Begun anywhere, so that no reference into another life of the plane means a row of this one.
        self.incarnations = int(self.epoch[:15], 16)
        self._records: dict[str, Record] = {}
        self._next_prune = 0.0

    def monotonic(self) -> float:
        """Return the seconds of the clock that deadlines are given by."""
        return time.monotonic()

    def time(self) -> float:
        """Return unix seconds."""
        return time.time()

    def changed(self) -> None:
        """Take note that something may have become ready."""

    # -- mutations, once each

    def once(self, op_id: str, not_after: float, act: Callable[[], tuple[R, bool]]) -> R:
        """Run a mutation under its op_id: again, it gets the first answer; given up or too late, it is refused.

        Args:
            op_id: Names the mutation.
            not_after: Its deadline, by the directory's monotonic clock.
            act: Returns its result and whether it changed anything; only changes are remembered.
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
        """Say what became of a mutation (done, refused or forgotten); refuse it from now on if it has not arrived."""
        record = self._records.get(op_id)
        if record is not None:
            return "refused" if record.refused else "done"
        if age_s > KEEP_S:
            return "forgotten"
        self.refuse(op_id)
        return "refused"

    def refuse(self, op_id: str) -> None:
        """Refuse whatever arrives under ``op_id``."""
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
        """Return a partition; an unknown one is refused."""
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
        """Refuse a task that is not declared."""
        if task not in part.tasks:
            text = f"partition {part.id!r} has no task {task!r}; it has {list(part.tasks)}"
            raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field="task_name")
