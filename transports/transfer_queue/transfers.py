"""The part of the transport that writes rows to the storage units, and removes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.calls.answers import published, written
from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneWriteError,
)
from asyncdp.rows.block import Block, field_names, raw_leaf
from asyncdp.rows.device_memory import on_host

from .checksums import MARK, sums_of
from .reading import Reading, maybe_in_a_thread, nbytes_of
from .rows import (
    encode,
    form_of,
    sizes_of,
    spec_from_wire,
    spec_to_wire,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from asyncdp.meta import KVBatchMeta
    from asyncdp.rows.column import Column

__all__ = ["Transfers"]

#: Maximum time in seconds that a put spends on clearing replaced values; the rest is cleared by later calls.
SWEEP_S = 1.0

Share = tuple[str, int, int]


class Transfers(Reading):
    """Writes rows to storage units and removes them."""

    # -- puts

    @handles(c.PutSamples)
    async def _put(self, call: c.PutSamples, ctx: CallContext) -> KVBatchMeta:
        """Place the rows, write them to the units, and publish them, which makes all of them visible at once."""
        n = len(call.sample_ids)
        names = field_names(call.fields)
        shares: list[Share] = []
        block = Block(n, {})
        if call.fields is not None and names:
            wanted = len((await self._connection.link(ctx.deadline)).units) if self._is_big(call) else 1
            try:
                placed = await self._place(call.sample_ids, call, names, wanted, ctx)
                if placed[0] == "done":
                    return _meta(call, names, placed[1])
                specs = {name: spec_from_wire(spec) for name, spec in placed[2].items()}
                block = Block.from_fields(await on_host(call.fields, ctx.env), n, specs, self.object_codec)
                shares = await self._send(block, placed[1], call, names, ctx)
            except DataPlaneError as err:
                err.ambiguous = False  # nothing is visible before it is published
                await self._give_up(ctx, settled=isinstance(err, DataPlaneBadRequest))
                raise
        args = (
            *(call.partition_id, call.sample_ids, ctx.op_id, await self._not_after(ctx), self.owner, call.tags, shares),
            {name: self._form(column) for name, column in block.columns.items()},
            {name: spec_to_wire(spec) for name, spec in block.observed().items()},
            {name: sizes_of(column) for name, column in block.columns.items()},
            None if call.only is None else (call.only, call.lives, call.skip_stale),
        )
        try:
            done, (ticket, garbage) = await self._mutate("publish", args, ctx, call.partition_id)
        except DataPlaneError as err:
            if not err.ambiguous:
                await self._give_up(ctx, settled=False)
            raise
        await self._sweep_briefly(ticket, garbage, ctx)
        return _meta(call, names, done)

    def _form(self, column: Column) -> tuple[Any, ...]:
        form = form_of(column)
        return (*form, MARK) if self._settings.checksum else form

    def _is_big(self, call: c.PutSamples) -> bool:
        assert call.fields is not None  # noqa: S101 - asked by the caller
        total = 0
        for name in field_names(call.fields):
            leaf = raw_leaf(call.fields, name)
            if isinstance(leaf, torch.Tensor) and leaf.layout in (torch.strided, torch.jagged):
                total += leaf.values().nbytes if leaf.layout == torch.jagged else leaf.nbytes
        return total >= self._settings.split_bytes

    async def _place(
        self, ids: Sequence[str], call: c.PutSamples, names: tuple[str, ...], wanted: int, ctx: CallContext
    ) -> tuple[Any, ...]:
        silent = (await self._connection.link(ctx.deadline)).silent()
        args = (call.partition_id, ids, names, ctx.op_id, wanted, tuple(silent), max(0.0, ctx.remaining()), call.only)
        placed: tuple[Any, ...] = await self._ask("place", args, ctx, call.partition_id)
        return placed

    async def _send(
        self, block: Block, shares: Sequence[Share], call: c.PutSamples, names: tuple[str, ...], ctx: CallContext
    ) -> list[Share]:
        """Write all shares; retry each share that fails once on another unit. Return the shares as written."""
        starts = [0]
        for _, _, count in shares:
            starts.append(starts[-1] + count)
        spans = list(zip(starts, shares, strict=False))
        problems = await self._write(block, spans, ctx)
        if not any(problems):
            return list(shares)
        out: list[Share] = []
        for (start, share), problem in zip(spans, problems, strict=True):
            if problem is None:
                out.append(share)
                continue
            if not problem.retryable or ctx.remaining() <= 0:
                raise problem
            ids = call.sample_ids[start : start + share[2]]
            again = await self._place(ids, call, names, 1, ctx)
            if again[0] != "shares" or again[1][0][0] == share[0]:
                raise problem
            ctx.emit("host_skipped", host=share[0], reason=type(problem).__name__)
            second = await self._write(block, [(start, again[1][0])], ctx)
            if second[0] is not None:
                raise second[0]
            out.append(again[1][0])
        return out

    async def _write(
        self, block: Block, spans: Sequence[tuple[int, Share]], ctx: CallContext
    ) -> list[DataPlaneError | None]:
        """Write spans of rows to their units concurrently; return the error of each, or None."""
        link = await self._connection.link(ctx.deadline)
        problems: list[DataPlaneError | None] = [None] * len(spans)

        async def one(at: int, start: int, share: Share) -> None:
            unit, first, count = share
            keys = range(first, first + count)
            try:
                values: dict[str, Sequence[Any]] = {**encode(block, start, start + count)}
                if self._settings.checksum:
                    values.update(await maybe_in_a_thread(nbytes_of(values), sums_of, values, keys))
                await link.unit(unit).guard(lambda: link.client.put(unit, keys, values), ctx.deadline, host=unit)
            except DataPlaneError as err:
                problems[at] = err
            except Exception as err:  # noqa: BLE001 - as a value: the other units are to settle
                problems[at] = DataPlaneWriteError(f"{type(err).__name__}: {err}", host=unit, cause=err)

        if len(spans) == 1:
            await one(0, *spans[0])
        else:
            async with anyio.create_task_group() as group:
                for at, (start, share) in enumerate(spans):
                    group.start_soon(one, at, start, share)
        return problems

    async def _give_up(self, ctx: CallContext, *, settled: bool) -> None:
        """Release reserved keys, as far as time and the plane allow; otherwise the directory reclaims them later."""
        if ctx.remaining() > 0:
            try:
                _, (ticket, garbage) = await self._ask("abort", (ctx.op_id, settled), ctx)
                await self._sweep_briefly(ticket, garbage, ctx)
            except DataPlaneError:
                return

    # -- removing

    async def _removed(self, op: str, args: Sequence[Any], ctx: CallContext) -> int:
        """Remove rows from the directory, then from the units; return the number of removed rows.

        Raises:
            DataPlaneUnavailable: The rows are removed for every reader, but a unit that does not answer may still hold
                their bytes. They are cleared when the call is repeated, or later. (A unit whose process has ended
                holds nothing and is no error.)
        """
        (count, units), (ticket, garbage) = await self._mutate(op, args, ctx)
        if ticket:
            failed = await self._sweep(ticket, garbage, ctx.deadline)
            mine = [failed[unit] for unit in units if unit in failed]
            if mine:
                worst = next((err for err in mine if err.retryable), mine[0])
                what = "it may still hold their bytes" if worst.retryable else "it did not confirm it"
                msg = f"the samples are gone, but {worst.message}: {what}"
                raise type(worst)(msg, host=worst.host, retryable=worst.retryable, cause=worst)
        return int(count)

    async def _sweep_briefly(
        self, ticket: int, garbage: Mapping[str, Sequence[tuple[int, int]]], ctx: CallContext
    ) -> None:
        if ticket:
            await self._sweep(ticket, garbage, min(ctx.deadline, anyio.current_time() + SWEEP_S))

    async def _sweep(
        self, ticket: int, garbage: Mapping[str, Sequence[tuple[int, int]]], deadline: float
    ) -> dict[str, DataPlaneError]:
        link = await self._connection.link(deadline)
        failed = await link.clear(garbage, deadline)
        if not any(err.retryable for err in failed.values()):
            link.finished.append(ticket)
        return failed


def _meta(call: c.PutSamples, names: tuple[str, ...], done: tuple[list[int | None], list[bool]]) -> KVBatchMeta:
    return written(call, names, published(done))
