"""The base of the directory: its plane's config, partitions, and mutations that happen once."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from asyncdp.transports.transfer_queue.directory.state import Partition, Pending, Refused

__all__ = ["Core", "Record"]

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


class Sweep:
    """Garbage that a client was told to sweep."""

    __slots__ = ("op_id", "ranges", "until")

    def __init__(self, until: float, op_id: str, ranges: dict[str, list[tuple[int, int, float]]]) -> None:
        """Keep what it was, for whom, and when it counts as forgotten."""
        self.until = until
        self.op_id = op_id
        self.ranges = ranges


class Core:
    """State that all parts of the directory share. One thread of the controller runs all of it, one call at a time.

    Args:
        units: Ids of the storage units that the plane uses.
        config: ``capacity`` (samples), ``group_pattern``, ``strict_schema``, ``auto_register``.
    """

    def __init__(self, units: list[str], config: dict[str, Any]) -> None:
        """Begin empty, in an epoch of its own."""
        self.epoch = uuid.uuid4().hex
        self.units = list(units)
        self.config = dict(config)
        self.pattern = re.compile(config["group_pattern"])
        self.partitions: dict[str, Partition] = {}
        self.samples = 0
        self.pending: dict[str, Pending] = {}
        self.load: dict[str, int] = dict.fromkeys(self.units, 0)  # rows per unit
        self.layouts: list[tuple[Any, ...]] = []
        self.layout_ids: dict[tuple[Any, ...], int] = {}
        self.garbage: dict[str, list[tuple[int, int, float]]] = {unit: [] for unit in self.units}
        self.swept: dict[int, Sweep] = {}
        self.tickets = 0
        self.sequence = 0
        # Begun anywhere, so that no reference into another life of the plane means a row of this one.
        self.incarnations = int(self.epoch[:15], 16)
        # Never used twice, and apart from the indexes of TransferQueue itself and from those of other planes here.
        self.next_key = random.SystemRandom().getrandbits(29) << 33 | 1 << 62
        self.monotonic: Callable[[], float] = time.monotonic
        self.time: Callable[[], float] = time.time
        self._records: dict[str, Record] = {}
        self._next_prune = 0.0

    def __deepcopy__(self, memo: Any) -> dict[str, Any]:
        """Leave nothing in TransferQueue's snapshots: the classes are not importable where those are read."""
        return {}

    # -- mutations, once each

    def once(self, op_id: str, not_after: float, act: Callable[[], tuple[Any, bool]]) -> Any:
        """Run a mutation under its op_id: again, it gets the first answer; given up or too late, it is refused.

        ``act`` returns its result and whether it changed anything; only changes are remembered.
        """
        now = self.monotonic()
        if now >= self._next_prune:
            self._prune(now)
        record = self._records.get(op_id)
        if record is not None:
            if record.refused:
                raise Refused("DataPlaneWriteError", "this request was given up and is refused")
            return record.result
        if now > not_after:
            raise Refused("DataPlaneTimeout", "the request came after its deadline and is refused", blames_port=False)
        result, changed = act()
        if changed:
            self._records[op_id] = Record(min(not_after, now + 1e6) + KEEP_S, result)
        return result

    def resolve(self, op_id: str, age_s: float) -> str:
        """Say what became of a mutation; refuse it from now on if it has not arrived."""
        record = self._records.get(op_id)
        if record is not None:
            return "refused" if record.refused else "done"
        if age_s > KEEP_S:
            return "forgotten"
        self.refuse(op_id)
        self.drop_pending(op_id)
        return "refused"

    def refuse(self, op_id: str) -> None:
        """Refuse whatever arrives under ``op_id``."""
        self._records[op_id] = Record(self.monotonic() + 2 * KEEP_S, refused=True)

    def _prune(self, now: float) -> None:
        self._next_prune = now + KEEP_S / 10
        for op_id in [op_id for op_id, record in self._records.items() if record.keep_until < now]:
            del self._records[op_id]
        self.expire_pending()
        for partition in self.partitions.values():
            for key in [key for key, since in partition.lost.items() if since < now - KEEP_S]:
                del partition.lost[key]

    # -- storage keys that nobody needs any more

    def drop_pending(self, op_id: str, grace_s: float = 5.0) -> None:
        """Give up a put: what it may have written is garbage, after a grace for requests still under way."""
        pending = self.pending.pop(op_id, None)
        if pending is None:
            return
        after = self.monotonic() + grace_s
        for unit, first, count in pending.ranges:
            self.garbage.setdefault(unit, []).append((first, count, after))

    def give_back(self, op_id: str, shares: Sequence[tuple[str, int, int]]) -> None:
        """Make garbage of what a refused put has written; what it still writes elsewhere stays reserved for it."""
        pending = self.pending.get(op_id)
        if pending is None:
            return
        for share in shares:
            if share in pending.ranges:
                pending.ranges.remove(share)
                self.garbage.setdefault(share[0], []).append((share[1], share[2], 0.0))
        if not pending.ranges:
            del self.pending[op_id]

    def expire_pending(self) -> None:
        """Give up the puts whose writers cannot publish any more."""
        now = self.monotonic()
        for op_id in [op_id for op_id, pending in self.pending.items() if pending.until < now]:
            self.drop_pending(op_id)

    def discard(self, unit: str, key: int) -> None:
        """Note that nothing refers to a storage key any more."""
        ranges = self.garbage.setdefault(unit, [])
        self.load[unit] = self.load.get(unit, 0) - 1
        if ranges and ranges[-1][0] + ranges[-1][1] == key and ranges[-1][2] == 0.0:
            first, count, after = ranges[-1]
            ranges[-1] = (first, count + 1, after)
        else:
            ranges.append((key, 1, 0.0))

    def sweep(self, done: list[int], op_id: str = "") -> tuple[int, dict[str, list[tuple[int, int]]]]:
        """Hand out the garbage that is due, as (ticket, {unit: [(first key, count)]}); ``done`` are tickets that are.

        What was never reported done is handed out again after half a minute, under the same op_id at once.
        """
        now = self.monotonic()
        for ticket in done:
            self.swept.pop(ticket, None)
        for ticket in [t for t, sweep in self.swept.items() if sweep.until < now or (op_id and sweep.op_id == op_id)]:
            for unit, ranges in self.swept.pop(ticket).ranges.items():
                self.garbage.setdefault(unit, []).extend(ranges)
        due = {}
        for unit, ranges in self.garbage.items():
            ready = [entry for entry in ranges if entry[2] <= now]
            if ready:
                due[unit] = ready
                self.garbage[unit] = [entry for entry in ranges if entry[2] > now]
        if not due:
            return 0, {}
        self.tickets += 1
        self.swept[self.tickets] = Sweep(now + 30.0, op_id, due)
        return self.tickets, {unit: [(first, count) for first, count, _ in ranges] for unit, ranges in due.items()}

    def all_keys(self) -> dict[str, list[tuple[int, int]]]:
        """Return every storage key that may hold something, as {unit: [(first key, count)]}: for the plane's end."""
        for op_id in list(self.pending):
            self.drop_pending(op_id, 0.0)
        for partition in self.partitions.values():
            for row in partition.rows.values():
                cells: dict[int, Any] = {id(cell): cell for cell in row.cells.values()}
                for cell in cells.values():
                    self.discard(cell.share.unit, cell.key)
        for sweep in self.swept.values():
            for unit, ranges in sweep.ranges.items():
                self.garbage.setdefault(unit, []).extend(ranges)
        return {unit: [(first, count) for first, count, _ in ranges] for unit, ranges in self.garbage.items() if ranges}

    # -- partitions

    def partition(self, partition_id: str) -> Partition:
        """Return a partition; an unknown one is refused."""
        found = self.partitions.get(partition_id)
        if found is None:
            text = f"no partition {partition_id!r} is registered"
            raise Refused(
                "DataPlaneBadRequest", text, partition_id=partition_id, field="partition_id", unknown_partition=True
            )
        return found

    def check_task(self, part: Partition, task: str) -> None:
        """Refuse a task that is not declared."""
        if task not in part.tasks:
            text = f"partition {part.id!r} has no task {task!r}; it has {list(part.tasks)}"
            raise Refused("DataPlaneBadRequest", text, partition_id=part.id, field="task_name")

    def group_of(self, sample_id: str, tags: dict[str, Any] | None) -> str:
        """Return the group of a sample: its tag, else what the pattern reads off its id, else itself."""
        told = None if tags is None else tags.get("group_id")
        if told is not None:
            return str(told)
        match = self.pattern.fullmatch(sample_id)
        return match["group"] if match else sample_id
