"""The seam: one frozen dataclass per verb, and the context that travels with it.

Everything that can serve calls, a layer as well as a transport, has one method::

    async def execute(self, call: Call[R], ctx: CallContext) -> R

The slot calls, into which a layer turns the sample calls, are in :mod:`asyncdp.calls.slots`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import anyio

from asyncdp.errors import DataPlaneClosed
from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, KVBatchMeta, PartitionInfo, RowHandle, Tags

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.compose.outcomes import PendingOutcomes
    from asyncdp.rows.block import ObjectCodec

__all__ = [
    "Budget",
    "Call",
    "CallContext",
    "CheckConsumptionStatus",
    "ClaimMeta",
    "ClearSamples",
    "Clock",
    "Depth",
    "DescribePartition",
    "DropPartition",
    "Env",
    "EvictSamples",
    "GetSamples",
    "Life",
    "ListClaims",
    "ListMetadata",
    "ListPartitions",
    "Only",
    "Ping",
    "PopSamples",
    "PutSamples",
    "RegisterPartition",
    "ReleaseClaim",
    "ReleaseClaims",
    "Resend",
    "Sink",
    "WaitPartition",
]

R_co = TypeVar("R_co", covariant=True)

#: Which rows a put may write: those that live already, or those that do not.
Only = Literal["existing", "new"]


class Resend(Enum):
    """When the same call may be sent again after an attempt that may have reached the backend."""

    ALWAYS = "always"  # it changes nothing, or the same thing
    DEDUP = "dedup"  # where the backend remembers op_ids; else only while nothing else touched the same ids
    CLAIM = "claim"  # where the backend remembers claim tokens
    NEVER = "never"  # it is made of other calls, which are sent again on their own


class Call(Generic[R_co]):
    """A verb with its arguments; ``R_co`` is what executing it returns."""

    __slots__ = ()
    resend: ClassVar[Resend] = Resend.ALWAYS
    #: Whether an attempt whose answer is missing may have changed something.
    mutates: ClassVar[bool] = False


# --- context --------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """Time as the layers see it."""

    def now(self) -> float:
        """Seconds, monotonic, on the base that cancel scopes use for deadlines."""

    def time(self) -> float:
        """Unix seconds."""

    async def sleep(self, seconds: float) -> None:
        """Sleep."""


class Sink(Protocol):
    """Where layers send what happened."""

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Take one event, such as ``("retry", {"reason": ..., "host": ..., "port": ...})``; must not raise."""


class Budget(Protocol):
    """How many wire requests may be retries."""

    def deposit(self, now: float) -> None:
        """Count one user call."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Take tokens for as many retries, or none and return False."""


class Life:
    """Which waits a closing client has to end."""

    __slots__ = ("closed", "scopes")

    def __init__(self) -> None:
        """Begin open."""
        self.closed = False
        self.scopes: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """Cancel every wait; those who waited raise DataPlaneClosed."""
        self.closed = True
        for scope in list(self.scopes):
            scope.cancel()


@dataclass(slots=True)
class Env:
    """What all layers of one stack share; made by ``stack()``.

    Attributes:
        clock, rng: The only sources of time and chance.
        sink: Where events go: the counters of the stack.
        budget: The retry budget.
        codec: How the transport encodes non-tensor values.
        pending_outcomes: What a cancel or a lost reply left to be settled.
        life: Which waits close() has to end.
        session: Prefix of op_ids, unique per client.
        claim_poll_s: Pause between two looks of a blocking claim where the backend cannot wait itself, in seconds.
        long_poll_s: How long one look may wait in the backend, in seconds.
    """

    clock: Clock
    rng: random.Random
    sink: Sink
    budget: Budget
    codec: ObjectCodec
    pending_outcomes: PendingOutcomes
    session: str
    claim_poll_s: float = 0.05
    long_poll_s: float = 1.0
    life: Life = field(default_factory=Life)
    _count: int = 0

    def next_op_id(self) -> str:
        """Return an id that no other mutation of any client has."""
        self._count += 1
        return f"{self.session}-{self._count}"


@dataclass(frozen=True, slots=True)
class CallContext:
    """What belongs to one user call and is not part of the request.

    Attributes:
        env: Shared by the stack.
        op_id: Names this user call to the backend: a mutation sent twice under one op_id happens once.
        deadline: Absolute, by ``env.clock.now()``.
        verb: The user's verb, such as ``"get_data"``.
        began: When the user called, by ``env.clock.now()``.
        attempt: 1 for the first wire request, counted by SlotRetry.
        tried: (host id, port) pairs that failed the attempt before: another port is better.
        looks_once: The user gave no time to a verb that waits: it looks once, within the time of one attempt.
    """

    env: Env
    op_id: str
    deadline: float
    verb: str
    began: float = 0.0
    attempt: int = 1
    tried: tuple[tuple[str, int], ...] = ()
    looks_once: bool = False

    def remaining(self) -> float:
        """Seconds until the deadline; negative once it passed."""
        return self.deadline - self.env.clock.now()

    def for_attempt(self, attempt: int, tried: tuple[tuple[str, int], ...] = ()) -> CallContext:
        """Return the context of another attempt."""
        return replace(self, attempt=attempt, tried=tried)

    def emit(self, name: str, **labels: Any) -> None:
        """Tell the sink what happened."""
        self.env.sink.emit(name, labels)

    async def pause(self, seconds: float) -> None:
        """Sleep, but not beyond the deadline, and not through a close of the client.

        Raises:
            DataPlaneClosed: The client was closed meanwhile.
        """
        life = self.env.life
        if life.closed:
            raise DataPlaneClosed("the client is closed", op=self.verb)
        scope = anyio.CancelScope()
        life.scopes.add(scope)
        try:
            with scope:
                await self.env.clock.sleep(max(0.0, min(seconds, self.remaining())))
        finally:
            life.scopes.discard(scope)
        if scope.cancelled_caught:
            raise DataPlaneClosed("the client was closed while this call waited", op=self.verb)


C_contra = TypeVar("C_contra", contravariant=True)
Handler = TypeVar("Handler", bound=Callable[..., Any])


def handles(*kinds: type[Call[Any]]) -> Callable[[Handler], Handler]:
    """Mark a method ``async def (self, call, ctx)`` of a layer or transport as the one that serves these calls."""

    def mark(method: Handler) -> Handler:
        method.__handles__ = kinds  # type: ignore[attr-defined]
        return method

    return mark


# --- A. task-mediated -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterPartition(Call[None]):
    """Declare a partition, or widen its declaration."""

    partition_id: str
    fields: tuple[str, ...]
    num_samples: int
    consumer_tasks: tuple[str, ...]
    grpo_group_size: int | None = None
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ClaimMeta(Call[KVBatchMeta]):
    """Claim ready samples, waiting for them where ``blocking``."""

    partition_id: str
    task_name: str
    required_fields: tuple[str, ...]
    batch_size: int
    min_batch_size: int | None = None
    dp_rank: int | None = None
    blocking: bool = True
    resend: ClassVar[Resend] = Resend.NEVER
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class GetSamples(Call["TensorDict"]):
    """Read fields of samples; ``handles`` (from a meta) say which incarnation is meant.

    Raises, from ``execute``, PartialReadError also where no row came at all; the verbs then raise the error itself.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    handles: tuple[RowHandle | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckConsumptionStatus(Call[bool]):
    """Ask whether every sample present is claimed by every named task."""

    partition_id: str
    task_names: tuple[str, ...]


# --- B. by key ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutSamples(Call[KVBatchMeta]):
    """Write fields and tags of samples; whole or absent.

    Attributes:
        only: ``"existing"``: a row that does not live is stale. ``"new"``: a row that lives is DataPlaneBadRequest.
            None: rows that live are written, others are created.
        lives: With ``only="existing"``: the incarnation that each row must have, None where any will do; a row of
            another one is stale.
        skip_stale: What becomes of stale rows: they are left out, and the meta returned does not hold them; else the
            whole put is StaleSlotError.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: TensorDict | None = None
    tags: tuple[Tags, ...] | None = None
    only: Only | None = None
    lives: tuple[int | None, ...] | None = None
    skip_stale: bool = False
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ClearSamples(Call[int]):
    """Remove samples, or (``sample_ids`` None) all that ``owner`` put and that still live. Returns how many there were.

    Attributes:
        claims: Per id, the claim ids of which one must still be live, or None where the holder claimed nothing.
        lives: Per id, the incarnation that is meant, or None where any is; another one counts as gone already.
    """

    sample_ids: tuple[str, ...] | None
    partition_id: str
    owner: str = ""
    claims: tuple[tuple[str, ...] | None, ...] | None = None
    lives: tuple[int | None, ...] | None = None
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class PopSamples(ClearSamples):
    """Remove trained samples; the removal is ClearSamples', the count is its own."""


@dataclass(frozen=True, slots=True)
class EvictSamples(ClearSamples):
    """Remove stale samples; the removal is ClearSamples', the count is its own."""


# --- C. recovery ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ping(Call[None]):
    """Go through the request path of the plane and come back."""


@dataclass(frozen=True, slots=True)
class ListMetadata(Call[list[DataPlaneGroupMeta]]):
    """List the groups of a partition, oldest first."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class Depth(Call[int]):
    """Count the groups of a partition that are committed and complete."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class ReleaseClaim(Call[None]):
    """Make claimed samples claimable again; ``claim_ids`` has one per id."""

    partition_id: str
    task_name: str
    sample_ids: tuple[str, ...]
    claim_ids: tuple[str | None, ...]
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ListClaims(Call[list[ClaimInfo]]):
    """List the claims of a task that live."""

    partition_id: str
    task_name: str


@dataclass(frozen=True, slots=True)
class ReleaseClaims(Call[None]):
    """Make everything that ``owner`` claimed in a partition claimable again."""

    partition_id: str
    owner: str
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ListPartitions(Call[list[PartitionInfo]]):
    """List all partitions."""


@dataclass(frozen=True, slots=True)
class DescribePartition(Call[PartitionInfo]):
    """Describe one partition."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class DropPartition(Call[None]):
    """Remove a partition with all its samples and claims."""

    partition_id: str
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WaitPartition(Call[None]):
    """Wait until somebody registered the partition."""

    partition_id: str
    resend: ClassVar[Resend] = Resend.NEVER


def ids_of(call: Call[Any]) -> Sequence[str] | None:
    """Ids that a call names, or None where it names none or means all."""
    return getattr(call, "sample_ids", None)
