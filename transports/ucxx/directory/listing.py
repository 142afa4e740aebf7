"""What a partition holds, group by group; nothing of it is consumed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import DataPlaneGroupMeta, Tags
from asyncdp.transports.ucxx.directory.cells import pieces, slot_name
from asyncdp.transports.ucxx.directory.hosts import Hosts
from asyncdp.transports.ucxx.directory.texts import load, load_tags, pack, text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["Listing"]

#: A listing during which rows vanish is begun anew this often; then it is taken in one go.
MOST_TRIES = 3
#: How the server keeps the tag committed=False.
NOT_COMMITTED = 2


@dataclass(slots=True)
class _Row:
    """One sample as the server keeps it."""

    rid: bytes
    id: str
    group: str
    owner: str
    created_at: float
    size0: int
    committed: int
    nbytes: int
    tags: bytes | None
    cells: bytes | None

    @property
    def age(self) -> tuple[float, bytes]:
        """What rows are ordered by; rows of one put were created in the same moment."""
        return self.created_at, self.rid

    def all_tags(self) -> Tags:
        """Return the tags, with what the plane adds where the producer did not say it."""
        return full_tags(self.tags, self.created_at, self.size0)


def full_tags(blob: bytes | None, created_at: float, size0: int) -> Tags:
    """Read tags and add what the producer did not say."""
    tags = load_tags(blob)
    tags.setdefault("created_at", created_at)
    tags.setdefault("size_bytes", size0)
    return tags


class Listing(Hosts):
    """Listings, in pages: one page keeps the server busy for about 10 ms."""

    async def list_metadata(self, partition_id: str) -> list[DataPlaneGroupMeta]:
        """List the groups of a partition, oldest first.

        ``lost_keys`` are rows of hosts that are gone, in another epoch, or silent for ``host_timeout_s``.

        Raises:
            DataPlaneBadRequest: No such partition.
        """
        by_group, expected, size = await self._groups(partition_id)
        out = []
        for group_id, rows in sorted(by_group.items(), key=lambda item: min(row.age for row in item[1])):
            tags = [row.all_tags() for row in rows]
            versions = [row["weight_version"] for row in tags if row.get("weight_version") is not None]
            out.append(
                DataPlaneGroupMeta(
                    partition_id,
                    group_id,
                    tuple(row.id for row in rows),
                    min(versions, default=None),
                    min(row.created_at for row in rows),
                    all(row.get("committed") is not False for row in tags),
                    expected.get(group_id) or size or len(rows),
                    sum(row.nbytes for row in rows),
                    tuple(tags),
                    tuple(row.id for row in rows if self._lost(row)),
                )
            )
        return out

    async def depth(self, partition_id: str) -> int:
        """Count the groups that are committed and complete."""
        by_group, expected, size = await self._groups(partition_id)
        return sum(
            len(rows) >= (expected.get(group_id) or size or len(rows))
            and all(row.committed != NOT_COMMITTED and not self._lost(row) for row in rows)
            for group_id, rows in by_group.items()
        )

    def _lost(self, row: _Row) -> bool:
        for key in {piece[0] for piece in pieces(row.cells)}:
            name = slot_name(key)
            if (name.host, name.epoch) not in self._alive:
                return True
        return False

    async def _groups(self, partition_id: str) -> tuple[dict[str, list[_Row]], dict[str, int], int | None]:
        rows, groups, size = await self._rows(partition_id)
        await self.hosts()
        by_group: dict[str, list[_Row]] = {}
        for row in rows:
            by_group.setdefault(row.group, []).append(row)
        expected = {text(name): load(blob)[0] for name, blob in zip(groups[::2], groups[1::2], strict=True)}
        return by_group, expected, size

    async def _rows(self, partition_id: str) -> tuple[list[_Row], list[bytes], int | None]:
        """Read all rows, by incarnation. Rows of one put are all there, or none."""
        limit = self._settings.list_rows
        for turn in range(MOST_TRIES):
            last = turn == MOST_TRIES - 1
            whole = (1 << 53 if last else limit, False)
            answer = await self._serve("rows", partition_id, lambda _, ask=whole: pack(ask))  # type: ignore[misc]
            reply = load(answer.blob)
            size, groups = answer.schema.group_size, reply[2]
            if reply[0]:
                return sorted(_read(reply), key=lambda row: row.rid), groups, size
            rids = sorted(reply[1])
            rows: list[_Row] = []
            for at in range(0, len(rids), limit):
                ask = (False, rids[at : at + limit])
                page = await self._serve("rows", partition_id, lambda _, ask=ask: pack(ask))  # type: ignore[misc]
                rows += _read(load(page.blob))
            if len(rows) == len(rids):
                return rows, groups, size
        raise AssertionError  # the last turn came whole

    async def cells_of(self, host_id: str, epoch: int, partition_ids: Iterable[str]) -> dict[tuple[int, int], set[int]]:
        """Find what the directory still needs of a host: ``{(slot, generation): places of live rows}``.

        A put that is published while this runs may be missing: only slots that are older than the longest not_after
        and not named here are orphans.
        """
        found: dict[tuple[int, int], set[int]] = {}
        for partition_id in partition_ids:
            try:
                rows, _, _ = await self._rows(partition_id)
            except DataPlaneBadRequest:
                continue  # dropped meanwhile
            for row in rows:
                for key, index, *_ in pieces(row.cells):
                    name = slot_name(key)
                    if (name.host, name.epoch) == (host_id, epoch):
                        found.setdefault((name.slot, name.generation), set()).add(index)
        return found

    async def _owned(self, partition_id: str, owner: str) -> tuple[list[str], list[bytes]]:
        """Find the samples of an owner, with their incarnations."""
        rows, _, _ = await self._rows(partition_id)
        mine = [row for row in rows if row.owner == owner]
        return [row.id for row in mine], [row.rid for row in mine]


def _read(reply: list[Any]) -> Iterator[_Row]:
    for rid, blob, tags, cells in zip(reply[1], reply[3], reply[4], reply[5], strict=True):
        if blob:
            row = load(blob)
            where = text(row[0]), text(row[1]), text(row[2])
            yield _Row(rid, *where, float(row[3]), row[4], row[6], row[9], tags or None, cells or None)
