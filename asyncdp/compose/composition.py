"""SlotMapping: turns sample calls into slot calls."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from asyncdp.calls import (
    Call,
    CallContext,
    ClaimMeta,
    ClearSamples,
    DropPartition,
    GetSamples,
    PutSamples,
    WaitPartition,
    handles,
)
from asyncdp.service import Layer, R

from .invalidations import invalidate
from .reads import read_rows
from .waits import claim_until, partition_until
from .writes import write_rows

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator

    from tensordict import TensorDict

    from asyncdp.client import Client
    from asyncdp.meta import KVBatchMeta
    from asyncdp.service import Service

__all__ = ["SlotMapping"]


class SlotMapping(Layer):
    """Composes sample calls of slot calls, so that the layers below can retry each slot on its own.

    It does so with :func:`~asyncdp.compose.reads.read_rows`, :func:`~asyncdp.compose.writes.write_rows` and
    :func:`~asyncdp.compose.waits.claim_until`. Reads are passed on unchanged to a transport without the capability
    slot_addressable, puts to one without slot_writes.
    """

    def __init__(self, inner: Service | Client) -> None:
        """Look at the services below."""
        super().__init__(inner)
        self._at_once = not any(service.sees_reads for service in _below(self))

    @handles(GetSamples)
    def get(self, call: GetSamples, ctx: CallContext) -> Coroutine[Any, Any, TensorDict]:
        """Read by slots, if the transport is slot-addressable."""
        if not self.capabilities.slot_addressable:
            return self.inner.execute(call, ctx)
        return read_rows(self.inner.execute, call, ctx, at_once=self._at_once)

    @handles(PutSamples)
    def put(self, call: PutSamples, ctx: CallContext) -> Coroutine[Any, Any, KVBatchMeta]:
        """Write by slots, if the transport supports that."""
        if not self.capabilities.slot_writes:
            return self.inner.execute(call, ctx)
        return write_rows(self.inner.execute, call, ctx)

    @handles(ClearSamples, DropPartition)
    async def remove(self, call: Call[R], ctx: CallContext) -> R:
        """Remove, then tell slot hosts which of their rows are gone, if the transport needs that."""
        result = await self.inner.execute(call, ctx)
        if len(ctx.env.pending_outcomes):
            await invalidate(self.inner.execute, call, ctx)
        return result

    @handles(ClaimMeta)
    def claim(self, call: ClaimMeta, ctx: CallContext) -> Coroutine[Any, Any, KVBatchMeta]:
        """Poll until a batch is ready or the time is up."""
        return claim_until(self.inner.execute, call, ctx)

    @handles(WaitPartition)
    def wait(self, call: WaitPartition, ctx: CallContext) -> Coroutine[Any, Any, None]:
        """Poll until the partition is registered or the time is up."""
        return partition_until(self.inner.execute, call, ctx)


def _below(layer: Layer) -> Iterator[Service]:
    """Return the layers below this one, and the transport."""
    service: Service = layer
    while isinstance(service, Layer):
        service = service.inner
        yield service
