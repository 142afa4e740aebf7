"""Promises 3 and 9: planes that are full, or that accept only declared fields and partitions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    DataPlaneNotReady,
    SampleNotFound,
)

from ..rig import at_once, declare, table
from ..same import check_same

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["PutLimits"]


class PutLimits(Contract):
    """Promises 3 and 9: planes that are full, or that accept only declared fields and partitions."""

    async def test_a_put_over_capacity_leaves_nothing(self, rig: Rig) -> None:
        """P4: a put over capacity raises DataPlaneNotReady, leaves nothing visible, and loses no space."""
        client = await rig.open(storage_capacity=4)
        await declare(client)
        await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
        with pytest.raises(DataPlaneNotReady) as caught:
            await client.put_samples(["c", "d", "e"], "p", {"x": torch.ones(3)}, [{}] * 3)
        assert not caught.value.ambiguous
        assert caught.value.retry_after_s is not None
        assert (await client.describe("p")).size == 2
        with pytest.raises(SampleNotFound):
            await client.get_samples(["c"], "p", ["x"])
        assert (await client.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["a", "b"]
        with pytest.raises(DataPlaneNotReady):  # a sample with tags only counts as well
            await client.put_samples(["c", "d", "e"], "p", tags=[{}] * 3)
        await client.put_samples(["b", "d", "e"], "p", {"x": torch.ones(3)})
        assert (await client.describe("p")).size == 4

    async def test_dropping_a_partition_makes_room(self, rig: Rig) -> None:
        """P4: the samples of a dropped partition do not count any more."""
        client = await rig.open(storage_capacity=2)
        for _ in range(2):
            await declare(client)
            await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})
            await client.drop_partition("p")

    async def test_waiting_puts_go_on_when_there_is_room(self, rig: Rig) -> None:
        """P4: a put to a full plane is retried, and succeeds after another client clears samples."""
        client = await rig.open(storage_capacity=1)
        mate = await rig.attach(to=client)
        await declare(client)
        await client.put_samples(["a"], "p", {"x": torch.zeros(1)})

        async def clear() -> None:
            await anyio.sleep(0.02)
            await mate.clear_samples(["a"], "p")

        put, _ = await at_once(client.put_samples(["b"], "p", {"x": torch.ones(1)}), clear())
        assert not isinstance(put, Exception)
        check_same((await mate.get_samples(["b"], "p", ["x"]))["x"], torch.ones(1))

    async def test_a_strict_schema_takes_declared_fields_only(self, rig: Rig) -> None:
        """Promise 9: undeclared fields are accepted, unless strict_schema."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"new": torch.zeros(1)})
        assert (await rig.client.describe("p")).fields["new"] == "float32[]"
        strict = await rig.open(strict_schema=True)
        await declare(strict)
        with pytest.raises(DataPlaneBadRequest, match="'new'") as caught:
            await strict.put_samples(["a"], "p", table(x=torch.zeros(1), new=torch.zeros(1)))
        assert caught.value.field == "new"
        assert (await strict.describe("p")).size == 0
        await strict.put_samples(["a"], "p", {"x": torch.zeros(1)})

    async def test_auto_register_is_off_unless_asked_for(self, rig: Rig) -> None:
        """A put to an unknown partition raises DataPlaneBadRequest; with auto_register it declares the partition."""
        with pytest.raises(DataPlaneBadRequest, match="'q'"):
            await rig.client.put_samples(["a"], "q", {"x": torch.zeros(1)})
        easy = await rig.open(auto_register=True)
        await easy.put_samples(["a"], "q", {"x": torch.zeros(1)})
        assert [info.partition_id for info in await easy.list_partitions()] == ["q"]
