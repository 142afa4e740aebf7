"""The directory's declarations, puts and removals."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from .claims import Claims
from .listing import count_complete, describe
from .partition import Partition, Spec
from .rows import Cell, Group, Row, Tags

__all__ = ["Bound", "Directory", "Piece", "Published"]

#: Lives that a put is bound to: ``only``, ``lives``, ``skip_stale`` of ``asyncdp.calls.PutSamples``.
Bound = tuple[str, Sequence["int | None"] | None, bool]
#: The incarnation of each row, None for rows left out as stale; and, for each row, whether the put created it.
Published = tuple[list["int | None"], list[bool]]
#: Rows of a put that are stored in one place: the place, the fields, their indexes in the place and in the put.
Piece = tuple[Any, Sequence[str], Sequence[int], Sequence[int]]


class Directory(Claims):
    """Records the samples of a plane, where they are stored, and who claimed them. Subclasses manage the storage.

    Attributes:
        new_spec: Makes the specification of a field from its kind (``""``) and its vocabulary; see
            :class:`~asyncdp.transports.directory.partition.Spec`.
    """

    new_spec: ClassVar[Callable[..., Any]]

    # -- hooks for the storage

    def discard(self, cell: Cell) -> None:
        """Handle that nothing refers to a cell any more; a hook for subclasses."""
        raise NotImplementedError

    def replaced(self, cell: Cell, names: Sequence[str]) -> None:
        """Handle that these fields of a cell were replaced, while others are still in use; a hook for subclasses."""

    # -- declarations

    def register(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        tasks: Sequence[str],
        group_size: int | None,
        enums: Mapping[str, Sequence[str]],
        anew: bool = False,  # noqa: FBT001, FBT002 - arguments come by position from other processes
    ) -> None:
        """Declare a partition, or merge the declaration with an existing one.

        ``anew``: of a partition without rows, field types, vocabularies and group size are forgotten first.
        """
        part = self.partitions.get(partition_id) or Partition(partition_id)
        fresh = anew and not part.rows
        size = None if fresh else part.group_size
        if group_size is not None and size not in (None, group_size):
            text = f"partition {part.id!r} has grpo_group_size {size}, not {group_size}"
            raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field="grpo_group_size")
        known = {name: self.new_spec() for name in part.fields} if fresh else dict(part.fields)
        for name in fields:
            known.setdefault(name, self.new_spec())
        for name, words in enums.items():
            old: Spec = known.get(name) or self.new_spec()
            if old.kind not in ("", "enum"):
                text = f"field {name!r} holds {old.describe()} and cannot get a vocabulary"
                raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field=name)
            # Words that are declared already keep their numbers.
            known[name] = self.new_spec(old.kind, enum=tuple(dict.fromkeys((*old.enum, *words))))
        if group_size is not None and part.groups:
            group = min(part.groups.values(), key=lambda group: (-len(group.rows), group.id))
            if len(group.rows) > group_size:
                text = f"group {group.id!r} has {len(group.rows)} rows already, grpo_group_size would be {group_size}"
                raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field="grpo_group_size")
        part.fields = known
        part.declared.update(fields, enums)
        part.tasks.update(dict.fromkeys(tasks))
        part.num_samples = max(part.num_samples, num_samples)
        size = size if group_size is None else group_size
        if size != part.group_size:
            part.group_size = size
            part.indexes.clear()
        self.partitions[part.id] = part
        self.changed()

    # -- puts

    def prepare(
        self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str], only: str | None, promised: int = 0
    ) -> tuple[dict[str, Any], int]:
        """Refuse a put that cannot be published; ``promised`` is the number of samples reserved for other puts.

        Returns:
            The specs of the fields as the partition fixed them, and the number of new samples (0 with ``existing``).
        """
        part = self.partitions.get(partition_id)
        if part is None and not self.auto_register:
            part = self.partition(partition_id)
        specs: dict[str, Any] = {}
        rows: Mapping[str, Row] = {}
        if part is not None:
            self._check_declared(part, fields)
            specs = {name: part.fields[name] for name in fields if name in part.fields}
            rows = part.rows
        new = 0 if only == "existing" else sum(i not in rows for i in sample_ids)
        self._check_room(new, promised)
        return specs, new

    def put(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        owner: str,
        tags: Sequence[Tags | None] | None,
        specs: Mapping[str, Any],
        bound: Bound | None,
        sizes: Mapping[str, int | Sequence[int]],
        lies: Callable[[], Iterable[Piece]],
        promised: int = 0,
    ) -> Published:
        """Publish the rows of a put, with their tags, atomically.

        Args:
            partition_id: Id of the partition.
            sample_ids: Ids of the rows.
            owner: Owner of the client that puts them.
            tags: One mapping per row; None: no tags.
            specs: Specs of the fields as written.
            bound: Lives that may be written; None: any.
            sizes: Payload bytes by field: one number per row of the put, or one number that holds for each row.
            lies: Returns where the rows are stored. Called after all checks; the put cannot be refused afterwards.
            promised: Number of samples reserved for other puts, for which capacity must remain.
        """
        part = self.partitions.get(partition_id)
        if part is None:
            part = Partition(partition_id) if self.auto_register else self.partition(partition_id)
        told: Sequence[Tags | None] = tags or (None,) * len(sample_ids)
        keep = self._written(part, sample_ids, bound)
        merged: dict[str, Any] = {}
        if keep:
            fields = part.fields
            merged = {name: (fields.get(name) or self.new_spec()).merge(spec, name) for name, spec in specs.items()}
            self._check_declared(part, list(specs))
            self._check_room(sum(sample_ids[at] not in part.rows for at in keep), promised)
            self._check_groups(part, [(sample_ids[at], told[at]) for at in keep])
        pieces = lies()
        if keep:
            self.partitions[partition_id] = part
            part.fields.update(merged)
        self.sequence += 1
        new = {at for at in keep if sample_ids[at] not in part.rows}
        rows = {at: self._row(part, sample_ids[at], owner, told[at]) for at in keep}
        for place, names, indexes, positions in pieces:
            for index, at in zip(indexes, positions, strict=True):
                cell = Cell(place, index)
                if at in rows:
                    self._store(rows[at], cell, names, sizes, at)
                else:
                    self.discard(cell)
        for at, row in rows.items():
            self._tag(part, row, told[at])
        self.changed()
        every = range(len(sample_ids))
        return [rows[at].incarnation if at in rows else None for at in every], [at in new for at in every]

    def _check_declared(self, part: Partition, fields: Sequence[str]) -> None:
        for name in fields if self.strict_schema else ():
            if name not in part.declared:
                text = f"field {name!r} is not declared in partition {part.id!r}"
                raise self.error("DataPlaneBadRequest", text, partition_id=part.id, field=name)

    def _check_room(self, new: int, promised: int = 0) -> None:
        if new and self.samples + promised + new > self.capacity:
            text = f"the plane holds {self.samples} of at most {self.capacity} samples; {new} more do not fit"
            raise self.error("DataPlaneNotReady", text, retry_after_s=0.05)

    def _written(self, part: Partition, ids: Sequence[str], bound: Bound | None) -> Sequence[int]:
        """Return the positions of the rows that a put may write, given the lives that it is bound to.

        ``asyncdp.calls.answers`` writes the messages of its refusals, so that they are the same on every transport.
        """
        if bound is None:
            return range(len(ids))
        only, lives, skip = bound
        info = {"partition_id": part.id, "bound": len(ids)}
        if only == "new":
            living = tuple(sample_id for sample_id in ids if sample_id in part.rows)
            if living:
                raise self.error("DataPlaneBadRequest", "rows already exist", sample_ids=living, **info)
            return range(len(ids))
        meant = lives or (None,) * len(ids)
        keep = [at for at, (i, life) in enumerate(zip(ids, meant, strict=True)) if part.lives(i, life)]
        if len(keep) < len(ids) and not skip:
            there = set(keep)
            stale = tuple(sample_id for at, sample_id in enumerate(ids) if at not in there)
            raise self.error("StaleSlotError", "rows were removed, or removed and put again", sample_ids=stale, **info)
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
                raise self.error("DataPlaneBadRequest", text, field="expected_num_keys", **where)
            row = part.rows.get(sample_id)
            name = self.group_of(sample_id, row_tags)
            if row is not None and ("group_id" not in row_tags or name == row.group):
                continue
            known = part.groups.get(name)
            sizes[name] = sizes.get(name, 0 if known is None else len(known.rows)) + 1
            if sizes[name] > part.group_size:
                text = f"group {name!r} would have {sizes[name]} rows, grpo_group_size is {part.group_size}"
                raise self.error("DataPlaneBadRequest", text, field="group_id", **where)

    def group_of(self, sample_id: str, tags: Tags | None) -> str:
        """Return the group of a sample: its tag ``group_id``, else the match of the pattern in its id, else the id."""
        told = None if tags is None else tags.get("group_id")
        if told is not None:
            return str(told)
        match = self.pattern.fullmatch(sample_id)
        return match["group"] if match else sample_id

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
        self, row: Row, cell: Cell, names: Sequence[str], sizes: Mapping[str, int | Sequence[int]], at: int
    ) -> None:
        """Store new fields in a row and release the ones that they replace."""
        old: dict[int, tuple[Cell, list[str]]] = {}
        for name in names:
            was = row.cells.get(name)
            if was is not None:
                old.setdefault(id(was), (was, []))[1].append(name)
            size = sizes.get(name, 0)
            row.cells[name] = cell
            row.nbytes[name] = size if isinstance(size, int) else size[at]
            row.produced.setdefault(name, self.sequence)
        if not old:
            return
        kept = {id(one) for one in row.cells.values()}
        for was, lost in old.values():
            if id(was) in kept:
                self.replaced(was, lost)
            else:
                self.discard(was)

    def _tag(self, part: Partition, row: Row, tags: Tags | None) -> None:
        """Merge tags into a row, move it to the group that they name, and update the ready indexes."""
        if tags:
            row.tags.update(tags)
        created = row.tags.setdefault("created_at", row.created_at)
        if isinstance(created, (int, float)):
            row.created_at = float(created)
        row.tags.setdefault("size_bytes", sum(row.nbytes.values()))  # the size at the first put, as producers set it
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
        part.update_ready(row, group)

    # -- removals

    def clear(
        self,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        op_id: str,
        not_after: float,
        owner: str,
        claims: Sequence[tuple[str, ...] | None] | None,
        lives: Sequence[int | None] | None = None,
    ) -> tuple[int, tuple[Any, ...]]:
        """Remove samples; absent samples, and those in another life than ``lives`` names, are skipped.

        The outcome is recorded even if nothing was removed: a repeated request would remove what was put since.

        Returns:
            The number of removed samples, and the homes that held them.
        """
        return self.once(op_id, not_after, lambda: self.remove(partition_id, sample_ids, owner, claims, lives))

    def remove(
        self,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        owner: str,
        claims: Sequence[tuple[str, ...] | None] | None,
        lives: Sequence[int | None] | None = None,
    ) -> tuple[tuple[int, tuple[Any, ...]], bool]:
        """Remove samples without checking an op_id; returns the result and whether to record it."""
        part = self.partitions.get(partition_id)
        if part is None:
            return (0, ()), True
        self.expire(part)
        ids = [row.id for row in part.rows.values() if row.owner == owner] if sample_ids is None else sample_ids
        meant: Sequence[int | None] = lives or (None,) * len(ids)
        if claims is not None:
            for sample_id, held, life in zip(ids, claims, meant, strict=True):
                self._check_claim(part, sample_id, held, life)
        homes: set[Any] = set()
        count = sum(
            part.lives(sample_id, life) and self._remove(part, sample_id, homes)
            for sample_id, life in zip(ids, meant, strict=True)
        )
        if count:
            self.changed()
        return (count, tuple(homes)), True

    def _remove(self, part: Partition, sample_id: str, homes: set[Any]) -> bool:
        row = part.rows.pop(sample_id)
        for claim_id in row.claimed.values():
            claim = part.claims.get(claim_id)
            if claim is not None:
                claim.rows.pop(sample_id, None)
                if not claim.rows:
                    del part.claims[claim_id]
                    self.refuse(claim_id)
        part.leave(row)
        self._free(row, homes)
        self.samples -= 1
        self.sequence += 1
        return True

    def _free(self, row: Row, homes: set[Any]) -> None:
        for cell in row.each_cell():
            self.discard(cell)
            homes.add(cell.place.home)

    def drop(self, partition_id: str, op_id: str, not_after: float) -> tuple[int, tuple[Any, ...]]:
        """Remove a partition with its content and return what :meth:`clear` does; recorded even if there was none."""
        return self.once(op_id, not_after, lambda: self.remove_partition(partition_id))

    def remove_partition(self, partition_id: str) -> tuple[tuple[int, tuple[Any, ...]], bool]:
        """Remove a partition without checking an op_id; returns the result and whether to record it."""
        part = self.partitions.pop(partition_id, None)
        if part is None:
            return (0, ()), True
        homes: set[Any] = set()
        for row in part.rows.values():
            self._free(row, homes)
        for claim_id in part.claims:
            self.refuse(claim_id)
        self.samples -= len(part.rows)
        self.sequence += 1
        self.changed()
        return (len(part.rows), tuple(homes)), True

    # -- queries

    def depth(self, partition_id: str, gone: frozenset[Any]) -> int:
        """Count the groups that are committed and complete, with no row in the homes in ``gone``."""
        return count_complete(self.partition(partition_id), gone)

    def describe(self, partition_id: str) -> tuple[Any, ...]:
        """Describe one partition."""
        return describe(self.partition(partition_id))

    def listing(self) -> list[tuple[Any, ...]]:
        """Describe all partitions."""
        return [describe(part) for part in self.partitions.values()]
