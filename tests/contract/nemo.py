"""What clients with the option ``nemo`` do on every transport that a config names."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from asyncdp import ClaimNotReady, DataPlaneBadRequest, PartialReadError, build_data_plane_client
from asyncdp.testing.contract import Contract
from asyncdp.testing.contract.rig import declare

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.testing.contract import Rig

__all__ = ["NemoMode"]


@asynccontextmanager
async def nemo(rig: Rig, **settings: Any) -> AsyncIterator[Client]:
    """Yield a client of the plane under test with the option, or with some of its settings."""
    config = {**rig.client.attach_config(), "nemo": settings or True}
    async with build_data_plane_client(config, bootstrap=False) as client:
        yield client


def ragged(*lengths: int) -> torch.Tensor:
    """Make a jagged tensor of these row lengths."""
    return torch.nested.as_nested_tensor([torch.arange(n) for n in lengths], layout=torch.jagged)


MESSAGES = [
    [{"role": "user", "content": "two", "token_ids": torch.arange(3)}, {"role": "assistant", "content": "four"}],
    [{"role": "user", "content": "one", "token_ids": torch.ones(2, dtype=torch.bfloat16)}],
]


class NemoMode(Contract):
    """A client with the option means what NeMo-RL's means; the plane serves others unchanged."""

    async def test_equal_ragged_rows_are_a_rectangle(self, rig: Rig) -> None:
        """Rows of one length come back dense, others nested; without the option both are nested."""
        await declare(rig.client)
        rows = ragged(2, 2, 3)
        async with nemo(rig) as client:
            await client.put_samples(["a", "b", "c"], "p", TensorDict({"x": rows}, batch_size=[3]))
            two = (await client.get_samples(["a", "b"], "p", ["x"]))["x"]
            three = (await client.get_samples(["a", "b", "c"], "p", ["x"]))["x"]
            with pytest.raises(PartialReadError) as partial:
                await client.get_samples(["a", "b", "nobody"], "p", ["x"])
        assert not two.is_nested
        assert torch.equal(two, torch.tensor([[0, 1], [0, 1]]))
        assert three.is_nested
        assert not partial.value.rows["x"].is_nested
        assert isinstance(partial.value, KeyError)
        assert (await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"].is_nested
        async with nemo(rig, rectangles=False) as client:
            assert (await client.get_samples(["a", "b"], "p", ["x"]))["x"].is_nested

    async def test_a_claim_takes_what_is_ready(self, rig: Rig) -> None:
        """Up to batch_size as soon as one is ready, without regard to groups; nothing ready is a TimeoutError."""
        async with nemo(rig) as client:
            await client.register_partition("p", ["x"], 8, ["train"], 4)
            await client.put_samples(["a_g0", "a_g1", "b_g0"], "p", {"x": torch.zeros(3)})
            assert (await client.claim_meta("p", "train", ["x"], 2)).size == 2
            assert (await client.claim_meta("p", "train", ["x"], 8)).sample_ids == ["b_g0"]
            with pytest.raises(ClaimNotReady) as nothing:
                await client.claim_meta("p", "train", ["x"], 8, timeout_s=0)
        assert isinstance(nothing.value, TimeoutError)
        assert not isinstance(nothing.value, ConnectionError)

    async def test_clearing_none_empties_the_partition(self, rig: Rig) -> None:
        """Whoever put the rows; an empty or unknown partition is a RuntimeWarning."""
        await declare(rig.client)
        await rig.client.put_samples(["theirs"], "p", {"x": torch.zeros(1)})
        async with nemo(rig) as client:
            await client.put_samples(["own"], "p", {"x": torch.zeros(1)})
            await client.clear_samples(None, "p")
            assert (await rig.client.describe("p")).size == 0
            for name in ("p", "nobody's"):
                with pytest.warns(RuntimeWarning, match="found nothing"):
                    await client.clear_samples(None, name)

    async def test_another_group_size_may_be_registered(self, rig: Rig) -> None:
        """Each step may register with another number of generations, with rows of the last step still there."""
        async with nemo(rig) as client:
            for size in (2, 4, None, 1):
                await client.register_partition("p", ["x"], 8, ["train"], size)
                ids = [f"{size}_g{i}" for i in range(3)]
                await client.put_samples(ids, "p", {"x": torch.zeros(3)})
                assert (await client.claim_meta("p", "train", ["x"], 3)).sample_ids == ids

    async def test_whole_groups_change_their_size_when_the_partition_is_empty(self, rig: Rig) -> None:
        """Where groups are wanted, the size is that of the last declaration of an empty partition."""
        async with nemo(rig, whole_groups=True) as client:
            await client.register_partition("p", ["x"], 8, ["train"], 2)
            await client.put_samples(["a_g0", "a_g1"], "p", {"x": torch.zeros(2)})
            with pytest.raises(DataPlaneBadRequest, match="grpo_group_size"):
                await client.register_partition("p", ["x"], 8, ["train"], 3)
            await client.claim_meta("p", "train", ["x"], 2)
            await client.clear_samples(["a_g0", "a_g1"], "p")
            await client.register_partition("p", ["x"], 8, ["train"], 3)
            await client.put_samples(["a_g0", "a_g1"], "p", {"x": torch.zeros(2)})
            assert (await client.claim_meta("p", "train", ["x"], 8, blocking=False)).size == 0
            await client.put_samples(["a_g2"], "p", {"x": torch.zeros(1)})
            assert (await client.claim_meta("p", "train", ["x"], 8)).size == 3

    async def test_an_empty_partition_is_declared_anew(self, rig: Rig) -> None:
        """Cleared by ids and registered again, a field may hold another dtype, rank or kind; with rows it may not."""
        long = torch.ones(1, 3, dtype=torch.int64)
        kinds: list[Any] = [(torch.zeros(1), [0.0]), (long, [[1, 1, 1]]), (["a"], ["a"]), (ragged(2), [[0, 1]])]
        async with nemo(rig) as client:
            for value, wanted in kinds:
                await client.register_partition("p", ["x"], 8, ["train"])
                await client.put_samples(["a"], "p", TensorDict({"x": value}, batch_size=[1]))
                back = (await client.get_samples(["a"], "p", ["x"])).get("x")
                assert back.tolist() == wanted
                await client.register_partition("p", ["x"], 8, ["train"])
                with pytest.raises(DataPlaneBadRequest, match="x"):
                    await client.put_samples(["b"], "p", {"x": torch.zeros(1, 2, 2, dtype=torch.int16)})
                assert (await client.claim_meta("p", "train", ["x"], 1)).size == 1
                await client.clear_samples(["a"], "p")
        await rig.client.register_partition("p", ["x"], 8, ["train"])
        with pytest.raises(DataPlaneBadRequest, match="x"):
            await rig.client.put_samples(["b"], "p", {"x": torch.zeros(1, 2, 2, dtype=torch.int16)})

    async def test_message_logs_and_matrices_of_objects_travel(self, rig: Rig) -> None:
        """Lists of messages with tensors in them, and arrays of objects of two dimensions, as one list per row."""
        matrix = np.array([[{"n": 1}, None], ["a", (2,)]], dtype=object)
        logs = np.empty(2, dtype=object)
        logs[:] = MESSAGES
        async with nemo(rig) as client:
            await client.register_partition("p", ["m", "log"], 2, ["train"])
            await client.put_samples(["a", "b"], "p", TensorDict({"m": matrix, "log": logs}, batch_size=[2]))
            await client.put_samples(["c", "d"], "p", {"m": matrix, "log": MESSAGES})
            back = await client.get_samples(["a", "b", "c", "d"], "p", ["m", "log"])
        assert back.get("m").tolist() == matrix.tolist() * 2
        for found, put in zip(back.get("log").tolist(), MESSAGES * 2, strict=True):
            assert [m["role"] for m in found] == [m["role"] for m in put]
            assert torch.equal(found[0]["token_ids"], put[0]["token_ids"])

    async def test_unknown_names_are_key_errors(self, rig: Rig) -> None:
        """Partition, task, field and sample; without the option they are what they were."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        async with nemo(rig) as client:
            for call in (
                client.claim_meta("nobody's", "train", ["x"], 1),
                client.claim_meta("p", "nobody", ["x"], 1),
                client.claim_meta("p", "train", ["nothing"], 1),
                client.check_consumption_status("nobody's", ["train"]),
                client.check_consumption_status("p", ["nobody"]),
                client.get_samples(["a"], "nobody's", ["x"]),
                client.get_samples(["nobody"], "p", ["x"]),
                client.get_samples(["a"], "p", ["nothing"]),
                client.get_samples(["a"], "p", ["x", "nothing"]),
            ):
                with pytest.raises(KeyError):
                    await call
            with pytest.raises(ValueError, match="batch_size") as wrong:
                await client.claim_meta("p", "train", ["x"], 0)
        assert not isinstance(wrong.value, KeyError)
        with pytest.raises(DataPlaneBadRequest) as plain:
            await rig.client.claim_meta("p", "nobody", ["x"], 1)
        assert not isinstance(plain.value, KeyError)
