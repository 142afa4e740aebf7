"""Workload on registers: a few samples that all clients put, read and remove."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneError

from .worker import REGISTERS, Worker

if TYPE_CHECKING:
    from asyncdp.meta import KVBatchMeta

__all__ = ["Registers"]


class Registers(Worker):
    """A task that puts, reads and removes a few samples that other tasks use as well."""

    role = "registers"

    def __init__(self, *args: Any) -> None:
        """Set up the sample ids and the weighted steps."""
        super().__init__(*args)
        self.ids = [f"r{n}" for n in range(self.scenario.registers)]
        self.metas: list[KVBatchMeta] = []
        self.choices = [
            *[self.get] * 12,
            *[self.put] * 7,
            *[self.get_data] * 3,
            *[self.look] * 6,
            *[self.clear] * 3,
            *[self.put_bound] * 3,
            *(self.put_existing, self.put_new),
            *[self.remove_bound] * 2,
            *(self.evict, self.tag, self.list),
        ]

    def some(self) -> list[str]:
        """Draw one to four of the samples."""
        return self.rng.sample(self.ids, min(len(self.ids), self.rng.choice([1, 1, 2, 4])))

    def fields(self) -> list[str]:
        """Draw the fields to use, mostly both."""
        return self.rng.choice([["x", "y"], ["x", "y"], ["x"], ["y"]])

    async def put(self) -> None:
        """Put some fields of some samples."""
        ids = self.some()
        numbers, field = self.values.take(len(ids))
        tags = [{"v": n} for n in numbers] if self.rng.random() < 0.5 else None  # noqa: PLR2004
        meta = await self.verbs.put_samples(
            ids, REGISTERS, dict.fromkeys(self.fields(), field), tags, timeout_s=self.patience()
        )
        self.metas = [*self.metas[-3:], meta]

    async def put_bound(self) -> None:
        """Put by the meta of an earlier put of this task, to the rows that are still in the same life."""
        if self.metas:
            await self.write(self.rng.choice(self.metas), stale=self.rng.choice(["raise", "skip"]))

    async def put_existing(self) -> None:
        """Put with ``only="existing"``, to rows in any life."""
        await self.write(self.some(), only="existing", stale=self.rng.choice(["raise", "skip"]))

    async def put_new(self) -> None:
        """Put with ``only="new"``."""
        await self.write(self.some(), only="new")

    async def write(self, rows: list[str] | KVBatchMeta, **bound: Any) -> None:
        """Put some fields of rows, with the binding arguments ``bound``."""
        numbers, field = self.values.take(len(rows))
        fields = dict.fromkeys(self.fields(), field)
        tags = [{"v": n} for n in numbers] if self.rng.random() < 0.5 else None  # noqa: PLR2004
        meta = await self.verbs.put_samples(rows, REGISTERS, fields, tags, timeout_s=self.patience(), **bound)
        if meta.size:
            self.metas = [*self.metas[-3:], meta]

    async def tag(self) -> None:
        """Put tags only."""
        ids = self.some()
        numbers, _ = self.values.take(len(ids))
        await self.verbs.put_samples(ids, REGISTERS, None, [{"v": n} for n in numbers], timeout_s=self.patience())

    async def get(self) -> None:
        """Read some samples by their ids."""
        await self.verbs.get_samples(self.some(), REGISTERS, self.fields(), timeout_s=self.patience())

    async def get_data(self) -> None:
        """Read by the meta of an earlier put of this task."""
        if self.metas:
            await self.verbs.get_data(self.rng.choice(self.metas), timeout_s=self.patience())

    async def clear(self) -> None:
        """Clear some samples."""
        await self.verbs.clear_samples(self.some(), REGISTERS, timeout_s=self.patience())

    async def evict(self) -> None:
        """Evict some samples."""
        await self.verbs.evict(self.some(), REGISTERS, timeout_s=self.patience())

    async def remove_bound(self) -> None:
        """Remove by the meta of an earlier put of this task, or by a listed group, bound to those lives."""
        if self.metas and self.rng.random() < 0.6:  # noqa: PLR2004
            verb = self.rng.choice([self.verbs.evict, self.verbs.clear_samples])
            await verb(self.rng.choice(self.metas), REGISTERS, timeout_s=self.patience())
            return
        groups = await self.list()
        if groups:
            await self.verbs.evict(self.rng.choice(groups), REGISTERS, timeout_s=self.patience())

    async def list(self) -> list[Any]:
        """List the groups."""
        groups: list[Any] = await self.verbs.list_metadata(REGISTERS, timeout_s=self.patience())
        return groups

    async def look(self) -> None:
        """Call a verb that changes nothing."""
        verb = self.rng.choice([("ping",), ("depth", REGISTERS), ("describe", REGISTERS)])
        await self.verbs.call(*verb, timeout_s=self.patience())

    async def finish(self) -> None:
        """Read each sample."""
        for sample_id in self.ids:
            with suppress(DataPlaneError):
                await self.verbs.get_samples([sample_id], REGISTERS, ["x"], timeout_s=10.0)
