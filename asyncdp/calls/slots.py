"""Slot calls, and how the sample calls are made of them.

A *slot* is the piece of storage that holds one stored payload, with a generation that differs at each reuse. Routing
and retrying work on slots, since a slot is what can fail alone. Three compositions turn sample calls into slot calls:
:func:`asyncdp.compose.reads.read_rows`, :func:`asyncdp.compose.writes.write_rows` and
:func:`asyncdp.compose.waits.claim_until`. They take a ``send`` function:
:class:`~asyncdp.compose.composition.SlotMapping` passes the next layer's ``execute``, or the transport's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    StaleSlotError,
)
from asyncdp.meta import KVBatchMeta, RowHandle, Tags  # noqa: TC001 - in annotations of dataclasses

from . import Call, CallContext, Only, Resend

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from asyncdp.rows.block import Block, FieldSpec

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
    "Probe",
    "Publish",
    "Published",
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
    "living_rows",
    "stale_rows",
    "verify",
]

R = TypeVar("R")

#: Ids that a message names; ``sample_ids`` has them all.
NAMED = 8


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


class Published(NamedTuple):
    """What a put did, row by row.

    Attributes:
        handles: The life of each row that was written; None for a row that was left out as stale.
        created: Whether the put created the row, as opposed to writing one that lived already; None where the backend
            cannot tell.
    """

    handles: tuple[RowHandle | None, ...]
    created: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class ClaimTry:
    """Answer to one look: a batch, or (``meta`` empty) how far the samples are.

    ``missing_fields`` says of each required field how many of those that wait lack it, where any do.
    """

    meta: KVBatchMeta
    ready: int = 0
    oldest_wait_s: float | None = None
    waiting_ids: tuple[str, ...] = ()
    missing_fields: Mapping[str, int] = field(default_factory=dict)


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

    def through(self, port: int) -> ReadSlots:
        """Return the same request through this port."""
        return ReadSlots(self.host, self.refs, port)


@dataclass(frozen=True, slots=True)
class Place(Call[Placement]):
    """Choose hosts for a put, and learn what the partition fixed about its fields.

    ``only`` as in :class:`~asyncdp.calls.PutSamples`: a put of rows that live needs no room for more rows.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    only: Only | None = None


@dataclass(frozen=True, slots=True)
class Reserve(Call[tuple[SlotRef, ...]]):
    """Reserve slots for rows ``first_row ..`` of a put; ``sizes`` are their payload bytes. Same op_id: same slots.

    ``spare``: another host can take the rows, so that this one is not waited for where it does not answer.
    """

    host: HostRef
    fields: tuple[str, ...]
    sizes: tuple[int, ...]
    first_row: int = 0
    port: int | None = None
    spare: bool = False
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True

    def through(self, port: int) -> Reserve:
        """Return the same request through this port."""
        return Reserve(self.host, self.fields, self.sizes, self.first_row, port, self.spare)


@dataclass(frozen=True, slots=True)
class WriteSlots(Call[None]):
    """Write payload into reserved slots; ``block`` holds the rows of all refs, in their order.

    ``spare``: as of :class:`Reserve`.
    """

    host: HostRef
    refs: tuple[SlotRef, ...]
    block: Block
    port: int | None = None
    spare: bool = False
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True

    def through(self, port: int) -> WriteSlots:
        """Return the same request through this port."""
        return WriteSlots(self.host, self.refs, self.block, port, self.spare)


@dataclass(frozen=True, slots=True)
class Publish(Call[Published]):
    """Make written slots the content of samples, all at once, tags included.

    Which rows live is decided here, once, and the answer is remembered under the op_id: sent again, it gets the same.

    Attributes:
        nbytes: Payload bytes per field, one number per sample: a directory does not see the slots.
        only, lives, skip_stale: As in :class:`~asyncdp.calls.PutSamples`. The slots of rows that are left out are freed
            in this step.

    Raises, from ``execute``:
        StaleSlotError: Rows are stale and ``skip_stale`` is off; made by :func:`stale_rows`, nothing was written.
        DataPlaneBadRequest: Rows live although ``only`` is ``"new"``; made by :func:`living_rows`, nothing was written.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    refs: tuple[SlotRef, ...]
    tags: tuple[Tags, ...] | None
    specs: Mapping[str, FieldSpec]
    nbytes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    only: Only | None = None
    lives: tuple[int | None, ...] | None = None
    skip_stale: bool = False
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Abort(Call[None]):
    """Free what ``op_id`` reserved on a host and has not published, and refuse whatever of it arrives later."""

    host: HostRef
    op_id: str
    port: int | None = None

    def through(self, port: int) -> Abort:
        """Return the same request through this port."""
        return Abort(self.host, self.op_id, port)


@dataclass(frozen=True, slots=True)
class TryClaim(Call[ClaimTry]):
    """Look once for a batch, waiting up to ``wait_s`` seconds for it. The op_id becomes the claim id.

    At least ``min_rows`` rows are claimed, or none; at most ``batch_size``; whole groups where the partition has them.
    With ``explain`` the answer says what those that wait lack; a backend that knows it without effort always may.
    """

    partition_id: str
    task_name: str
    required_fields: tuple[str, ...]
    batch_size: int
    min_rows: int
    wait_s: float = 0.0
    dp_rank: int | None = None
    explain: bool = False
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
class Probe(Call[bool]):
    """Ask whether a slot host answers again, or (``host_id`` None) the directory; takes a second or two at the most.

    True: it answers. False: it does not, and nothing says that it will. A retryable error: it does not yet, and it is
    known to come back, since somebody starts it again or since it was seen alive a moment ago. A backend that does not
    serve this call is waited for by nobody.
    """

    host_id: str | None


@dataclass(frozen=True, slots=True)
class TryPartition(Call[bool]):
    """Look once whether a partition is registered, waiting up to ``wait_s`` seconds for it."""

    partition_id: str
    wait_s: float = 0.0


# --- puts that are bound to lives -----------------------------------------------------------------------------------


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(map(repr, ids[:NAMED])) + more


def stale_rows(partition_id: str, ids: Sequence[str], of: int) -> StaleSlotError:
    """Return the error of a put of ``of`` rows, of which ``ids`` are gone or live again."""
    msg = f"{len(ids)} of {of} rows are gone, or live again, and nothing was written: {_named(ids)}"
    return StaleSlotError(msg, partition_id=partition_id, sample_ids=tuple(ids))


def living_rows(partition_id: str, ids: Sequence[str], of: int) -> DataPlaneBadRequest:
    """Return the error of a put of ``of`` new rows, of which ``ids`` live already."""
    msg = f"{len(ids)} of {of} rows live already, only='new' allows none, and nothing was written: {_named(ids)}"
    return DataPlaneBadRequest(msg, partition_id=partition_id, sample_ids=tuple(ids), field="only")


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
        why = (
            f"{block.n} rows of fields {sorted(block.columns)} came for {sum(counts)} rows of {sorted(refs[0].fields)}"
        )
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
        sizes = [int(per_row[a:b].sum()) for a, b in pairwise(ends)]
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
