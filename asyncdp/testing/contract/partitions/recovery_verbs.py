"""Promise 9 and the verbs by which a controller recovers: partitions, ping, attaching, pickling."""

from __future__ import annotations

import functools
import pickle
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import (
    ClaimNotReady,
    DataPlaneCapabilities,
    DataPlaneClient,
    DataPlaneTimeout,
    DataPlaneUnavailable,
)

from ...verbs import VERBS
from ..rig import at_once, declare, table
from ..same import check_same, rows_of
from ..steps import fails_with

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..rig import Rig
from ..base import Contract

__all__ = ["RecoveryVerbs"]


class RecoveryVerbs(Contract):
    """Promise 9 and the verbs by which a controller recovers: partitions, ping, attaching, pickling."""

    async def test_registering_again_unites_and_keeps(self, rig: Rig) -> None:
        """Promise 9: fields, tasks and vocabularies are merged; rows, tags and claims are kept."""
        await declare(rig.client, "x", "e", enums={"e": ["u", "v"]})
        await rig.client.put_samples(["a", "b"], "p", {"x": torch.arange(2), "e": ["v", "u"]}, [{"k": 1}, {"k": 2}])
        assert (await rig.client.claim_meta("p", "train", ["x"], 1)).sample_ids == ["a"]
        await rig.mate.register_partition("p", ["y"], 8, ["log"], enums={"e": ["w", "u"]})
        info = await rig.client.describe("p")
        assert set(info.fields) == {"x", "y", "e"}
        assert info.consumer_tasks == ("train", "log")
        assert info.enums == {"e": ("u", "v", "w")}
        assert info.size == 2
        got = await rig.mate.get_samples(["a", "b"], "p", ["x", "e"])
        check_same(got["x"], torch.arange(2))
        assert rows_of(got.get("e")) == ["v", "u"]
        assert (await rig.client.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["b"]
        assert (await rig.client.claim_meta("p", "log", ["x"], 9, blocking=False)).sample_ids == ["a", "b"]

    async def test_num_samples_is_a_hint(self, rig: Rig) -> None:
        """Promise 9: more samples than num_samples are accepted; so is num_samples=0."""
        await rig.client.register_partition("p", ["x"], 0, ["train"])
        await rig.client.put_samples(["a", "b", "c"], "p", {"x": torch.zeros(3)})
        assert (await rig.client.describe("p")).size == 3

    async def test_many_may_register_at_once(self, rig: Rig) -> None:
        """Workers may declare what they need concurrently and in any order."""
        results = await at_once(
            *((rig.client, rig.mate)[i % 2].register_partition("p", [f"f{i}"], 1, [f"t{i}"]) for i in range(8))
        )
        assert results == [None] * 8
        info = await rig.client.describe("p")
        assert (len(info.fields), len(info.consumer_tasks)) == (8, 8)

    async def test_a_partition_is_described(self, rig: Rig) -> None:
        """Describe returns types as text, sizes, tasks and vocabularies."""
        await declare(rig.client, "x", "r", "o", "e", "none", grpo_group_size=2, enums={"e": ["u", "v"]})
        nested = torch.nested.nested_tensor([torch.zeros(1), torch.zeros(3)], layout=torch.jagged)
        data = table(2, x=torch.zeros(2, 4, dtype=torch.bfloat16), r=nested)
        await rig.client.put_samples(["g_g0", "g_g1"], "p", {**dict(data.items()), "o": [None, 1], "e": ["v", "u"]})
        info = await rig.mate.describe("p")
        assert info.fields == {"x": "bfloat16[4]", "r": "float32[*]", "o": "object", "e": "enum(u, v)", "none": ""}
        assert (info.partition_id, info.num_samples, info.grpo_group_size, info.size) == ("p", 64, 2, 2)
        assert info.size_bytes > 2 * 8 + 16
        assert await rig.mate.list_partitions() == [info]

    async def test_partitions_are_apart(self, rig: Rig) -> None:
        """The same id and field in two partitions are different samples and may have different types."""
        await declare(rig.client)
        await rig.client.register_partition("q", ["x"], 1, ["train"])
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        await rig.client.put_samples(["a"], "q", {"x": torch.ones(1, 2, dtype=torch.int64)})
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.zeros(1))
        await rig.client.clear_samples(["a"], "p")
        assert (await rig.client.claim_meta("q", "train", ["x"], 9, blocking=False)).sample_ids == ["a"]

    async def test_waiting_for_a_partition_ends_when_it_is_registered(self, rig: Rig) -> None:
        """A worker that starts before the driver waits; if the partition never appears, the wait times out."""

        async def later() -> None:
            await anyio.sleep(0.02)
            await declare(rig.mate)

        assert await at_once(rig.client.wait_partition("p", timeout_s=50), later()) == [None, None]
        await rig.client.wait_partition("p", timeout_s=30)
        with pytest.raises(DataPlaneTimeout) as caught:
            await rig.client.wait_partition("q", timeout_s=0.2)
        err = caught.value
        assert (err.op, err.partition_id, err.retryable) == ("wait_partition", "q", False)

    async def test_ping_goes_through(self, rig: Rig) -> None:
        """Ping succeeds from every client of a plane."""
        await rig.client.ping()
        await rig.mate.ping(timeout_s=30)

    async def test_hosts_are_listed(self, rig: Rig) -> None:
        """Every client sees the same hosts by id, all of which answer; what is not counted is None or absent."""
        rig.need("host_listing")
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        hosts = await rig.mate.list_hosts()
        assert hosts
        assert [host.host_id for host in hosts] == sorted({host.host_id for host in hosts})
        assert [(host.host_id, host.epoch) for host in await rig.client.list_hosts()] == [
            (host.host_id, host.epoch) for host in hosts
        ]
        for host in hosts:
            assert host.alive
            assert not host.draining
            assert (host.capacity_bytes is None) == (host.free_bytes is None)
            if host.capacity_bytes is not None and host.free_bytes is not None:
                assert 0 <= host.free_bytes <= host.capacity_bytes
            assert set(host.slots) <= {"free", "writing", "ready", "given_up", "reading", "doomed", "leased"}
        rows = [host.rows for host in hosts]
        assert None in rows or sum(n or 0 for n in rows) == 1

    async def test_a_client_is_a_data_plane_client(self, rig: Rig) -> None:
        """It fulfils the protocol, and its capabilities are bools."""
        assert isinstance(rig.client, DataPlaneClient)
        assert isinstance(rig.client.get_capabilities(), DataPlaneCapabilities)
        assert rig.client.get_capabilities() == rig.mate.get_capabilities()

    async def test_a_pickled_client_attaches(self, rig: Rig) -> None:
        """A client is pickled as its config; the unpickled one uses the same plane, and its close keeps the plane."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)})
        twin = pickle.loads(pickle.dumps(rig.client))
        third = pickle.loads(pickle.dumps(twin))
        check_same((await twin.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))
        await third.put_samples(["b"], "p", {"x": torch.ones(1)})
        assert third.owner != rig.client.owner
        await third.close()
        await twin.close()
        await rig.client.ping()
        assert (await rig.client.describe("p")).size == 2

    async def test_the_owners_close_ends_the_plane(self, rig: Rig) -> None:
        """X4: every verb of attached clients then raises DataPlaneUnavailable at once."""
        owner = await rig.open()
        worker = await rig.attach(to=owner)
        await declare(worker)
        await rig.end(owner)
        for verb in ("ping", "depth", "put_samples", "get_samples", "claim_meta", "clear_samples"):
            await fails_with(DataPlaneUnavailable, functools.partial(VERBS[verb], worker), 0.2)

    async def test_a_claim_that_waits_when_the_plane_ends_is_told(self, rig: Rig) -> None:
        """A blocking claim ends after the end of its plane, not much later than its own timeout."""
        claimed: Any = None
        for timeout_s in (0.3, 3.0, 30.0):  # closing takes its time on a busy machine
            owner = await rig.open()
            worker = await rig.attach(to=owner)
            await declare(worker)

            async def close(ending: Client = owner) -> None:
                await anyio.sleep(0.02)
                await rig.end(ending)

            claimed, _ = await at_once(worker.claim_meta("p", "train", ["x"], 1, timeout_s=timeout_s), close())
            if not isinstance(claimed, (ClaimNotReady, DataPlaneTimeout)):
                break
        assert isinstance(claimed, DataPlaneUnavailable)
