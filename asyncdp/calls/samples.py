"""The sample calls, one frozen dataclass per verb.

The layer :class:`~asyncdp.compose.composition.SlotMapping` turns some of them into the slot calls of
:mod:`asyncdp.calls.slots`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, HostStatus, KVBatchMeta, PartitionInfo, RowHandle, Tags

from .context import Call, Resend

if TYPE_CHECKING:
    from tensordict import TensorDict

__all__ = [
    "CheckConsumptionStatus",
    "ClaimMeta",
    "ClearSamples",
    "Depth",
    "DescribePartition",
    "DropPartition",
    "EvictSamples",
    "GetSamples",
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
    "WaitPartition",
]

#: Which rows a put may write: only rows that exist already, or only new ones.
Only = Literal["existing", "new"]


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

    With ``borrow`` the transport may return tensors on the memory in which the rows are stored, if that memory is not
    reused before they are gone, and what is written to them stays with the caller. A copy always will do.

    ``execute`` raises PartialReadError even if no row could be read; the verbs then raise one of its errors instead.
    """

    sample_ids: tuple[str, ...]
    partition_id: str
    fields: tuple[str, ...]
    handles: tuple[RowHandle | None, ...] | None = None
    borrow: bool = False


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
