"""Promise 8: the results of list_metadata, depth and check_consumption_status, which consume nothing."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import DataPlaneBadRequest

from ..rig import at_once, declare, table
from ..steps import claim

if TYPE_CHECKING:
    from asyncdp import DataPlaneGroupMeta
    from asyncdp.client import Client

    from ..rig import Rig
from ..base import Contract

__all__ = ["Metadata"]


async def put(client: Client, *ids: str, **tags: Any) -> None:
    """Put ``x`` for these ids."""
    await client.put_samples(ids, "p", {"x": torch.zeros(len(ids), 2)}, [dict(tags) for _ in ids])


async def the_group(client: Client, group_id: str) -> DataPlaneGroupMeta:
    """Return the group with this id."""
    (found,) = [g for g in await client.list_metadata("p") if g.group_id == group_id]
    return found


class Metadata(Contract):
    """Promise 8: the results of list_metadata, depth and check_consumption_status, which consume nothing."""

    async def test_groups_are_listed_with_what_producers_stamped(self, rig: Rig) -> None:
        """A group has the lowest weight_version and created_at, all() of committed, ordered keys, and added sizes."""
        before = time.time()
        await declare(rig.client, "x", "y")
        await put(rig.client, "a", group_id="g", weight_version=5, expected_num_keys=2)
        await put(rig.client, "b", group_id="g", weight_version=3, created_at=1000.5)
        await rig.client.put_samples(["a"], "p", {"y": torch.zeros(1, dtype=torch.int64)})
        group = await the_group(rig.mate, "g")
        assert (group.partition_id, group.keys, group.weight_version, group.created_at) == ("p", ("a", "b"), 3, 1000.5)
        assert (group.committed, group.expected_num_keys, group.is_complete, group.lost_keys) == (True, 2, True, ())
        assert group.size_bytes == 2 * 8 + 8
        assert [tags["weight_version"] for tags in group.tags] == [5, 3]
        assert before - 1 <= group.tags[0]["created_at"] <= time.time() + 1
        assert group.tags[1]["created_at"] == 1000.5
        assert all(isinstance(tags["size_bytes"], int) for tags in group.tags)

    async def test_the_highest_expectation_ever_seen_counts(self, rig: Rig) -> None:
        """expected_num_keys does not decrease when another row has a lower value."""
        await declare(rig.client)
        await put(rig.client, "a", group_id="g", expected_num_keys=3)
        await put(rig.client, "b", group_id="g", expected_num_keys=2)
        group = await the_group(rig.client, "g")
        assert (group.expected_num_keys, group.is_complete) == (3, False)
        assert await rig.client.depth("p") == 0

    async def test_without_a_tag_the_group_is_read_off_the_id(self, rig: Rig) -> None:
        """The group is the match of the config's pattern; a sample without a match is its own group."""
        await declare(rig.client)
        await put(rig.client, "q_7_g0", "q_7_g1", "alone")
        assert {g.group_id: g.keys for g in await rig.client.list_metadata("p")} == {
            "q_7": ("q_7_g0", "q_7_g1"),
            "alone": ("alone",),
        }
        other = await rig.open(group_id_pattern="r{i}-{group}")
        await declare(other)
        await put(other, "r0-z", "r1-z", "z_g0")
        assert {g.group_id for g in await other.list_metadata("p")} == {"z", "z_g0"}

    async def test_a_tag_moves_a_sample_to_its_group(self, rig: Rig) -> None:
        """The group_id of a later put applies from then on."""
        await declare(rig.client)
        await put(rig.client, "a", "b")
        await rig.client.put_samples(["a", "b"], "p", tags=[{"group_id": "g"}] * 2)
        assert {g.group_id: g.keys for g in await rig.client.list_metadata("p")} == {"g": ("a", "b")}

    async def test_groups_are_listed_oldest_first(self, rig: Rig) -> None:
        """The order is that of created_at."""
        await declare(rig.client)
        for name, at in (("new", 30.0), ("old", 10.0), ("mid", 20.0)):
            await put(rig.client, name, created_at=at)
        assert [g.group_id for g in await rig.client.list_metadata("p")] == ["old", "mid", "new"]

    async def test_depth_counts_committed_complete_groups_until_popped(self, rig: Rig) -> None:
        """Promise 8: claimed groups count, uncommitted and incomplete ones do not."""
        await declare(rig.client, grpo_group_size=2)
        assert await rig.client.depth("p") == 0
        await put(rig.client, "g1_g0", "g1_g1")
        await put(rig.client, "g2_g0")
        await put(rig.client, "g3_g0", "g3_g1", committed=False)
        assert await rig.client.depth("p") == 1
        await rig.client.put_samples(["g3_g0", "g3_g1"], "p", tags=[{"committed": True}] * 2)
        await put(rig.client, "g2_g1")
        assert await rig.client.depth("p") == 3
        meta = await rig.mate.claim_meta("p", "train", ["x"], 2)
        assert await rig.client.depth("p") == 3
        await rig.mate.pop(rig.rows_of(meta), "p")
        assert await rig.client.depth("p") == 2

    async def test_looking_consumes_nothing(self, rig: Rig) -> None:
        """Promise 8: list_metadata, depth and check_consumption_status can be called any number of times."""
        await declare(rig.client, tasks=("train", "log"))
        await put(rig.client, "a", "b")
        seen = []
        for client in (rig.client, rig.mate) * 2:
            seen.append((await client.list_metadata("p"), await client.depth("p")))
            assert not await client.check_consumption_status("p", ["train"])
        assert all(s == seen[0] for s in seen)
        assert seen[0][1] == 2
        assert await claim(rig.client) == ["a", "b"]
        seen[0][0][0].tags[0]["k"] = "changed by the caller"
        assert "k" not in (await rig.client.list_metadata("p"))[0].tags[0]

    async def test_consumption_is_every_sample_by_every_named_task(self, rig: Rig) -> None:
        """An empty partition counts as consumed; after a further sample is put, it does not."""
        await declare(rig.client, tasks=("train", "log"))
        assert await rig.client.check_consumption_status("p", ["train", "log"])
        await put(rig.client, "a")
        assert not await rig.client.check_consumption_status("p", ["train"])
        await claim(rig.client)
        assert await rig.client.check_consumption_status("p", ["train"])
        assert not await rig.client.check_consumption_status("p", ["train", "log"])
        await put(rig.client, "b")
        assert not await rig.client.check_consumption_status("p", ["train"])
        with pytest.raises(DataPlaneBadRequest, match="'mistyped'"):
            await rig.client.check_consumption_status("p", ["train", "mistyped"])

    async def test_rows_of_a_group_from_several_writers_make_one_group(self, rig: Rig) -> None:
        """Rollout workers that each put a part of a group complete it together, once."""
        await declare(rig.client, grpo_group_size=8)
        puts = await at_once(
            *((rig.client, rig.mate)[i % 2].put_samples([f"g_g{i}"], "p", table(x=torch.zeros(1))) for i in range(8)),
            rig.client.claim_meta("p", "train", ["x"], 8, timeout_s=30),
        )
        assert sorted(puts[-1].sample_ids) == [f"g_g{i}" for i in range(8)]
        assert await claim(rig.client) == []
