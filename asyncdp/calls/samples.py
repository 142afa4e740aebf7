"""The sample calls, one frozen dataclass per verb, and the context that is passed along with each.

Layers and transports are services; a service executes calls with one method::

    async def execute(self, call: Call[R], ctx: CallContext) -> R

The layer :class:`~asyncdp.compose.composition.SlotMapping` turns sample calls into the slot calls of
:mod:`asyncdp.calls.slots`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, Protocol, TypeVar

import anyio

from asyncdp.errors import DataPlaneClosed
from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, HostStatus, KVBatchMeta, PartitionInfo, RowHandle, Tags

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
    "ListHosts",
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

#: Which rows a put may write: only rows that exist already, or only new ones.
Only = Literal["existing", "new"]


class Resend(Enum):
    """When the same call may be sent again after an attempt that may have reached the backend."""

    ALWAYS = "always"  # the call is idempotent
    DEDUP = "dedup"  # if the backend deduplicates by op_id; else only while no other mutation touched the same ids
    CLAIM = "claim"  # if the backend deduplicates claims by claim id
    NEVER = "never"  # it is composed of other calls, which are sent again on their own


class Call(Generic[R_co]):
    """A request to a service; executing it returns an ``R_co``."""

    __slots__ = ()
    resend: ClassVar[Resend] = Resend.ALWAYS
    #: Whether an attempt that was not answered may have changed something.
    mutates: ClassVar[bool] = False


# --- context --------------------------------------------------------------------------------------------------------


class Clock(Protocol):
    """The source of time of the layers."""

    def now(self) -> float:
        """Return monotonic seconds, on the clock that cancel scopes use for deadlines."""

    def time(self) -> float:
        """Return the Unix time in seconds."""

    async def sleep(self, seconds: float) -> None:
        """Sleep for that many seconds."""


class Sink(Protocol):
    """Receives the events of layers."""

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Take one event, such as ``("retry", {"reason": ..., "host": ..., "port": ...})``; must not raise."""


class Budget(Protocol):
    """Limits how many of the requests that are sent may be retries."""

    def deposit(self, now: float) -> None:
        """Count one user call."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Take a token for each of that many retries and return True, or take none and return False."""


class Life:
    """The waits of a client's calls, which closing the client cancels."""

    __slots__ = ("closed", "scopes")

    def __init__(self) -> None:
        """Begin open, without waits."""
        self.closed = False
        self.scopes: set[anyio.CancelScope] = set()

    def end(self) -> None:
        """Cancel every wait; the calls that were waiting raise DataPlaneClosed."""
        self.closed = True
        for scope in list(self.scopes):
            scope.cancel()


@dataclass(slots=True)
class Env:
    """State shared by all layers of one stack; made by ``stack()``.

    Attributes:
        clock: The only source of time.
        rng: The only source of randomness.
        sink: Receives events; the counters of the stack.
        budget: The retry budget.
        codec: The transport's encoding of non-tensor values.
        pending_outcomes: Mutations whose outcome is not known, since they were cancelled or not answered.
        life: The waits that close() cancels.
        session: Prefix of op_ids, unique per client.
        claim_poll_s: Seconds between two polls of a blocking claim, if the backend cannot long-poll.
        long_poll_s: Seconds that one poll may wait in the backend.
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
        """Return a new op_id, unique over all clients."""
        self._count += 1
        return f"{self.session}-{self._count}"


@dataclass(frozen=True, slots=True)
class CallContext:
    """Context of one user call that is not part of the request.

    Attributes:
        env: State shared by the layers of the stack.
        op_id: Identifies this user call to the backend, so that a mutation sent twice under one op_id happens once.
        deadline: When the call has to end, in seconds on ``env.clock.now()``.
        verb: The user's verb, such as ``"get_data"``.
        began: When the user called the verb, in seconds on ``env.clock.now()``.
        attempt: Number of the attempt, from 1; counted by SlotRetry.
        tried: (host id, port) pairs through which the previous attempt failed; another port is preferred.
        looks_once: Whether the user called a waiting verb with ``timeout_s=0``: it polls once, within the time of one
            attempt.
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
        """Return the seconds until the deadline; negative once it has passed."""
        return self.deadline - self.env.clock.now()

    def for_attempt(self, attempt: int, tried: tuple[tuple[str, int], ...] = ()) -> CallContext:
        """Return this context with another attempt number and other tried ports."""
        return replace(self, attempt=attempt, tried=tried)

    def emit(self, name: str, **labels: Any) -> None:
        """Send an event to the sink."""
        self.env.sink.emit(name, labels)

    async def pause(self, seconds: float) -> None:
        """Sleep for ``seconds``, or until the deadline or the close of the client, whichever comes first.

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
    """Mark a method ``async def (self, call, ctx)`` of a service as the one that serves calls of these classes."""

    def mark(method: Handler) -> Handler:
        method.__handles__ = kinds  # type: ignore[attr-defined]
        return method

    return mark


# --- A. task-mediated -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RegisterPartition(Call[None]):
    """Declare a partition, or add to its declaration.

    ``anew``: if the partition has no rows, the types of its fields, their vocabularies and its group size are those of
    this declaration; what was declared or written before does not bind them.
    """

    partition_id: str
    fields: tuple[str, ...]
    num_samples: int
    consumer_tasks: tuple[str, ...]
    grpo_group_size: int | None = None
    enums: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    anew: bool = False
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ClaimMeta(Call[KVBatchMeta]):
    """Claim ready samples; if ``blocking``, wait for them."""

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
    """Read fields of samples; ``handles`` (from a meta) bind each row to one incarnation.

    ``execute`` raises PartialReadError even if no row could be read; the verbs then raise one of its errors instead.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    handles: tuple[RowHandle | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class CheckConsumptionStatus(Call[bool]):
    """Return whether every sample in the partition is claimed by every named task."""

    partition_id: str
    task_names: tuple[str, ...]


# --- B. by key ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutSamples(Call[KVBatchMeta]):
    """Write fields and tags of samples, all or nothing.

    Attributes:
        only: ``"existing"``: a row that does not exist is stale. ``"new"``: a row that exists is DataPlaneBadRequest.
            None: rows that exist are updated, the others created.
        lives: With ``only="existing"``, the incarnation that each row must have, or None if any will do; a row with
            another one is stale.
        skip_stale: If True, stale rows are left out of the put and of the returned meta. If False, one stale row makes
            the whole put StaleSlotError.
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
    """Remove samples, or (``sample_ids`` None) all that ``owner`` put; return how many existed.

    Attributes:
        sample_ids: Ids of the samples, or None.
        partition_id: The partition.
        owner: Name of the client whose samples are removed if ``sample_ids`` is None.
        claims: For each id, claim ids of which one must still be live, or None if the caller has no claim on it.
        lives: For each id, the incarnation to remove, or None for any; one with another counts as removed already.
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
    """Remove samples that were trained on, as ClearSamples does; counted as a verb of its own."""


@dataclass(frozen=True, slots=True)
class EvictSamples(ClearSamples):
    """Remove samples that are too old or lost, as ClearSamples does; counted as a verb of its own."""


# --- C. recovery ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Ping(Call[None]):
    """Send one request through the request path of the plane, to see whether it answers."""


@dataclass(frozen=True, slots=True)
class ListMetadata(Call[list[DataPlaneGroupMeta]]):
    """List the groups of a partition, oldest first."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class Depth(Call[int]):
    """Return the number of groups of a partition that are committed and complete."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class ReleaseClaim(Call[None]):
    """Release claims, so that the samples can be claimed again; ``claim_ids`` has one claim id per sample."""

    partition_id: str
    task_name: str
    sample_ids: tuple[str, ...]
    claim_ids: tuple[str | None, ...]
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ListClaims(Call[list[ClaimInfo]]):
    """List the live claims of a task: those neither released nor expired."""

    partition_id: str
    task_name: str


@dataclass(frozen=True, slots=True)
class ReleaseClaims(Call[None]):
    """Release all claims of ``owner`` in a partition, so that the samples can be claimed again."""

    partition_id: str
    owner: str
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class ListPartitions(Call[list[PartitionInfo]]):
    """List all partitions."""


@dataclass(frozen=True, slots=True)
class ListHosts(Call[list[HostStatus]]):
    """List the slot hosts, or storage units, of the plane."""


@dataclass(frozen=True, slots=True)
class DescribePartition(Call[PartitionInfo]):
    """Return what one partition declares and how full it is."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class DropPartition(Call[None]):
    """Remove a partition with all its samples and claims."""

    partition_id: str
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class WaitPartition(Call[None]):
    """Wait until the partition is registered."""

    partition_id: str
    resend: ClassVar[Resend] = Resend.NEVER


def ids_of(call: Call[Any]) -> Sequence[str] | None:
    """Return the ids that a call names, or None if it names none or means all."""
    return getattr(call, "sample_ids", None)
