"""Putting and clearing in the memory plane."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from asyncdp.errors import ClaimLost, DataPlaneBadRequest, DataPlaneNotReady, DataPlaneUnavailable, DataPlaneWriteError
from asyncdp.field_spec import FieldSpec
from asyncdp.meta import RowHandle, Tags
from asyncdp.slots import Placement, Publish, Published, living_rows, stale_rows
from asyncdp.transports.memory.base import PlaneBase
from asyncdp.transports.memory.claims import Group, Row
from asyncdp.transports.memory.host import Cell, least_loaded
from asyncdp.transports.memory.partition import Partition

if TYPE_CHECKING:
    from asyncdp.calls import Only

__all__ = ["Writing"]


class Writing(PlaneBase):
    """Places, publishes and clears: everything is checked first, then everything changes."""

    def place(
        self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str], only: Only | None
    ) -> Placement:
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
        if only != "existing":
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
            raise DataPlaneUnavailable(msg, partition_id=partition_id, host=next(iter(self.hosts), None))
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

    def publish(self, call: Publish, owner: str) -> tuple[Published, bool]:
        """Make slots the content of samples: everything is checked first, then everything changes.

        Remembered also where all rows were left out as stale: sent again, it must leave them out again.
        """
        partition_id, sample_ids, refs = call.partition_id, call.sample_ids, call.refs
        tags: Sequence[Tags | None] = call.tags or (None,) * len(sample_ids)
        part = self.partitions.get(partition_id)
        if part is None and self.auto_register:
            part = Partition(partition_id)
        if part is None:
            part = self.partition(partition_id)
        keep = self._written(part, call)
        merged = self._check_publish(part, [(sample_ids[at], tags[at]) for at in keep], call.specs) if keep else {}
        for ref in refs:
            host = self.hosts[ref.host.id]
            host.answer(None)
            slot = host.slot(ref)
            if slot is None or slot.block is None:
                msg = f"slot {ref.slot} of host {host.id!r} holds no finished write"
                raise DataPlaneWriteError(msg, partition_id=partition_id)
        if keep:
            self.partitions[partition_id] = part
        part.fields.update(merged)
        created = tuple(sample_id not in part.rows for sample_id in sample_ids)
        rows = {at: self._row(part, sample_ids[at], owner, tags[at]) for at in keep}
        self._sequence += 1
        for ref in refs:
            host = self.hosts[ref.host.id]
            slot = host.commit(ref)
            assert slot.block is not None  # noqa: S101 - checked above
            sizes = {name: slot.block.columns[name].row_nbytes().tolist() for name in ref.fields}
            for index, position in zip(ref.index, ref.rows, strict=True):
                cell = Cell(host, ref.host.epoch, slot, ref.generation, index)
                if position in rows:
                    self._store(rows[position], cell, sizes)
                else:
                    host.kill(cell)
        for at, row in rows.items():
            self._tag(part, row, tags[at])
        self.changed()
        lives = (rows.get(at) for at in range(len(sample_ids)))
        return Published(tuple(None if row is None else RowHandle(row.incarnation) for row in lives), created), True

    def _written(self, part: Partition, call: Publish) -> Sequence[int]:
        """Return the positions of the rows that a put may write, by the lives that it is bound to.

        Raises:
            StaleSlotError, DataPlaneBadRequest: It may not write all of them, and leaves none out.
        """
        ids = call.sample_ids
        if call.only is None:
            return range(len(ids))
        if call.only == "new":
            living = [i for i in ids if i in part.rows]
            if living:
                raise living_rows(part.id, living, len(ids))
            return range(len(ids))
        meant = call.lives or (None,) * len(ids)
        keep = [at for at, (i, life) in enumerate(zip(ids, meant, strict=True)) if self._lives(part, i, life)]
        if len(keep) < len(ids) and not call.skip_stale:
            there = set(keep)
            raise stale_rows(part.id, [i for at, i in enumerate(ids) if at not in there], len(ids))
        return keep

    @staticmethod
    def _lives(part: Partition, sample_id: str, life: int | None) -> bool:
        """Whether a row lives, in the life that is meant, or in any."""
        row = part.rows.get(sample_id)
        return row is not None and life in (None, row.incarnation)

    def _check_publish(
        self, part: Partition, puts: Sequence[tuple[str, Tags | None]], specs: Mapping[str, FieldSpec]
    ) -> dict[str, FieldSpec]:
        merged = {name: part.fields.get(name, FieldSpec()).merge(spec, name) for name, spec in specs.items()}
        if self.strict_schema:
            self._check_declared(part, list(specs))
        self._check_room(sum(i not in part.rows for i, _ in puts))
        if part.group_size is None:
            return merged
        sizes: dict[str, int] = {}
        for sample_id, told in puts:
            row_tags = told or {}
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
        lives: Sequence[int | None] | None = None,
    ) -> tuple[int, bool]:
        """Remove samples; what is not there, or not in the life that is meant, is no error.

        Remembered also where nothing was there: the same request, late, would remove what was put meanwhile.
        """
        part = self.partitions.get(partition_id)
        if part is None:
            return 0, True
        self.expire(part)
        ids = [row.id for row in part.rows.values() if row.owner == owner] if sample_ids is None else sample_ids
        meant: Sequence[int | None] = lives or (None,) * len(ids)
        if claims is not None:
            for sample_id, held, life in zip(ids, claims, meant, strict=True):
                self._check_claim(part, sample_id, held, life)
        count = 0
        for sample_id, life in zip(ids, meant, strict=True):
            if not self._lives(part, sample_id, life):
                continue
            row = part.rows.pop(sample_id)
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

    def _check_claim(self, part: Partition, sample_id: str, held: tuple[str, ...] | None, life: int | None) -> None:
        if held is None:
            return
        row = part.rows[sample_id] if self._lives(part, sample_id, life) else None
        if row is not None and any(claim_id in row.claimed.values() for claim_id in held):
            return
        if row is None and not any((claim_id, sample_id) in part.lost for claim_id in held):
            return  # gone already, by this claim or by an evict
        msg = f"sample {sample_id!r} is not claimed by this client any more"
        raise ClaimLost(msg, partition_id=part.id, sample_ids=(sample_id,))
