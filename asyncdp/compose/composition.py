"""SlotMapping: turns sample calls into slot calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

from asyncdp.calls import CallContext, ClaimMeta, GetSamples, PutSamples, WaitPartition, handles
from asyncdp.service import Layer

from .reads import read_rows
from .waits import claim_until, partition_until
from .writes import write_rows

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.meta import KVBatchMeta

__all__ = ["SlotMapping"]


class SlotMapping(Layer):
    """Locates and reads, places and writes, looks for claims, so that the layers below see what can fail alone.

    The compositions are :func:`~asyncdp.compose.reads.read_rows`, :func:`~asyncdp.compose.writes.write_rows` and
    :func:`~asyncdp.compose.waits.claim_until`. A transport without slot_addressable gets its reads as they are, one
    without slot_writes its puts.
    """

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> TensorDict:
        """Read by slots, where the transport can be addressed by them."""
        if not self.capabilities.slot_addressable:
            return await self.inner.execute(call, ctx)
        return await read_rows(self.inner.execute, call, ctx)

    @handles(PutSamples)
    async def put(self, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
        """Write by slots, where the transport can."""
        if not self.capabilities.slot_writes:
            return await self.inner.execute(call, ctx)
        return await write_rows(self.inner.execute, call, ctx)

    @handles(ClaimMeta)
    async def claim(self, call: ClaimMeta, ctx: CallContext) -> KVBatchMeta:
        """Look until a batch is ready or time is up."""
        return await claim_until(self.inner.execute, call, ctx)

    @handles(WaitPartition)
    async def wait(self, call: WaitPartition, ctx: CallContext) -> None:
        """Look until the partition is there or time is up."""
        await partition_until(self.inner.execute, call, ctx)
