"""The memory plane's directory: who produced what, where it lies, who claimed it. All of it is synchronous."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, SampleNotFound, StaleSlotError
from asyncdp.field_spec import FieldSpec
from asyncdp.meta import DataPlaneGroupMeta, PartitionInfo, RowHandle
from asyncdp.slots import Located, SlotRef
from asyncdp.transports.memory.claiming import Claiming
from asyncdp.transports.memory.partition import Partition
from asyncdp.transports.memory.writing import Writing

if TYPE_CHECKING:
    from asyncdp.calls import RegisterPartition
    from asyncdp.transports.memory.claims import Group
    from asyncdp.transports.memory.host import Cell

__all__ = ["PLANES", "Partition", "Plane"]


class Plane(Writing, Claiming):
    """A directory and its slot hosts."""

    # -- partitions

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
        if size is not None and part.groups:
            group = min(part.groups.values(), key=lambda group: (-len(group.rows), group.id))
            if len(group.rows) > size:
                msg = f"group {group.id!r} has {len(group.rows)} rows already, grpo_group_size would be {size}"
                raise DataPlaneBadRequest(msg, partition_id=part.id, field="grpo_group_size")
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
        """Remove a partition with everything in it; remembered also where there was none."""
        part = self.partitions.pop(partition_id, None)
        if part is not None:
            for row in part.rows.values():
                self._free(row)
            for claim_id in part.claims:
                self.refuse(claim_id)
            self.samples -= len(part.rows)
            self.changed()
        return None, True

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
            all(row.tags.get("committed") is not False for row in group.fit or rows),
            group.expected or part.group_size or len(rows),
            sum(sum(row.nbytes.values()) for row in rows),
            tuple(dict(row.tags) for row in rows),
            tuple(lost),
            tuple(RowHandle(row.incarnation) for row in rows),
        )

    def depth(self, partition_id: str) -> int:
        """Count the groups that are committed and complete."""
        return sum(meta.committed and meta.is_complete for meta in self.groups(partition_id))


#: The named exception to "no module state": lets clients of one process attach to a plane and be pickled.
PLANES: weakref.WeakValueDictionary[str, Plane] = weakref.WeakValueDictionary()
