"""How a user of pytest-asyncio tests code that runs on a data plane."""

from __future__ import annotations

import asyncio
import pickle
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio
import torch

import asyncdp
from asyncdp import build_data_plane_client
from asyncdp.calls import handles
from asyncdp.calls.slots import ReadSlots

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from asyncdp import DataPlaneClient
    from asyncdp.calls import CallContext

pytestmark = pytest.mark.asyncio

CONFIG: dict[str, Any] = {
    "enabled": True,
    "impl": "memory",
    "backend": "simple",
    "storage_capacity": 1000,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.01,
}


@pytest_asyncio.fixture
async def plane() -> AsyncIterator[DataPlaneClient]:
    """Give a plane of one partition with two tasks."""
    async with build_data_plane_client(CONFIG) as client:
        await client.register_partition("rollouts", ["tokens", "reward"], 64, ["train", "score"], grpo_group_size=4)
        yield client


async def rollout(plane: DataPlaneClient, prompt: int, version: int = 0) -> None:
    """Produce one group of four ragged samples."""
    ids = [f"{prompt}_g{i}" for i in range(4)]
    rows = [torch.arange(i + 1) for i in range(4)]
    tokens = torch.nested.nested_tensor(rows, layout=torch.jagged)
    tags = [{"input_lengths": len(row), "weight_version": version} for row in rows]
    await plane.put_samples(ids, "rollouts", {"tokens": tokens}, tags)


async def test_a_sample_goes_from_rollout_over_scorer_to_trainer(plane: DataPlaneClient) -> None:
    """Produced, scored, trained, popped: each step by its own task, at the same time."""

    async def score() -> None:
        for _ in range(3):
            meta = await plane.claim_meta("rollouts", "score", ["tokens"], 4, timeout_s=10)
            tokens = (await plane.get_data(meta))["tokens"]
            reward = torch.tensor([float(row.sum()) for row in tokens.unbind()])
            await plane.put_samples(meta.sample_ids, "rollouts", {"reward": reward})

    async def train() -> list[float]:
        rewards: list[float] = []
        for _ in range(3):
            meta = await plane.claim_meta("rollouts", "train", ["tokens", "reward"], 4, timeout_s=10)
            data = await plane.get_data(meta)
            assert meta.sequence_lengths == [len(row) for row in data["tokens"].unbind()]
            rewards += data["reward"].tolist()
            await plane.pop(meta, "rollouts")
        return rewards

    producers = [rollout(plane, prompt) for prompt in range(3)]
    *_, rewards = await asyncio.gather(*producers, score(), train())
    assert rewards == [0.0, 1.0, 3.0, 6.0] * 3
    assert await plane.depth("rollouts") == 0


async def test_a_controller_evicts_what_is_stale(plane: DataPlaneClient) -> None:
    """Metadata only: groups below a weight version go, the others stay."""
    for prompt in range(4):
        await rollout(plane, prompt, version=prompt)
    for group in await plane.list_metadata("rollouts"):
        assert group.is_complete
        if group.weight_version is not None and group.weight_version < 2:
            await plane.evict(group.keys, "rollouts")
    assert [g.group_id for g in await plane.list_metadata("rollouts")] == ["2", "3"]
    assert await plane.depth("rollouts") == 2


async def test_a_worker_gets_the_client_pickled(plane: DataPlaneClient) -> None:
    """Sent to a worker, the client attaches to the same plane."""
    worker = pickle.loads(pickle.dumps(plane))
    await rollout(worker, 7)
    await worker.close()
    assert await plane.depth("rollouts") == 1


async def test_a_timeout_of_the_user_leaves_the_client_usable(plane: DataPlaneClient) -> None:
    """asyncio.timeout around a claim that waits, then business as usual."""
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await plane.claim_meta("rollouts", "train", ["tokens"], 4)
    await rollout(plane, 1)
    assert (await plane.claim_meta("rollouts", "train", ["tokens"], 4, timeout_s=5)).size == 4


async def test_errors_are_caught_by_what_they_mean(plane: DataPlaneClient) -> None:
    """By the plane's classes, or by Python's own."""
    with pytest.raises(asyncdp.SampleNotFound):
        await plane.get_samples(["nobody"], "rollouts", ["tokens"])
    with pytest.raises(KeyError):
        await plane.get_samples(["nobody"], "rollouts", ["tokens"])
    with pytest.raises(ValueError, match="mistyped"):
        await plane.claim_meta("rollouts", "mistyped", ["tokens"], 4)
    with pytest.raises(TimeoutError):
        await plane.claim_meta("rollouts", "train", ["tokens"], 4, timeout_s=0.2)


async def test_a_fault_of_ones_own_is_a_layer_of_ten_lines() -> None:
    """A user's layer that fails each second read: the layers above it cure it."""

    class Flaky(asyncdp.Layer):
        reads = 0

        @handles(ReadSlots)
        async def read(self, call: ReadSlots, ctx: CallContext) -> Any:
            Flaky.reads += 1
            if Flaky.reads % 2:
                raise asyncdp.DataPlaneUnavailable("connection reset")
            return await self.inner.execute(call, ctx)

    layers = [*asyncdp.default_layers(backoff_base_s=0.001), Flaky]
    async with asyncdp.stack(asyncdp.MemoryTransport(), layers) as plane:
        await plane.register_partition("p", ["x"], 1, ["t"])
        await plane.put_samples(["a"], "p", {"x": torch.ones(1)})
        for _ in range(3):
            assert float((await plane.get_samples(["a"], "p", ["x"]))["x"]) == 1.0
    assert Flaky.reads == 6
