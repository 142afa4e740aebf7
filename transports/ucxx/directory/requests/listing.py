"""Listings of a partition's groups and rows, without claiming them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.meta import DataPlaneGroupMeta, RowHandle

from ..encoding.cells import homes_named, pieces, slot_name
from ..encoding.msgpack_codec import load, pack, text
from ..encoding.rows import CELLS, Rows
from .hosts import Hosts

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

    from ..encoding.schema import Schema
    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["Listing"]

#: Attempts of a listing during which rows vanish; the last one reads all rows in a single request.
MOST_TRIES = 3
#: Name of an entry of the hash of groups that is no group, as in the Lua library.
PAD = b"\xff" * 65
#: Most rows of a shelf, the hash that rows are stored in.
SHELF_ROWS = 1000


class Listing(Hosts):
    """Sends the requests that list rows, in pages, between which the server handles other requests."""

    def __init__(self, link: DirectoryLink, settings: DirectorySettings) -> None:
        """Start with no known slots."""
        super().__init__(link, settings)
        self._gone_slots: dict[bytes, bool] = {}

    async def list_metadata(self, partition_id: str) -> list[DataPlaneGroupMeta]:
        """List the groups of a partition, oldest first.

        ``lost_keys`` are rows of hosts that are not registered, have another epoch, or have sent no heartbeat for
        ``host_timeout_s``.

        Raises:
            DataPlaneBadRequest: The partition is unknown.
        """
        rows, by_group, expected = await self._groups(partition_id)
        out = []
        for group_id, at in sorted(by_group.items(), key=lambda item: min(map(rows.age, item[1]))):
            tags = tuple(map(rows.all_tags, at))
            versions = [row["weight_version"] for row in tags if row.get("weight_version") is not None]
            meta = DataPlaneGroupMeta(
                partition_id,
                group_id,
                tuple(rows.ids[i] for i in at),
                min(versions, default=None),
                min(rows.created_at[i] for i in at),
                not any(rows.unfit[i] for i in _fit(rows, at) or at),
                expected[group_id],
                sum(rows.nbytes[i] for i in at),
                tags,
                tuple(rows.ids[i] for i in at if self._lost(rows, i)),
                tuple(RowHandle(int(rows.rids[i])) for i in at),
            )
            out.append(meta)
        return out

    async def depth(self, partition_id: str) -> int:
        """Return the number of groups that are committed and complete and have no lost row.

        The server counts them as they change, by the homes of their rows: the reply has an entry for each set of homes.
        """
        flat = load(await self._ask("depth", partition_id))
        self._known[partition_id] = self._link.epoch
        await self.hosts()
        return sum(
            int(count)
            for homes, count in zip(flat[::2], flat[1::2], strict=True)
            if self._alive.issuperset(homes_named(homes))
        )

    def _lost(self, rows: Rows, at: int) -> bool:
        return any(self._gone(key) for key, _ in rows.slots(at))

    def _gone(self, key: bytes) -> bool:
        gone = self._gone_slots.get(key)
        if gone is None:
            name = slot_name(key)
            gone = self._gone_slots[key] = (name.host, name.epoch) not in self._alive
        return gone

    async def _groups(self, partition_id: str) -> tuple[Rows, dict[str, list[int]], dict[str, int]]:
        """Read all rows; return them, the positions of each group's rows, and each group's expected size."""
        rows, told, size = await self._rows(partition_id)
        await self.hosts()
        self._gone_slots = {}
        by_group: dict[str, list[int]] = {}
        for at, group_id in enumerate(rows.groups):
            by_group.setdefault(group_id, []).append(at)
        expected = {group_id: told.get(group_id) or size or len(at) for group_id, at in by_group.items()}
        return rows, by_group, expected

    async def _rows(self, partition_id: str) -> tuple[Rows, dict[str, int], int | None]:
        """Read all rows in order of incarnation, the declared sizes of groups, and the partition's group size.

        The rows of one put are all included, or none of them is. A large partition is read in pages, between which the
        server handles others: rows put meanwhile are left out by their incarnation, and where others have gone
        meanwhile, it is read again.
        """
        limit = self._settings.list_rows
        for turn in range(MOST_TRIES):
            whole = turn == MOST_TRIES - 1
            before, groups, stored, schema = await self._seen(partition_id, 1 << 53 if whole else limit)
            if stored is None:
                groups = await self._scan(self._key(partition_id) + "g")
                stored = {}
                async for page in self._pages_of(partition_id):
                    stored.update(page)
                stored = {rid: blob for rid, blob in stored.items() if rid <= before[2]}
                if (await self._seen(partition_id, -1))[0][:2] != before[:2]:
                    continue
            rows = Rows()
            rows.add(stored)
            told = {text(name): load(blob)[0] for name, blob in groups.items() if name != PAD}
            return rows, told, schema.group_size
        raise AssertionError  # the last attempt reads all rows at once

    async def _seen(
        self, partition_id: str, limit: int
    ) -> tuple[list[Any], dict[bytes, bytes], dict[bytes, bytes] | None, Schema]:
        """Return what identifies the state of a partition, and its groups and rows where ``limit`` allows it."""
        answer = await self._serve("rows", partition_id, lambda _: pack(limit))
        seen, *whole = load(answer.blob)
        groups, rows = (dict(zip(flat[::2], flat[1::2], strict=True)) for flat in whole or ((), ()))
        return seen, groups, rows if whole else None, answer.schema

    async def _scan(self, key: str) -> dict[bytes, bytes]:
        """Read a hash in pages; entries that exist for the whole duration are all included."""
        found: dict[bytes, bytes] = {}
        cursor = 0
        while True:
            raw, flat = await self._link.command("HSCAN", key, cursor, "COUNT", self._settings.list_rows)
            found.update(zip(flat[::2], flat[1::2], strict=True))
            cursor = int(raw)
            if not cursor:
                return found

    async def _pages_of(self, partition_id: str) -> AsyncIterator[dict[bytes, bytes]]:
        """Yield keys and rows in pages of about ``list_rows``; rows that exist all the time are all included."""
        key = self._key(partition_id)
        names = [text(raw) for raw in await self._link.command("ZRANGE", key + "s", 0, -1)]
        step = max(1, self._settings.list_rows // SHELF_ROWS)
        for at in range(0, len(names), step):
            replies = await self._link.pipeline([("HGETALL", f"{key}r:{name}") for name in names[at : at + step]])
            page: dict[bytes, bytes] = {}
            for shelf in replies:
                if isinstance(shelf, Exception):
                    raise shelf
                page.update(shelf if isinstance(shelf, dict) else zip(shelf[::2], shelf[1::2], strict=True))
            yield page

    async def cells_of(self, host_id: str, epoch: int, partition_ids: Iterable[str]) -> dict[tuple[int, int], set[int]]:
        """Return the live rows that lie on a host: ``{(slot, generation): row indices}``.

        A put that is published during the call may be missing. Therefore only slots older than the longest put may be
        freed because they are absent here.
        """
        found: dict[tuple[int, int], set[int]] = {}
        wanted: dict[bytes, set[int] | None] = {}
        await self._open()
        for partition_id in partition_ids:
            async for page in self._pages_of(partition_id):
                for blob in page.values():
                    for slot, index, *_ in pieces(load(blob)[CELLS] or None):
                        if slot not in wanted:
                            name = slot_name(slot)
                            mine = (name.host, name.epoch) == (host_id, epoch)
                            wanted[slot] = found.setdefault((name.slot, name.generation), set()) if mine else None
                        places = wanted[slot]
                        if places is not None:
                            places.add(index)
        return found

    async def _owned(self, partition_id: str, owner: str) -> tuple[list[str], list[bytes]]:
        """Return the ids and the incarnations of the samples that an owner put."""
        rows, _, _ = await self._rows(partition_id)
        mine = [at for at, name in enumerate(rows.owners) if name == owner]
        return [rows.ids[at] for at in mine], [rows.rids[at] for at in mine]


def _fit(rows: Rows, at: list[int]) -> list[int]:
    """Return the positions of the rows that count in a group: all but the failed ones."""
    return [i for i in at if not rows.failed[i]]
