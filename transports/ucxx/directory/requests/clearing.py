"""Removal of samples, and the outcome of mutations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncdp.calls.slots import Resolved
from asyncdp.errors import ClaimLost, DataPlaneBadRequest

from ..encoding.cells import DeadCells, dead_cells
from ..encoding.msgpack_codec import load, pack
from ..encoding.rows import rid_of
from .base import ERROR, OK
from .listing import Listing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..encoding.operation_ids import OperationId

__all__ = ["Cleared", "Clearing"]

#: Seconds for which the server remembers an outcome after the deadline of its call; KEEP_S of the Lua library.
KEEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Cleared:
    """The number of samples that were removed, and their cells, for the invalidation of their hosts."""

    count: int
    freed: tuple[DeadCells, ...]


class Clearing(Listing):
    """Sends the requests that remove samples or resolve the outcome of a mutation."""

    async def clear(
        self,
        op: OperationId,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        owner: str = "",
        claims: Sequence[tuple[str, ...] | None] | None = None,
        lives: Sequence[int | None] | None = None,
    ) -> Cleared:
        """Remove samples; samples that do not exist are no error.

        Args:
            op: Identifies the removal.
            partition_id: Partition of the samples; an unknown one counts as empty.
            sample_ids: Ids of the samples; None: all live samples that ``owner`` put.
            owner: Client whose samples are removed, where ``sample_ids`` is None.
            claims: Per id the claim ids of which one must still be live, or None.
            lives: Per id the incarnation that is meant, or None for any; another incarnation is not removed.

        Returns:
            What was removed. The server is busy for 6 us a row that is claimed.

        Raises:
            ClaimLost: A sample is not, or no longer, held by one of its claims; nothing was removed.
        """
        meant: Sequence[bytes | str | bool] = [] if lives is None else [rid_of(life) for life in lives]
        ids: Sequence[str] = () if sample_ids is None else tuple(sample_ids)
        if sample_ids is None:
            try:
                # By incarnation, so that a sample that another client clears and puts anew meanwhile is not removed.
                ids, meant = await self._owned(partition_id, owner)
            except DataPlaneBadRequest:
                ids = ()
        checks = False if claims is None else [False if held is None else held for held in claims]
        await self._open()
        reply = await self._send("clear", partition_id, pack((ids, checks, meant or False)), b"", op)
        if reply[0] == OK:
            count, freed = load(reply[1])
            return Cleared(count, dead_cells(freed))
        if reply[0] == ERROR:
            sample_id = ids[load(reply[1])[1] - 1]
            msg = f"sample {sample_id!r} is not claimed by this client any more"
            raise ClaimLost(msg, partition_id=partition_id, sample_ids=(sample_id,))
        return await self._refused(reply, partition_id)

    async def resolve(self, op_id: str, partition_id: str, age_s: float = 0.0) -> Resolved:
        """Return the outcome of a mutation; if it has not arrived, have the server refuse it from now on.

        Args:
            op_id: Id of the mutation.
            partition_id: Partition that the mutation was sent to.
            age_s: Seconds since the mutation's deadline; beyond ``KEEP_S`` the outcome is ``"forgotten"``.
        """
        await self._open()
        late = b"1" if age_s > KEEP_S else b"0"
        reply = await self._link.function("resolve", self._key(partition_id), op_id, late)
        return Resolved(reply[1].decode(), *reply[2:])
