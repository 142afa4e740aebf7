"""Claims of samples: make, list, release and abandon them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.calls.slots import ClaimTry
from asyncdp.errors import ClaimLost, DataPlaneBadRequest
from asyncdp.meta import ClaimInfo, KVBatchMeta, RowHandle, lengths_of

from ..encoding.cells import hints_of, mark_of
from ..encoding.msgpack_codec import load, pack, text
from ..encoding.operation_ids import OperationId
from ..encoding.rows import full_tags
from .waiting import Waiting

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from asyncdp.errors import DataPlaneError

    from ..encoding.schema import Schema

__all__ = ["Claiming"]


class Claiming(Waiting):
    """Sends the requests that make, list and end claims."""

    async def claim(  # noqa: PLR0913 - one request
        self,
        op: OperationId,
        partition_id: str,
        task: str,
        fields: Sequence[str],
        most: int,
        least: int,
        owner: str,
        *,
        lease_s: float | None = None,
        wait_s: float = 0.0,
        explain: bool = False,
    ) -> ClaimTry:
        """Claim the first ready samples, or return how many are ready and which are not.

        Args:
            op: Identifies the claim; its id is the claim id. A repeated request gets the same batch while it is live.
            partition_id: Partition of the samples.
            task: Task that the samples are claimed for.
            fields: Fields that a sample must have.
            most: Most rows; in whole groups where the partition has a group size.
            least: Least rows; fewer are not claimed.
            owner: Client that claims.
            lease_s: Seconds after which the claim ends by itself; None: never.
            wait_s: Seconds to wait for the samples; a notice of the server ends the wait early.
            explain: Whether to return which fields waiting samples lack; of the oldest 1000, at 1 us each.

        Returns:
            The batch, or an empty one with the number of ready samples and the waiting ones. The server is busy for
            2 us a row, 3 with whole groups. A task's first claim by a set of fields indexes the partition, at 7 us a
            row (12), in pages of about 2000 rows between which the server handles other requests.

        Raises:
            DataPlaneBadRequest: The partition, task or a field is unknown, or ``most`` is below one group.
            DataPlaneWriteError: The claim was abandoned, or it has ended.
            DataPlaneTimeout: The request arrived after its deadline.
        """

        def make(schema: Schema) -> bytes:
            number = schema.task(partition_id, task)
            needed = schema.required(partition_id, fields)
            low = least
            if schema.group_size is not None:
                if most < schema.group_size:
                    msg = f"batch_size {most} is below one group of {schema.group_size}"
                    raise DataPlaneBadRequest(msg, partition_id=partition_id, field="batch_size")
                low = min(least, most // schema.group_size * schema.group_size)
            lease = False if lease_s is None else lease_s
            return pack((number, needed, most, low, owner, lease, tuple(fields), explain))

        async def look(passed_s: float) -> tuple[ClaimTry, float | None]:
            return await self._look(OperationId(op.id, op.left_s - passed_s), partition_id, task, fields, make)

        return await self._until(partition_id, wait_s, look, lambda seen: seen.meta.size > 0)

    async def _look(
        self, op: OperationId, partition_id: str, task: str, fields: Sequence[str], make: Callable[[Schema], bytes]
    ) -> tuple[ClaimTry, float | None]:
        """Send the request that ``make`` encodes; return the answer, and in how many seconds a lease ends."""
        answer = await self._serve("claim", partition_id, make, op)
        while not answer.blob:  # the index is being built, page by page
            answer = await self._serve("claim", partition_id, make, op)
        reply = load(answer.blob)
        if reply[0]:
            meta = _batch(partition_id, task, op.id, reply, answer.schema.version)
            return ClaimTry(meta, ready=meta.size), None
        _, ready, oldest, ids, ends, lacking = reply
        empty = KVBatchMeta(partition_id, task, [], list(fields), tags=[], handles=[])
        waited = None if oldest is False else float(oldest)
        names = {number: name for name, number in answer.schema.numbers.items()}
        missing = {names[number]: count for number, count in lacking}
        missing = {name: missing[name] for name in sorted(missing)}
        seen = ClaimTry(empty, ready, waited, tuple(text(raw) for raw in ids), missing)
        return seen, None if ends is False else float(ends)

    async def release(
        self, op: OperationId, partition_id: str, sample_ids: Sequence[str], claim_ids: Sequence[str | None], task: str
    ) -> None:
        """Make claimed samples claimable again; all of them, or none.

        Raises:
            ClaimLost: One of the samples is not, or no longer, held by its claim.
        """

        def make(schema: Schema) -> bytes:
            number = schema.task(partition_id, task)
            return pack((number, tuple(sample_ids), [claim_id or "" for claim_id in claim_ids]))

        def wrong(why: list[Any]) -> DataPlaneError:
            sample_id = sample_ids[why[1] - 1]
            msg = f"sample {sample_id!r} is not claimed by this client any more"
            return ClaimLost(msg, partition_id=partition_id, sample_ids=(sample_id,))

        await self._serve("release", partition_id, make, op, wrong=wrong)

    async def release_owner(self, op: OperationId, partition_id: str, owner: str) -> None:
        """Make all samples that an owner claimed claimable again."""
        await self._ask("release_owner", partition_id, pack(owner), op)

    async def abandon(self, partition_id: str, claim_id: str) -> None:
        """End a claim whose batch no client received; a request for it that arrives later is refused."""
        await self._open()
        await self._link.function("abandon", self._key(partition_id), claim_id, 0, b"", b"")

    async def list_claims(self, partition_id: str, task: str) -> list[ClaimInfo]:
        """List the live claims of a task, oldest first, in pages that keep the server busy for about 10 ms.

        Raises:
            DataPlaneBadRequest: The partition or task is unknown.
        """
        answer = await self._list_claims(partition_id, task)
        heads = {claim_id: load(blob) for claim_id, blob in load(answer)}
        found = []
        for page in _pages({claim_id: head[5] for claim_id, head in heads.items()}, self._settings.list_rows):
            for claim_id, rows in zip(page, load(await self._list_claims(partition_id, task, page)), strict=True):
                _, _, _, at, ends, _, order = heads[claim_id]
                ids = tuple(text(load(row)[0]) for row in rows if row)
                owner, expires = text(heads[claim_id][0]), None if ends is False else float(ends)
                if ids:  # otherwise the claim has ended meanwhile
                    info = ClaimInfo(text(claim_id), owner, task, ids, float(at), expires)
                    found.append(((float(at), int(order)), info))
        return [info for _, info in sorted(found, key=lambda row: row[0])]

    async def _list_claims(self, partition_id: str, task: str, claims: list[bytes] | None = None) -> bytes:
        make = lambda schema: pack((schema.task(partition_id, task), claims or False))  # noqa: E731
        return (await self._serve("list_claims", partition_id, make)).blob

    async def consumed(self, partition_id: str, tasks: Sequence[str]) -> bool:
        """Return whether every sample present is claimed by every named task.

        Raises:
            DataPlaneBadRequest: The partition or a task is unknown.
        """
        answer = await self._serve(
            "consumed", partition_id, lambda schema: pack([schema.task(partition_id, task) for task in tasks])
        )
        return bool(load(answer.blob))


def _pages(sizes: Mapping[bytes, int], most: int) -> Iterator[list[bytes]]:
    """Group claims into pages of at most ``most`` rows; a larger claim is a page of its own."""
    page: list[bytes] = []
    total = 0
    for claim_id, size in sizes.items():
        if page and total + size > most:
            yield page
            page, total = [], 0
        page.append(claim_id)
        total += size
    if page:
        yield page


def _batch(partition_id: str, task: str, claim_id: str, reply: list[Any], version: bytes) -> KVBatchMeta:
    _, head, rids, rows, moved = reply
    ids, tags, cells = [], [], []
    for blob in rows:
        sample_id, _, size0, _, cell, told, _, created, *_ = load(blob)
        ids.append(text(sample_id))
        tags.append(full_tags(told or None, float(created), size0))
        cells.append(cell)
    lives = zip(rids, hints_of(ids, mark_of(version, moved), cells), strict=True)
    handles: list[RowHandle | None] = [RowHandle(int(rid), claim_id, hint) for rid, hint in lives]
    names = [text(name) for name in load(head)[2]]
    return KVBatchMeta(partition_id, task, ids, names, lengths_of(tags), tags=tags, handles=handles)
