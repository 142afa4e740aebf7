"""The protocol that every client fulfils."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, runtime_checkable

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from tensordict import TensorDict

    from asyncdp.batches import Idle, Survivors
    from asyncdp.calls import Only
    from asyncdp.meta import (
        ClaimInfo,
        DataPlaneCapabilities,
        DataPlaneGroupMeta,
        HostStatus,
        KVBatchMeta,
        PartitionInfo,
        Tags,
    )

__all__ = ["VERBS", "DataPlaneClient", "Stale"]

#: How a put treats stale rows: refuse the whole put with StaleSlotError, or leave those rows out.
Stale = Literal["raise", "skip"]


@runtime_checkable
class DataPlaneClient(Protocol):
    """An async client of a data plane.

    Every verb returns or raises within ``timeout_s`` seconds, and raises the error that made it fail rather than a bare
    timeout. None means the client's ``call_timeout_s``, 60 s by default. There are two exceptions: ``batches`` with
    ``idle="wait"`` waits without end, and ``claim_meta`` and ``wait_partition`` with ``timeout_s=0`` ask once, which
    may take as long as one attempt (``attempt_timeout_s``, 10 s by default). Sample ids and the names of fields, tasks
    and partitions are non-empty strings.

    The *life* of a row lasts from the put that creates it to its removal. A row that is put again under the same id
    after a removal begins a new life; a reference to the earlier life is then *stale*.
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
        """Declare the fields and consumer tasks of a partition, or add to an earlier declaration.

        Registering a partition again unites fields, tasks and enums with those declared before and keeps its rows.

        Args:
            partition_id: Name of the partition.
            fields: Names of the fields that its samples will have.
            num_samples: Expected number of samples; a hint, not a limit.
            consumer_tasks: Names of the tasks that will claim samples.
            grpo_group_size: Number of rows per group; a claim then takes whole groups. None: claims ignore groups.
            enums: Vocabulary of each field whose values are words of a fixed list.
            timeout_s: Seconds that the call may take; None: the client's default.
        """

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,  # noqa: FBT001, FBT002 - the customary order of arguments
        timeout_s: float | None = None,
        *,
        min_batch_size: int | None = None,
    ) -> KVBatchMeta:
        """Claim samples that have all ``required_fields``, in the order in which they became ready.

        No task gets a sample twice, unless the claim was released or has expired. The call returns at most
        ``batch_size`` samples, as soon as that many (or ``min_batch_size``) are ready, in whole groups if the partition
        has a group size. Rows tagged ``committed=False`` or ``status="failed"`` are never claimed; a group is complete
        without its failed rows if enough other rows are present.

        Args:
            partition_id: The partition.
            task_name: The task that claims; one of the partition's consumer tasks.
            required_fields: Fields that a sample must have to be ready.
            batch_size: Largest number of samples to claim.
            dp_rank: Data-parallel rank of the caller, or None.
            blocking: Whether to wait until enough samples are ready. If False, returns what is ready, possibly nothing.
            timeout_s: Seconds to wait. None: the client's default; 0: poll once, within the time of one attempt.
            min_batch_size: Smallest number of samples to return; None: ``batch_size``.

        Raises:
            ClaimNotReady: Too few samples were ready in time; nothing was claimed. The error has the missing fields.
            DataPlaneBadRequest: The partition, the task or a field is unknown, or ``batch_size`` is below one group.
        """

    async def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        borrow: bool = False,
        timeout_s: float | None = None,
    ) -> TensorDict:
        """Read fields of the rows of a meta.

        Args:
            meta: The rows, as a claim or a put returned them.
            select_fields: Fields to read; None: ``meta.fields``.
            borrow: Whether tensors may be on the memory in which the rows are stored, so that nothing is copied. They
                stay as they were read, whatever becomes of the rows, and may be written to, which changes nothing
                elsewhere; their memory is not used for other rows until they and all slices of them are gone, or
                :func:`asyncdp.borrowed` ends it. Only UCXX can do so, where the rows of a field lie in one slot on this
                machine; all else is copied.
            timeout_s: Seconds that the call may take; None: the client's default.

        Returns:
            A TensorDict of batch size ``(meta.size,)``, rows in the order of the meta.

        Raises:
            StaleSlotError: No row could be read, since rows were removed, or removed and put anew, since the meta was
                made.
            PartialReadError: Only some rows could be read; the error holds them.
            DataPlaneBadRequest: Neither ``select_fields`` nor the meta names a field.
        """

    async def check_consumption_status(
        self, partition_id: str, task_names: Sequence[str], *, timeout_s: float | None = None
    ) -> bool:
        """Return whether every sample in the partition is claimed by every named task; True if there are no samples."""

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
        """Write fields and tags of samples atomically: other clients see the whole put or nothing of it.

        Plain ids update the rows that exist and create the others. A meta refers to particular lives of its rows: a row
        that was removed since, or removed and put anew, is *stale* and is never written. With ``only="existing"``, or a
        meta without handles, a row is stale if it does not exist.

        Args:
            sample_ids: Ids, or a meta (also one of another project with the same attributes).
            partition_id: The partition.
            fields: One column per field, ``N = len(sample_ids)`` rows each. A tensor or an array of numbers is a dense
                field. A nested tensor, or a list of tensors or arrays, is a ragged field, which is read back as
                ``torch.jagged``. A list of numbers is a dense field of shape ``(N,)``, in the field's dtype if that is
                of their kind, else in torch's default for them. Any other list is a field of objects, as
                ``NonTensorStack(*rows)`` always is. A list that mixes tensors with other values, or bools with other
                numbers, is refused.
            tags: One mapping of small primitives per row; merged by key into the tags that the row has.
            only: ``"existing"``: update rows, create none. ``"new"``: create rows, update none. None: both.
            stale: With stale rows, ``"raise"`` writes nothing and raises; ``"skip"`` writes the other rows.
            timeout_s: Seconds that the call may take; None: the client's default.

        Returns:
            A meta of the rows that were written, with a handle per row and, in ``created``, whether the row is new. A
            put by a meta returns those of its rows that were written, with its task and claims.

        Raises:
            StaleSlotError: Rows are stale; the error's ``sample_ids`` names them. Nothing was written.
            DataPlaneNotReady: The plane is full; nothing was written.
            DataPlaneBadRequest: A value cannot be stored unchanged, or a row exists although ``only`` is ``"new"``; the
                message names it. Nothing was written.
            DataPlaneUnsupported: The backend cannot bind a put to lives (capability ``bound_mutations``).
        """

    async def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        borrow: bool = False,
        timeout_s: float | None = None,
    ) -> TensorDict:
        """Read fields of samples by id.

        Args:
            sample_ids: Ids of the rows.
            partition_id: The partition.
            select_fields: Fields to read.
            borrow: As for ``get_data``.
            timeout_s: Seconds that the call may take; None: the client's default.

        Returns:
            A TensorDict with all rows, in the order of ``sample_ids``, and all fields; never fewer.

        Raises:
            SampleNotFound: No row could be read: the ids do not exist, or the field has not been produced for them.
            PartialReadError: Only some rows could be read; the error holds them.
        """

    async def clear_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta | None,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove samples; samples that do not exist are ignored.

        Args:
            sample_ids: Plain ids remove the rows that exist now. A meta or a group removes only the lives that it
                names: a row that was put anew since stays. None removes all rows that this client's owner put.
            partition_id: The partition.
            timeout_s: Seconds that the call may take; None: the client's default.
        """

    async def ping(self, timeout_s: float = 5.0) -> None:
        """Check that the plane answers: send one request through its request path, within ``timeout_s`` seconds."""

    async def list_metadata(self, partition_id: str, *, timeout_s: float | None = None) -> list[DataPlaneGroupMeta]:
        """List the groups of a partition, oldest first, without tensors; claims and removes nothing."""

    async def depth(self, partition_id: str, *, timeout_s: float | None = None) -> int:
        """Return the number of groups that are committed and complete, claimed or not."""

    async def pop(
        self,
        keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove samples that were trained on.

        Args:
            keys: Plain ids remove the rows that exist now; a meta or a group removes only the lives that it names.
            partition_id: The partition.
            timeout_s: Seconds that the call may take; None: the client's default.

        Raises:
            ClaimLost: This client had claimed the samples and no longer holds the claim.
        """

    async def evict(
        self,
        keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        """Remove samples that are too old to train on, or lost, no matter who claimed them.

        Args:
            keys: Plain ids remove the rows that exist now; a meta or a group removes only the lives that it names: a
                group from ``list_metadata``, or ``group.meta(group.lost_keys)``, spares rows that were put anew since.
            partition_id: The partition.
            timeout_s: Seconds that the call may take; None: the client's default.
        """

    async def release_claim(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """Release the claims that a meta holds, so that its samples can be claimed again."""

    async def list_claims(
        self, partition_id: str, task_name: str, *, timeout_s: float | None = None
    ) -> list[ClaimInfo]:
        """List the live claims of a task: those neither released nor expired."""

    async def release_claims(self, partition_id: str, owner: str, *, timeout_s: float | None = None) -> None:
        """Release all claims of ``owner`` in the partition, so that the samples can be claimed again."""

    async def list_partitions(self, *, timeout_s: float | None = None) -> list[PartitionInfo]:
        """List all partitions of the plane."""

    async def describe(self, partition_id: str, *, timeout_s: float | None = None) -> PartitionInfo:
        """Return what one partition declares and how full it is."""

    async def list_hosts(self, *, timeout_s: float | None = None) -> list[HostStatus]:
        """List the slot hosts (of TransferQueue: the storage units) of the plane by id, also those that do not answer.

        Raises:
            DataPlaneUnsupported: The backend cannot list hosts (capability ``host_listing``).
        """

    async def drop_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """Remove a partition with its samples and claims; one that does not exist is ignored."""

    async def wait_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """Wait until the partition is registered.

        Raises:
            DataPlaneTimeout: Nobody registered it in time.
        """

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return what the backend guarantees beyond the promises common to all backends."""

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""

    def batches(  # noqa: PLR0913 - the arguments of claim_meta, and how to iterate
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        select_fields: Sequence[str] | None = None,
        min_batch_size: int | None = None,
        prefetch: int = 0,
        device: torch.device | str | int | None = None,
        borrow: bool = False,
        survivors: Survivors = "raise",
        idle: Idle = "raise",
        timeout_s: float | None = None,
    ) -> AsyncIterator[tuple[KVBatchMeta, TensorDict]]:
        """Return an iterator over claimed batches: ``(meta, data)``, as ``claim_meta`` and ``get_data`` return.

        Args:
            partition_id: The partition.
            task_name: The task that claims.
            required_fields: Fields that a sample must have to be claimed.
            batch_size: Largest number of samples per batch.
            select_fields: Fields to read; None: ``required_fields``.
            min_batch_size: Smallest number of samples per batch; None: ``batch_size``.
            prefetch: Number of batches to claim and read ahead; above 0, use ``async with`` on the result.
            device: Device to which the data is moved; None: it stays in host memory. One that is not there is
                DataPlaneBadRequest at once.
            borrow: As for ``get_data``, for each batch.
            survivors: If only some rows of a batch can be read, ``"raise"`` raises PartialReadError; ``"drop"`` returns
                the others, without groups (tag ``group_id``) of which a row is missing, and passes over batches of
                which no row exists any more. Claims of rows that are left out and still exist are released.
            idle: If too few samples are ready within ``timeout_s``, ``"raise"`` raises ClaimNotReady and can be
                continued, ``"wait"`` waits again, ``"end"`` ends the iteration.
            timeout_s: Seconds to wait until enough samples are ready; None: the client's default, which a read may take
                in any case.
        """

    async def close(self) -> None:
        """Close the client: waiting calls raise DataPlaneClosed. Closing it again does nothing."""

    async def __aenter__(self) -> Self:
        """Return the client itself."""

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None, /
    ) -> None:
        """Close the client."""


#: Names of the verbs: all public coroutine methods but ``close``, and ``batches``.
VERBS = tuple(
    name
    for name, verb in vars(DataPlaneClient).items()
    if (inspect.iscoroutinefunction(verb) and name != "close" and not name.startswith("_")) or name == "batches"
)
