"""Scorers that are slower than eviction, and a recovery loop that evicts by an old listing, on real planes.

    python -m tests.chaos slow_scorer [--seconds 60] [--on memory,transfer_queue,ucxx]

Ids are used again as soon as they are free, so what is written or evicted late meets rows that are gone and rows that
live again. Prints an account per plane; the exit code is not 0 if a row without its producer's tags was seen, a row got
another row's score, a row vanished that nobody removed, or depth and capacity are not what they should be at the end.
"""

# ruff: noqa: T201 - it prints its report
from __future__ import annotations

import argparse
import asyncio
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncdp import (
    ClaimNotReady,
    DataPlaneBadRequest,
    DataPlaneNotReady,
    DataPlaneTimeout,
    PartialReadError,
    StaleSlotError,
    stack,
    write_columns,
)

if TYPE_CHECKING:
    from asyncdp import KVBatchMeta
    from asyncdp.testing.contract import Opener, Plane

__all__ = ["Scene", "main", "run"]

#: Samples that the plane holds: fewer than there are ids, so that rows that come alive fill it soon.
CAPACITY = 48
GROUPS = 30
GROUP = 2
SCORERS = 6
#: A weight version lives so long, in seconds; groups that are more than so many versions old are stale.
VERSION_S = 0.05
KEPT_VERSIONS = 4
#: The longest that a scorer takes, in seconds: three times as long as a row lives.
SCORING_S = 0.6
CLAIM_S = 1.0
PARTITION = "rollouts"


class Scene:
    """Everybody who works on one plane.

    Attributes:
        counts: What happened how often.
        wrong: What must not be.
    """

    def __init__(self, plane: Plane, seed: int = 0) -> None:
        """Attach one client for each part; ``plane`` is an open plane of the contract suite."""
        self.plane = plane
        self.rng = random.Random(seed)
        self.owner = stack(plane.transport)
        self.clients = [stack(plane.attach({"owner": f"part{at}"})) for at in range(4)]
        self.producer, self.scorer, self.trainer, self.controller = self.clients
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.version = 0
        self.made: set[int] = set()
        self.removed: set[int] = set()
        self._lives = itertools.count(1)
        self._over = anyio.Event()

    # -- the parts

    async def produce(self) -> None:
        """Put groups under ids that are free; each row of one put is stamped with the number of its life."""
        for number in itertools.cycle(range(GROUPS)):
            if self._over.is_set():
                return
            life = next(self._lives)
            ids = [f"r{number}_g{at}" for at in range(GROUP)]
            tags = {"life": life, "group_id": f"r{number}", "weight_version": self.version, "expected_num_keys": GROUP}
            fields = {"x": torch.full((GROUP,), float(life))}
            try:
                await self.producer.put_samples(ids, PARTITION, fields, [dict(tags) for _ in ids], only="new")
            except DataPlaneNotReady:
                self.counts["puts that found the plane full"] += 1
                await anyio.sleep(0.02)
            except DataPlaneBadRequest:
                self.counts["puts that found an id in use"] += 1
                await anyio.sleep(0.005)
            else:
                self.counts["groups put"] += 1
                self.made.add(life)
                await anyio.sleep(0.005)

    async def train_on(self) -> None:
        """Count weight versions."""
        while not self._over.is_set():
            await anyio.sleep(VERSION_S)
            self.version += 1

    async def score(self) -> None:
        """Claim, take longer than a row lives, write the score of what was claimed."""
        for turn in itertools.count(self.rng.randrange(3)):
            meta = await self._claim(self.scorer, "score", ["x"])
            if meta is None:
                return
            await anyio.sleep(self.rng.uniform(0.0, SCORING_S))
            scores = torch.tensor([float(row["life"]) for row in meta.tags or ()])
            before = len(meta.sample_ids)
            try:
                if turn % 3 == 0:
                    await self.scorer.put_samples(meta, PARTITION, {"score": scores})
                elif turn % 3 == 1:
                    before -= (await self.scorer.put_samples(meta, PARTITION, {"score": scores}, stale="skip")).size
                    self.counts["rows that were skipped"] += before
                else:
                    await write_columns(self.scorer, meta, {"score": scores})
            except StaleSlotError as err:
                self.counts["puts that came too late"] += 1
                if not set(err.sample_ids or ()) <= set(meta.sample_ids) or not err.sample_ids:
                    self.wrong.append(f"StaleSlotError names {err.sample_ids}, put were {meta.sample_ids}")
            else:
                self.counts["puts of scores"] += 1

    async def train(self) -> None:
        """Claim what is scored, compare each score with its row, pop it."""
        while True:
            meta = await self._claim(self.trainer, "train", ["x", "score"])
            if meta is None:
                return
            try:
                rows = await self.trainer.get_data(meta, ["x", "score"])
            except (StaleSlotError, PartialReadError):
                self.counts["claims that were evicted before they were read"] += 1
                continue
            lives = [float(row["life"]) for row in meta.tags or ()]
            if rows["x"].tolist() != lives or rows["score"].tolist() != lives:
                self.wrong.append(f"lives {lives}: x {rows['x'].tolist()}, score {rows['score'].tolist()}")
            self.removed.update(int(life) for life in lives)
            await self.trainer.pop(meta, PARTITION)
            self.counts["rows trained"] += meta.size

    async def evict(self) -> None:
        """List, check each row that is there, hesitate, and evict by that listing what is stale in it."""
        while not self._over.is_set():
            groups = await self.controller.list_metadata(PARTITION)
            for group in groups:
                self._check_tags(group)
            stale = [g for g in groups if (g.weight_version or 0) < self.version - KEPT_VERSIONS]
            await anyio.sleep(self.rng.uniform(0.0, 0.1))
            for group in stale:
                self.removed.update(row["life"] for row in group.tags if "life" in row)
                await self.controller.evict(group, PARTITION)
                self.counts["evictions by group"] += 1

    def _check_tags(self, group: Any) -> None:
        for key, row in zip(group.keys, group.tags, strict=True):
            if "life" not in row:
                self.wrong.append(f"{key} is there without its tags: {row}")
        if len(group.keys) > GROUP:
            self.wrong.append(f"group {group.group_id} has {group.keys}")

    async def _claim(self, client: Any, task: str, fields: list[str]) -> KVBatchMeta | None:
        """Claim a group; None once the run is over."""
        while not self._over.is_set():
            try:
                return await client.claim_meta(PARTITION, task, fields, GROUP, timeout_s=CLAIM_S)  # type: ignore[no-any-return]
            except (ClaimNotReady, DataPlaneTimeout):  # the latter where a busy machine left a look without an answer
                continue
        return None

    # -- the run

    async def run(self, seconds: float) -> None:
        """Work for so many seconds, then compare what is there with what should be."""
        try:
            await self.owner.register_partition(
                PARTITION, ["x", "score"], CAPACITY, ["score", "train"], grpo_group_size=GROUP
            )
            async with anyio.create_task_group() as group:
                for part in (self.produce, self.train_on, self.train, self.evict, *[self.score] * SCORERS):
                    group.start_soon(part)
                await anyio.sleep(seconds)
                self._over.set()
            await self._check_rows()
        finally:
            for client in (*self.clients, self.owner):
                await client.close()
        left = self.plane.leftovers()
        if left:
            self.wrong.append(f"left behind: {left}")

    async def _check_rows(self) -> None:
        """What was put and not removed is there, and nothing else; all of it gone, there is room for as much again."""
        groups = await self.owner.list_metadata(PARTITION)
        there = Counter(row.get("life") for group in groups for row in group.tags)
        self._same("rows by life", there, dict.fromkeys(self.made - self.removed, GROUP))
        self._same("depth", await self.owner.depth(PARTITION), len(groups))
        self._same("samples", (await self.owner.describe(PARTITION)).size, there.total())
        for group in groups:
            await self.owner.evict(group, PARTITION)
        self._same("depth of the empty plane", await self.owner.depth(PARTITION), 0)
        self._same("samples of the empty plane", (await self.owner.describe(PARTITION)).size, 0)
        ids = [f"f{at}_g{member}" for at in range(CAPACITY // GROUP) for member in range(GROUP)]
        await self.owner.put_samples(ids, PARTITION, {"x": torch.zeros(len(ids))})
        try:
            await self.owner.put_samples(["one more"], PARTITION, {"x": torch.zeros(1)}, timeout_s=0.5)
        except DataPlaneNotReady:
            pass
        else:
            self.wrong.append("the plane takes more than its capacity")
        self._same("samples of the full plane", (await self.owner.describe(PARTITION)).size, CAPACITY)

    def _same(self, what: str, there: Any, wanted: Any) -> None:
        if there != wanted:
            self.wrong.append(f"{what}: {there}, not {wanted}")


async def run(opener: Opener, seconds: float, seed: int = 0) -> Scene:
    """Run the scene on a fresh plane; returns it with its account."""
    async with opener({"storage_capacity": CAPACITY}) as plane:
        scene = Scene(plane, seed)
        await scene.run(seconds)
    return scene


def _memory(seconds: float) -> Scene:
    from asyncdp import MemoryTransport
    from tests.contract.memory_planes import memory

    return asyncio.run(run(memory(MemoryTransport), seconds))


def _transfer_queue(seconds: float) -> Scene:
    from tests.transfer_queue.opener import CLUSTER, on_ray

    try:
        return asyncio.run(run(on_ray(), seconds))
    finally:
        CLUSTER.close()


def _ucxx(seconds: float) -> Scene:
    from tests.ucxx.opener import PLANES, on_lane

    try:
        return asyncio.run(run(on_lane(), seconds))
    finally:
        PLANES.close()


ON: Mapping[str, Callable[[float], Scene]] = {"memory": _memory, "transfer_queue": _transfer_queue, "ucxx": _ucxx}


def main(argv: list[str]) -> int:
    """Run it; returns an exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos slow_scorer", description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--on", default=",".join(ON), help="planes, with commas between")
    args = parser.parse_args(argv)
    names = [name.strip() for name in args.on.split(",")]
    unknown = set(names) - set(ON)
    if unknown:
        parser.error(f"no such plane: {sorted(unknown)}; there are {list(ON)}")
    code = 0
    for name in names:
        scene = ON[name](args.seconds)
        print(f"{name}, {args.seconds:g} s: " + ", ".join(f"{n} {what}" for what, n in sorted(scene.counts.items())))
        print("\n".join(f"WRONG {what}" for what in scene.wrong) or "nothing wrong", flush=True)
        code = code or int(bool(scene.wrong))
    return code
