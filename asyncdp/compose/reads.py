"""Composes GetSamples of slot calls: locate the rows, read their slots host by host, assemble the result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from asyncdp.calls.answers import verify
from asyncdp.calls.slots import Locate, Located, ReadResult, ReadSlots, Send, SlotRef
from asyncdp.errors import DataPlaneError, PartialReadError, StaleSlotError
from asyncdp.meta import KVBatchMeta, RowHandle
from asyncdp.rows.block import Block, FieldSpec, assemble

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.calls import CallContext, GetSamples

__all__ = ["fan_out", "partial_read", "read_rows"]


async def fan_out(
    send: Callable[[Any, CallContext], Awaitable[Any]], calls: Sequence[Any], ctx: CallContext
) -> list[Any]:
    """Send calls concurrently and return the result or the error of each; an error does not cancel the others."""
    out: list[Any] = [None] * len(calls)

    async def one(at: int) -> None:
        try:
            out[at] = await send(calls[at], ctx)
        except Exception as err:  # noqa: BLE001 - returned, since raised in a task group it would cancel the others
            out[at] = err

    async with anyio.create_task_group() as group:
        for at in range(len(calls)):
            group.start_soon(one, at)
    return out


Read = tuple[Block, Sequence[int]]
#: Identifies what a ref reads: host id, epoch, slot, generation, fields, positions of the rows in the slot.
RefKey = tuple[str, int, int, int, tuple[str, ...], tuple[int, ...]]
#: Positions in the request of rows that were stale, and the keys of the stale refs.
Gone = tuple[Sequence[int], set[RefKey]]
#: How often stale rows are read again. A writer that replaces a row again and again may win twice in a row, where a
#: read takes as long as a put.
REREADS = 4


async def _ask_all(
    send: Send, refs: Sequence[SlotRef], ctx: CallContext, *, borrow: bool
) -> list[tuple[ReadSlots, Any]]:
    """Send one request per host; return each request with its result or its error."""
    by_host: dict[tuple[str, int], list[SlotRef]] = {}
    for ref in refs:
        by_host.setdefault((ref.host.id, ref.host.epoch), []).append(ref)
    calls = [ReadSlots(group[0].host, tuple(group), borrow=borrow) for group in by_host.values()]
    return list(zip(calls, await fan_out(send, calls, ctx), strict=True))


def _at_one_host(refs: Sequence[SlotRef]) -> bool:
    host = refs[0].host
    return len(refs) == 1 or all(ref.host is host for ref in refs)


async def _read_refs(
    send: Send, refs: Sequence[SlotRef], ctx: CallContext, *, borrow: bool = False
) -> tuple[list[Read], dict[int, DataPlaneError], set[RefKey]]:
    """Read refs, with one request per host.

    Returns the blocks with the positions of their rows, an error per row that failed, and the keys of stale refs.
    """
    # Many callers wait here at a time, so what is made before the wait is kept small: Python's garbage collector runs
    # by how many more objects there are.
    if not _at_one_host(refs):
        return _taken_apart(await _ask_all(send, refs, ctx, borrow=borrow))
    call = ReadSlots(refs[0].host, tuple(refs), borrow=borrow)
    try:
        answer = await send(call, ctx)
    except DataPlaneError as err:
        return _taken_apart([(call, err)])
    return _taken_apart([(call, answer)])


def _taken_apart(
    answers: Sequence[tuple[ReadSlots, Any]],
) -> tuple[list[Read], dict[int, DataPlaneError], set[RefKey]]:
    """Return what the answers to requests hold, as :func:`_read_refs` does."""
    reads: list[Read] = []
    failed: dict[int, DataPlaneError] = {}
    stale: set[RefKey] = set()
    for call, answer in answers:
        if isinstance(answer, Exception) and not isinstance(answer, DataPlaneError):
            raise answer
        if isinstance(answer, ReadResult):
            result = answer if answer.verified else verify(answer, call)
        else:
            result = ReadResult((), dict.fromkeys(range(len(call.refs)), answer), verified=True)
        for at, problem in result.errors.items():
            if isinstance(problem, StaleSlotError):
                stale.add(_ref_key(call.refs[at]))
            for row in call.refs[at].rows:
                # StaleSlotError takes precedence over other errors, since the row has to be located again anyway.
                if row not in failed or isinstance(problem, StaleSlotError):
                    failed[row] = problem
        for part in result.parts:
            rows = call.refs[part.refs[0]].rows
            if len(part.refs) > 1:
                rows = [row for at in part.refs for row in call.refs[at].rows]
            reads.append((part.block, rows))
    return reads, failed, stale


def _without(reads: list[Read], gone: Mapping[int, Any] | set[int]) -> list[Read]:
    """Remove whole rows from what was read."""
    out: list[Read] = []
    for block, rows in reads:
        keep = [at for at, row in enumerate(rows) if row not in gone]
        if len(keep) == block.n:
            out.append((block, rows))
        elif keep:
            out.append((block.take(keep), [rows[at] for at in keep]))
    return out


async def read_rows(send: Send, call: GetSamples, ctx: CallContext, *, at_once: bool = False) -> TensorDict:
    """Serve GetSamples: locate the rows, read their slots host by host, and assemble the result.

    With ``at_once`` the transport may read slots as soon as it knows them, see :class:`~asyncdp.calls.slots.Locate`.

    Rows of which a slot is stale are discarded as a whole, located, and read again, so that no row is assembled from
    two lives. A row that is gone by then, has begun another life, or still has the same slot is StaleSlotError, and so
    is one whose new slot is stale again, ``REREADS`` times.

    Raises:
        PartialReadError: Some rows, or all, could not be read; its ``errors`` have the reasons.
    """
    n = len(call.sample_ids)
    where = Locate(call.sample_ids, call.partition_id, call.fields, call.handles, at_once, call.borrow)
    located = await send(where, ctx)
    specs: Mapping[str, FieldSpec] = located.specs
    if not located.refs:
        reads: list[Read] = []
        failed: dict[int, DataPlaneError] = dict(located.missing)
    else:
        reads, broken, stale_refs = (
            _taken_apart(located.read)
            if located.read
            else await _read_refs(send, located.refs, ctx, borrow=call.borrow)
        )
        failed = dict(located.missing)
        if broken:
            stale: Sequence[int] = sorted(row for row, err in broken.items() if isinstance(err, StaleSlotError))
            reads = _without(reads, broken)
            if stale:
                ctx.emit("stale_slots", rows=len(stale), partition_id=call.partition_id)
            for _ in range(REREADS):
                if not stale:
                    break
                fresh, broken_again, specs, moved = await _read_again(send, call, located, (stale, stale_refs), ctx)
                reads += fresh
                for row in stale:
                    del broken[row]
                broken.update(broken_again)
                stale, stale_refs = moved
            failed.update(broken)
    if not failed:
        whole = assemble(reads, n, call.fields, specs, ctx.env.codec)
        try:
            return whole.to_tensordict()
        except DataPlaneError:
            if not whole.undecodable():
                raise
        reads = [(whole, range(n))]
    raise _partial(call, located.handles, reads, failed, specs, ctx)


async def _read_again(
    send: Send, call: GetSamples, before: Located, gone: Gone, ctx: CallContext
) -> tuple[list[Read], dict[int, DataPlaneError], Mapping[str, FieldSpec], Gone]:
    """Locate and read rows again whose slots were stale, bound to the incarnations that were located before.

    ``gone`` has the positions of these rows in the request, and the keys of the stale refs, which are not read again.
    The last result is what is stale after this, of what was read; it holds the refs that were stale before, too.
    """
    stale, stale_refs = gone
    ids = tuple(call.sample_ids[row] for row in stale)
    handles = tuple(before.handles[row] for row in stale)
    try:
        located = await send(Locate(ids, call.partition_id, call.fields, handles), ctx)
    except DataPlaneError as err:
        return [], dict.fromkeys(stale, err), before.specs, ([], stale_refs)
    failed: dict[int, DataPlaneError] = {}
    for at, problem in located.missing.items():
        text = f"sample {ids[at]!r} was cleared while it was read"
        failed[stale[at]] = (
            problem
            if isinstance(problem, StaleSlotError)
            else StaleSlotError(text, sample_ids=(ids[at],), cause=problem)
        )
    refs = [replace(ref, rows=[stale[at] for at in ref.rows]) for ref in located.refs]
    for ref in refs:
        for row in ref.rows if _ref_key(ref) in stale_refs else ():
            name = call.sample_ids[row]
            msg = f"the data of sample {name!r} is gone from its slot"
            failed.setdefault(row, StaleSlotError(msg, sample_ids=(name,)))
    wanted = [
        replace(ref, index=[ref.index[i] for i in keep], rows=[ref.rows[i] for i in keep])
        for ref in refs
        if (keep := [i for i, row in enumerate(ref.rows) if row not in failed])
    ]
    if not wanted:
        return [], failed, located.specs, ([], stale_refs)
    reads, broken, stale_again = await _read_refs(send, wanted, ctx)
    moved = sorted(row for row, err in broken.items() if isinstance(err, StaleSlotError))
    failed.update(broken)
    return _without(reads, failed), failed, located.specs, (moved, stale_refs | stale_again)


def _ref_key(ref: SlotRef) -> RefKey:
    """Return what identifies what a ref reads.

    It includes rows and fields. If one of several rows of a slot was removed, or one of its fields replaced, the whole
    read is stale, whereas the same slot without that row or field can be read.
    """
    return ref.host.id, ref.host.epoch, ref.slot, ref.generation, ref.fields, tuple(ref.index)


def _partial(
    call: GetSamples,
    handles: Sequence[RowHandle | None],
    reads: list[Read],
    failed: dict[int, DataPlaneError],
    specs: Mapping[str, FieldSpec],
    ctx: CallContext,
) -> PartialReadError:
    """Return the error that holds the rows that were read."""
    n = len(call.sample_ids)
    came = [row for row in range(n) if row not in failed]
    where = {row: at for at, row in enumerate(came)}
    kept = [(block, [where[row] for row in rows]) for block, rows in _without(reads, failed)]
    block = assemble(kept, len(came), call.fields, specs, ctx.env.codec) if came else Block(0, {})
    if bad := block.undecodable():
        failed = {**failed, **{came[row]: err for row, err in bad.items()}}
        block = block.take([row for row in range(block.n) if row not in bad])
    meta = KVBatchMeta(
        call.partition_id,
        sample_ids=list(call.sample_ids),
        fields=list(call.fields),
        handles=list(call.handles or handles),
    )
    return partial_read(meta, block, failed, op=ctx.verb)


def partial_read(
    meta: KVBatchMeta, rows: Block | TensorDict, failed: Mapping[int, DataPlaneError], *, op: str
) -> PartialReadError:
    """Return the error that holds ``rows``, which are the rows of ``meta`` that are not in ``failed``."""
    lost = sorted(failed)
    kinds: dict[str, int] = {}
    for err in failed.values():
        kinds[type(err).__name__] = kinds.get(type(err).__name__, 0) + 1
    tally = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    first = failed[lost[0]]
    msg = f"{len(lost)} of {meta.size} rows did not come ({tally}); {meta.sample_ids[lost[0]]!r}: {first.message}"
    return PartialReadError(
        msg,
        rows=rows,
        ok=meta.subset([row for row in range(meta.size) if row not in failed]),
        failed=meta.subset(lost),
        errors={row: failed[row] for row in lost},
        sample_ids=[meta.sample_ids[row] for row in lost],
        op=op,
        partition_id=meta.partition_id,
        attempts=max(err.attempts for err in failed.values()),
    )
