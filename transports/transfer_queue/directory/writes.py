"""The directory's part in puts and clears."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncdp.transports.memory.claims import Group, Row
from asyncdp.transports.transfer_queue.directory.core import Core
from asyncdp.transports.transfer_queue.directory.specs import NOTHING, Spec, describe, merge
from asyncdp.transports.transfer_queue.directory.state import Cell, Partition, Pending, Refused, Share, Tags

__all__ = ["Bound", "Published", "Writes"]

#: What a put is bound to: ``only``, ``lives``, ``skip_stale`` of :class:`asyncdp.calls.PutSamples`.
Bound = tuple[str, Sequence["int | None"] | None, bool]
#: The incarnation of each row, None where it was left out as stale; and which rows the put created.
Published = tuple[list["int | None"], list[bool]]


class Writes(Core):
    """Registering, placing, publishing, clearing."""

    def register(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        tasks: Sequence[str],
        group_size: int | None,
        enums: Mapping[str, Sequence[str]],
    ) -> None:
        """Unite a declaration with what is there."""
        part = self.partitions.get(partition_id) or Partition(partition_id)
        if group_size is not None and part.group_size not in (None, group_size):
            text = f"partition {part.id!r} has grpo_group_size {part.group_size}, not {group_size}"
            raise Refused("DataPlaneBadRequest", text, partition_id=part.id, field="grpo_group_size")
        known = dict(part.fields)
        for name in fields:
            known.setdefault(name, NOTHING)
        for name, words in enums.items():
            old = known.get(name, NOTHING)
            if old[0] not in ("", "enum"):
                text = f"field {name!r} holds {describe(old)} and cannot get a vocabulary"
                raise Refused("DataPlaneBadRequest", text, partition_id=part.id, field=name)
            # The words that are there keep their numbers.
            known[name] = (*old[:4], tuple(dict.fromkeys((*old[4], *words))))
        if group_size is not None and part.groups:
            group = min(part.groups.values(), key=lambda group: (-len(group.rows), group.id))
            if len(group.rows) > group_size:
                text = f"group {group.id!r} has {len(group.rows)} rows already, grpo_group_size would be {group_size}"
                raise Refused("DataPlaneBadRequest", text, partition_id=part.id, field="grpo_group_size")
        part.fields = known
        part.declared.update(fields, enums)
        part.tasks.update(dict.fromkeys(tasks))
        part.num_samples = max(part.num_samples, num_samples)
        if group_size is not None and part.group_size is None:
            part.group_size = group_size
            part.indexes.clear()
        self.partitions[part.id] = part

    # -- puts

    def place(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        op_id: str,
        wanted: int,
        avoid: Sequence[str],
        left_s: float,
        only: str | None = None,
    ) -> tuple[Any, ...]:
        """Choose units for the rows of a put and give out storage keys; one of rows that live needs no room for more.

        Returns:
            ``("done", result)`` where this op_id was published already, else ``("shares", [(unit, first key, count)],
            {field: spec})``; the shares cover the rows in their order, in at most ``wanted`` parts.
        """
        record = self._records.get(op_id)
        if record is not None:
            return ("done", self.once(op_id, 0.0, lambda: (None, False)))
        part = self.partitions.get(partition_id)
        if part is None and not self.config["auto_register"]:
            part = self.partition(partition_id)
        specs: dict[str, Spec] = {}
        rows: Mapping[str, Row] = {}
        if part is not None:
            self._check_declared(part, fields)
            specs = {name: part.fields[name] for name in fields if name in part.fields}
            rows = part.rows
        pending = self.pending.get(op_id)
        new = 0 if only == "existing" else sum(i not in rows for i in sample_ids)
        self._check_room(new, except_for=op_id)
        units = sorted((u for u in self.units if u not in avoid), key=lambda u: self.load.get(u, 0))
        if not units:
            text = "none of the storage units answers"
            raise Refused("DataPlaneUnavailable", text, partition_id=partition_id, blames_port=False)
        units = units[: max(1, min(wanted, len(sample_ids)))]
        if pending is None:
            pending = self.pending[op_id] = Pending()
        pending.new = max(pending.new, new)
        pending.until = self.monotonic() + min(left_s, 1e6) + 60.0
        shares, left = [], len(sample_ids)
        for at, unit in enumerate(units):
            count = -(-left // (len(units) - at))
            shares.append((unit, self.next_key, count))
            self.next_key += count
            left -= count
        pending.ranges.extend(shares)
        return ("shares", shares, specs)

    def _check_declared(self, part: Partition, fields: Sequence[str]) -> None:
        if not self.config["strict_schema"]:
            return
        for name in fields:
            if name not in part.declared:
                text = f"field {name!r} is not declared in partition {part.id!r}"
                raise Refused("DataPlaneBadRequest", text, partition_id=part.id, field=name)

    def _check_room(self, new: int, except_for: str = "") -> None:
        room = self.config["capacity"] - self.samples
        if self.pending:
            self.expire_pending()
            room -= sum(p.new for op_id, p in self.pending.items() if op_id != except_for)
        if new and new > room:
            text = f"the plane holds {self.samples} of at most {self.config['capacity']} samples; {new} more do not fit"
            raise Refused("DataPlaneNotReady", text, retry_after_s=0.05)

    def publish(  # noqa: PLR0913, PLR0917 - one request
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        op_id: str,
        not_after: float,
        owner: str,
        tags: Sequence[Tags] | None,
        shares: Sequence[tuple[str, int, int]],
        forms: Mapping[str, tuple[Any, ...]],
        specs: Mapping[str, Spec],
        sizes: Mapping[str, int | Sequence[int]],
        bound: Bound | None = None,
    ) -> Published:
        """Make what was written the content of samples, all at once, tags included.

        Which rows may be written is decided here, once: remembered also where all of them are left out.
        """

        def act() -> tuple[Published, bool]:
            if shares and op_id not in self.pending:
                raise Refused(
                    "DataPlaneWriteError", "this put was given up: its storage keys are not reserved any more"
                )
            try:
                stored = (op_id, shares, forms, sizes)
                done = self._publish(partition_id, sample_ids, owner, tags, specs, bound, stored)
            except Refused:
                self.give_back(op_id, shares)
                raise
            return done, True

        result: Published = self.once(op_id, not_after, act)
        return result

    def _publish(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        owner: str,
        tags: Sequence[Tags] | None,
        specs: Mapping[str, Spec],
        bound: Bound | None,
        stored: tuple[str, Sequence[tuple[str, int, int]], Mapping[str, Any], Mapping[str, Any]],
    ) -> Published:
        part = self.partitions.get(partition_id)
        if part is None:
            part = Partition(partition_id) if self.config["auto_register"] else self.partition(partition_id)
        told: Sequence[Tags | None] = (None,) * len(sample_ids) if tags is None else tags
        keep = self._fit(part, sample_ids, bound)
        if keep:
            merged = {name: merge(part.fields.get(name, NOTHING), spec, name) for name, spec in specs.items()}
            self._check_declared(part, list(specs))
            self._check_room(sum(sample_ids[at] not in part.rows for at in keep), except_for=stored[0])
            self._check_groups(part, [(sample_ids[at], told[at]) for at in keep])
            # Nothing is refused from here on.
            self.partitions[partition_id] = part
            part.fields.update(merged)
        self.sequence += 1
        new = {at for at in keep if sample_ids[at] not in part.rows}
        rows = {at: self._row(part, sample_ids[at], owner, told[at]) for at in keep}
        if stored[1]:
            self._store(rows, *stored)
        for at, row in rows.items():
            self._tag(part, row, told[at])
        every = range(len(sample_ids))
        return [rows[at].incarnation if at in rows else None for at in every], [at in new for at in every]

    @staticmethod
    def _fit(part: Partition, ids: Sequence[str], bound: Bound | None) -> Sequence[int]:
        """Return the positions of the rows that a put may write by the lives that it is bound to.

        What it refuses with is put into words by the client, as on every transport.
        """
        if bound is None:
            return range(len(ids))
        only, lives, skip = bound
        info = {"partition_id": part.id, "bound": len(ids)}
        if only == "new":
            living = tuple(sample_id for sample_id in ids if sample_id in part.rows)
            if living:
                raise Refused("DataPlaneBadRequest", "rows live already", sample_ids=living, **info)
            return range(len(ids))
        meant = (None,) * len(ids) if lives is None else lives
        keep = [at for at, (i, life) in enumerate(zip(ids, meant, strict=True)) if part.lives(i, life)]
        if len(keep) < len(ids) and not skip:
            there = set(keep)
            stale = tuple(sample_id for at, sample_id in enumerate(ids) if at not in there)
            raise Refused("StaleSlotError", "rows are gone, or live again", sample_ids=stale, **info)
        return keep

    def _check_groups(self, part: Partition, puts: Sequence[tuple[str, Tags | None]]) -> None:
        if part.group_size is None:
            return
        sizes: dict[str, int] = {}
        for sample_id, told in puts:
            row_tags = told or {}
            expected = row_tags.get("expected_num_keys")
            where = {"partition_id": part.id, "sample_ids": (sample_id,)}
            if isinstance(expected, (int, float)) and expected > part.group_size:
                text = (
                    f"expected_num_keys {expected} of sample {sample_id!r} is above grpo_group_size {part.group_size}"
                )
                raise Refused("DataPlaneBadRequest", text, field="expected_num_keys", **where)
            row = part.rows.get(sample_id)
            name = self.group_of(sample_id, row_tags)
            if row is not None and ("group_id" not in row_tags or name == row.group):
                continue
            known = part.groups.get(name)
            sizes[name] = sizes.get(name, 0 if known is None else len(known.rows)) + 1
            if sizes[name] > part.group_size:
                text = f"group {name!r} would have {sizes[name]} rows, grpo_group_size is {part.group_size}"
                raise Refused("DataPlaneBadRequest", text, field="group_id", **where)

    def _row(self, part: Partition, sample_id: str, owner: str, tags: Tags | None) -> Row:
        row = part.rows.get(sample_id)
        if row is None:
            self.incarnations += 1
            name = self.group_of(sample_id, tags)
            row = Row(sample_id, self.incarnations, owner, name, self.time())
            part.rows[sample_id] = row
            part.groups.setdefault(name, Group(name)).rows[sample_id] = row
            self.samples += 1
        return row

    def _store(
        self,
        rows: Mapping[int, Row],
        op_id: str,
        shares: Sequence[tuple[str, int, int]],
        forms: Mapping[str, tuple[Any, ...]],
        sizes: Mapping[str, int | Sequence[int]],
    ) -> None:
        """Give rows, by position, their new fields; what they replace becomes garbage, as do those of no row."""
        layout = self._layout(forms)
        names = list(forms)
        start = 0
        for unit, first, count in shares:
            share = Share(unit, layout)
            self.load[unit] = self.load.get(unit, 0) + count
            for at, key in enumerate(range(first, first + count), start):
                row = rows.get(at)
                if row is None:
                    self.discard(unit, key)
                    continue
                cell: Any = Cell(share, key)
                replaced = {id(old): old for name in names if (old := row.cells.get(name)) is not None}
                for name in names:
                    size = sizes[name]
                    row.cells[name] = cell
                    row.nbytes[name] = size if isinstance(size, int) else size[at]
                    row.produced.setdefault(name, self.sequence)
                if replaced:
                    self._let_go(row, replaced.values())
            start += count
        used = set(shares)
        pending = self.pending.pop(op_id)
        after = self.monotonic() + 5.0
        for entry in pending.ranges:
            if entry not in used:  # a unit that failed the put, and may still run it
                self.garbage.setdefault(entry[0], []).append((entry[1], entry[2], after))

    def _let_go(self, row: Row, cells: Any) -> None:
        kept = {id(cell) for cell in row.cells.values()}
        for cell in cells:
            if id(cell) not in kept:
                self.discard(cell.share.unit, cell.key)

    def _layout(self, forms: Mapping[str, tuple[Any, ...]]) -> int:
        """Return the number of a layout; there are as many as puts differ in the form of their fields."""
        key = tuple(sorted(forms.items()))
        number = self.layout_ids.get(key)
        if number is None:
            number = self.layout_ids[key] = len(self.layouts)
            self.layouts.append(key)
        return number

    def _tag(self, part: Partition, row: Row, tags: Tags | None) -> None:
        """Merge tags, move the row to the group it is tagged with, and tell the ready indexes."""
        if tags:
            row.tags.update(tags)
        created = row.tags.setdefault("created_at", row.created_at)
        if isinstance(created, (int, float)):
            row.created_at = float(created)
        row.tags.setdefault("size_bytes", sum(row.nbytes.values()))
        told = row.tags.get("group_id")
        if told is not None and str(told) != row.group:
            part.leave(row)
            row.group = str(told)
            part.groups.setdefault(row.group, Group(row.group)).rows[row.id] = row
        group = part.groups[row.group]
        expected = row.tags.get("expected_num_keys")
        if isinstance(expected, int):
            group.expected = max(expected, group.expected or 0)
        fit = row.tags.get("committed") is not False and row.tags.get("status") != "failed"
        if not fit:
            row.eligible = None
        elif row.eligible is None:
            row.eligible = self.sequence
        part.touch(row, group)

    def abort(self, op_id: str, *, settled: bool) -> None:
        """Give up a put that was not published."""
        self.drop_pending(op_id, 0.0 if settled else 5.0)

    # -- clears

    def clear(
        self,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        op_id: str,
        not_after: float,
        owner: str,
        claims: Sequence[tuple[str, ...] | None] | None,
        lives: Sequence[int | None] | None = None,
    ) -> tuple[int, tuple[str, ...]]:
        """Remove samples; what is not there, or not in the life that is meant, is no error.

        Returns how many there were, and on which units.

        Remembered also where nothing was there: the same request, late, would remove what was put meanwhile.
        """

        def act() -> tuple[tuple[int, tuple[str, ...]], bool]:
            part = self.partitions.get(partition_id)
            if part is None:
                return (0, ()), True
            self.expire(part)
            ids = [row.id for row in part.rows.values() if row.owner == owner] if sample_ids is None else sample_ids
            meant = (None,) * len(ids) if lives is None else lives
            if claims is not None:
                for sample_id, held, life in zip(ids, claims, meant, strict=True):
                    self.check_claim(part, sample_id, held, life)
            units: set[str] = set()
            count = sum(
                part.lives(sample_id, life) and self._remove(part, sample_id, units)
                for sample_id, life in zip(ids, meant, strict=True)
            )
            return (count, tuple(units)), True

        result: tuple[int, tuple[str, ...]] = self.once(op_id, not_after, act)
        return result

    def _remove(self, part: Partition, sample_id: str, units: set[str]) -> bool:
        row = part.rows.pop(sample_id, None)
        if row is None:
            return False
        for claim_id in row.claimed.values():
            claim = part.claims.get(claim_id)
            if claim is not None:
                claim.rows.pop(sample_id, None)
                if not claim.rows:
                    del part.claims[claim_id]
                    self.refuse(claim_id)
        part.leave(row)
        units.update(self._free(row))
        self.samples -= 1
        self.sequence += 1
        return True

    def _free(self, row: Row) -> list[str]:
        """Make all that a row has garbage; return the units that hold it."""
        cells: dict[int, Any] = {id(cell): cell for cell in row.cells.values()}
        for cell in cells.values():
            self.discard(cell.share.unit, cell.key)
        return [cell.share.unit for cell in cells.values()]

    def drop(self, partition_id: str, op_id: str, not_after: float) -> tuple[int, tuple[str, ...]]:
        """Remove a partition with everything in it; remembered also where there was none."""

        def act() -> tuple[tuple[int, tuple[str, ...]], bool]:
            part = self.partitions.pop(partition_id, None)
            if part is None:
                return (0, ()), True
            units: set[str] = set()
            for row in part.rows.values():
                units.update(self._free(row))
            for claim_id in part.claims:
                self.refuse(claim_id)
            self.samples -= len(part.rows)
            self.sequence += 1
            return (len(part.rows), tuple(units)), True

        result: tuple[int, tuple[str, ...]] = self.once(op_id, not_after, act)
        return result

    # -- what the part for claims brings

    def expire(self, part: Partition) -> None:
        """Take back claims whose lease is over."""
        raise NotImplementedError

    def check_claim(self, part: Partition, sample_id: str, held: tuple[str, ...] | None, life: int | None) -> None:
        """Refuse the removal of a sample whose claim is not the caller's any more."""
        raise NotImplementedError
