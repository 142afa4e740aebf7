"""Slot calls, and how the sample calls are made of them.

A *slot* is the piece of storage that holds one stored payload, with a generation that grows at each reuse. Routing and
retrying work on slots, since a slot is what can fail alone. Three compositions turn sample calls into slot calls:
:func:`read_rows`, :func:`write_rows` and :func:`claim_until`. They take a ``send`` function: the SlotMapping layer passes
the next layer's ``execute``, a transport that is used without a stack its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

import anyio
from tensordict import TensorDict

from asyncdp.block import Block, FieldSpec, assemble
from asyncdp.calls import Call, CallContext, ClaimMeta, GetSamples, PutSamples, Resend, WaitPartition
from asyncdp.errors import (
    ClaimNotReady,
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    PartialReadError,
    StaleSlotError,
)
from asyncdp.ledger import Debt
from asyncdp.meta import KVBatchMeta, RowHandle, Tags

if TYPE_CHECKING:
    from collections.abc import Coroutine

__all__ = [
    "AbandonClaim",
    "Abort",
    "ClaimTry",
    "HostRef",
    "Locate",
    "Located",
    "Part",
    "Place",
    "Placement",
    "Publish",
    "ReadResult",
    "ReadSlots",
    "Reserve",
    "Resolve",
    "Resolved",
    "Send",
    "SlotRef",
    "TryClaim",
    "TryPartition",
    "WriteSlots",
    "claim_until",
    "partition_until",
    "read_rows",
    "verify",
    "write_rows",
]

R = TypeVar("R")


class Send(Protocol):
    """Sends a call to whoever serves it."""

    def __call__(self, call: Call[R], ctx: CallContext, /) -> Coroutine[Any, Any, R]:
        """Execute ``call``."""


# --- what they talk about -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostRef:
    """A slot host: its id, its epoch (another one means that all its slots are other slots), its equal doors."""

    id: str
    epoch: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Rows of one request that lie in one slot.

    Attributes:
        host: Who serves the slot.
        slot, generation: Which slot, and which use of it.
        fields: Fields to read from it.
        index: Where in the slot the rows lie.
        rows: Their positions in the request; as many as ``index``.
    """

    host: HostRef
    slot: int
    generation: int
    fields: tuple[str, ...]
    index: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Located:
    """Where rows lie.

    Attributes:
        refs: Together they cover every field of every row that is not missing.
        missing: ``{position: error}`` for rows that cannot be read.
        handles: The incarnation of each row.
        specs: How the partition defines the fields asked for.
    """

    refs: tuple[SlotRef, ...]
    missing: Mapping[int, DataPlaneError]
    handles: Sequence[RowHandle | None]
    specs: Mapping[str, FieldSpec]


@dataclass(frozen=True, slots=True)
class Part:
    """Payload of one or more refs, and what the host says about it.

    Attributes:
        refs: Indices into the request's refs, in the order of the block's rows.
        block: Their rows.
        nbytes: Payload bytes per ref.
        schema: ``Block.schema_hash`` of what was stored.
        checksums: CRC-32 per ref, or None where checksums are off.
    """

    refs: tuple[int, ...]
    block: Block
    nbytes: tuple[int, ...]
    schema: int
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReadResult:
    """What a host answered: parts for the refs that came, errors (by index of the ref) for those that did not."""

    parts: tuple[Part, ...]
    errors: Mapping[int, DataPlaneError] = field(default_factory=dict)
    verified: bool = False


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a put may go.

    Attributes:
        shares: ``(host, rows)`` in the order of the request; together they cover all rows.
        spare: Hosts to turn to where one of them fails, best first.
        specs: How the partition defines the fields so far.
    """

    shares: tuple[tuple[HostRef, int], ...]
    spare: tuple[HostRef, ...]
    specs: Mapping[str, FieldSpec]


@dataclass(frozen=True, slots=True)
class ClaimTry:
    """Answer to one look: a batch, or (``meta`` empty) how far the samples are."""

    meta: KVBatchMeta
    ready: int = 0
    oldest_wait_s: float | None = None
    waiting_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Resolved:
    """What became of a mutation: ``"done"``, ``"refused"`` (it never will be), or ``"forgotten"`` (past its record)."""

    state: str


# --- the calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Locate(Call[Located]):
    """Find the slots of samples; ``handles`` say which incarnation is meant (another one: StaleSlotError)."""

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    handles: tuple[RowHandle | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReadSlots(Call[ReadResult]):
    """Read slots of one host through one of its ports."""

    host: HostRef
    refs: tuple[SlotRef, ...]
    port: int | None = None


@dataclass(frozen=True, slots=True)
class Place(Call[Placement]):
    """Choose hosts for a put, and learn what the partition fixed about its fields."""

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Reserve(Call[tuple[SlotRef, ...]]):
    """Reserve slots for rows ``first_row ..`` of a put; ``sizes`` are their payload bytes. Same op_id: same slots."""

    host: HostRef
    fields: tuple[str, ...]
    sizes: tuple[int, ...]
    first_row: int = 0
    port: int | None = None
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WriteSlots(Call[None]):
    """Write payload into reserved slots; ``block`` holds the rows of all refs, in their order."""

    host: HostRef
    refs: tuple[SlotRef, ...]
    block: Block
    port: int | None = None
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Publish(Call[tuple[RowHandle, ...]]):
    """Make written slots the content of samples, all at once, tags included. Returns a handle per row."""

    sample_ids: tuple[str, ...]
    partition_id: str
    refs: tuple[SlotRef, ...]
    tags: tuple[Tags, ...] | None
    specs: Mapping[str, FieldSpec]
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Abort(Call[None]):
    """Free what ``op_id`` reserved on a host and has not published, and refuse whatever of it arrives later."""

    host: HostRef
    op_id: str
    port: int | None = None


@dataclass(frozen=True, slots=True)
class TryClaim(Call[ClaimTry]):
    """Look once for a batch, waiting up to ``wait_s`` seconds for it. The op_id becomes the claim id.

    At least ``min_rows`` rows are claimed, or none; at most ``batch_size``; whole groups where the partition has them.
    """

    partition_id: str
    task_name: str
    required_fields: tuple[str, ...]
    batch_size: int
    min_rows: int
    wait_s: float = 0.0
    dp_rank: int | None = None
    resend: ClassVar[Resend] = Resend.CLAIM
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class AbandonClaim(Call[None]):
    """Give back a claim whose answer nobody got; if it has not arrived yet, it is refused when it does."""

    claim_id: str
    partition_id: str
    task_name: str


@dataclass(frozen=True, slots=True)
class Resolve(Call[Resolved]):
    """Find out what became of a mutation; if it has not arrived yet, it is refused when it does.

    ``age_s``: how long ago the mutation's deadline passed, in seconds: past the backend's memory it is forgotten.
    """

    op_id: str
    partition_id: str
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class TryPartition(Call[bool]):
    """Look once whether a partition is registered, waiting up to ``wait_s`` seconds for it."""

    partition_id: str
    wait_s: float = 0.0


# --- verification ---------------------------------------------------------------------------------------------------


def _corrupt(why: str, call: ReadSlots) -> CorruptPayload:
    return CorruptPayload(why, host=call.host.id, port=call.port)


def _check_part(part: Part, call: ReadSlots) -> dict[int, DataPlaneError]:
    """Compare what came with what the host says came; return the refs that do not match."""
    block, refs = part.block, [call.refs[i] for i in part.refs]
    counts = [len(ref.rows) for ref in refs]
    short = [f for f, column in block.columns.items() if len(column) != block.n]
    absent = [f for ref in refs for f in ref.fields if f not in block.columns]
    if block.n != sum(counts) or short or absent or len(part.nbytes) != len(refs):
        why = f"{block.n} rows of fields {sorted(block.columns)} came for {sum(counts)} rows of {sorted(refs[0].fields)}"
        return dict.fromkeys(part.refs, _corrupt(why, call))
    if block.schema_hash() != part.schema:
        return dict.fromkeys(part.refs, _corrupt("the payload's schema is not the one announced", call))
    bad: dict[int, DataPlaneError] = {}
    if len(refs) == 1:
        sizes = [block.nbytes]
    else:
        per_row = block.row_nbytes()
        ends = [0]
        for count in counts:
            ends.append(ends[-1] + count)
        sizes = [int(per_row[a:b].sum()) for a, b in zip(ends, ends[1:], strict=False)]
    first = 0
    for at, (ref, size, count) in enumerate(zip(part.refs, sizes, counts, strict=True)):
        if size != part.nbytes[at]:
            bad[ref] = _corrupt(f"{size} bytes came where {part.nbytes[at]} were announced", call)
        elif part.checksums is not None and block.checksum(range(first, first + count)) != part.checksums[at]:
            bad[ref] = _corrupt("the payload's checksum does not match", call)
        first += count
    return bad


def verify(result: ReadResult, call: ReadSlots) -> ReadResult:
    """Check lengths, schema and checksums; what does not match, or did not come at all, becomes CorruptPayload.

    Idempotent: a verified result is returned as it is.
    """
    if result.verified:
        return result
    errors = dict(result.errors)
    parts = []
    seen = len(errors)
    for part in result.parts:
        bad = _check_part(part, call)
        seen += len(part.refs)
        errors.update(bad)
        if not bad:
            parts.append(part)
            continue
        parts.extend(_split(part, call, [ref for ref in part.refs if ref not in bad]))
    if seen < len(call.refs):
        there = set(result.errors).union(*(part.refs for part in result.parts))
        for ref in range(len(call.refs)):
            if ref not in there:
                errors[ref] = _corrupt("the host's answer leaves this slot out", call)
    return ReadResult(tuple(parts), errors, verified=True)


def _split(part: Part, call: ReadSlots, keep: Sequence[int]) -> Iterable[Part]:
    """Cut the refs in ``keep`` out of a part."""
    first = 0
    for at, ref in enumerate(part.refs):
        count = len(call.refs[ref].rows)
        if ref in keep:
            block = part.block.take(range(first, first + count))
            yield Part((ref,), block, (part.nbytes[at],), part.schema)
        first += count


# --- reading --------------------------------------------------------------------------------------------------------


async def fan_out(send: Callable[[Any, CallContext], Awaitable[Any]], calls: Sequence[Any], ctx: CallContext) -> list[Any]:
    """Send several calls at once and return, for each, its result or its error; errors never cancel their siblings."""
    out: list[Any] = [None] * len(calls)

    async def one(at: int) -> None:
        try:
            out[at] = await send(calls[at], ctx)
        except Exception as err:  # noqa: BLE001 - as a value: raised in a task group it would cancel the others
            out[at] = err

    async with anyio.create_task_group() as group:
        for at in range(len(calls)):
            group.start_soon(one, at)
    return out


async def _read_refs(
    send: Send, refs: Sequence[SlotRef], ctx: CallContext
) -> tuple[list[tuple[Block, Sequence[int]]], dict[int, DataPlaneError]]:
    """Read refs, grouped by host. Returns blocks with the rows they hold, and an error per row that failed."""
    if len(refs) == 1 or all(ref.host is refs[0].host for ref in refs):
        calls = [ReadSlots(refs[0].host, tuple(refs))]
    else:
        by_host: dict[tuple[str, int], list[SlotRef]] = {}
        for ref in refs:
            by_host.setdefault((ref.host.id, ref.host.epoch), []).append(ref)
        calls = [ReadSlots(group[0].host, tuple(group)) for group in by_host.values()]
    answers: list[Any]
    if len(calls) == 1:
        try:
            answers = [await send(calls[0], ctx)]
        except DataPlaneError as err:
            answers = [err]
    else:
        answers = await fan_out(send, calls, ctx)
    reads: list[tuple[Block, Sequence[int]]] = []
    failed: dict[int, DataPlaneError] = {}
    for call, answer in zip(calls, answers, strict=True):
        if isinstance(answer, DataPlaneError):
            for ref in call.refs:
                for row in ref.rows:
                    failed.setdefault(row, answer)
            continue
        if isinstance(answer, Exception):
            raise answer
        result = verify(answer, call)
        for at, err in result.errors.items():
            for row in call.refs[at].rows:
                # A stale slot outweighs a fault: the row has to be located again anyway.
                if row not in failed or isinstance(err, StaleSlotError):
                    failed[row] = err
        for part in result.parts:
            rows = call.refs[part.refs[0]].rows
            if len(part.refs) > 1:
                rows = [row for at in part.refs for row in call.refs[at].rows]
            reads.append((part.block, rows))
    return reads, failed


def _without(
    reads: list[tuple[Block, Sequence[int]]], gone: Mapping[int, Any] | set[int]
) -> list[tuple[Block, Sequence[int]]]:
    """Drop whole rows from what was read."""
    out: list[tuple[Block, Sequence[int]]] = []
    for block, rows in reads:
        keep = [at for at, row in enumerate(rows) if row not in gone]
        if len(keep) == block.n:
            out.append((block, rows))
        elif keep:
            out.append((block.take(keep), [rows[at] for at in keep]))
    return out


async def read_rows(send: Send, call: GetSamples, ctx: CallContext) -> TensorDict:
    """Serve GetSamples: locate the rows, read their slots host by host, put them together.

    A stale slot discards its whole rows; they are located and read once more, so that no row is put together from two
    lives. A row that is gone by then, lives again, or still has the same slot is StaleSlotError.

    Raises:
        PartialReadError: Not all rows came (also where none came: its ``errors`` tell).
    """
    n = len(call.sample_ids)
    located = await send(Locate(call.sample_ids, call.partition_id, call.fields, call.handles), ctx)
    failed: dict[int, DataPlaneError] = dict(located.missing)
    reads: list[tuple[Block, Sequence[int]]] = []
    specs: Mapping[str, FieldSpec] = located.specs
    if located.refs:
        reads, broken = await _read_refs(send, located.refs, ctx)
        if broken:
            stale = sorted(row for row, err in broken.items() if isinstance(err, StaleSlotError))
            reads = _without(reads, broken)
            if stale:
                ctx.emit("stale_slots", rows=len(stale), partition_id=call.partition_id)
                fresh, broken_again, specs = await _read_again(send, call, located, stale, ctx)
                reads += fresh
                for row in stale:
                    del broken[row]
                broken.update(broken_again)
            failed.update(broken)
    if not failed:
        return assemble(reads, n, call.fields, specs, ctx.env.codec).to_tensordict()
    raise _partial(call, located.handles, reads, failed, specs, ctx)


async def _read_again(
    send: Send, call: GetSamples, before: Located, stale: Sequence[int], ctx: CallContext
) -> tuple[list[tuple[Block, Sequence[int]]], dict[int, DataPlaneError], Mapping[str, FieldSpec]]:
    """Locate and read the stale rows once more, by the incarnation that was meant. Positions are the request's."""
    ids = tuple(call.sample_ids[row] for row in stale)
    handles = tuple(before.handles[row] for row in stale)
    try:
        located = await send(Locate(ids, call.partition_id, call.fields, handles), ctx)
    except DataPlaneError as err:
        return [], dict.fromkeys(stale, err), before.specs
    failed: dict[int, DataPlaneError] = {}
    for at, err in located.missing.items():
        gone = f"sample {ids[at]!r} was cleared while it was read"
        failed[stale[at]] = (
            err if isinstance(err, StaleSlotError) else StaleSlotError(gone, sample_ids=(ids[at],), cause=err)
        )
    refs = [replace(ref, rows=[stale[at] for at in ref.rows]) for ref in located.refs]
    then, now = _places(before.refs, stale), _places(refs, stale)
    for row in stale:
        if row not in failed and then[row] == now[row]:
            name = call.sample_ids[row]
            msg = f"the data of sample {name!r} is gone from its slot"
            failed[row] = StaleSlotError(msg, sample_ids=(name,))
    wanted = [
        replace(ref, index=[ref.index[i] for i in keep], rows=[ref.rows[i] for i in keep])
        for ref in refs
        if (keep := [i for i, row in enumerate(ref.rows) if row not in failed])
    ]
    if not wanted:
        return [], failed, located.specs
    reads, broken = await _read_refs(send, wanted, ctx)
    failed.update(broken)
    return _without(reads, failed), failed, located.specs


def _places(refs: Iterable[SlotRef], rows: Iterable[int]) -> dict[int, set[tuple[str, int, int, int, str]]]:
    """Where each field of some rows lies: (host, epoch, slot, generation, field)."""
    places: dict[int, set[tuple[str, int, int, int, str]]] = {row: set() for row in rows}
    for ref in refs:
        for row in ref.rows:
            if row in places:
                places[row].update((ref.host.id, ref.host.epoch, ref.slot, ref.generation, f) for f in ref.fields)
    return places


def _partial(
    call: GetSamples,
    handles: Sequence[RowHandle | None],
    reads: list[tuple[Block, Sequence[int]]],
    failed: dict[int, DataPlaneError],
    specs: Mapping[str, FieldSpec],
    ctx: CallContext,
) -> PartialReadError:
    """Keep the rows that came."""
    n = len(call.sample_ids)
    came = [row for row in range(n) if row not in failed]
    where = {row: at for at, row in enumerate(came)}
    kept = [(block, [where[row] for row in rows]) for block, rows in _without(reads, failed)]
    block = assemble(kept, len(came), call.fields, specs, ctx.env.codec) if came else Block(0, {})
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
    """Make the error that keeps ``rows``, the rows of ``meta`` that are not in ``failed``."""
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


# --- writing --------------------------------------------------------------------------------------------------------


def lengths_of(tags: Sequence[Tags] | None) -> list[int] | None:
    """Lift sequence lengths from the tag ``input_lengths``, where every row has it."""
    if not tags or any("input_lengths" not in row for row in tags):
        return None
    return [int(row["input_lengths"]) for row in tags]


async def write_rows(send: Send, call: PutSamples, ctx: CallContext) -> KVBatchMeta:
    """Serve PutSamples: place, reserve, write, publish. Nothing is visible before publish, which is all or nothing.

    A host that fails or is full is left for a spare one. What a failed put reserved is given back at once, what a
    cancelled one reserved with the next mutation.
    """
    n = len(call.sample_ids)
    names = () if call.fields is None else tuple(str(name) for name in call.fields.keys())
    refs: list[SlotRef] = []
    specs: Mapping[str, FieldSpec] = {}
    touched: list[Debt] = []
    try:
        if call.fields is not None and names:
            placed = await send(Place(call.sample_ids, call.partition_id, names), ctx)
            block = Block.from_fields(call.fields, n, placed.specs, ctx.env.codec)
            specs = block.observed()
            sizes = tuple(block.row_nbytes().tolist())
            first = 0
            for host, count in placed.shares:
                part = block if count == n else block.take(range(first, first + count))
                share = (first, sizes[first : first + count])
                refs += await _write_share(send, (host, *placed.spare), names, part, share, touched, ctx)
                first += count
    except BaseException as err:
        if isinstance(err, DataPlaneError):
            err.ambiguous = False  # nothing is visible before publish
            await _give_back(send, touched, ctx)
        raise
    try:
        handles = await send(Publish(call.sample_ids, call.partition_id, tuple(refs), call.tags, specs), ctx)
    except DataPlaneError as err:
        if not err.ambiguous:
            await _give_back(send, touched, ctx)
        else:  # the Settle layer, or the record of the backend, knows more about these slots
            for debt in touched:
                ctx.env.ledger.paid(debt)
        raise
    except BaseException:
        for debt in touched:
            ctx.env.ledger.paid(debt)
        raise
    for debt in touched:
        ctx.env.ledger.paid(debt)
    return KVBatchMeta(
        call.partition_id,
        sample_ids=list(call.sample_ids),
        fields=list(names),
        sequence_lengths=lengths_of(call.tags),
        tags=None if call.tags is None else [dict(row) for row in call.tags],
        handles=list(handles),
    )


async def _write_share(  # noqa: PLR0913 - one step of write_rows
    send: Send,
    hosts: Sequence[HostRef],
    names: tuple[str, ...],
    block: Block,
    share: tuple[int, tuple[int, ...]],
    touched: list[Debt],
    ctx: CallContext,
) -> tuple[SlotRef, ...]:
    """Reserve and write the rows of one share on the first host that takes them."""
    first_row, sizes = share
    problem: DataPlaneError | None = None
    for host in hosts:
        # Written down before anything is sent, so that a cancel at any await leaves no slot behind.
        debt = ctx.env.ledger.owe(Debt(Abort(host, ctx.op_id), ctx.op_id))
        touched.append(debt)
        try:
            refs = await send(Reserve(host, names, sizes, first_row), ctx)
            await send(WriteSlots(host, refs, block), ctx)
        except DataPlaneError as err:
            if isinstance(err, DataPlaneBadRequest) or not err.retryable or ctx.remaining() <= 0:
                raise
            # A host that is full is no fault; what the others say matters more.
            if problem is None or isinstance(problem, DataPlaneNotReady):
                problem = err
            ctx.emit("host_skipped", host=host.id, reason=type(err).__name__)
            await _give_back(send, [debt], ctx)
            continue
        return refs
    if problem is None:
        msg = "no slot host is there to take the rows"
        raise DataPlaneNotReady(msg)
    raise problem


async def _give_back(send: Send, debts: Iterable[Debt], ctx: CallContext) -> None:
    """Send what is owed, as far as time and the backend allow; the rest stays owed."""
    for debt in debts:
        if ctx.remaining() <= 0:
            return
        try:
            await send(debt.call, ctx)
        except DataPlaneError:
            continue
        ctx.env.ledger.paid(debt)


# --- claiming -------------------------------------------------------------------------------------------------------


def _margin(timeout_s: float) -> float:
    """How long before the deadline the last look is made: it must be answered in time."""
    return min(0.05 * timeout_s, 0.1)


async def claim_until(send: Send, call: ClaimMeta, ctx: CallContext) -> KVBatchMeta:
    """Serve ClaimMeta: look until a batch is ready or time is up.

    All looks of one claim share its op_id, which is the claim id: a look whose answer was lost gets the same batch when
    it is asked again. Faults that the layers below gave up on do not end a blocking claim before its time.

    Raises:
        ClaimNotReady: Too few samples by the deadline, nothing was claimed.
        DataPlaneError: The last look was not answered, with its error.
    """
    need = call.batch_size if call.min_batch_size is None else call.min_batch_size
    look = TryClaim(
        call.partition_id,
        call.task_name,
        call.required_fields,
        call.batch_size,
        need if call.blocking else 1,
        dp_rank=call.dp_rank,
    )
    if not call.blocking:
        return (await send(look, ctx)).meta
    env = ctx.env
    margin = _margin(ctx.remaining())
    while True:
        began = env.clock.now()
        left = max(0.0, ctx.deadline - margin - began)
        wait = min(env.long_poll_s, left)
        problem: DataPlaneError | None = None
        seen: ClaimTry | None = None
        try:
            seen = await send(replace(look, wait_s=wait), ctx)
        except DataPlaneError as err:
            if not err.retryable:
                raise
            problem = err
        if seen is not None and seen.meta.size:
            return seen.meta
        ended = env.clock.now()
        if ended >= ctx.deadline - margin:
            if problem is not None:
                raise problem
            assert seen is not None  # noqa: S101 - there is a problem or an answer
            raise _not_ready(call, need, seen)
        if problem is not None or ended - began < wait:
            await ctx.pause(min(env.claim_poll_s, ctx.deadline - margin - ended))


def _not_ready(call: ClaimMeta, need: int, seen: ClaimTry) -> ClaimNotReady:
    waits = "" if seen.oldest_wait_s is None else f"; the oldest has been waiting for {seen.oldest_wait_s:.3g} s"
    msg = (
        f"task {call.task_name!r} needs {need} samples with fields {list(call.required_fields)}: "
        f"{seen.ready} ready, {len(seen.waiting_ids)}{'+' if len(seen.waiting_ids) > 15 else ''} waiting{waits}"
    )
    return ClaimNotReady(
        msg,
        required_fields=call.required_fields,
        ready=seen.ready,
        requested=need,
        oldest_wait_s=seen.oldest_wait_s,
        waiting_ids=seen.waiting_ids,
    )


async def partition_until(send: Send, call: WaitPartition, ctx: CallContext) -> None:
    """Serve WaitPartition: look until the partition is there or time is up.

    Raises:
        DataPlaneTimeout: Nobody registered it in time.
    """
    env = ctx.env
    margin = _margin(ctx.remaining())
    while True:
        began = env.clock.now()
        wait = min(env.long_poll_s, max(0.0, ctx.deadline - margin - began))
        try:
            if await send(TryPartition(call.partition_id, wait), ctx):
                return
        except DataPlaneError as err:
            if not err.retryable or ctx.remaining() <= margin:
                raise
        ended = env.clock.now()
        if ended >= ctx.deadline - margin:
            msg = f"nobody registered partition {call.partition_id!r} in time"
            raise DataPlaneTimeout(msg, partition_id=call.partition_id, blames_port=False)
        if ended - began < wait:
            await ctx.pause(min(env.claim_poll_s, ctx.deadline - margin - ended))
