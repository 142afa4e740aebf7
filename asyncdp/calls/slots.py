"""The slot calls and their results.

A *slot* is the piece of storage that holds one stored payload; its generation changes at each reuse. Requests are
routed and retried by slot, since slots can fail independently. Three functions compose sample calls of slot calls:
:func:`asyncdp.compose.reads.read_rows`, :func:`asyncdp.compose.writes.write_rows` and
:func:`asyncdp.compose.waits.claim_until`. Each takes a ``send`` function, for which
:class:`~asyncdp.compose.composition.SlotMapping` passes the ``execute`` of the service below it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, TypeVar

from asyncdp.errors import DataPlaneError  # noqa: TC001 - in annotations of dataclasses
from asyncdp.meta import KVBatchMeta, RowHandle, Tags  # noqa: TC001 - as above

from .context import Call, CallContext, Resend
from .samples import Only  # noqa: TC001 - as above

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from asyncdp.rows.block import Block, FieldSpec

__all__ = [
    "AbandonClaim",
    "Abort",
    "ClaimTry",
    "HostRef",
    "Invalidate",
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
]

R = TypeVar("R")


class Send(Protocol):
    """Has a service execute a call."""

    def __call__(self, call: Call[R], ctx: CallContext, /) -> Coroutine[Any, Any, R]:
        """Execute ``call``."""


# --- hosts, slots and results ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostRef:
    """Identifies a slot host.

    ``epoch`` increases whenever the host loses its slots, so a :class:`SlotRef` with another epoch is stale. ``ports``
    are interchangeable endpoints of the same host.
    """

    id: str
    epoch: int
    ports: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SlotRef:
    """Identifies the rows of one request that are stored in one slot.

    Attributes:
        host: Host that serves the slot.
        slot: Number of the slot on that host.
        generation: Use of the slot that is meant; it changes whenever the slot is reused.
        fields: Fields to read from the slot.
        index: Positions of the rows within the slot.
        rows: Positions of the rows within the request; as many as ``index``.
    """

    host: HostRef
    slot: int
    generation: int
    fields: tuple[str, ...]
    index: Sequence[int]
    rows: Sequence[int]


@dataclass(frozen=True, slots=True)
class Located:
    """Result of :class:`Locate`: the slots in which rows are stored.

    Attributes:
        refs: Slots that together cover every requested field of every row that is not missing.
        missing: ``{position in the request: error}`` of the rows that cannot be read.
        handles: Handle of each row, with its incarnation; None for a missing one.
        specs: Specs of the requested fields, as the partition has fixed them.
        read: Requests that together read all ``refs``, and their results, where the transport has read them already.
    """

    refs: tuple[SlotRef, ...]
    missing: Mapping[int, DataPlaneError]
    handles: Sequence[RowHandle | None]
    specs: Mapping[str, FieldSpec]
    read: tuple[tuple[ReadSlots, ReadResult], ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Payload of one or more refs, with what the host announced about it.

    Attributes:
        refs: Indices into the request's refs, in the order of the block's rows.
        block: Rows of these refs.
        nbytes: Payload bytes of each ref.
        schema: ``Block.schema_hash`` of what was stored.
        checksums: CRC-32 of each ref, or None if checksums are off.
    """

    refs: tuple[int, ...]
    block: Block
    nbytes: tuple[int, ...]
    schema: int
    checksums: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class ReadResult:
    """Result of :class:`ReadSlots`.

    Attributes:
        parts: Payloads of the refs that were read.
        errors: ``{index of the ref: error}`` of the refs that could not be read.
        verified: Whether :func:`~asyncdp.calls.answers.verify` has checked the parts.
        through_port: Whether a port answered. False for rows that were read in shared memory: that says nothing of the
            port of the call.
    """

    parts: tuple[Part, ...]
    errors: Mapping[int, DataPlaneError] = field(default_factory=dict)
    verified: bool = False
    through_port: bool = True


@dataclass(frozen=True, slots=True)
class Placement:
    """Result of :class:`Place`: the hosts to which a put may write.

    Attributes:
        shares: ``(host, number of rows)`` in the order of the request; together they cover all rows.
        spare: Hosts to use if one of the others fails, best first.
        specs: Specs of the fields, as far as the partition has fixed them.
        current: Whether the backend was asked for the specs; False where a client answered by what it remembers.
    """

    shares: tuple[tuple[HostRef, int], ...]
    spare: tuple[HostRef, ...]
    specs: Mapping[str, FieldSpec]
    current: bool = True


class Published(NamedTuple):
    """Result of :class:`Publish`: what a put did to each row.

    Attributes:
        handles: Handle of each row that was written, with its life; None for a row that was left out as stale.
        created: For each row, whether the put created it rather than updating one that existed; None if the backend
            cannot tell.
    """

    handles: tuple[RowHandle | None, ...]
    created: tuple[bool, ...] | None = None


@dataclass(frozen=True, slots=True)
class ClaimTry:
    """Result of :class:`TryClaim`: a claimed batch, or, if ``meta`` is empty, how many samples are ready.

    Attributes:
        meta: The claimed rows; empty if too few were ready.
        ready: Number of ready samples.
        oldest_wait_s: Seconds for which the oldest unready sample has been waiting; None if there is none.
        waiting_ids: Ids of unready samples, oldest first; the oldest ones only.
        missing_fields: ``{required field: number of unready samples that lack it}``, without fields that none lacks.
    """

    meta: KVBatchMeta
    ready: int = 0
    oldest_wait_s: float | None = None
    waiting_ids: tuple[str, ...] = ()
    missing_fields: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolved:
    """Result of :class:`Resolve`: the outcome of a mutation.

    ``state`` is ``"done"``, ``"refused"`` (it has not happened and never will), or ``"forgotten"`` (the backend's
    record of it has expired).
    """

    state: str
    answer: bytes | None = field(default=None, compare=False, repr=False)
    """What a mutation that is done was answered, for the transport that encoded it."""


# --- the calls ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Locate(Call[Located]):
    """Find the slots of samples; a row with another incarnation than its handle in ``handles`` is StaleSlotError.

    Attributes:
        read: Whether the transport may read the slots as soon as it knows them, where no port has to take part; from
            the hints of handles it may know them before it has asked whether the rows lie there still. Then the rows
            are in the result, and no ReadSlots is sent.
        borrow: For such a read as in :class:`~asyncdp.calls.GetSamples`.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    handles: tuple[RowHandle | None, ...] | None = None
    read: bool = False
    borrow: bool = False


@dataclass(frozen=True, slots=True)
class ReadSlots(Call[ReadResult]):
    """Read slots of one host through one of its ports.

    ``borrow`` is as in :class:`~asyncdp.calls.GetSamples`.
    """

    host: HostRef
    refs: tuple[SlotRef, ...]
    port: int | None = None
    borrow: bool = False

    def through(self, port: int) -> ReadSlots:
        """Return the same request through this port."""
        return ReadSlots(self.host, self.refs, port, self.borrow)


@dataclass(frozen=True, slots=True)
class Place(Call[Placement]):
    """Choose hosts for a put, and return the specs that the partition has fixed for its fields.

    Nothing depends on the answer being the newest: whether the partition exists, has room, and has other types for the
    fields, is decided by :class:`Publish`.

    Attributes:
        only: As in :class:`~asyncdp.calls.PutSamples`: a put of existing rows needs no capacity for more rows.
        by_specs: Whether the specs decide how the fields are stored. False where all are tensors, which are stored as
            they are; then a transport may answer by specs that it remembers.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    only: Only | None = None
    by_specs: bool = True


@dataclass(frozen=True, slots=True)
class Reserve(Call[tuple[SlotRef, ...]]):
    """Reserve slots on one host for consecutive rows of a put; sent again under the same op_id, it gets the same slots.

    Attributes:
        host: The slot host.
        fields: Fields of the put.
        sizes: Payload bytes of each row.
        first_row: Position in the put of the first row.
        port: Port of the host to send through; None until one is chosen.
        spare: Whether another host can take the rows, so that this one is not waited for if it does not answer.
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
class WriteSlots(Call["bool | None"]):
    """Write payload into reserved slots; ``block`` holds the rows of all refs, in their order.

    ``spare`` is as in :class:`Reserve`. The result is False where the payload was written in shared memory, so that no
    port took part; a transport whose ports always do may return None.
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
    """Make written slots the content of samples, together with the tags, in one atomic step.

    This step decides, once, which rows exist. Its answer is remembered under the op_id, so that the call gets the same
    answer when it is sent again.

    Attributes:
        nbytes: For each field, the payload bytes of each sample; the directory itself does not see the slots.
        only, lives, skip_stale: As in :class:`~asyncdp.calls.PutSamples`. The slots of rows that are left out are freed
            in the same step.

    Raises, from ``execute``:
        StaleSlotError: Rows are stale and ``skip_stale`` is False; made by ``answers.stale_rows``. Nothing was written.
        DataPlaneBadRequest: Rows exist and ``only`` is ``"new"``; made by ``answers.living_rows``. Nothing was written.
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
    """Free the slots that ``op_id`` reserved on a host and has not published; refuse its requests that come later."""

    host: HostRef
    op_id: str
    port: int | None = None

    def through(self, port: int) -> Abort:
        """Return the same request through this port."""
        return Abort(self.host, self.op_id, port)


@dataclass(frozen=True, slots=True)
class Invalidate(Call[None]):
    """Tell a slot host that rows in its slots have been removed or replaced, so that it serves them no more.

    A transport whose hosts need to be told records this call with :func:`asyncdp.compose.invalidations.record` when
    the mutation has happened; SlotMapping sends it. It returns once the host has applied it, or if the host cannot
    serve those slots any more.

    Attributes:
        host: The slot host.
        refs: The rows, by slot and ``index``; without ``fields``, all fields of theirs. Their ``rows`` mean nothing.
        port: Port of the host to send through; None until one is chosen.
    """

    host: HostRef
    refs: tuple[SlotRef, ...]
    port: int | None = None

    def through(self, port: int) -> Invalidate:
        """Return the same request through this port."""
        return Invalidate(self.host, self.refs, port)


@dataclass(frozen=True, slots=True)
class TryClaim(Call[ClaimTry]):
    """Try once to claim a batch, waiting in the backend for up to ``wait_s`` seconds. The op_id becomes the claim id.

    Claims at least ``min_rows`` rows or none, at most ``batch_size``, and whole groups if the partition has groups.
    With ``explain`` the result has ``missing_fields``; a backend that knows them at no cost may always fill them in.
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
    """Release a claim whose answer was not received; if the claim arrives later than this call, it is refused."""

    claim_id: str
    partition_id: str
    task_name: str


@dataclass(frozen=True, slots=True)
class Resolve(Call[Resolved]):
    """Find out the outcome of a mutation; if the mutation arrives later than this call, it is refused.

    A transport whose hosts are told of dead rows records the :class:`Invalidate` calls of a mutation that is done, as
    it does when the mutation itself is answered, and under the mutation's op_id.

    Attributes:
        age_s: Seconds since the mutation's deadline: if the backend keeps records for a shorter time, the outcome is
            ``"forgotten"``.
        of: The mutation, as far as it is known.
    """

    op_id: str
    partition_id: str
    age_s: float = 0.0
    of: Call[Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Probe(Call[bool]):
    """Ask whether a slot host, or (``host_id`` None) the directory, answers again; takes two seconds at most.

    Returns True if it answers, and False if it does not and is not known to come back. Raises a retryable error if it
    does not answer yet but is expected to: a supervisor restarts it, or it was alive a moment ago. No call waits for
    hosts of a backend that does not serve Probe.
    """

    host_id: str | None


@dataclass(frozen=True, slots=True)
class TryPartition(Call[bool]):
    """Check once whether a partition is registered, waiting in the backend for up to ``wait_s`` seconds."""

    partition_id: str
    wait_s: float = 0.0
