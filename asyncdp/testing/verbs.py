"""The table of verbs: how a test calls each verb of a client, and what is known about it.

The contract, the cancellation sweep, fault plans and chaos tests take the verbs from here, so that a new verb is added
in one place::

    await VERBS["get_samples"](client, timeout_s=5.0, partition="train", read=["s0", "s1"])
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from asyncdp.calls import Call, ClaimMeta, GetSamples, PutSamples, WaitPartition
from asyncdp.calls.slots import Publish, ReadSlots, TryClaim, TryPartition
from asyncdp.meta import KVBatchMeta, RowHandle

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["VERBS", "Arguments", "Verb"]


@dataclass(frozen=True)
class Arguments:
    """What the calls of the table are about; a test replaces what differs in its plane.

    Attributes:
        partition: Id of the partition that all verbs but ``drop_partition`` use.
        task: Consumer task.
        field: Field that is put, read, and required by claims.
        new_field: Field that ``register_partition`` declares.
        read: Ids of the samples to read.
        put: Ids of the samples to put, or a meta to put by.
        values: Values of ``field`` to put, one per sample, or one number for all; None: only ``tags`` are put.
        tags: Tags to put, one mapping per sample.
        remove: Ids of the samples to clear, pop or evict, or a meta of them.
        batch: Meta to read by ``get_data``; None: one of the samples ``read``, without handles.
        claim: Meta of a claim to release; None: one of the samples ``read``, under a claim that does not exist.
        size: Largest number of samples to claim.
        least: Smallest number of samples to claim; None: ``size``.
        blocking: Whether a claim waits.
        owner: Owner whose claims ``release_claims`` releases.
        drop: Id of the partition that ``drop_partition`` drops.
    """

    partition: str = "p"
    task: str = "train"
    field: str = "x"
    new_field: str = "y"
    read: Sequence[str] = ("a",)
    put: Sequence[str] | KVBatchMeta = ("b",)
    values: torch.Tensor | float | None = 0.0
    tags: Sequence[dict[str, Any]] | None = None
    remove: Sequence[str] | KVBatchMeta = ("c",)
    batch: KVBatchMeta | None = None
    claim: KVBatchMeta | None = None
    size: int = 1
    least: int | None = None
    blocking: bool = True
    owner: str = "nobody"
    drop: str = "q"

    def columns(self) -> dict[str, torch.Tensor] | None:
        """Return the fields to put."""
        if self.values is None or isinstance(self.values, torch.Tensor):
            return None if self.values is None else {self.field: self.values}
        return {self.field: torch.full((len(self.put),), self.values)}

    def to_read(self) -> KVBatchMeta:
        """Return the meta to read by."""
        return self.batch or KVBatchMeta(self.partition, sample_ids=list(self.read))

    def to_release(self) -> KVBatchMeta:
        """Return the meta of the claim to release."""
        handles: list[RowHandle | None] = [RowHandle(1, "claim")] * len(self.read)
        return self.claim or KVBatchMeta(self.partition, self.task, list(self.read), handles=handles)


@dataclass(frozen=True)
class Verb:
    """One verb of a client.

    Attributes:
        call: Calls it with arguments of the table and a timeout in seconds.
        mutates: Whether it changes the plane, so that a call without an answer is ambiguous.
        looks_once: Whether a call with ``timeout_s=0`` looks once, instead of raising DataPlaneTimeout.
        decided_by: Types of the request that decides its outcome, where it is made of several requests: on a backend
            with slots, and on one that gets whole verbs.
        needs: Capabilities without which a backend does not serve it.
    """

    call: Callable[[Client, Arguments, float | None], Awaitable[Any]]
    mutates: bool = False
    looks_once: bool = False
    decided_by: tuple[type[Call[Any]], ...] = ()
    needs: tuple[str, ...] = ()

    def __call__(
        self, client: Client, timeout_s: float | None = None, about: Arguments | None = None, **differing: Any
    ) -> Awaitable[Any]:
        """Call the verb of ``client`` with ``about`` (default: ``Arguments()``), of which ``differing`` is replaced."""
        arguments = about or Arguments()
        return self.call(client, replace(arguments, **differing) if differing else arguments, timeout_s)


#: All verbs that make requests, by name.
VERBS: Mapping[str, Verb] = {
    "register_partition": Verb(
        lambda c, a, t: c.register_partition(a.partition, [a.new_field], 1, [a.task], timeout_s=t), mutates=True
    ),
    "claim_meta": Verb(
        lambda c, a, t: c.claim_meta(
            a.partition, a.task, [a.field], a.size, min_batch_size=a.least, blocking=a.blocking, timeout_s=t
        ),
        mutates=True,
        looks_once=True,
        decided_by=(TryClaim, ClaimMeta),
    ),
    "get_data": Verb(
        lambda c, a, t: c.get_data(a.to_read(), [a.field], borrow=True, timeout_s=t),
        decided_by=(ReadSlots, GetSamples),
    ),
    "check_consumption_status": Verb(lambda c, a, t: c.check_consumption_status(a.partition, [a.task], timeout_s=t)),
    "put_samples": Verb(
        lambda c, a, t: c.put_samples(a.put, a.partition, a.columns(), a.tags, timeout_s=t),
        mutates=True,
        decided_by=(Publish, PutSamples),
    ),
    "get_samples": Verb(
        lambda c, a, t: c.get_samples(a.read, a.partition, [a.field], timeout_s=t),
        decided_by=(ReadSlots, GetSamples),
    ),
    "clear_samples": Verb(lambda c, a, t: c.clear_samples(a.remove, a.partition, timeout_s=t), mutates=True),
    "ping": Verb(lambda c, _a, t: c.ping() if t is None else c.ping(t)),
    "list_metadata": Verb(lambda c, a, t: c.list_metadata(a.partition, timeout_s=t)),
    "depth": Verb(lambda c, a, t: c.depth(a.partition, timeout_s=t)),
    "pop": Verb(lambda c, a, t: c.pop(a.remove, a.partition, timeout_s=t), mutates=True),
    "evict": Verb(lambda c, a, t: c.evict(a.remove, a.partition, timeout_s=t), mutates=True),
    "release_claim": Verb(lambda c, a, t: c.release_claim(a.to_release(), timeout_s=t), mutates=True),
    "list_claims": Verb(lambda c, a, t: c.list_claims(a.partition, a.task, timeout_s=t)),
    "release_claims": Verb(lambda c, a, t: c.release_claims(a.partition, a.owner, timeout_s=t), mutates=True),
    "list_hosts": Verb(lambda c, _a, t: c.list_hosts(timeout_s=t), needs=("host_listing",)),
    "list_partitions": Verb(lambda c, _a, t: c.list_partitions(timeout_s=t)),
    "describe": Verb(lambda c, a, t: c.describe(a.partition, timeout_s=t)),
    "drop_partition": Verb(lambda c, a, t: c.drop_partition(a.drop, timeout_s=t), mutates=True),
    "wait_partition": Verb(
        lambda c, a, t: c.wait_partition(a.partition, timeout_s=t),
        looks_once=True,
        decided_by=(TryPartition, WaitPartition),
    ),
}
