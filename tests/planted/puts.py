"""Broken layers and transports: puts, reads, claims, time limits, errors and pending outcomes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio
import torch
from tensordict import TensorDict

from asyncdp import DataPlaneError, DataPlaneTimeout, MemoryTransport, PartialReadError, Reconcile, TypedErrors
from asyncdp.calls import Call, CallContext, ClearSamples, GetSamples, PutSamples, handles
from asyncdp.calls.slots import Publish, Published, ReadResult, ReadSlots
from asyncdp.compose.composition import SlotMapping
from asyncdp.middleware.attempt_timeout import AttemptTimeout


class RollbackRemovesAll(SlotMapping):
    """The rollback of a put that failed removes what earlier puts stored under the same ids."""

    @handles(PutSamples)
    async def put(self, call: PutSamples, ctx: CallContext) -> Any:
        """Put, or clear."""
        try:
            return await super().put(call, ctx)
        except DataPlaneError as err:
            if not err.ambiguous and ctx.remaining() > 0:
                undo = replace(ctx, op_id=ctx.env.next_op_id())
                await self.inner.execute(ClearSamples(call.sample_ids, call.partition_id), undo)
            raise


class CompletionOrder(SlotMapping):
    """Rows come back in the order in which their reads were completed."""

    @handles(GetSamples)
    async def get(self, call: GetSamples, ctx: CallContext) -> Any:
        """Read both halves at once and put the one in front that came first."""
        half = len(call.sample_ids) // 2
        if not half:
            return await super().get(call, ctx)
        came: list[TensorDict] = []
        problems: list[DataPlaneError] = []

        async def read(part: slice) -> None:
            handles_ = None if call.handles is None else call.handles[part]
            try:
                came.append(
                    await SlotMapping.get(self, replace(call, sample_ids=call.sample_ids[part], handles=handles_), ctx)
                )
            except DataPlaneError as err:
                problems.append(err)

        async with anyio.create_task_group() as group:
            group.start_soon(read, slice(0, half))
            group.start_soon(read, slice(half, None))
        if problems:
            return await super().get(call, ctx)
        return TensorDict(
            {name: torch.cat([part[name] for part in came]) for name in call.fields}, [len(call.sample_ids)]
        )


class Careless(Reconcile):
    """What a cancel left open is not settled before the next mutation of the same ids."""

    async def resolve_due(self, call: Call[Any], ctx: CallContext) -> None:
        """Do nothing."""


class Heedless(Reconcile):
    """A claim that was given up is written down nowhere."""

    def _record(self, call: Call[Any], ctx: CallContext) -> None:
        pass


class ConvertsResults(AttemptTimeout):
    """A result that came, but not at once, becomes a timeout that says that nothing happened."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Look at the clock afterwards."""
        began = ctx.env.clock.now()
        result = await super().execute(call, ctx)
        if type(call) is Publish and ctx.env.clock.now() - began > self.attempt_timeout_s / 4:
            raise DataPlaneTimeout("too late", retryable=False)
        return result


class Endless(AttemptTimeout):
    """Attempts have no time limit."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Wait."""
        return await self.inner.execute(call, ctx)


class HalfVisible(MemoryTransport):
    """A publish makes one half of the rows visible, then the other."""

    partition = "flow"

    async def _publish(self, call: Any, ctx: Any) -> Any:
        half = len(call.sample_ids) // 2
        by_row = all(len(ref.rows) == 1 for ref in call.refs)
        if not half or not by_row or call.partition_id != self.partition:
            return await super()._publish(call, ctx)
        done: list[Published] = []
        for first, stop in ((0, half), (half, len(call.sample_ids))):
            refs = tuple(replace(r, rows=[r.rows[0] - first]) for r in call.refs if first <= r.rows[0] < stop)
            tags = None if call.tags is None else call.tags[first:stop]
            lives = None if call.lives is None else call.lives[first:stop]
            sizes = {name: each[first:stop] for name, each in call.nbytes.items()}
            ids = call.sample_ids[first:stop]
            part = replace(call, sample_ids=ids, refs=refs, tags=tags, lives=lives, nbytes=sizes)
            done.append(await super()._publish(part, replace(ctx, op_id=f"{ctx.op_id}/{first}")))
            await anyio.sleep(0.02)
        one, two = done
        return Published(one.handles + two.handles, (one.created or ()) + (two.created or ()))


class TagsLater(MemoryTransport):
    """Samples are ready before their tags are there."""

    async def _publish(self, call: Any, ctx: Any) -> Any:
        handles_ = await super()._publish(replace(call, tags=None), ctx)
        await anyio.sleep(0.02)
        await super()._publish(replace(call, refs=(), specs={}), replace(ctx, op_id=f"{ctx.op_id}/tags"))
        return handles_


class DecidesAnew(MemoryTransport):
    """A put that leaves stale rows out, sent again, is told which of them live by now."""

    async def _publish(self, call: Any, ctx: Any) -> Any:
        done = await super()._publish(call, ctx)
        if not call.skip_stale or call.partition_id not in self.plane.partitions:
            return done
        rows = self.plane.partitions[call.partition_id].rows
        now = [
            handle if handle is not None and name in rows and rows[name].incarnation == handle.incarnation else None
            for name, handle in zip(call.sample_ids, done.handles, strict=True)
        ]
        return Published(tuple(now), done.created)


class ShortReads(SlotMapping):
    """Returns the rows that came as if they were all; a transport that is read as a whole."""

    def __init__(self, config: Any, *, bootstrap: bool = True) -> None:
        super().__init__(MemoryTransport(config, bootstrap=bootstrap))
        self.plane = self.inner.plane  # type: ignore[attr-defined]

    def get_capabilities(self) -> Any:
        """Be read as a whole."""
        return replace(super().get_capabilities(), slot_addressable=False)

    async def get(self, call: Any, ctx: Any) -> Any:
        """Read."""
        try:
            return await super().get(call, ctx)
        except PartialReadError as err:
            return err.rows if err.ok.size else TensorDict({}, batch_size=[0])


class LeavesReaders(MemoryTransport):
    """A cancelled read never ends its attempt."""

    async def _read(self, call: Any, ctx: Any) -> Any:
        try:
            return await super()._read(call, ctx)
        except anyio.get_cancelled_exc_class():
            for ref in call.refs:
                self.plane.hosts[ref.host.id].slots[ref.slot].readers.add(-1)
            raise


class LookingAtTheClock(AttemptTimeout):
    """Throws a reply away that was there in time, because the clock says it is late by now."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Look at the clock afterwards."""
        result = await super().execute(call, ctx)
        if ctx.remaining() < 0:
            msg = "too late"
            raise DataPlaneTimeout(msg)
        return result


class Swallowing(TypedErrors):
    """Translates cancellation as well."""

    async def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Translate everything."""
        try:
            return await super().execute(call, ctx)
        except DataPlaneError:
            raise
        except BaseException as err:
            raise self.typed(err, call, ctx) from err


class Trusting(TypedErrors):
    """Takes every payload for what was announced."""

    def _verified(self, call: ReadSlots, result: ReadResult, ctx: CallContext) -> ReadResult:
        """Check nothing."""
        return replace(result, verified=True)


class Meddling(Reconcile):
    """Outcomes are reconciled for which other calls of the client may still be asking."""

    async def resolve_due(self, call: Call[Any], ctx: CallContext) -> None:
        """Reconcile everything."""
        for outcome in ctx.env.pending_outcomes:
            if outcome.op_id != ctx.op_id:
                await self._resolve(outcome, ctx)
