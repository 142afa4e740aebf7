"""Snapshots of a partition, and claims that are restored from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .directory import Directory
from .listing import describe
from .rows import Cell, Claim, Row

__all__ = ["Snapshots"]

#: A claim: owner, task, fields, (id, life) of each row, time of the claim, seconds until its lease ends.
ClaimState = tuple[str, str, tuple[str, ...], Sequence[tuple[str, int]], float, "float | None"]


class Snapshots(Directory):
    """A directory with the operations that checkpoints need."""

    def cell_name(self, cell: Cell) -> str:
        """Return what identifies a cell for the lifetime of the plane; a hook for subclasses."""
        raise NotImplementedError

    def snapshot(self, partition_id: str) -> tuple[Any, ...]:
        """Return the state of a partition.

        Returns:
            ``(description, rows, claims)``: rows are (id, life, group, tags, ((cell, fields, bytes), ...)), oldest
            first, and claims are as for :meth:`restore_claims`.
        """
        part = self.partition(partition_id)
        self.expire(part)
        now = self.time()
        rows = [
            (row.id, row.incarnation, row.group, dict(row.tags), self._cells(row))
            for row in sorted(part.rows.values(), key=lambda row: row.incarnation)
        ]
        claims = [
            (
                *(claim.owner, claim.task, claim.fields, [(row.id, row.incarnation) for row in claim.rows.values()]),
                *(claim.claimed_at, None if claim.expires_at is None else claim.expires_at - now),
            )
            for claim in part.claims.values()
        ]
        return describe(part), rows, claims

    def _cells(self, row: Row) -> tuple[tuple[str, tuple[str, ...], int], ...]:
        fields: dict[int, tuple[Cell, list[str]]] = {}
        for name, cell in row.cells.items():
            fields.setdefault(id(cell), (cell, []))[1].append(name)
        return tuple(
            (self.cell_name(cell), tuple(names), sum(row.nbytes.get(name, 0) for name in names))
            for cell, names in fields.values()
        )

    def restore_claims(
        self, partition_id: str, tasks: Sequence[str], claims: Sequence[ClaimState], op_id: str, not_after: float
    ) -> None:
        """Declare tasks and make claims for them under new ids, all or none."""
        self.once(op_id, not_after, lambda: self._restore(partition_id, tasks, claims, op_id))

    def _restore(
        self, partition_id: str, tasks: Sequence[str], claims: Sequence[ClaimState], op_id: str
    ) -> tuple[None, bool]:
        part = self.partition(partition_id)
        self.expire(part)
        named: set[tuple[str, str]] = set()
        for _, task, _, rows, _, _ in claims:
            for sample_id, life in rows:
                info = {"partition_id": part.id, "sample_ids": (sample_id,)}
                if not part.lives(sample_id, life):
                    text = f"sample {sample_id!r} was removed, or removed and put again, before its claim was restored"
                    raise self.error("StaleSlotError", text, **info)
                if task in part.rows[sample_id].claimed or (task, sample_id) in named:
                    text = f"sample {sample_id!r} is claimed for task {task!r} already"
                    raise self.error("DataPlaneBadRequest", text, field="claims", **info)
                named.add((task, sample_id))
        part.tasks.update(dict.fromkeys(tasks))
        now = self.time()
        for number, (owner, task, fields, rows, at, left_s) in enumerate(claims):
            held = {sample_id: part.rows[sample_id] for sample_id, _ in rows}
            claim_id = f"{op_id}.{number}"
            ends = None if left_s is None else now + left_s
            part.claims[claim_id] = Claim(claim_id, owner, task, tuple(fields), held, at, ends)
            for row in held.values():
                row.claimed[task] = claim_id
                part.update_ready(row, part.groups[row.group])
        self.changed()
        return None, True
