"""The verbs of the table in a form that can be swept, for a partition with four unclaimed samples."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from asyncdp.calls.slots import Resolve
from asyncdp.compose.outcomes import PendingOutcome
from asyncdp.errors import DataPlaneNotReady, DataPlaneTimeout, DataPlaneUnavailable, SampleNotFound

from ..verbs import VERBS as VERBS_TO_CALL
from ..verbs import Arguments

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.meta import KVBatchMeta

__all__ = ["IDS", "VERBS", "SweptVerb"]

IDS = ("s0", "s1", "s2", "s3")
TASK = "t"
#: Timeout in seconds of waits that never succeed; long enough to be cancelled during the wait.
WAIT_S = 0.3

Prepare = Callable[["Client", str], Awaitable[Any]]
Check = Callable[["Client", str, bool], Awaitable[None]]


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
    prepare: Prepare | None = None
    check: Check | None = None
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


def _by(client: Client, meta: KVBatchMeta) -> KVBatchMeta | list[str]:
    """Return the meta of rows, or their ids if the backend cannot bind to lives."""
    return meta if client.get_capabilities().bound_mutations else meta.sample_ids


async def _claimed_rows(client: Client, partition: str) -> KVBatchMeta | list[str]:
    return _by(client, await _claim(client, partition))


async def _listed(client: Client, partition: str) -> KVBatchMeta | list[str]:
    """Return the first two samples, bound to the lives of a listing."""
    groups = [group for group in await client.list_metadata(partition) if group.keys[0] in IDS[:2]]
    return _by(client, groups[0].meta().concat(groups[1].meta()))


async def _unless_late(call: Awaitable[Any]) -> None:
    """Await a call that times out if it is not cancelled; accept any error of its last look."""
    try:
        await call
    except (DataPlaneTimeout, DataPlaneNotReady, DataPlaneUnavailable):
        return


async def _pending(client: Client, partition: str) -> None:
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


def whole_or_absent(new: Mapping[str, float]) -> Check:
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


#: What the swept calls are about.
ABOUT = Arguments(
    task=TASK,
    new_field="z",
    read=IDS,
    put=("n0", "n1"),
    values=torch.tensor([70.0, 71.0]),
    tags=[{"v": 1}] * 2,
    remove=IDS[:2],
    size=2,
)


def _of(
    verb: str,
    check: Check,
    prepare: Prepare | None = None,
    given: str = "",
    wait_s: float | None = None,
    missing: str = "",
    **differing: Any,
) -> SweptVerb:
    """Return a verb of the table to sweep.

    Args:
        verb: Its name.
        check: See :class:`SweptVerb`.
        prepare: See :class:`SweptVerb`.
        given: Name of the argument of the call that is what ``prepare`` returned.
        wait_s: Timeout in seconds of a call that waits in vain; None: the call succeeds at once.
        missing: Suffix of the name of the partition, for a partition that does not exist.
        **differing: Arguments that differ from ``ABOUT``.
    """

    def act(client: Client, partition: str, prepared: Any) -> Awaitable[Any]:
        name = partition + missing
        more = {"partition": name, "drop": name, "owner": client.owner, **differing}
        if given:
            more[given] = prepared
        call = VERBS_TO_CALL[verb](client, wait_s, ABOUT, **more)
        return call if wait_s is None else _unless_late(call)

    return SweptVerb(act, prepare, check)


_CHECKS: Mapping[str, Check] = {
    "claim_meta": claimed_once,
    "put_samples": whole_or_absent({**OLD, "n0": 70.0, "n1": 71.0}),
    "clear_samples": absent,
    "evict": absent,
    "drop_partition": gone_or_whole,
}
_again = whole_or_absent({**OLD, "s0": 70.0, "s1": 71.0})

#: {name: verb}; some verbs have several variants.
VERBS: Mapping[str, SweptVerb] = {
    **{verb: _of(verb, _CHECKS.get(verb, unharmed)) for verb in VERBS_TO_CALL},
    "claim_meta, waiting": _of("claim_meta", claimed_once, wait_s=WAIT_S, size=5),
    "put_samples, again": _of("put_samples", _again, put=IDS[:2]),
    "put_samples, by meta": _of("put_samples", _again, _claimed_rows, "put"),
    "pop": _of("pop", absent, _claim, "remove"),
    "evict, by meta": _of("evict", absent, _listed, "remove"),
    "release_claim": _of("release_claim", some_claims, _claim, "claim"),
    "release_claims": _of("release_claims", some_claims, _claim),
    "wait_partition, waiting": _of("wait_partition", unharmed, wait_s=WAIT_S, missing="-never"),
    "batches": SweptVerb(lambda c, p, _: _batches(c, p, 0), check=handed_over, shields=True),
    "batches, ahead": SweptVerb(lambda c, p, _: _batches(c, p, 2), check=handed_over, shields=True),
    "close": SweptVerb(lambda c, _p, _: c.close(), prepare=_pending, check=unharmed, ends=True),
}
