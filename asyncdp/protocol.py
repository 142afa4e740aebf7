"""The protocol that every client fulfils."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from types import TracebackType

    from tensordict import TensorDict

    from asyncdp.calls import Only
    from asyncdp.meta import ClaimInfo, DataPlaneCapabilities, DataPlaneGroupMeta, KVBatchMeta, PartitionInfo, Tags

__all__ = ["VERBS", "DataPlaneClient", "Stale"]

#: What becomes of a put some of whose rows are stale.
Stale = Literal["raise", "skip"]


@runtime_checkable
class DataPlaneClient(Protocol):
    """An async client of a data plane. Each verb ends within ``timeout_s`` (default 60 s) with the real error.

    Sample ids, fields, tasks and partitions are named by non-empty strings.
    """

    async def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Declare fields and consumer tasks of a partition; again: fields, tasks and enums are united, rows stay.

        ``num_samples`` is a hint, not a limit.
        """

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,  # noqa: FBT001, FBT002 - the order is the field's
        timeout_s: float | None = None,
        *,
        min_batch_size: int | None = None,
    ) -> KVBatchMeta:
        """Claim samples that have all ``required_fields``, first ready first; no task gets a sample twice.

        Returns as soon as ``batch_size`` samples (or ``min_batch_size``) are ready, at most ``batch_size``; whole
        groups where the partition has a group size. ``blocking=False`` returns what is ready, maybe nothing. Rows
        tagged ``committed=False`` or ``status="failed"`` are never given; a group is whole without failed ones where
        enough others are there. ``timeout_s=0`` looks once, within the time of one attempt.

        Raises:
            ClaimNotReady: Too few were ready in time; nothing was claimed. It says which fields are missing.
            DataPlaneBadRequest: Unknown partition, task or field; batch_size below one group.
        """

    async def get_data(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TensorDict:
        """Read ``select_fields``, else ``meta.fields``, of the rows of a meta; batch size ``(meta.size,)``.

        Raises:
            StaleSlotError: A row was cleared, or lives again, since the meta was made.
            PartialReadError: Some rows came; they are in the error.
            DataPlaneBadRequest: Neither names a field.
        """

    async def check_consumption_status(
        self, partition_id: str, task_names: Sequence[str], *, timeout_s: float | None = None
    ) -> bool:
        """Tell whether every sample present is claimed by every named task; True where there is none."""

    async def put_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta,
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Tags] | None = None,
        *,
        only: Only | None = None,
        stale: Stale = "raise",
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write fields, batch size ``(len(sample_ids),)``, and tags; whole or absent. Tags merge by key.

        Plain ids write rows that live and create others. A meta means the rows that it names in the lives that it
        names: rows that were removed since, or removed and put anew, are *stale* and never written. Of a meta without
        handles, as of ``only="existing"``, a row is stale that does not live.

        Args:
            sample_ids: Ids, or a meta (also one of another project with the same attributes).
            partition_id: The partition.
            fields: One column per field, ``len(sample_ids)`` rows each: a tensor or an array; a list of tensors (or
                arrays) is a ragged field, which comes back as ``torch.jagged``, a list of numbers a dense one ``(N,)``
                of torch's dtype for them (or of the field's, where that is of their kind), any other list one of
                objects. A list that mixes them is refused; ``NonTensorStack(*rows)`` is always one of objects.
            tags: One mapping of small primitives per row.
            only: ``"existing"``: write rows that live and create none. ``"new"``: create rows and write none that live.
            stale: What becomes of a put some of whose rows are stale: ``"raise"`` writes nothing, ``"skip"`` writes the
                others.
            timeout_s: Seconds.

        Returns:
            A meta of the rows that were written, with a handle per row, and ``created``: which of them are new. Of a
            put by a meta: the rows of it that were written, with its task and claims.

        Raises:
            StaleSlotError: Rows are stale; ``sample_ids`` names them, nothing was written.
            DataPlaneNotReady: The plane is full; nothing was written.
            DataPlaneBadRequest: Something cannot be kept unchanged, or a row lives already and ``only`` is ``"new"``;
                the message names it, nothing was written.
            DataPlaneUnsupported: The backend cannot bind a put to lives (``bound_mutations``).
        """

    async def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | None = None,
    ) -> TensorDict:
        """Read fields of samples, in the order asked; never fewer rows or columns.

        Raises:
            SampleNotFound: No row came: no such id, or the field is not produced.
            PartialReadError: Some rows came; they are in the error.
        """

    async def clear_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta | None,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove samples; what is not there is no error. None: all that this client's owner put and still lives.

        Plain ids mean whatever lives under them; a meta or a group means the lives that it names, so that a row that
        was put anew since stays.
        """

    async def ping(self, timeout_s: float = 5.0) -> None:
        """Go through the plane's request path and come back."""

    async def list_metadata(self, partition_id: str, *, timeout_s: float | None = None) -> list[DataPlaneGroupMeta]:
        """List the groups of a partition, oldest first, without tensors; consumes nothing."""

    async def depth(self, partition_id: str, *, timeout_s: float | None = None) -> int:
        """Count the groups that are committed and complete, claimed or not."""

    async def pop(
        self,
        keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove trained samples: by plain ids, or by a meta or group in the lives that it names.

        Raises:
            ClaimLost: They were claimed by this client, and the claim is not its own any more.
        """

    async def evict(
        self,
        keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove stale samples, whoever claimed them: by plain ids, or by a meta or group in the lives that it names.

        A group as ``list_metadata`` gave it, or ``group.meta(group.lost_keys)``, spares what was put anew since.
        """

    async def release_claim(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """Make the claimed samples of a meta claimable again."""

    async def list_claims(
        self, partition_id: str, task_name: str, *, timeout_s: float | None = None
    ) -> list[ClaimInfo]:
        """List the claims of a task that live."""

    async def release_claims(self, partition_id: str, owner: str, *, timeout_s: float | None = None) -> None:
        """Make everything that ``owner`` claimed claimable again."""

    async def list_partitions(self, *, timeout_s: float | None = None) -> list[PartitionInfo]:
        """List all partitions."""

    async def describe(self, partition_id: str, *, timeout_s: float | None = None) -> PartitionInfo:
        """Describe one partition."""

    async def drop_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """Remove a partition with its samples; what is not there is no error."""

    async def wait_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """Wait until somebody registered the partition."""

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the backend guarantees beyond the common promises."""

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""

    def batches(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        select_fields: Sequence[str] | None = None,
        min_batch_size: int | None = None,
        prefetch: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[tuple[KVBatchMeta, TensorDict]]:
        """Iterate over claimed batches with their data, until the caller stops."""

    async def close(self) -> None:
        """End the client; idempotent."""

    async def __aenter__(self) -> Self:
        """Return the client itself."""

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the client."""


#: The names of the verbs.
VERBS = tuple(
    name
    for name, verb in vars(DataPlaneClient).items()
    if (inspect.iscoroutinefunction(verb) and name != "close" and not name.startswith("_")) or name == "batches"
)
