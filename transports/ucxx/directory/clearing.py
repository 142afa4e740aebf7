"""Removing samples, and finding out what became of a mutation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from asyncdp.calls.slots import Resolved
from asyncdp.errors import ClaimLost, DataPlaneBadRequest

from .base import ERROR, OK
from .cells import DeadCells, dead_cells
from .listing import Listing
from .msgpack_codec import load, pack
from .rows import rid_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .operation_ids import Op

__all__ = ["Cleared", "Clearing"]

#: How long outcomes are remembered after the deadline of the call that they belong to; KEEP_S of the library.
KEEP_S = 600.0


@dataclass(frozen=True, slots=True)
class Cleared:
    """How many samples were removed, and where they lay, for their hosts to be told."""

    count: int
    freed: tuple[DeadCells, ...]


class Clearing(Listing):
    """Removals."""

    async def clear(
        self,
        op: Op,
        partition_id: str,
        sample_ids: Sequence[str] | None,
        owner: str = "",
        claims: Sequence[tuple[str, ...] | None] | None = None,
        lives: Sequence[int | None] | None = None,
    ) -> Cleared:
        """Remove samples (None: all that ``owner`` put and that still live); what is not there is no error.

        Args:
            op: Names the removal.
            partition_id: Where; an unknown partition holds nothing.
            sample_ids: Which.
            owner: Whose, where no ids are given.
            claims: Per id the claim ids of which one must still be live, or None.
            lives: Per id the incarnation that is meant, or None; another one is as good as gone.

        Returns:
            What was removed. The server is busy for 13 us a row that is claimed.

        Raises:
            ClaimLost: A claim is not, or no longer, its holder's; nothing was removed.
        """
        meant: Sequence[bytes | str | bool] = [] if lives is None else [rid_of(life) for life in lives]
        ids: Sequence[str] = () if sample_ids is None else tuple(sample_ids)
        if sample_ids is None:
            try:
                # By incarnation: a sample that is cleared and put anew by another meanwhile is not meant.
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
        """Say what became of a mutation; refuse it from now on if it has not arrived.

        Args:
            op_id: Which.
            partition_id: Where it was sent.
            age_s: Seconds since its deadline passed; past what the server remembers it is ``"forgotten"``.
        """
        await self._open()
        late = b"1" if age_s > KEEP_S else b"0"
        reply = await self._link.function("resolve", self._key(partition_id), op_id, late)
        return Resolved(reply[1].decode())
