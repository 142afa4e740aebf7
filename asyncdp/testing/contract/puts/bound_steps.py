"""Steps of the tests of puts and removals that are bound to lives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import (
    KVBatchMeta,
    SampleNotFound,
    write_columns,
)

from ..base import Contract
from ..rig import declare
from ..steps import put

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from asyncdp.client import Client

    from ..rig import Rig

__all__ = ["REMOVALS", "WRITERS", "BoundBase", "by_meta", "claimed", "group_of", "there"]

REMOVALS = ["clear_samples", "pop", "evict"]


async def by_meta(client: Client, meta: KVBatchMeta, value: float = 9.0) -> Any:
    """Put ``y`` for the rows of a meta."""
    return await client.put_samples(meta, "p", {"y": torch.full((meta.size,), value)})


async def _by_columns(client: Client, meta: KVBatchMeta) -> Any:
    return await write_columns(client, meta, {"y": torch.full((meta.size,), 9.0)})


async def _by_tags(client: Client, meta: KVBatchMeta) -> Any:
    return await client.put_samples(meta, "p", tags=[{"score": 9}] * meta.size)


async def _by_ids(client: Client, meta: KVBatchMeta) -> Any:
    ids = meta.sample_ids
    return await client.put_samples(ids, "p", {"y": torch.full((len(ids),), 9.0)}, only="existing")


#: The ways in which a scorer can write; the last one cannot distinguish two lives of one id.
WRITERS: dict[str, Callable[[Client, KVBatchMeta], Awaitable[Any]]] = {
    "meta": by_meta,
    "columns": _by_columns,
    "tags": _by_tags,
    "ids": _by_ids,
}


async def there(rig: Rig) -> dict[str, set[str]]:
    """Return {sample: its fields, and ``score`` if it has that tag}."""
    found: dict[str, set[str]] = {}
    for group in await rig.mate.list_metadata("p"):
        for key, tags in zip(group.keys, group.tags, strict=True):
            found[key] = {"score"} & set(tags)
            for name in ("x", "y"):
                try:
                    await rig.mate.get_samples([key], "p", [name])
                except SampleNotFound:
                    continue
                found[key].add(name)
    return found


async def claimed(rig: Rig, *ids: str, by: Client | None = None) -> KVBatchMeta:
    """Declare fields and two tasks, put ``x`` for these ids, and claim them for the task ``score``."""
    await declare(rig.client, "x", "y", tasks=("score", "train"))
    await put(rig.client, *ids)
    meta = await (by or rig.mate).claim_meta("p", "score", ["x"], len(ids))
    assert meta.sample_ids == list(ids)
    return meta


async def group_of(rig: Rig, name: str = "g") -> Any:
    """Return the group with this id."""
    return next(group for group in await rig.client.list_metadata("p") if group.group_id == name)


class BoundBase(Contract):
    """Base of the tests of puts and removals that are bound to lives."""

    @pytest.fixture(autouse=True)
    def able(self, rig: Rig, request: pytest.FixtureRequest) -> None:
        """Skip only the tests of these themes if the backend lacks the capability ``bound_mutations``."""
        if request.function.__module__.startswith(f"{__package__}.bound"):
            rig.need("bound_mutations")
