"""Claims of a checkpoint: what a task has had it does not get again, and a claim keeps its owner and its lease."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncdp import build_data_plane_client
from asyncdp.checkpoint import restore, save
from asyncdp.errors import ClaimLost, ClaimNotReady, DataPlaneBadRequest, DataPlaneUnsupported, StaleSlotError
from tests.checkpoint.test_checkpoints import plane

pytest.importorskip("msgpack", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytestmark = pytest.mark.anyio
IDS = [f"s{i}" for i in range(6)]


def mate(client: Any, **config: Any) -> Any:
    """Return another client of the plane."""
    return build_data_plane_client({**client.attach_config(), **config}, bootstrap=False)


async def fill(client: Any, tasks: tuple[str, ...] = ("train", "log"), **more: Any) -> None:
    """Put six rows."""
    await client.register_partition("p", ["x"], 6, tasks, **more)
    await client.put_samples(IDS, "p", {"x": torch.arange(6)})


async def claimed(client: Any, task: str) -> dict[str, tuple[str, bool]]:
    """Return owner, and whether there is a lease, of each claimed row."""
    found = await client.list_claims("p", task)
    return {name: (one.owner, one.expires_at is not None) for one in found for name in one.sample_ids}


async def test_each_task_goes_on_where_it_was(tmp_path: Path) -> None:
    """Popped rows are gone, claimed ones stay with their owner and lease, the rest is claimable, task by task."""
    async with plane() as one, plane() as two, mate(one, owner="tom") as tom, mate(one, claim_lease_s=600.0) as eve:
        await fill(one)
        await tom.pop(await tom.claim_meta("p", "train", ["x"], 1), "p")
        await tom.claim_meta("p", "train", ["x"], 2)
        await eve.claim_meta("p", "log", ["x"], 1)
        await save(one, tmp_path)
        await restore(two, tmp_path)
        tom_has = {"s1": ("tom", False), "s2": ("tom", False)}
        assert await claimed(two, "train") == await claimed(one, "train") == tom_has
        assert await claimed(two, "log") == {"s1": (eve.owner, True)}
        (lease,) = await two.list_claims("p", "log")
        assert lease.expires_at - lease.claimed_at <= 601.0
        assert (await two.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["s3", "s4", "s5"]
        assert (await two.claim_meta("p", "log", ["x"], 9, blocking=False)).sample_ids == ["s2", "s3", "s4", "s5"]
        await two.release_claims("p", "tom")
        assert (await two.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["s1", "s2"]


async def test_what_a_client_held_before_is_no_reference_to_what_was_restored(tmp_path: Path) -> None:
    """Restored into the same plane: metas are stale, claims lost; the rows stay claimed by the owner."""
    async with plane() as one:
        await fill(one)
        meta = await one.claim_meta("p", "train", ["x"], 2)
        await save(one, tmp_path)
        await restore(one, tmp_path, replace=True)
        with pytest.raises(StaleSlotError):
            await one.get_data(meta)
        with pytest.raises(ClaimLost):
            await one.release_claim(meta)
        await one.pop(meta, "p")
        assert set(await claimed(one, "train")) == {"s0", "s1"}


async def test_whoever_claims_while_rows_come_back_is_noticed(tmp_path: Path) -> None:
    """A task that is declared already may claim rows that were claimed: the restore fails, and claims nothing else."""
    async with plane() as one, plane() as two:
        await fill(one)
        await one.claim_meta("p", "train", ["x"], 6)
        await one.claim_meta("p", "log", ["x"], 6)
        await save(one, tmp_path)
        await two.register_partition("p", ["x"], 6, ["train"])
        put = two.put_samples

        async def put_and_claim(*args: Any, **kwargs: Any) -> Any:
            meta = await put(*args, **kwargs)
            await two.claim_meta("p", "train", ["x"], 1, blocking=False)
            return meta

        two.put_samples = put_and_claim
        with pytest.raises(DataPlaneBadRequest, match="'s0' is claimed for task 'train' already"):
            await restore(two, tmp_path)
        assert set(await claimed(two, "train")) == {"s0"}
        with pytest.raises(DataPlaneBadRequest, match="no task 'log'"):
            await two.list_claims("p", "log")


async def test_nobody_can_claim_before_all_is_back(tmp_path: Path) -> None:
    """While rows are put, the tasks of a new partition are not declared yet."""
    async with plane() as one, plane() as two:
        await fill(one)
        await one.claim_meta("p", "train", ["x"], 1)
        await save(one, tmp_path, chunk_bytes=16)
        put, refused = two.put_samples, 0

        async def put_and_claim(*args: Any, **kwargs: Any) -> Any:
            nonlocal refused
            meta = await put(*args, **kwargs)
            with pytest.raises(DataPlaneBadRequest, match="no task"):
                await two.claim_meta("p", "train", ["x"], 1)
            refused += 1
            return meta

        two.put_samples = put_and_claim
        await restore(two, tmp_path)
        assert refused >= 3
        assert (await two.claim_meta("p", "train", ["x"], 1)).sample_ids == ["s1"]


async def test_whole_groups_are_claimed_again(tmp_path: Path) -> None:
    """A group that was claimed is claimed, one that was not is whole."""
    async with plane() as one, plane() as two:
        await one.register_partition("p", ["x"], 6, ["train"], grpo_group_size=3)
        await one.put_samples(IDS, "p", {"x": torch.arange(6)}, [{"group_id": f"g{i // 3}"} for i in range(6)])
        await one.claim_meta("p", "train", ["x"], 3)
        await save(one, tmp_path)
        await restore(two, tmp_path)
        assert (await two.claim_meta("p", "train", ["x"], 6, blocking=False)).sample_ids == IDS[3:]
        with pytest.raises(ClaimNotReady):
            await two.claim_meta("p", "train", ["x"], 3, timeout_s=0)


async def test_a_claim_and_a_removal_during_a_save_are_both_in_it_or_not(tmp_path: Path) -> None:
    """Rows and claims are those of one moment: after each claim its rows are popped, so none is claimable that was."""
    rng = random.Random(3)
    async with plane() as one, plane() as two:
        await fill(one, ("train",))
        get_data, had = one.get_data, list[str]()

        async def read(*args: Any, **kwargs: Any) -> Any:
            data = await get_data(*args, **kwargs)
            meta = await one.claim_meta("p", "train", ["x"], 1, blocking=False)
            had.extend(meta.sample_ids)
            if meta.size and rng.random() < 0.5:
                await one.pop(meta, "p")
            return data

        one.get_data = read
        await save(one, tmp_path, chunk_bytes=16)
        await restore(two, tmp_path)
        assert len(had) >= 3
        left = (await two.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids
        assert sorted([*left, *had]) == IDS


async def test_a_backend_without_snapshots_is_refused_by_name(tmp_path: Path) -> None:
    """Save is DataPlaneUnsupported; restore too where there are claims, and puts nothing."""
    async with plane() as one, plane() as two:
        await fill(one)
        await one.claim_meta("p", "train", ["x"], 1)
        await save(one, tmp_path)
        can = two.get_capabilities()
        two.get_capabilities = lambda: type(can)(slot_addressable=True)
        for call in (save(two, tmp_path / "other"), restore(two, tmp_path)):
            with pytest.raises(DataPlaneUnsupported, match="directory_snapshots"):
                await call
        assert await two.list_partitions() == []
