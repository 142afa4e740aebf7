"""Putting and clearing in the memory plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncdp.errors import ClaimLost, DataPlaneBadRequest, DataPlaneNotReady, DataPlaneUnavailable, DataPlaneWriteError
from asyncdp.field_spec import FieldSpec
from asyncdp.meta import RowHandle, Tags
from asyncdp.slots import Placement, SlotRef
from asyncdp.transports.memory.base import PlaneBase
from asyncdp.transports.memory.claims import Group, Row
from asyncdp.transports.memory.host import Cell, least_loaded
from asyncdp.transports.memory.partition import Partition

__all__ = ["Writing"]


class Writing(PlaneBase):
    """Places, publishes and clears: everything is checked first, then everything changes."""

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
            room = host.room(self.clock.time())
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
        row.tags.setdefault("size_bytes", sum(row.nbytes.values()))  # of the first put, as producers stamp it
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

    def clear(
        self,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        owner: str,
        claims: Sequence[tuple[str, ...] | None] | None,
    ) -> tuple[int, bool]:
        """Remove samples; what is not there is no error.

        Remembered also where nothing was there: the same request, late, would remove what was put meanwhile.
        """
        part = self.partitions.get(partition_id)
        if part is None:
            return 0, True
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
                        self.refuse(claim_id)
            self._leave(part, row, part.groups[row.group])
            self._free(row)
        self.samples -= count
        if count:
            self.changed()
        return count, True

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
