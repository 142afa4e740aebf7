"""Declaration, description and removal of partitions."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneBadRequest
from asyncdp.meta import PartitionInfo

from ..encoding.cells import DeadCells, dead_cells
from ..encoding.msgpack_codec import load, pack, text
from ..encoding.schema import ABSENT, Schema
from .base import ERROR, NO_OP, OK, SCHEMA, UNKNOWN, Base, no_name

if TYPE_CHECKING:
    from asyncdp.calls import RegisterPartition

    from ..encoding.operation_ids import OperationId

__all__ = ["Partitions"]


class Partitions(Base):
    """Sends the requests that declare, describe, list and drop partitions."""

    @property
    def _names(self) -> str:
        return f"{self._settings.namespace}:partitions"

    async def register(self, call: RegisterPartition) -> None:
        """Declare a partition, or merge a declaration into the existing one.

        Raises:
            DataPlaneBadRequest: The declaration contradicts the existing one.
        """
        await self._open()
        await self._link.command("SADD", self._names, call.partition_id.encode("utf-8", "surrogatepass"))
        self._known.pop(call.partition_id, None)
        schema = await self._fetch(call.partition_id, no_name)
        while True:
            united = schema.united(call)
            if united == schema and schema.version != ABSENT.version:  # what declares nothing is declared all the same
                break
            payload = pack((united.dump(), united.group_size or 0, len(united.tasks), call.anew))
            reply = await self._send("register", call.partition_id, payload, schema.version, NO_OP)
            if reply[0] == OK:
                break
            if reply[0] == SCHEMA:
                schema = Schema.load(reply[1], reply[2])
            elif reply[0] == UNKNOWN:
                schema = ABSENT
            elif reply[0] == ERROR and call.anew:  # it has rows, which keep their types
                call = replace(call, anew=False)
            elif reply[0] == ERROR:
                name, rows = load(reply[1])
                msg = f"group {text(name)!r} has {rows} rows already, grpo_group_size would be {call.grpo_group_size}"
                raise DataPlaneBadRequest(msg, partition_id=call.partition_id, field="grpo_group_size")
            else:
                await self._refused(reply, call.partition_id)
        self._schemas.pop(call.partition_id, None)
        self._known[call.partition_id] = self._link.epoch

    async def describe(self, partition_id: str) -> PartitionInfo:
        """Describe a partition.

        Raises:
            DataPlaneBadRequest: The partition is unknown.
            DataPlaneUnavailable: The partition existed, but the plane was restarted without its data.
        """
        blob = await self._ask("describe", partition_id)
        self._known[partition_id] = self._link.epoch
        return self._info(partition_id, load(blob))

    async def partition_names(self) -> list[str]:
        """Return the names of all partitions, and of those that are registered or dropped just now."""
        await self._open()
        return [text(raw) for raw in await self._link.command("SMEMBERS", self._names)]

    async def list_partitions(self) -> list[PartitionInfo]:
        """Describe all partitions, oldest first."""
        names = await self.partition_names()
        calls = [("describe", self._key(name), ("", 0, b"", b"")) for name in names]
        replies = await self._link.functions(calls) if calls else []
        there = [(name, load(reply[1])) for name, reply in zip(names, replies, strict=True) if reply[0] == OK]
        there.sort(key=lambda row: int(row[1][2]))
        return [self._info(name, row) for name, row in there]

    @staticmethod
    def _info(partition_id: str, row: list[Any]) -> PartitionInfo:
        version, doc, _, size, nbytes = row
        schema = Schema.load(version, doc)
        return PartitionInfo(
            partition_id,
            {name: spec.describe() for name, spec in schema.fields.items()},
            schema.tasks,
            schema.num_samples,
            schema.group_size,
            {name: spec.enum for name, spec in schema.fields.items() if spec.enum},
            size,
            int(nbytes),
        )

    async def drop(self, op: OperationId, partition_id: str) -> tuple[DeadCells, ...]:
        """Remove a partition with all its samples.

        Returns:
            The cells that died, for the invalidation of their hosts. The server is busy for 3 us a row.
        """
        blob = await self._ask("drop", partition_id, op=op)
        self._schemas.pop(partition_id, None)
        self._known.pop(partition_id, None)
        await self._link.command("SREM", self._names, partition_id.encode("utf-8", "surrogatepass"))
        return dead_cells(load(blob))
