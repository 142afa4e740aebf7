"""All verbs in a form that can be swept, for a partition with four unclaimed samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from asyncdp.calls.slots import Resolve
from asyncdp.compose.outcomes import PendingOutcome
from asyncdp.errors import DataPlaneNotReady, DataPlaneTimeout, DataPlaneUnavailable, SampleNotFound
from asyncdp.meta import KVBatchMeta

if TYPE_CHECKING:
    from asyncdp.client import Client

__all__ = ["IDS", "VERBS", "SweptVerb"]

IDS = ("s0", "s1", "s2", "s3")
TASK = "t"
#: Timeout in seconds of waits that never succeed; long enough to be cancelled during the wait.
WAIT_S = 0.3


@dataclass(frozen=True)
class SweptVerb:
    """A verb to sweep.

    Attributes:
        act: The call to cancel: ``act(client, partition)``. An exception without a cancel is a failure.
        prepare: Called before ``act`` with the same client; its result is the third argument of ``act``.
        check: Called after the swept client was closed: ``check(observer, partition, cancelled)`` raises
            AssertionError if the plane is in an inconsistent state.
        ends: Whether the verb closes the client.
        shields: Whether the end of the verb is shielded from cancels, so that it may complete although cancelled.
    """

    act: Callable[[Client, str, Any], Awaitable[Any]]
    prepare: Callable[[Client, str], Awaitable[Any]] | None = None
    check: Callable[[Client, str, bool], Awaitable[None]] | None = None
    ends: bool = False
    shields: bool = False


async def _values(observer: Client, partition: str) -> dict[str, float]:
    """Return the value of ``x`` of each present sample."""
    there = sorted(key for group in await observer.list_metadata(partition) for key in group.keys)
    if not there:
        return {}
    got = await observer.get_samples(there, partition, ["x"])
    return dict(zip(there, got["x"].tolist(), strict=True))


OLD = {name: float(i) for i, name in enumerate(IDS)}


async def _claim(client: Client, partition: str) -> KVBatchMeta:
    return await client.claim_meta(partition, TASK, ["x"], 2)


async def _unless_late(call: Awaitable[Any]) -> None:
    """Await a call that times out if it is not cancelled; accept any error of its last look."""
    try:
        await call
    except (DataPlaneTimeout, DataPlaneNotReady, DataPlaneUnavailable):
        return


async def _owing(client: Client, partition: str) -> None:
    """Leave a pending outcome in the client, as after a cancel, so that its close has to reconcile it."""
    client.env.pending_outcomes.record(
        PendingOutcome(Resolve(client.env.next_op_id(), partition), "", partition_id=partition)
    )


async def _batches(client: Client, partition: str, prefetch: int) -> None:
    async with client.batches(partition, TASK, ["x"], 2, prefetch=prefetch, timeout_s=5) as batches:
        async for meta, data in batches:
            assert data.batch_size[0] == meta.size  # noqa: S101 - what a sweep checks
            break


# --- checks after the run


async def unharmed(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001 - one protocol
    """Check that nothing has changed."""
    del cancelled
    found = await _values(observer, partition)
    if found != OLD:
        raise AssertionError(f"the samples were {OLD} and are {found}")


async def claimed_once(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001
    """Check that no claim is lost: samples of a cancelled claim can be claimed again, each once."""
    await unharmed(observer, partition, cancelled)
    held = [name for claim in await observer.list_claims(partition, TASK) for name in claim.sample_ids]
    if cancelled and held:
        raise AssertionError(f"the claim was cancelled, and {held} are claimed for ever")
    free = list((await observer.claim_meta(partition, TASK, ["x"], 4, blocking=False)).sample_ids)
    if sorted([*held, *free]) != sorted(IDS):
        raise AssertionError(f"of {IDS}, {held} are claimed and {free} can be claimed")


async def some_claims(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001
    """Check after a release that each sample is either claimed or claimable, and that none is missing."""
    await unharmed(observer, partition, cancelled)
    held = [name for claim in await observer.list_claims(partition, TASK) for name in claim.sample_ids]
    free = list((await observer.claim_meta(partition, TASK, ["x"], 4, blocking=False)).sample_ids)
    if sorted([*held, *free]) != sorted(IDS) or (held and not cancelled):
        raise AssertionError(f"of {IDS}, {held} are claimed and {free} can be claimed (cancelled: {cancelled})")


async def handed_over(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001
    """Check that an iterator that was left holds at most the batch that it yielded; the others are released."""
    await unharmed(observer, partition, cancelled)
    held = [name for claim in await observer.list_claims(partition, TASK) for name in claim.sample_ids]
    free = list((await observer.claim_meta(partition, TASK, ["x"], 4, blocking=False)).sample_ids)
    if sorted([*held, *free]) != sorted(IDS) or len(held) not in ((0, 2) if cancelled else (2,)):
        raise AssertionError(f"of {IDS}, {held} are claimed and {free} can be claimed (cancelled: {cancelled})")


def whole_or_absent(new: Mapping[str, float]) -> Callable[[Client, str, bool], Awaitable[None]]:
    """Return a check that the samples are all as before or all as in ``new``; the latter if nothing was cancelled."""

    async def check(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001
        found = await _values(observer, partition)
        if found != new and not (cancelled and found == OLD):
            raise AssertionError(f"the samples were {OLD}, were to be {dict(new)}, and are {found}")

    return check


async def gone_or_whole(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001
    """Check that the partition is either removed or complete."""
    there = any(info.partition_id == partition for info in await observer.list_partitions())
    if there and not cancelled:
        raise AssertionError("the partition was dropped and is there")
    if there:
        await unharmed(observer, partition, cancelled)


async def absent(observer: Client, partition: str, cancelled: bool) -> None:  # noqa: FBT001
    """Check that the removed samples are all gone and unreadable or, after a cancel, all unchanged."""
    found = await _values(observer, partition)
    rest = {name: value for name, value in OLD.items() if name not in IDS[:2]}
    if found != rest and not (cancelled and found == OLD):
        raise AssertionError(f"the samples were {OLD}, the first two were to go, and there are {found}")
    for name in IDS[:2]:
        if name not in found:
            try:
                await observer.get_samples([name], partition, ["x"])
            except SampleNotFound:
                continue
            raise AssertionError(f"{name} was removed and can be read")


_PUT_OLD = {**OLD, "s0": 70.0, "s1": 71.0}
_PUT_NEW = {**OLD, "n0": 70.0, "n1": 71.0}


def _put(first: str, second: str) -> Callable[[Client, str, Any], Awaitable[Any]]:
    return lambda c, p, _: c.put_samples([first, second], p, {"x": torch.tensor([70.0, 71.0])}, [{"v": 1}] * 2)


async def _listed(client: Client, partition: str) -> KVBatchMeta:
    """Return a meta of the first two samples, bound to the lives of a listing."""
    groups = [group for group in await client.list_metadata(partition) if group.keys[0] in IDS[:2]]
    return groups[0].meta().concat(groups[1].meta())


def _by(client: Client, meta: KVBatchMeta) -> Any:
    """Return the meta of rows, or their ids if the backend cannot bind to lives."""
    return meta if client.get_capabilities().bound_mutations else meta.sample_ids


def _put_bound(client: Client, partition: str, meta: KVBatchMeta) -> Awaitable[Any]:
    return client.put_samples(_by(client, meta), partition, {"x": torch.tensor([70.0, 71.0])}, [{"v": 1}] * 2)


#: {name: verb}; some verbs have several variants.
VERBS: Mapping[str, SweptVerb] = {
    "register_partition": SweptVerb(lambda c, p, _: c.register_partition(p, ["z"], 8, [TASK]), check=unharmed),
    "claim_meta": SweptVerb(lambda c, p, _: _claim(c, p), check=claimed_once),
    "claim_meta, waiting": SweptVerb(
        lambda c, p, _: _unless_late(c.claim_meta(p, TASK, ["x"], 5, timeout_s=WAIT_S)), check=claimed_once
    ),
    "get_data": SweptVerb(
        lambda c, p, _: c.get_data(KVBatchMeta(p, sample_ids=list(IDS)), ["x"], timeout_s=10), check=unharmed
    ),
    "check_consumption_status": SweptVerb(lambda c, p, _: c.check_consumption_status(p, [TASK]), check=unharmed),
    "put_samples": SweptVerb(_put("n0", "n1"), check=whole_or_absent(_PUT_NEW)),
    "put_samples, again": SweptVerb(_put("s0", "s1"), check=whole_or_absent(_PUT_OLD)),
    "put_samples, by meta": SweptVerb(_put_bound, prepare=_claim, check=whole_or_absent(_PUT_OLD)),
    "get_samples": SweptVerb(lambda c, p, _: c.get_samples(IDS, p, ["x"]), check=unharmed),
    "clear_samples": SweptVerb(lambda c, p, _: c.clear_samples(IDS[:2], p), check=absent),
    "ping": SweptVerb(lambda c, _p, _: c.ping(), check=unharmed),
    "list_metadata": SweptVerb(lambda c, p, _: c.list_metadata(p), check=unharmed),
    "depth": SweptVerb(lambda c, p, _: c.depth(p), check=unharmed),
    "pop": SweptVerb(lambda c, p, meta: c.pop(meta, p), prepare=_claim, check=absent),
    "evict": SweptVerb(lambda c, p, _: c.evict(IDS[:2], p), check=absent),
    "evict, by meta": SweptVerb(lambda c, p, meta: c.evict(_by(c, meta), p), prepare=_listed, check=absent),
    "release_claim": SweptVerb(lambda c, _p, meta: c.release_claim(meta), prepare=_claim, check=some_claims),
    "list_claims": SweptVerb(lambda c, p, _: c.list_claims(p, TASK), check=unharmed),
    "release_claims": SweptVerb(lambda c, p, _: c.release_claims(p, c.owner), prepare=_claim, check=some_claims),
    "list_hosts": SweptVerb(lambda c, _p, _: c.list_hosts(), check=unharmed),
    "list_partitions": SweptVerb(lambda c, _p, _: c.list_partitions(), check=unharmed),
    "describe": SweptVerb(lambda c, p, _: c.describe(p), check=unharmed),
    "drop_partition": SweptVerb(lambda c, p, _: c.drop_partition(p), check=gone_or_whole),
    "wait_partition": SweptVerb(lambda c, p, _: c.wait_partition(p), check=unharmed),
    "wait_partition, waiting": SweptVerb(
        lambda c, p, _: _unless_late(c.wait_partition(f"{p}-never", timeout_s=WAIT_S)), check=unharmed
    ),
    "batches": SweptVerb(lambda c, p, _: _batches(c, p, 0), check=handed_over, shields=True),
    "batches, ahead": SweptVerb(lambda c, p, _: _batches(c, p, 2), check=handed_over, shields=True),
    "close": SweptVerb(lambda c, _p, _: c.close(), prepare=_owing, check=unharmed, ends=True),
}
