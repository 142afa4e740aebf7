"""Read-only queries on a partition: locations of rows, groups and their progress, the description."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from .partition import Partition
    from .rows import Cell, Group

__all__ = ["count_complete", "describe", "find", "page"]


class Found(NamedTuple):
    """Locations of rows.

    Attributes:
        spots: {(place, fields): (indexes in the place, positions in the request)}.
        missing: {position: (name of the error, message, its attributes)} for rows that cannot be read.
        lives: The incarnation of each row, or the one that was asked for where it is gone.
    """

    spots: dict[tuple[Any, tuple[str, ...]], tuple[list[int], list[int]]]
    missing: dict[int, tuple[str, str, dict[str, Any]]]
    lives: list[int | None]


def find(
    part: Partition, sample_ids: Sequence[str], fields: Sequence[str], meant: Sequence[int | None] | None
) -> Found:
    """Find where samples are stored; ``meant`` gives the life of each that is asked for (None: any)."""
    spots: dict[tuple[Any, tuple[str, ...]], tuple[list[int], list[int]]] = {}
    missing: dict[int, tuple[str, str, dict[str, Any]]] = {}
    lives: list[int | None] = []
    for at, sample_id in enumerate(sample_ids):
        row = part.rows.get(sample_id)
        wanted = None if meant is None else meant[at]
        if wanted is not None and (row is None or row.incarnation != wanted):
            lives.append(wanted)
            what = "was cleared" if row is None else "was cleared and put anew"
            text = f"sample {sample_id!r} of partition {part.id!r} {what} since it was looked up"
            missing[at] = ("StaleSlotError", text, {"sample_ids": (sample_id,)})
            continue
        if row is None:
            lives.append(None)
            text = f"no sample {sample_id!r} in partition {part.id!r}"
            missing[at] = ("SampleNotFound", text, {"sample_ids": (sample_id,)})
            continue
        lives.append(row.incarnation)
        cells = row.cells
        absent = [name for name in fields if name not in cells]
        if absent:
            text = f"field {absent[0]!r} of sample {sample_id!r} is not produced"
            missing[at] = ("SampleNotFound", text, {"sample_ids": (sample_id,), "field": absent[0]})
            continue
        by_cell: dict[int, tuple[Cell, list[str]]] = {}
        for name in fields:
            cell = cells[name]
            by_cell.setdefault(id(cell), (cell, []))[1].append(name)
        for cell, names in by_cell.values():
            indexes, rows = spots.setdefault((cell.place, tuple(names)), ([], []))
            indexes.append(cell.index)
            rows.append(at)
    return Found(spots, missing, lives)


def page(part: Partition, after: int, most: int) -> tuple[list[tuple[Any, ...]], int | None]:
    """List a page of groups by the incarnation of their first row, up to the group that reaches ``most`` rows.

    Returns:
        The groups, and the ``after`` of the next page (None: this is the last page). A group is ``(id, keys,
        weight version, created at, committed, expected rows, bytes, tags, homes, incarnations)``.
    """
    first = {name: min(row.incarnation for row in group.rows.values()) for name, group in part.groups.items()}
    names = sorted((name for name in first if first[name] > after), key=first.__getitem__)
    found: list[tuple[Any, ...]] = []
    rows = 0
    for name in names:
        if rows >= most:
            return found, first[found[-1][0]]
        found.append(_group(part, part.groups[name]))
        rows += len(found[-1][1])
    return found, None


def _group(part: Partition, group: Group) -> tuple[Any, ...]:
    rows = sorted(group.rows.values(), key=lambda row: row.incarnation)
    versions = [row.tags["weight_version"] for row in rows if row.tags.get("weight_version") is not None]
    return (
        group.id,
        tuple(row.id for row in rows),
        min(versions, default=None),
        min(row.created_at for row in rows),
        all(row.tags.get("committed") is not False for row in group.fit or rows),
        group.expected or part.group_size or len(rows),
        sum(sum(row.nbytes.values()) for row in rows),
        tuple(dict(row.tags) for row in rows),
        tuple(row.homes() for row in rows),
        tuple(row.incarnation for row in rows),
    )


def count_complete(part: Partition, gone: frozenset[Any]) -> int:
    """Count the groups that are committed and complete, with no row in the homes in ``gone``."""
    count = 0
    for group in part.groups.values():
        rows = group.fit
        if len(rows) < (group.expected or part.group_size or len(group.rows)):
            continue
        if not all(row.tags.get("committed") is not False for row in rows):
            continue
        if gone and any(not gone.isdisjoint(row.homes()) for row in rows):
            continue
        count += 1
    return count


def describe(part: Partition) -> tuple[Any, ...]:
    """Describe a partition by the values of the fields of ``asyncdp.PartitionInfo``, in their order."""
    fields = {name: spec.describe() for name, spec in part.fields.items()}
    enums = {name: spec.enum for name, spec in part.fields.items() if spec.enum}
    size = sum(sum(row.nbytes.values()) for row in part.rows.values())
    return (part.id, fields, tuple(part.tasks), part.num_samples, part.group_size, enums, len(part.rows), size)
