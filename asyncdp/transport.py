"""Transport: what every backend's client shares."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.client import BaseClient
from asyncdp.reads import read_rows
from asyncdp.waits import claim_until, partition_until
from asyncdp.writes import write_rows

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.meta import KVBatchMeta

__all__ = ["Transport"]

#: Seconds that the one look of a claim with ``timeout_s=0`` may take without a stack; AttemptTimeout's default.
LOOK_S = 10.0


class Transport(BaseClient):
    """A client that talks to storage.

    A backend that serves the slot calls (``Locate``, ``ReadSlots``, ``TryClaim``, ...) has the sample calls from here:
    they are composed of its own slot calls, so it is a whole client also without a stack around it. In a stack the
    SlotMapping layer makes the same compositions above the layers that retry and rotate.
    """

    @handles(c.GetSamples)
    async def _get(self, call: c.GetSamples, ctx: CallContext) -> TensorDict:
        return await read_rows(self.execute, call, ctx)

    @handles(c.PutSamples)
    async def _put(self, call: c.PutSamples, ctx: CallContext) -> KVBatchMeta:
        return await write_rows(self.execute, call, ctx)

    @handles(c.ClaimMeta)
    async def _claim(self, call: c.ClaimMeta, ctx: CallContext) -> KVBatchMeta:
        return await claim_until(self.execute, call, _one_look(ctx))

    @handles(c.WaitPartition)
    async def _wait(self, call: c.WaitPartition, ctx: CallContext) -> None:
        await partition_until(self.execute, call, _one_look(ctx))


def _one_look(ctx: CallContext) -> CallContext:
    """Give the one look of a call without time what AttemptTimeout would, where no such layer is above."""
    return replace(ctx, deadline=ctx.env.clock.now() + LOOK_S) if ctx.looks_once else ctx
