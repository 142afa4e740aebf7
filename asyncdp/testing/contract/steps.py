"""Common steps of the tests: put a few samples, claim ready ones, list the holders of claims."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import pytest
import torch

from asyncdp import ClaimNotReady, DataPlaneTimeout

from .rig import declare

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp import KVBatchMeta
    from asyncdp.client import Client

    from .rig import Rig

E = TypeVar("E", bound=Exception)

__all__ = [
    "IDS",
    "SHORT_S",
    "THREE",
    "TICK_S",
    "back",
    "claim",
    "claimed_by",
    "fails_with",
    "fill",
    "not_ready",
    "put",
    "put_floats",
    "tags_of",
]

IDS = [f"s{i}" for i in range(8)]
THREE = ["a", "b", "c"]
#: Short timeout in seconds; long enough that the last look of a claim is answered in time even on a busy machine.
SHORT_S = 0.3
#: Maximum time in seconds for something immediate on a busy machine; anything that hangs takes far longer.
TICK_S = 25.0


async def fill(rig: Rig, ids: list[str] = IDS, **more: Any) -> None:
    """Put ``x``, the number of each row, one put per row so that each can fail alone; ``more`` fields are declared."""
    await declare(rig.client, "x", *more)
    for i, name in enumerate(ids):
        await rig.client.put_samples([name], "p", {"x": torch.tensor([i])})


async def put_floats(rig: Rig, n: int = 8) -> None:
    """Put ``x``, the number of each row as a float, in one put per row; the ids are ``a``, ``s1``, ``s2``, ..."""
    await declare(rig.client)
    for i in range(n):
        await rig.client.put_samples(["a" if not i else f"s{i}"], "p", {"x": torch.tensor([float(i)])})


async def back(rig: Rig, leaf: Any, ids: list[str] = THREE) -> Any:
    """Put one field and return what a get returns."""
    await declare(rig.client)
    await rig.client.put_samples(ids, "p", {"x": leaf})
    return (await rig.mate.get_samples(ids, "p", ["x"]))["x"]


async def tags_of(rig: Rig, sample_id: str) -> dict[str, Any]:
    """Read the tags of one sample."""
    for group in await rig.client.list_metadata("p"):
        if sample_id in group.keys:
            return dict(group.tags[group.keys.index(sample_id)])
    raise AssertionError(sample_id)


async def put(client: Client, *ids: str, **tags: Any) -> KVBatchMeta:
    """Put ``x`` for these ids."""
    return await client.put_samples(ids, "p", {"x": torch.zeros(len(ids))}, [dict(tags) for _ in ids])


async def claim(client: Client, most: int = 99, task: str = "train", *fields: str) -> list[str]:
    """Claim the ready samples, at most ``most``, and return their ids."""
    return (await client.claim_meta("p", task, fields or ("x",), most, blocking=False)).sample_ids


async def not_ready(claim: Callable[[], Awaitable[Any]]) -> ClaimNotReady:
    """Return the ClaimNotReady of a claim; repeat the claim if its last look got no answer on a busy machine."""
    for _ in range(20):
        try:
            with pytest.raises(ClaimNotReady) as caught:
                await claim()
        except DataPlaneTimeout:
            continue
        return caught.value
    pytest.fail("no look was answered in time")


async def fails_with(kind: type[E], call: Callable[[float], Awaitable[Any]], timeout_s: float = SHORT_S) -> E:
    """Return the error of ``call(timeout_s)``; repeat it with more time if a busy machine gave no answer in time."""
    while True:
        with pytest.raises((kind, DataPlaneTimeout)) as caught:
            await call(timeout_s)
        if isinstance(caught.value, kind):
            return caught.value
        timeout_s *= 4
        assert timeout_s < 100, "no answer in time"


async def claimed_by(client: Client, task: str = "train") -> dict[str, str]:
    """Return {sample: owner} of all active claims."""
    return {name: info.owner for info in await client.list_claims("p", task) for name in info.sample_ids}
