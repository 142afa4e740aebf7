"""Everything at once: many tasks, many kinds of faults, cancels at random; what must hold whatever happens."""

import random
from collections.abc import Coroutine
from typing import Any

import anyio
import pytest
import torch

from asyncdp import (
    ClaimNotReady,
    DataPlaneError,
    MemoryTransport,
    PartialReadError,
    SampleNotFound,
)
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, virtual


def storm(seed: int) -> FaultPlan:
    """Every kind of fault, each now and then."""
    plan = FaultPlan(seed).delay(p50_s=0.002, p99_s=0.2).refuse(p=0.02).reset(p=0.02).lose_reply(p=0.03)
    plan.lose_reply(p=0.005, raises=None).silent(p=0.005).truncate(p=0.02).corrupt(p=0.02).stale(p=0.005)
    plan.not_ready(0.05, p=0.01).on("get_samples").recycle(how="moved", p=0.02)
    return plan.cut("host-1", at_s=3, for_s=2).crash_host("host-0", at_s=6, restart_at_s=7, adopt=True)


class Writer:
    """Puts, clears and reads ids of its own, and knows what may be there."""

    def __init__(self, rig: Rig, name: str, rng: random.Random) -> None:
        self.client = rig.client
        self.ids = [f"{name}{i}" for i in range(4)]
        self.rng = rng
        self.may: dict[str, set[float | None]] = {i: {None} for i in self.ids}
        self.value = 0.0

    async def run(self) -> None:
        """Do 25 things, one after the other."""
        for _ in range(25):
            await self.step()

    async def step(self) -> None:
        """Do one thing; give up on it at a random moment, sometimes."""
        some = self.rng.sample(self.ids, self.rng.randint(1, 4))
        patience = self.rng.uniform(0.0, 0.3) if self.rng.random() < 0.3 else 60.0
        with anyio.move_on_after(patience) as scope:
            await self.rng.choice([self.put, self.put, self.get, self.clear])(some)
        assert not scope.cancelled_caught or patience < 60.0

    async def put(self, ids: list[str]) -> None:
        """Put a value that was never there before."""
        self.value += 1.0
        fields = {"x": torch.full((len(ids), 2), self.value)}
        await self._change(ids, self.value, self.client.put_samples(ids, "p", fields, timeout_s=5.0))

    async def clear(self, ids: list[str]) -> None:
        """Clear."""
        await self._change(ids, None, self.client.clear_samples(ids, "p", timeout_s=5.0))

    async def _change(self, ids: list[str], value: float | None, call: Coroutine[Any, Any, object]) -> None:
        """Make a call after which the rows have a value, None: are gone; where it fails, they may have it."""
        before = {i: set(self.may[i]) for i in ids}
        for i in ids:
            self.may[i].add(value)
        try:
            await call
        except DataPlaneError as err:
            if not err.ambiguous:
                self.may.update(before)
            return
        for i in ids:
            self.may[i] = {value}

    async def get(self, ids: list[str]) -> None:
        """Read, and compare each row with what may be there; what is seen is what is there."""
        try:
            got = await self.client.get_samples(ids, "p", ["x"], timeout_s=5.0)
            came, failed = ids, {}
        except PartialReadError as err:
            got, came = err.rows, err.ok.sample_ids
            failed = {ids[at]: e for at, e in err.errors.items()}
        except DataPlaneError as err:
            if isinstance(err, SampleNotFound):
                assert any(None in self.may[i] for i in ids)
            return
        for i, row in zip(came, got["x"], strict=True):
            assert float(row[0]) == float(row[1])
            assert float(row[0]) in self.may[i], (i, row, self.may[i])
        for i, problem in failed.items():
            assert not isinstance(problem, SampleNotFound) or None in self.may[i], (i, self.may[i])


class Consumer:
    """Claims and reads; gives up on a claim at a random moment, sometimes."""

    def __init__(self, rig: Rig, rng: random.Random, claimed: list[str]) -> None:
        self.client, self.rng, self.claimed = rig.client, rng, claimed

    async def run(self) -> None:
        """Go on until nothing comes any more."""
        for _ in range(30):
            with anyio.move_on_after(self.rng.uniform(0.0, 0.2) if self.rng.random() < 0.2 else 30.0):
                try:
                    await self.step()
                except ClaimNotReady:
                    return
                except DataPlaneError:
                    continue

    async def step(self) -> None:
        """Claim some and compare what is read with what was put."""
        meta = await self.client.claim_meta("q", "t", ["x"], 4, timeout_s=2.0, min_batch_size=1)
        self.claimed.extend(meta.sample_ids)
        got = await self.client.get_data(meta, timeout_s=5.0)
        assert got["x"][:, 0].tolist() == [float(i[1:].split("-")[0]) for i in meta.sample_ids]


async def produce(rig: Rig) -> None:
    """Put what is to be claimed, without faults."""
    for n in range(20):
        await rig.plain.put_samples([f"q{n}-{i}" for i in range(3)], "q", {"x": torch.full((3, 2), float(n))})
        await anyio.sleep(0.3)


async def check_claims(rig: Rig, claimed: list[str]) -> None:
    """Each sample was given to one claim, or is still there to be claimed."""
    assert len(claimed) == len(set(claimed))
    left = (await rig.plain.claim_meta("q", "t", ["x"], 1000, blocking=False)).sample_ids
    held = {i for c in await rig.plain.list_claims("q", "t") for i in c.sample_ids}
    assert set(claimed).isdisjoint(left)
    assert held == set(claimed) | set(left) == {f"q{n}-{i}" for n in range(20) for i in range(3)}


async def check_rows(rig: Rig, writers: list[Writer]) -> None:
    """Each row is what its writer may find there."""
    there = set(rig.transport.plane.partitions["p"].rows)
    for writer in writers:
        for i in writer.ids:
            value = float((await rig.plain.get_samples([i], "p", ["x"]))["x"][0, 0]) if i in there else None
            assert value in writer.may[i], (i, value, writer.may[i])


@virtual
@pytest.mark.parametrize("seed", range(6))
async def test_nothing_is_lost_doubled_or_invented(seed: int) -> None:
    """Rows are whole and of the last put; each sample is claimed once; no call hangs; nothing is left behind."""
    config = {"storage_capacity": 10_000}
    async with Rig(storm(seed), hosts=2, ports=3, checksum=True, config=config, attempt_timeout_s=0.5) as rig:
        owner, rig.client = rig.client, rig.attach(MemoryTransport(rig.transport.attach_config(), bootstrap=False))
        await rig.plain.register_partition("q", ["x"], 100, ["t"])
        writers = [Writer(rig, f"w{n}-", random.Random(f"{seed}:{n}")) for n in range(6)]
        claimed: list[str] = []
        consumers = [Consumer(rig, random.Random(f"{seed}:c{n}"), claimed) for n in range(3)]
        async with anyio.create_task_group() as group:
            group.start_soon(produce, rig)
            for worker in (*writers, *consumers):
                group.start_soon(worker.run)
        assert rig.leftovers() == {}
        rig.plan.stop()
        await anyio.sleep(100.0)
        await rig.client.ping()
        await rig.client.close()
        assert len(rig.client.env.pending_outcomes) == 0
        assert rig.slots()["writing"] == rig.slots()["reading"] == 0
        await check_claims(rig, claimed)
        await check_rows(rig, writers)
        await owner.close()
