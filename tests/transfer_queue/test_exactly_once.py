"""Eight claimers in three processes, cancels and timeouts on, one of them killed: the account adds up."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import DataPlaneError, build_data_plane_client
from tests.transfer_queue.opener import CLUSTER

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.synchronize import Barrier
    from pathlib import Path

    from asyncdp.client import Client

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(240)]

SAMPLES = int(os.environ.get("ASYNCDP_CLAIM_SAMPLES", "2000"))


#: How long a claimer waits for more, in seconds: a busy machine may put that slowly.
PATIENCE_S = 10.0


async def _claimer(client: Client, rng: random.Random, log: Any) -> None:
    """Claim until nothing has come for a while; every third claim is cancelled or cut short."""
    latest = anyio.current_time()
    while anyio.current_time() < latest + PATIENCE_S:
        kind = rng.choice(("plain", "plain", "plain", "cancel", "timeout"))
        got: Any = None
        try:
            if kind == "cancel":
                with anyio.move_on_after(rng.uniform(0, 0.003)):
                    got = await client.claim_meta(
                        "p", "train", ["x"], rng.randint(1, 16), min_batch_size=1, timeout_s=5
                    )
            else:
                wait_s = 0.01 if kind == "timeout" else 1.0
                got = await client.claim_meta(
                    "p",
                    "train",
                    ["x"],
                    rng.randint(1, 16),
                    blocking=kind == "timeout",
                    timeout_s=wait_s,
                    min_batch_size=1,
                )
        except DataPlaneError:
            pass
        if got is not None and got.size:
            latest = anyio.current_time()
            print(json.dumps(got.sample_ids), file=log, flush=True)
        else:
            await anyio.sleep(0.005)


def _claim(config: dict[str, Any], seed: int, claimers: int, path: Path, begin: Barrier) -> None:
    """Run claimers in a process of their own, on one client, from when all are there; what they got is in a file."""

    async def run(log: Any) -> None:
        rng = random.Random(seed)
        client = build_data_plane_client({**config, "owner": f"claimer-{seed}"}, bootstrap=False)
        await client.ping()
        await anyio.to_thread.run_sync(begin.wait)
        async with anyio.create_task_group() as group:
            for _ in range(claimers):
                group.start_soon(_claimer, client, random.Random(rng.random()), log)
        await client.close()

    with path.open("w", encoding="utf-8") as log:
        anyio.run(run, log)


def _told(path: Path) -> list[str]:
    """Read what a process says it got; the last line of a killed one may be cut."""
    ids: list[str] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):
                ids += json.loads(line)
    return ids


async def test_each_sample_is_claimed_exactly_once_or_listed(plane: Callable[..., Client], tmp_path: Path) -> None:
    """C2, C4, C8 on a real cluster: no sample twice; what nobody got is in list_claims, under who was killed."""
    owner = plane(CLUSTER())
    await owner.register_partition("p", ["x"], SAMPLES, ["train"])
    config = owner.attach_config()
    context = multiprocessing.get_context("forkserver")
    paths = [tmp_path / f"claims-{at}" for at in range(3)]
    begin = context.Barrier(4, timeout=120)
    processes = [
        context.Process(target=_claim, args=(config, at, count, paths[at], begin)) for at, count in enumerate((3, 3, 2))
    ]
    for process in processes:
        process.start()
    await anyio.to_thread.run_sync(begin.wait)  # else the last one finds nothing, and gives up before it is killed
    ids = [f"s{at}" for at in range(SAMPLES)]
    for first in range(0, SAMPLES, 50):
        await owner.put_samples(ids[first : first + 50], "p", {"x": torch.zeros(50)})
        if first == SAMPLES // 2 // 50 * 50:
            with anyio.move_on_after(30):
                while not _told(paths[2]):  # noqa: ASYNC110 - what another process writes
                    await anyio.sleep(0.05)
            os.kill(processes[2].pid or 0, signal.SIGKILL)
    for process in processes:
        await anyio.to_thread.run_sync(process.join, 60)
    assert [process.exitcode for process in processes] == [0, 0, -signal.SIGKILL]

    got = [i for path in paths for i in _told(path)]
    assert len(got) == len(set(got)), "a sample was claimed twice"
    listed = {i: claim.owner for claim in await owner.list_claims("p", "train") for i in claim.sample_ids}
    lost = set(ids) - set(got)
    assert all(listed[i] == "claimer-2" for i in lost), "a sample is neither claimed nor listed under who was killed"
    assert set(got) <= set(listed)

    # What the dead one held is given back, and claimed once more by somebody else: now every sample has been.
    await owner.release_claims("p", "claimer-2")
    rest: list[str] = []
    while (again := await owner.claim_meta("p", "train", ["x"], 64, blocking=False)).size:
        rest += again.sample_ids
    assert len(rest) == len(set(rest))
    assert lost <= set(rest)
    assert await owner.check_consumption_status("p", ["train"])
