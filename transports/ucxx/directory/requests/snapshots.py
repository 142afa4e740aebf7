"""Snapshots of a partition, and claims that are restored from them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.calls import RegisterPartition
from asyncdp.calls.snapshots import CellState, ClaimState, PartitionState, RowState
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, StaleSlotError

from ..encoding.cells import pieces, slot_name
from ..encoding.msgpack_codec import load, pack, text
from ..encoding.rows import Rows, rid_of
from .partitions import Partitions

if TYPE_CHECKING:
    from asyncdp.calls.snapshots import RestoreClaims

    from ..encoding.operation_ids import OperationId
    from ..encoding.schema import Schema

__all__ = ["Snapshots"]


class Snapshots(Partitions):
    """Sends the requests that checkpoints need."""

    async def snapshot(self, partition_id: str) -> PartitionState:
        """Return the state of a partition; the server is busy about as long as with all pages of a listing.

        Raises:
            DataPlaneBadRequest: The partition is unknown.
        """
        answer = await self._serve("snapshot", partition_id, lambda _: b"")
        about, flat, claims = load(answer.blob)
        info = self._info(partition_id, load(about))
        rows = Rows()
        rows.add(dict(zip(flat[::2], flat[1::2], strict=True)))
        lives = dict(zip(rows.rids, rows.ids, strict=True))
        names = {number: name for name, number in answer.schema.numbers.items()}
        prefixes: dict[bytes, str] = {}
        told = tuple(
            RowState(
                *(rows.ids[at], int(rows.rids[at]), rows.groups[at], rows.all_tags(at)),
                _cells(rows.cells[at], names, prefixes),
            )
            for at in range(len(rows))
        )
        held = []
        for blob, claimed, left in claims:
            owner, task, fields, at, _, _, order = load(blob)
            mine = tuple((lives[rid], int(rid)) for rid in claimed)
            left_s = None if left is False else float(left)
            named = tuple(text(name) for name in fields)
            state = ClaimState(text(owner), answer.schema.tasks[task - 1], named, mine, float(at), left_s)
            held.append(((float(at), int(order)), state))
        held.sort(key=lambda one: one[0])
        return PartitionState(info, answer.schema.fields, told, tuple(state for _, state in held))

    async def restore_claims(self, op: OperationId, call: RestoreClaims) -> None:
        """Declare tasks and make claims for them under new ids; it takes as long as publishing the rows.

        Raises:
            StaleSlotError: A row is gone or has another life; nothing was done.
            DataPlaneBadRequest: A row is claimed for that task already, or named twice for it, or the partition is
                unknown; nothing was done.
        """
        declared = RegisterPartition(call.partition_id, (), 0, call.consumer_tasks, None)

        def make(schema: Schema) -> bytes:
            united = schema.united(declared)
            doc = False if united == schema else united.dump()
            claims = [
                (
                    *(one.owner, united.task(call.partition_id, one.task_name), one.fields, one.claimed_at),
                    False if one.left_s is None else one.left_s,
                    *([rid_of(life) for _, life in one.rows], [sample_id for sample_id, _ in one.rows]),
                )
                for one in call.claims
            ]
            return pack((doc, united.group_size or 0, len(united.tasks), claims))

        def wrong(why: list[Any]) -> DataPlaneError:
            kind, claim, row = why
            one = call.claims[claim - 1]
            sample_id, _ = one.rows[row - 1]
            where: dict[str, Any] = {"partition_id": call.partition_id, "sample_ids": (sample_id,)}
            if kind == b"stale":
                msg = f"sample {sample_id!r} was removed, or removed and put again, before its claim was restored"
                return StaleSlotError(msg, **where)
            msg = f"sample {sample_id!r} is claimed for task {one.task_name!r} already"
            return DataPlaneBadRequest(msg, field="claims", **where)

        await self._serve("restore_claims", call.partition_id, make, op, wrong=wrong)
        self._schemas.pop(call.partition_id, None)


def _cells(blob: bytes | None, names: dict[int, str], prefixes: dict[bytes, str]) -> tuple[CellState, ...]:
    found = []
    for key, index, fields, sizes in pieces(blob):
        prefix = prefixes.get(key)
        if prefix is None:
            slot = slot_name(key)
            prefix = prefixes[key] = f"{slot.host}/{slot.epoch}/{slot.slot}/{slot.generation}"
        found.append(CellState(f"{prefix}/{index}", tuple(names[number] for number in fields), sum(sizes)))
    return tuple(found)
