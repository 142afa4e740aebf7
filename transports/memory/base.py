"""What all parts of the memory plane share. All of it is synchronous."""

from __future__ import annotations

import re
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.clock import AnyioClock
from asyncdp.errors import DataPlaneBadRequest, DataPlaneTimeout, DataPlaneWriteError
from asyncdp.forks import on_fork
from asyncdp.slots import Resolved

if TYPE_CHECKING:
    from asyncdp.transports.memory.claims import Claim, Group, Row
    from asyncdp.transports.memory.host import Host
    from asyncdp.transports.memory.partition import Partition

__all__ = ["KEEP_S", "PlaneBase"]

R = TypeVar("R")

#: Seconds that outcomes are remembered after the call that they belong to ran out of time. No attempt of a call is sent
#: later than its deadline, so this only has to outlast a message under way.
KEEP_S = 600.0
#: A host that does not come back for so long, in seconds, is not waited for any more.
HOST_TIMEOUT_S = 5.0


@dataclass(slots=True)
class _Record:
    """What became of one mutation; ``refused`` where it never may happen."""

    keep_until: float
    result: Any = None
    refused: bool = False


class PlaneBase:
    """What all parts of a plane share: its hosts and partitions, what became of mutations, who waits.

    Args:
        capacity: Samples that the plane holds at most.
        hosts: The slot hosts.
        group_pattern: Reads a sample's group off its id.
        strict_schema: Whether fields must be declared.
        auto_register: Whether a put declares an unknown partition.
    """

    def __init__(
        self, capacity: int, hosts: Sequence[Host], group_pattern: str, *, strict_schema: bool, auto_register: bool
    ) -> None:
        """Begin empty."""
        self.epoch = uuid.uuid4().hex
        #: The config that it was started with, where a client started it.
        self.config: Any = None
        self.capacity = capacity
        self.hosts = {host.id: host for host in hosts}
        self.pattern = re.compile(group_pattern)
        self.strict_schema = strict_schema
        self.auto_register = auto_register
        self.clock = AnyioClock()
        self.closed = False
        self.partitions: dict[str, Partition] = {}
        self.lock = threading.RLock()
        self.samples = 0
        self._records: dict[str, _Record] = {}
        self._next_prune = 0.0
        # Begun anywhere, so that no reference into another life of the plane means a row of this one.
        self._incarnations = int(self.epoch[:15], 16)
        self._sequence = 0
        self._missed: dict[str, float] = {}
        self._wakers: dict[object, Callable[[], None]] = {}
        on_fork(self)

    def after_fork(self) -> None:
        """Be no plane in a forked child: what is put into a copy, nobody else would ever see."""
        self.closed = True

    # -- waiting

    def watch(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever something may have become ready; it may be called from any thread."""
        self._wakers[key] = wake

    def unwatch(self, key: object) -> None:
        """Stop calling."""
        self._wakers.pop(key, None)

    def changed(self) -> None:
        """Wake everybody who waits."""
        for key, wake in list(self._wakers.items()):
            try:
                wake()
            except RuntimeError:  # its event loop is gone
                self.unwatch(key)

    def close(self) -> None:
        """End the plane; its clients see DataPlaneUnavailable."""
        self.closed = True
        self.changed()

    # -- hosts

    def answers(self, host_id: str) -> bool:
        """Whether a host is up."""
        host = self.hosts.get(host_id)
        if host is None or not host.up:
            return False
        self._missed.pop(host_id, None)
        return True

    def expects(self, host_id: str) -> bool:
        """Whether a host that is down is known to come back: it was missed for the first time a moment ago."""
        now = self.clock.time()
        return host_id in self.hosts and now - self._missed.setdefault(host_id, now) <= HOST_TIMEOUT_S

    # -- mutations, once each

    def once(self, op_id: str, left_s: float, act: Callable[[], tuple[R, bool]]) -> R:
        """Run a mutation under its op_id: again, it gets the first answer; given up or too late, it is refused.

        ``act`` returns its result and whether it changed anything; only changes are remembered.
        """
        now = self.clock.time()
        if now >= self._next_prune:
            self._prune(now)
        record = self._records.get(op_id)
        if record is not None:
            if record.refused:
                msg = "this request was given up and is refused"
                raise DataPlaneWriteError(msg)
            return record.result  # type: ignore[no-any-return]
        if left_s < 0:
            msg = "the request came after its deadline and is refused"
            raise DataPlaneTimeout(msg, blames_port=False)
        result, changed = act()
        if changed:
            self._records[op_id] = _Record(now + min(left_s, 1e9) + KEEP_S, result)
        return result

    def resolve(self, op_id: str, age_s: float) -> Resolved:
        """Say what became of a mutation; refuse it from now on if it has not arrived."""
        record = self._records.get(op_id)
        if record is not None:
            return Resolved("refused" if record.refused else "done")
        if age_s > KEEP_S:
            return Resolved("forgotten")
        self.refuse(op_id)
        return Resolved("refused")

    def refuse(self, op_id: str) -> None:
        """Refuse whatever arrives under ``op_id``."""
        self._records[op_id] = _Record(self.clock.time() + 2 * KEEP_S, refused=True)

    def _prune(self, now: float) -> None:
        self._next_prune = now + KEEP_S / 10
        for op_id in [op_id for op_id, record in self._records.items() if record.keep_until < now]:
            del self._records[op_id]
        for host in self.hosts.values():
            host.forget(now - 2 * KEEP_S)
        for partition in self.partitions.values():
            for key in [key for key, since in partition.lost.items() if since < now - KEEP_S]:
                del partition.lost[key]

    # -- partitions, rows, claims

    def partition(self, partition_id: str) -> Partition:
        """Return a partition; an unknown one is DataPlaneBadRequest."""
        found = self.partitions.get(partition_id)
        if found is None:
            msg = f"no partition {partition_id!r} is registered"
            raise DataPlaneBadRequest(msg, partition_id=partition_id, field="partition_id")
        return found

    def check_task(self, part: Partition, task: str) -> None:
        """Refuse a task that is not declared."""
        if task not in part.tasks:
            msg = f"partition {part.id!r} has no task {task!r}; it has {list(part.tasks)}"
            raise DataPlaneBadRequest(msg, partition_id=part.id, field="task_name")

    @staticmethod
    def _leave(part: Partition, row: Row, group: Group) -> None:
        group.rows.pop(row.id, None)
        part.touch(row, group)
        if not group.rows:
            part.groups.pop(group.id, None)

    @staticmethod
    def _free(row: Row) -> None:
        for cell in row.cells.values():
            cell.host.kill(cell)

    def expire(self, part: Partition) -> None:
        """Take back claims whose lease is over."""
        now = self.clock.time()
        late = [c for c in part.claims.values() if c.expires_at is not None and c.expires_at <= now]
        for claim in late:
            self._unclaim(part, claim, list(claim.rows))

    def _unclaim(self, part: Partition, claim: Claim, ids: Sequence[str]) -> None:
        now = self.clock.time()
        for sample_id in ids:
            row = claim.rows.pop(sample_id)
            part.lost[claim.id, sample_id] = now
            if row.claimed.get(claim.task) == claim.id:
                del row.claimed[claim.task]
            part.touch(row, part.groups[row.group])
        if not claim.rows:
            part.claims.pop(claim.id, None)
            self.refuse(claim.id)
