"""The directory's part in reads and in recovery: metadata only, nothing is changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncdp.transports.transfer_queue.directory.claims import Claims
from asyncdp.transports.transfer_queue.directory.specs import describe

if TYPE_CHECKING:
    from asyncdp.transports.memory.claims import Group, Row
    from asyncdp.transports.transfer_queue.directory.state import Partition

__all__ = ["Directory"]

#: Rows per page of a listing: about 10 ms of the controller's time.
PAGE_ROWS = 2000


class Directory(Claims):
    """The whole directory: what its base classes do, locating, listing, and the dispatch of requests."""

    #: What a request may name.
    OPS = frozenset(
        (
            *("abandon", "abort", "claim", "clear", "consumed", "depth", "describe", "drop", "groups", "has"),
            *(
                "list_claims",
                "listing",
                "locate",
                "place",
                "publish",
                "register",
                "release",
                "release_owner",
                "resolve",
            ),
        )
    )

    def locate(
        self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str], meant: Sequence[int | None] | None
    ) -> tuple[Any, ...]:
        """Find where rows lie.

        Returns:
            ``(groups, missing, incarnations, specs, layouts, version)``: groups are (unit, layout, fields, keys, rows),
            missing is {row: (kind, message, info)}, layouts are the forms of the fields by layout.
        """
        part = self.partition(partition_id)
        found: list[int | None] = []
        missing: dict[int, tuple[str, str, dict[str, Any]]] = {}
        spots: dict[tuple[Any, ...], tuple[list[int], list[int]]] = {}
        single = fields[0] if len(fields) == 1 else None
        for at, sample_id in enumerate(sample_ids):
            row = part.rows.get(sample_id)
            wanted = None if meant is None else meant[at]
            found.append(wanted if row is None else row.incarnation)
            if wanted is not None and (row is None or row.incarnation != wanted):
                found[at] = wanted
                what = "was cleared" if row is None else "was cleared and put anew"
                text = f"sample {sample_id!r} of partition {partition_id!r} {what} since it was looked up"
                missing[at] = ("StaleSlotError", text, {"sample_ids": (sample_id,)})
                continue
            if row is None:
                text = f"no sample {sample_id!r} in partition {partition_id!r}"
                missing[at] = ("SampleNotFound", text, {"sample_ids": (sample_id,)})
                continue
            cells = row.cells
            absent = [name for name in fields if name not in cells]
            if absent:
                text = f"field {absent[0]!r} of sample {sample_id!r} is not produced"
                missing[at] = ("SampleNotFound", text, {"sample_ids": (sample_id,), "field": absent[0]})
                continue
            by_cell: dict[int, tuple[Any, list[str]]] = {}
            if single is not None:
                by_cell[0] = (cells[single], [single])
            else:
                for name in fields:
                    cell: Any = cells[name]
                    by_cell.setdefault(id(cell), (cell, []))[1].append(name)
            for cell, names in by_cell.values():
                keys, rows = spots.setdefault((cell.share.unit, cell.share.layout, tuple(names)), ([], []))
                keys.append(cell.key)
                rows.append(at)
        groups = [(*where, keys, rows) for where, (keys, rows) in spots.items()]
        specs = {name: part.fields[name] for name in fields if name in part.fields}
        layouts = {layout: self.layouts[layout] for layout in {group[1] for group in groups}}
        return groups, missing, found, specs, layouts, self.sequence

    # -- recovery

    def _group(self, part: Partition, group: Group) -> tuple[Any, ...]:
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
            tuple(_units(row) for row in rows),
            tuple(row.incarnation for row in rows),
        )

    def groups(self, partition_id: str, after: int) -> tuple[list[tuple[Any, ...]], int | None]:
        """List a page of groups, by the incarnation of their first row; the second value is where the next begins."""
        part = self.partition(partition_id)
        first = {name: min(row.incarnation for row in group.rows.values()) for name, group in part.groups.items()}
        names = sorted((name for name in first if first[name] > after), key=first.__getitem__)
        page: list[tuple[Any, ...]] = []
        rows = 0
        for name in names:
            if rows >= PAGE_ROWS:
                return page, first[page[-1][0]]
            page.append(self._group(part, part.groups[name]))
            rows += len(page[-1][1])
        return page, None

    def depth(self, partition_id: str, gone: frozenset[str]) -> int:
        """Count the groups that are committed and complete, with no row on the units in ``gone``."""
        part = self.partition(partition_id)
        count = 0
        for group in part.groups.values():
            rows = group.fit
            if len(rows) < (group.expected or part.group_size or len(group.rows)):
                continue
            if not all(row.tags.get("committed") is not False for row in rows):
                continue
            if gone and any(not gone.isdisjoint(_units(row)) for row in rows):
                continue
            count += 1
        return count

    def describe(self, partition_id: str) -> tuple[Any, ...]:
        """Describe one partition."""
        return self._describe(self.partition(partition_id))

    def listing(self) -> list[tuple[Any, ...]]:
        """Describe all partitions."""
        return [self._describe(part) for part in self.partitions.values()]

    def has(self, partition_id: str) -> bool:
        """Whether a partition is registered."""
        return partition_id in self.partitions

    @staticmethod
    def _describe(part: Partition) -> tuple[Any, ...]:
        fields = {name: describe(spec) for name, spec in part.fields.items()}
        enums = {name: spec[4] for name, spec in part.fields.items() if spec[4]}
        size = len(part.rows)
        return (part.id, fields, tuple(part.tasks), part.num_samples, part.group_size, enums, size, part.nbytes())


def _units(row: Row) -> frozenset[str]:
    """Return the storage units that hold a part of a row."""
    cells: list[Any] = list(row.cells.values())
    return frozenset(cell.share.unit for cell in cells)
