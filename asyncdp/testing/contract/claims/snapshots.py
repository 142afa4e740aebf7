"""Promise 12: a snapshot is the state of a partition at one moment, and claims are restored from it, all or none."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from asyncdp import ClaimNotReady, DataPlaneBadRequest, StaleSlotError
from asyncdp.calls.snapshots import ClaimState, PartitionState, RestoreClaims, Snapshot
from asyncdp.checkpoint.asking import ask

from ..base import Contract
from ..faults import LoseReply
from ..rig import declare
from ..steps import claim, claimed_by, put

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..rig import Rig

__all__ = ["Snapshots"]


async def look(client: Client) -> PartitionState:
    """Return the state of the partition."""
    return await ask(client, Snapshot("p"), "save")


def claim_of(state: PartitionState, *ids: str, task: str = "log", left_s: float | None = None) -> ClaimState:
    """Return a claim of these rows by an owner that is not there any more."""
    lives = {row.sample_id: row.life for row in state.rows}
    return ClaimState("gone", task, ("x",), tuple((name, lives[name]) for name in ids), 5.0, left_s)


class Snapshots(Contract):
    """Promise 12: a snapshot is the state of a partition at one moment, and claims are restored, all or none."""

    async def test_a_snapshot_has_rows_cells_and_claims(self, rig: Rig) -> None:
        """Rows in order of age with lives, tags and cells; claims with owner and lease; declarations."""
        rig.need("directory_snapshots")
        leased = await rig.attach(owner="leased", claim_lease_s=600.0)
        await declare(rig.client, tasks=("train", "log"))
        meta = await put(rig.client, "a", "b", weight_version=3)
        await rig.client.put_samples(["a"], "p", {"y": torch.ones(1, 2)})
        await rig.client.put_samples(["c"], "p", tags=[{"k": 1}])
        await leased.claim_meta("p", "train", ["x"], 1)
        await rig.mate.claim_meta("p", "log", ["x"], 2)
        state = await look(rig.client)
        assert [row.sample_id for row in state.rows] == ["a", "b", "c"]
        assert [row.life for row in state.rows[:2]] == [handle.incarnation for handle in meta.handles or () if handle]
        assert [row.tags["weight_version"] for row in state.rows[:2]] == [3, 3]
        cells = [sorted(sorted(cell.fields) for cell in row.cells) for row in state.rows]
        assert cells == [[["x"], ["y"]], [["x"]], []]
        names = [cell.name for row in state.rows for cell in row.cells]
        assert len({(row.life, cell.name) for row in state.rows for cell in row.cells}) == len(names)
        assert (state.info.consumer_tasks, state.info.size) == (("train", "log"), 3)
        assert set(state.specs) == {"x", "y"}
        held = {one.task_name: one for one in state.claims}
        assert [(i, life) for i, life in held["log"].rows] == [(row.sample_id, row.life) for row in state.rows[:2]]
        assert (held["log"].owner, held["log"].left_s, held["log"].fields) == ("mate", None, ("x",))
        assert held["train"].left_s is not None
        assert 0 < held["train"].left_s <= 600.0

    async def test_a_cell_keeps_its_name_until_it_is_replaced(self, rig: Rig) -> None:
        """A put of a field gives the row another cell for it, and takes the field from the old one; the rest stays."""
        rig.need("directory_snapshots")
        await declare(rig.client, "x", "y")
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1), "y": torch.ones(1)})
        before = (await look(rig.client)).rows[0]
        await rig.client.put_samples(["a"], "p", tags=[{"k": 1}])
        assert (await look(rig.mate)).rows[0].cells == before.cells
        await rig.client.put_samples(["a"], "p", {"y": torch.zeros(1)})
        after = (await look(rig.client)).rows[0]
        by_field = {name: cell.name for cell in after.cells for name in cell.fields}
        assert after.life == before.life
        assert by_field["x"] == before.cells[0].name != by_field["y"]

    async def test_restored_claims_hold_their_rows(self, rig: Rig) -> None:
        """Their task is declared in the same step; the rows are claimed by the owner until they are released."""
        rig.need("directory_snapshots", "claim_release")
        await declare(rig.client)
        await put(rig.client, "a", "b", "c")
        assert await claim(rig.client) == ["a", "b", "c"]  # of another task
        state = await look(rig.client)
        with pytest.raises(DataPlaneBadRequest, match="log"):
            await claim(rig.mate, task="log")
        await ask(rig.client, RestoreClaims("p", ("train", "log"), (claim_of(state, "a", "c"),)), "restore")
        assert await claimed_by(rig.client, "log") == {"a": "gone", "c": "gone"}
        assert await claim(rig.mate, task="log") == ["b"]
        assert await rig.client.check_consumption_status("p", ["train", "log"])
        await rig.client.release_claims("p", "gone")
        assert await claim(rig.mate, task="log") == ["a", "c"]

    async def test_the_lease_of_a_restored_claim_ends(self, rig: Rig) -> None:
        """A claim whose lease has no time left is taken back; the rows are claimable again."""
        rig.need("directory_snapshots")
        await declare(rig.client, tasks=("log",))
        await put(rig.client, "a", "b")
        with pytest.raises(ClaimNotReady):
            await rig.mate.claim_meta("p", "log", ["x"], 3, timeout_s=0)  # so that there is an index
        state = await look(rig.client)
        held = (claim_of(state, "a", left_s=0.01), claim_of(state, "b", left_s=600.0))
        await ask(rig.client, RestoreClaims("p", ("log",), held), "restore")
        assert (await rig.mate.claim_meta("p", "log", ["x"], 1)).sample_ids == ["a"]

    async def test_claims_are_restored_all_or_none(self, rig: Rig) -> None:
        """A row that is claimed already, named twice, gone or in another life refuses all, and no task is declared."""
        rig.need("directory_snapshots")
        await declare(rig.client)
        await put(rig.client, "a", "b", "c")
        await rig.client.claim_meta("p", "train", ["x"], 1)
        state = await look(rig.client)
        mine = claim_of(state, "c", "a", task="train")
        with pytest.raises(DataPlaneBadRequest, match="'a' is claimed for task 'train' already"):
            await ask(rig.client, RestoreClaims("p", ("log",), (claim_of(state, "b"), mine)), "restore")
        for twice in ((claim_of(state, "b", "b"),), (claim_of(state, "b"), claim_of(state, "c", "b"))):
            with pytest.raises(DataPlaneBadRequest, match="'b' is claimed for task 'log' already"):
                await ask(rig.client, RestoreClaims("p", ("log",), twice), "restore")
        stale = replace_life(claim_of(state, "a", "b"))
        with pytest.raises(StaleSlotError, match="'b'") as caught:
            await ask(rig.client, RestoreClaims("p", ("log",), (stale,)), "restore")
        assert caught.value.sample_ids == ("b",)
        assert replace(state.info) == (await look(rig.client)).info
        assert await claim(rig.mate) == ["b", "c"]

    async def test_a_whole_group_is_claimed_again(self, rig: Rig) -> None:
        """In a partition with groups, a group of which one row is claimed again is given to nobody."""
        rig.need("directory_snapshots")
        await declare(rig.client, tasks=("log",), grpo_group_size=2)
        for name in ("g1", "g2"):
            await rig.client.put_samples([f"{name}a", f"{name}b"], "p", {"x": torch.ones(2)}, [{"group_id": name}] * 2)
        with pytest.raises(ClaimNotReady):
            await rig.mate.claim_meta("p", "log", ["x"], 6, min_batch_size=6, timeout_s=0)
        state = await look(rig.client)
        await ask(rig.client, RestoreClaims("p", ("log",), (claim_of(state, "g1a", "g1b"),)), "restore")
        assert (await rig.mate.claim_meta("p", "log", ["x"], 2)).sample_ids == ["g2a", "g2b"]
        with pytest.raises(ClaimNotReady):
            await rig.mate.claim_meta("p", "log", ["x"], 2, timeout_s=0)

    async def test_claims_whose_answer_was_lost_are_made_once(self, rig: Rig) -> None:
        """Sent again, the call gets the answer of the first time."""
        rig.need("directory_snapshots", "mutation_dedup")
        await declare(rig.client)
        await put(rig.client, "a", "b")
        state = await look(rig.client)
        client = await rig.attach(LoseReply(RestoreClaims))
        await ask(client, RestoreClaims("p", ("log",), (claim_of(state, "a"),)), "restore")
        assert await claimed_by(rig.client, "log") == {"a": "gone"}
        assert len(await rig.client.list_claims("p", "log")) == 1

    async def test_an_unknown_partition_has_no_state(self, rig: Rig) -> None:
        """Both calls are DataPlaneBadRequest."""
        rig.need("directory_snapshots")
        for call in (Snapshot("nowhere"), RestoreClaims("nowhere", ("log",), ())):
            with pytest.raises(DataPlaneBadRequest, match="nowhere"):
                await ask(rig.client, call, "restore")


def replace_life(held: ClaimState) -> ClaimState:
    """Return the claim with another life of its last row."""
    name, life = held.rows[-1]
    return held._replace(rows=(*held.rows[:-1], (name, life + 1)))
