"""The memory plane's directory: who produced what, where it lies, who claimed it. All of it is synchronous."""

from __future__ import annotations

import re
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from asyncdp.block import FieldSpec
from asyncdp.clock import AnyioClock
from asyncdp.errors import (
    ClaimLost,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, KVBatchMeta, PartitionInfo, RowHandle, Tags, lengths_of
from asyncdp.slots import ClaimTry, Located, Placement, Resolved, SlotRef
from asyncdp.transports.memory.claims import Claim, Group, ReadyIndex, Row
from asyncdp.transports.memory.host import Cell, Host, least_loaded

if TYPE_CHECKING:
    from asyncdp.calls import RegisterPartition

__all__ = ["Partition", "Plane"]

R = TypeVar("R")

#: Seconds that outcomes are remembered after the call that they belong to ran out of time. No attempt of a call is sent
#: later than its deadline, so this only has to outlast a message under way.
KEEP_S = 600.0
#: Waiting ids that ClaimNotReady names.
SHOWN = 16


class Partition:
    """One address space: declarations, samples, groups, claims."""

    def __init__(self, partition_id: str) -> None:
        """Begin with nothing declared."""
        self.id = partition_id
        self.fields: dict[str, FieldSpec] = {}
        self.declared: set[str] = set()
        self.tasks: dict[str, None] = {}
        self.num_samples = 0
        self.group_size: int | None = None
        self.rows: dict[str, Row] = {}
        self.groups: dict[str, Group] = {}
        self.claims: dict[str, Claim] = {}
        self.lost: dict[tuple[str, str], float] = {}  # (claim id, sample id) -> when it expired or was released
        self.indexes: dict[tuple[str, frozenset[str]], ReadyIndex] = {}

    def touch(self, row: Row, group: Group) -> None:
        """Tell the ready indexes that something about a sample changed."""
        for index in self.indexes.values():
            index.update(row, group)

    def index(self, task: str, fields: Sequence[str]) -> ReadyIndex:
        """Return the ready index of a task, built on first use."""
        key = (task, frozenset(fields))
        index = self.indexes.get(key)
        if index is None:
            index = self.indexes[key] = ReadyIndex(task, key[1], self.group_size)
            ordered = [(index.ready_since(row), at, row) for at, row in enumerate(self.rows.values())]
            for _, _, row in sorted((since or 0, at, row) for since, at, row in ordered):
                index.update(row, self.groups[row.group])
        return index


@dataclass(slots=True)
class _Record:
    """What became of one mutation; ``refused`` where it never may happen."""

    keep_until: float
    result: Any = None
    refused: bool = False


class Plane:
    """A directory and its slot hosts.

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
        self._incarnations = 0
        self._sequence = 0
        self._wakers: dict[object, Callable[[], None]] = {}

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

    # -- partitions

    def partition(self, partition_id: str) -> Partition:
        """Return a partition; an unknown one is DataPlaneBadRequest."""
        found = self.partitions.get(partition_id)
        if found is None:
            msg = f"no partition {partition_id!r} is registered"
            raise DataPlaneBadRequest(msg, partition_id=partition_id, field="partition_id")
        return found

    def register(self, call: RegisterPartition) -> None:
        """Unite a declaration with what is there."""
        part = self.partitions.get(call.partition_id) or Partition(call.partition_id)
        size = call.grpo_group_size
        if size is not None and part.group_size not in (None, size):
            msg = f"partition {part.id!r} has grpo_group_size {part.group_size}, not {size}"
            raise DataPlaneBadRequest(msg, partition_id=part.id, field="grpo_group_size")
        fields = dict(part.fields)
        for name in call.fields:
            fields.setdefault(name, FieldSpec())
        for name, words in call.enums.items():
            old = fields.get(name, FieldSpec())
            if old.kind not in ("", "enum"):
                msg = f"field {name!r} holds {old.describe()} and cannot get a vocabulary"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field=name)
            # The words that are there keep their numbers.
            fields[name] = FieldSpec(old.kind, enum=tuple(dict.fromkeys(old.enum + words)))
        part.fields = fields
        part.declared.update(call.fields, call.enums)
        part.tasks.update(dict.fromkeys(call.consumer_tasks))
        part.num_samples = max(part.num_samples, call.num_samples)
        if size is not None and part.group_size is None:
            part.group_size = size
            part.indexes.clear()
        self.partitions[part.id] = part
        self.changed()

    def describe(self, part: Partition) -> PartitionInfo:
        """Describe a partition."""
        return PartitionInfo(
            part.id,
            {name: spec.describe() for name, spec in part.fields.items()},
            tuple(part.tasks),
            part.num_samples,
            part.group_size,
            {name: spec.enum for name, spec in part.fields.items() if spec.enum},
            len(part.rows),
            sum(sum(row.nbytes.values()) for row in part.rows.values()),
        )

    def drop(self, partition_id: str) -> tuple[None, bool]:
        """Remove a partition with everything in it."""
        part = self.partitions.pop(partition_id, None)
        if part is not None:
            for row in part.rows.values():
                self._free(row)
            self.samples -= len(part.rows)
            self.changed()
        return None, part is not None

    # -- writing

    def place(self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str]) -> Placement:
        """Choose hosts, the least loaded first, and say what the partition fixed about the fields."""
        if self.auto_register and partition_id not in self.partitions:
            specs: Mapping[str, FieldSpec] = {}
            rows: Mapping[str, Row] = {}
        else:
            part = self.partition(partition_id)
            if self.strict_schema:
                self._check_declared(part, fields)
            specs = {name: part.fields[name] for name in fields if name in part.fields}
            rows = part.rows
        self._check_room(sum(i not in rows for i in sample_ids))
        left = len(sample_ids)
        shares = []
        hosts = least_loaded(self.hosts.values())
        for host in hosts:
            room = host.room()
            count = left if room is None else min(left, room)
            if count:
                shares.append((host.ref, count))
                left -= count
            if not left:
                break
        if not hosts:
            msg = "no slot host answers"
            raise DataPlaneUnavailable(msg, partition_id=partition_id)
        if left:
            msg = f"the slot hosts have no room for {left} of {len(sample_ids)} rows"
            raise DataPlaneNotReady(msg, partition_id=partition_id, retry_after_s=0.05)
        used = {host.id for host, _ in shares}
        return Placement(tuple(shares), tuple(h.ref for h in hosts if h.id not in used), specs)

    @staticmethod
    def _check_declared(part: Partition, fields: Sequence[str]) -> None:
        for name in fields:
            if name not in part.declared:
                msg = f"field {name!r} is not declared in partition {part.id!r}"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field=name)

    def _check_room(self, new: int) -> None:
        if self.samples + new > self.capacity:
            msg = f"the plane holds {self.samples} of at most {self.capacity} samples; {new} more do not fit"
            raise DataPlaneNotReady(msg, retry_after_s=0.05)

    def publish(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        refs: Sequence[SlotRef],
        tags: Sequence[Tags] | None,
        specs: Mapping[str, FieldSpec],
        owner: str,
    ) -> tuple[tuple[RowHandle, ...], bool]:
        """Make slots the content of samples: everything is checked first, then everything changes."""
        part = self.partitions.get(partition_id)
        if part is None and self.auto_register:
            part = Partition(partition_id)
        if part is None:
            part = self.partition(partition_id)
        merged = self._check_publish(part, sample_ids, tags, specs)
        for ref in refs:
            host = self.hosts[ref.host.id]
            host.answer(None)
            slot = host.slot(ref)
            if slot is None or slot.block is None:
                msg = f"slot {ref.slot} of host {host.id!r} holds no finished write"
                raise DataPlaneWriteError(msg, partition_id=partition_id)
        self.partitions[partition_id] = part
        part.fields.update(merged)
        rows = [self._row(part, i, owner, None if tags is None else tags[at]) for at, i in enumerate(sample_ids)]
        self._sequence += 1
        for ref in refs:
            host = self.hosts[ref.host.id]
            slot = host.commit(ref)
            assert slot.block is not None  # noqa: S101 - checked above
            sizes = {name: slot.block.columns[name].row_nbytes().tolist() for name in ref.fields}
            for index, position in zip(ref.index, ref.rows, strict=True):
                self._store(rows[position], Cell(host, ref.host.epoch, slot, ref.generation, index), sizes)
        for at, row in enumerate(rows):
            self._tag(part, row, None if tags is None else tags[at])
        self.changed()
        return tuple(RowHandle(row.incarnation) for row in rows), True

    def _check_publish(
        self, part: Partition, ids: Sequence[str], tags: Sequence[Tags] | None, specs: Mapping[str, FieldSpec]
    ) -> dict[str, FieldSpec]:
        merged = {name: part.fields.get(name, FieldSpec()).merge(spec, name) for name, spec in specs.items()}
        if self.strict_schema:
            self._check_declared(part, list(specs))
        new = [i for i in ids if i not in part.rows]
        self._check_room(len(new))
        if part.group_size is None:
            return merged
        sizes: dict[str, int] = {}
        for at, sample_id in enumerate(ids):
            row_tags = {} if tags is None else tags[at]
            expected = row_tags.get("expected_num_keys")
            if expected is not None and expected > part.group_size:
                msg = f"expected_num_keys {expected} of sample {sample_id!r} is above grpo_group_size {part.group_size}"
                raise DataPlaneBadRequest(msg, partition_id=part.id, sample_ids=(sample_id,), field="expected_num_keys")
            row = part.rows.get(sample_id)
            name = self._group_of(sample_id, row_tags)
            if row is None or ("group_id" in row_tags and name != row.group):
                known = part.groups.get(name)
                sizes[name] = sizes.get(name, 0 if known is None else len(known.rows)) + 1
                if sizes[name] > part.group_size:
                    msg = f"group {name!r} would have {sizes[name]} rows, grpo_group_size is {part.group_size}"
                    raise DataPlaneBadRequest(msg, partition_id=part.id, sample_ids=(sample_id,), field="group_id")
        return merged

    def _group_of(self, sample_id: str, tags: Tags) -> str:
        told = tags.get("group_id")
        if told is not None:
            return str(told)
        match = self.pattern.fullmatch(sample_id)
        return match["group"] if match else sample_id

    def _row(self, part: Partition, sample_id: str, owner: str, tags: Tags | None) -> Row:
        row = part.rows.get(sample_id)
        if row is None:
            self._incarnations += 1
            name = self._group_of(sample_id, tags or {})
            row = Row(sample_id, self._incarnations, owner, name, self.clock.time())
            part.rows[sample_id] = row
            part.groups.setdefault(name, Group(name)).rows[sample_id] = row
            self.samples += 1
        return row

    def _store(self, row: Row, cell: Cell, sizes: Mapping[str, Sequence[int]]) -> None:
        """Give a row its new fields; what they replace dies."""
        for name, per_row in sizes.items():
            old = row.cells.get(name)
            row.cells[name] = cell
            row.nbytes[name] = per_row[cell.index]
            row.produced.setdefault(name, self._sequence)
            if old is not None and old not in row.cells.values():
                old.host.kill(old)
            elif old is not None:
                old.host.replace(old, name)

    def _tag(self, part: Partition, row: Row, tags: Tags | None) -> None:
        """Merge tags, move the row to the group it is tagged with, and tell the ready indexes."""
        if tags:
            row.tags.update(tags)
        if "created_at" not in row.tags:
            row.tags["created_at"] = row.created_at
        elif isinstance(row.tags["created_at"], (int, float)):
            row.created_at = float(row.tags["created_at"])
        row.tags.setdefault("size_bytes", sum(row.nbytes.values()))
        group = part.groups[row.group]
        told = row.tags.get("group_id")
        if told is not None and str(told) != row.group:
            self._leave(part, row, group)
            row.group = str(told)
            group = part.groups.setdefault(row.group, Group(row.group))
            group.rows[row.id] = row
        expected = row.tags.get("expected_num_keys")
        if isinstance(expected, int):
            group.expected = max(expected, group.expected or 0)
        fit = row.tags.get("committed") is not False and row.tags.get("status") != "failed"
        if fit and row.eligible is None:
            row.eligible = self._sequence
        elif not fit:
            row.eligible = None
        part.touch(row, group)

    @staticmethod
    def _leave(part: Partition, row: Row, group: Group) -> None:
        group.rows.pop(row.id, None)
        part.touch(row, group)
        if not group.rows:
            part.groups.pop(group.id, None)

    # -- clearing

    def clear(
        self,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        owner: str,
        claims: Sequence[tuple[str, ...] | None] | None,
    ) -> tuple[int, bool]:
        """Remove samples; what is not there is no error."""
        part = self.partitions.get(partition_id)
        if part is None:
            return 0, False
        self.expire(part)
        ids = [row.id for row in part.rows.values() if row.owner == owner] if sample_ids is None else sample_ids
        if claims is not None:
            for sample_id, held in zip(ids, claims, strict=True):
                self._check_claim(part, sample_id, held)
        count = 0
        for sample_id in ids:
            row = part.rows.pop(sample_id, None)
            if row is None:
                continue
            count += 1
            for claim_id in row.claimed.values():
                claim = part.claims.get(claim_id)
                if claim is not None:
                    claim.rows.pop(sample_id, None)
                    if not claim.rows:
                        del part.claims[claim_id]
            self._leave(part, row, part.groups[row.group])
            self._free(row)
        self.samples -= count
        if count:
            self.changed()
        return count, bool(count)

    @staticmethod
    def _check_claim(part: Partition, sample_id: str, held: tuple[str, ...] | None) -> None:
        if held is None:
            return
        row = part.rows.get(sample_id)
        if row is not None and any(claim_id in row.claimed.values() for claim_id in held):
            return
        if row is None and not any((claim_id, sample_id) in part.lost for claim_id in held):
            return  # gone already, by this claim or by an evict
        msg = f"sample {sample_id!r} is not claimed by this client any more"
        raise ClaimLost(msg, partition_id=part.id, sample_ids=(sample_id,))

    @staticmethod
    def _free(row: Row) -> None:
        for cell in row.cells.values():
            cell.host.kill(cell)

    # -- reading

    def locate(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        handles: Sequence[RowHandle | None] | None,
    ) -> Located:
        """Find the slots of samples."""
        part = self.partition(partition_id)
        missing: dict[int, DataPlaneError] = {}
        found: list[RowHandle | None] = []
        spots: dict[tuple[int, int, tuple[str, ...]], tuple[Cell, list[int], list[int]]] = {}
        for at, sample_id in enumerate(sample_ids):
            row = part.rows.get(sample_id)
            handle = None if handles is None else handles[at]
            if handle is not None and (row is None or row.incarnation != handle.incarnation):
                found.append(handle)
                what = "was cleared" if row is None else "was cleared and put anew"
                msg = f"sample {sample_id!r} of partition {partition_id!r} {what} since it was looked up"
                missing[at] = StaleSlotError(msg, partition_id=partition_id, sample_ids=(sample_id,))
                continue
            if row is None:
                found.append(None)
                msg = f"no sample {sample_id!r} in partition {partition_id!r}"
                missing[at] = SampleNotFound(msg, partition_id=partition_id, sample_ids=(sample_id,))
                continue
            found.append(RowHandle(row.incarnation))
            by_cell: dict[Cell, list[str]] = {}
            for name in fields:
                cell = row.cells.get(name)
                if cell is None:
                    msg = f"field {name!r} of sample {sample_id!r} is not produced"
                    missing[at] = SampleNotFound(msg, partition_id=partition_id, sample_ids=(sample_id,), field=name)
                    break
                by_cell.setdefault(cell, []).append(name)
            else:
                for cell, names in by_cell.items():
                    key = (id(cell.slot), cell.generation, tuple(names))
                    spot = spots.get(key)
                    if spot is None:
                        spots[key] = spot = (cell, [], [])
                    spot[1].append(cell.index)
                    spot[2].append(at)
        refs = tuple(
            SlotRef(self._host_ref(cell), cell.slot.number, cell.generation, key[2], index, rows)
            for key, (cell, index, rows) in spots.items()
        )
        return Located(refs, missing, found, {name: part.fields[name] for name in fields if name in part.fields})

    @staticmethod
    def _host_ref(cell: Cell) -> Any:
        ref = cell.host.ref
        return ref if ref.epoch == cell.epoch else type(ref)(ref.id, cell.epoch, ref.ports)

    # -- claims

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

    def check_task(self, part: Partition, task: str) -> None:
        """Refuse a task that is not declared."""
        if task not in part.tasks:
            msg = f"partition {part.id!r} has no task {task!r}; it has {list(part.tasks)}"
            raise DataPlaneBadRequest(msg, partition_id=part.id, field="task_name")

    def claim(
        self,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        most: int,
        least: int,
        claim_id: str,
        owner: str,
        lease_s: float | None,
    ) -> tuple[ClaimTry, bool]:
        """Claim the first ready samples, or say how far they are."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        for name in fields:
            if name not in part.fields:
                msg = f"required field {name!r} is neither declared in partition {part.id!r} nor was it ever written"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field=name)
        size = part.group_size
        if size is not None:
            if most < size:
                msg = f"batch_size {most} is below one group of {size}"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field="batch_size")
            least = min(least, most // size * size)
        self.expire(part)
        index = part.index(task, fields)
        rows = index.take(most, least)
        if not rows:
            return self._unready(part, task, fields, index), False
        now = self.clock.time()
        expires = None if lease_s is None else now + lease_s
        claim = Claim(claim_id, owner, task, tuple(fields), {row.id: row for row in rows}, now, expires)
        part.claims[claim_id] = claim
        for row in rows:
            row.claimed[task] = claim_id
            index_group = part.groups[row.group]
            part.touch(row, index_group)
        return self._batch(part, claim), True

    def claimed(self, partition_id: str, claim_id: str) -> ClaimTry | None:
        """Return the batch of a claim that was answered before, as far as it lives; None where there is none."""
        part = self.partitions.get(partition_id)
        claim = None if part is None else part.claims.get(claim_id)
        return None if part is None or claim is None else self._batch(part, claim)

    @staticmethod
    def _batch(part: Partition, claim: Claim) -> ClaimTry:
        rows = list(claim.rows.values())
        tags = [dict(row.tags) for row in rows]
        meta = KVBatchMeta(
            part.id,
            claim.task,
            [row.id for row in rows],
            list(claim.fields),
            lengths_of(tags),
            tags=tags,
            handles=[RowHandle(row.incarnation, claim.id) for row in rows],
        )
        return ClaimTry(meta, ready=len(rows))

    def _unready(self, part: Partition, task: str, fields: Sequence[str], index: ReadyIndex) -> ClaimTry:
        waiting = [row for row in part.rows.values() if task not in row.claimed and index.ready_since(row) is None]
        waiting.sort(key=lambda row: row.created_at)
        oldest = self.clock.time() - waiting[0].created_at if waiting else None
        empty = KVBatchMeta(part.id, task, [], list(fields), tags=[], handles=[])
        return ClaimTry(empty, index.rows, oldest, tuple(row.id for row in waiting[:SHOWN]))

    def release(
        self, partition_id: str, sample_ids: Sequence[str], claim_ids: Sequence[str | None], task: str
    ) -> tuple[None, bool]:
        """Make claimed samples claimable again; all of them, or none."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        self.expire(part)
        by_claim: dict[str, list[str]] = {}
        for sample_id, claim_id in zip(sample_ids, claim_ids, strict=True):
            claim = part.claims.get(claim_id or "")
            if claim is None or claim.task != task or sample_id not in claim.rows:
                msg = f"sample {sample_id!r} is not claimed by this client any more"
                raise ClaimLost(msg, partition_id=part.id, sample_ids=(sample_id,))
            by_claim.setdefault(claim.id, []).append(sample_id)
        for claim_id, ids in by_claim.items():
            self._unclaim(part, part.claims[claim_id], ids)
        self.changed()
        return None, True

    def release_owner(self, partition_id: str, owner: str) -> tuple[None, bool]:
        """Make everything that an owner claimed claimable again."""
        part = self.partitions.get(partition_id)
        held = [] if part is None else [claim for claim in part.claims.values() if claim.owner == owner]
        if part is not None and held:
            for claim in held:
                self._unclaim(part, claim, list(claim.rows))
            self.changed()
        return None, bool(held)

    def abandon(self, partition_id: str, claim_id: str) -> None:
        """Give back a claim that nobody got; refuse it if it arrives later."""
        part = self.partitions.get(partition_id)
        claim = None if part is None else part.claims.get(claim_id)
        if part is not None and claim is not None:
            self._unclaim(part, claim, list(claim.rows))
            self.changed()
        self.refuse(claim_id)

    def list_claims(self, partition_id: str, task: str) -> list[ClaimInfo]:
        """List the claims of a task that live."""
        part = self.partition(partition_id)
        self.check_task(part, task)
        self.expire(part)
        return [
            ClaimInfo(c.id, c.owner, c.task, tuple(c.rows), c.claimed_at, c.expires_at)
            for c in part.claims.values()
            if c.task == task
        ]

    def next_expiry(self, partition_id: str) -> float | None:
        """Unix time at which the next lease ends."""
        part = self.partitions.get(partition_id)
        ends = [] if part is None else [c.expires_at for c in part.claims.values() if c.expires_at is not None]
        return min(ends, default=None)

    def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Whether every sample present is claimed by every named task."""
        part = self.partition(partition_id)
        for task in tasks:
            self.check_task(part, task)
        self.expire(part)
        return all(task in row.claimed for row in part.rows.values() for task in tasks)

    # -- recovery

    def groups(self, partition_id: str) -> list[DataPlaneGroupMeta]:
        """List groups, oldest first."""
        part = self.partition(partition_id)
        out = [self._group_meta(part, group) for group in part.groups.values()]
        out.sort(key=lambda meta: meta.created_at)
        return out

    @staticmethod
    def _group_meta(part: Partition, group: Group) -> DataPlaneGroupMeta:
        rows = sorted(group.rows.values(), key=lambda row: row.incarnation)
        versions = [row.tags["weight_version"] for row in rows if row.tags.get("weight_version") is not None]
        lost = [row.id for row in rows if any(not c.host.up or c.host.ref.epoch != c.epoch for c in row.cells.values())]
        return DataPlaneGroupMeta(
            part.id,
            group.id,
            tuple(row.id for row in rows),
            min(versions, default=None),
            min(row.created_at for row in rows),
            all(row.tags.get("committed") is not False for row in rows),
            group.expected or part.group_size or len(rows),
            sum(sum(row.nbytes.values()) for row in rows),
            tuple(dict(row.tags) for row in rows),
            tuple(lost),
        )

    def depth(self, partition_id: str) -> int:
        """Count the groups that are committed and complete."""
        return sum(meta.committed and meta.is_complete for meta in self.groups(partition_id))


#: The named exception to "no module state": lets clients of one process attach to a plane and be pickled.
PLANES: weakref.WeakValueDictionary[str, Plane] = weakref.WeakValueDictionary()
