"""Workload on a flow of samples, which are produced, scored, trained on and watched."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from asyncdp.errors import ClaimLost, DataPlaneError, PartialReadError, SampleNotFound, StaleSlotError

from .worker import FLOW, Worker

if TYPE_CHECKING:
    from asyncdp.meta import KVBatchMeta
    from asyncdp.protocol import Stale

__all__ = ["Producer", "Scorer", "Trainer", "Watcher"]

#: Number of waiting groups above which producers pause.
ENOUGH = 12
#: Every n-th group of a producer is put in two parts.
IN_TWO = 4
#: Errors that mean that a sample is gone or claimed by another client.
GONE = (SampleNotFound, StaleSlotError, ClaimLost)


class Producer(Worker):
    """A task that puts groups of new samples into the flow."""

    role = "produces"

    def __init__(self, *args: Any) -> None:
        """Start with the first group."""
        super().__init__(*args)
        self.count = self.depth = 0
        self.choices = [self.produce, self.produce, self.look]

    async def produce(self) -> None:
        """Put a group, mostly in one put, unless enough groups are waiting."""
        if self.depth > ENOUGH:
            await self.look()
            return
        self.count += 1
        size = self.scenario.group_size
        n = size or self.rng.randint(1, 4)
        group = f"{self.name}-{self.count}"
        # Some groups are put in two parts; the first must not be claimable before the second.
        cut = 1 if size is not None and self.count % IN_TWO == 0 else n
        for first, stop in ((0, cut), (cut, n)):
            if first < stop:
                numbers, field = self.values.take(stop - first)
                tags = [{"v": v, "group_id": group, "weight_version": self.count} for v in numbers]
                ids = [f"{group}_g{i}" for i in range(first, stop)]
                await self.verbs.put_samples(ids, FLOW, {"x": field}, tags, timeout_s=self.patience())

    async def look(self) -> None:
        """Query how many groups are waiting."""
        self.depth = await self.verbs.call("depth", FLOW, timeout_s=self.patience())


class Consumer(Worker):
    """Base of the tasks that claim batches of the flow and process them."""

    task: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any) -> None:
        """Start without a claimed batch."""
        super().__init__(*args)
        self.held: list[KVBatchMeta] = []
        self.choices = [self.claim, self.claim, self.go_on]

    async def claim(self) -> None:
        """Claim a batch and process it."""
        size = 4 * (self.scenario.group_size or 1)
        blocking = self.rng.random() < 0.6  # noqa: PLR2004
        meta = await self.verbs.claim_meta(
            FLOW,
            self.task,
            self.needs,
            size,
            timeout_s=self.rng.uniform(0.2, 1.5),
            blocking=blocking,
            min_batch_size=1,
        )
        if meta.size:
            self.held.append(meta)
            if self.rng.random() < 0.1:  # noqa: PLR2004 - some take so long that a lease may end
                await anyio.sleep(self.rng.uniform(0.0, 2.0))
            await self.go_on()

    async def go_on(self) -> None:
        """Continue with the claimed batches, oldest first."""
        if self.held and await self.work(self.held[0]):
            del self.held[0]

    async def work(self, meta: KVBatchMeta) -> bool:
        """Process a batch; return whether it is finished."""
        raise NotImplementedError

    async def read(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """Read a batch; return a meta of the rows that are still present, None if there are none."""
        try:
            await self.verbs.get_data(meta, timeout_s=self.patience())
        except PartialReadError as err:
            if not all(isinstance(e, GONE) for e in err.errors.values()):
                raise
            return meta.drop(err.failed.sample_ids)
        except GONE:
            return None
        return meta

    async def finish(self) -> None:
        """Finish all claimed batches; drop those that a fault removed."""
        while self.held:
            meta = self.held[0]
            try:
                done = await self.work(meta)
            except DataPlaneError:
                done = True
            if done and self.held and self.held[0] is meta:
                del self.held[0]


class Scorer(Consumer):
    """A task that claims produced samples and adds a field."""

    role = "scores"
    task = "score"
    needs = ("x",)

    async def work(self, meta: KVBatchMeta) -> bool:
        """Read ``x`` and put ``y`` to the rows that are still present; sometimes to all rows or none."""
        there = await self.read(meta)
        if there is None:
            return True
        _, field = self.values.take(there.size)
        choices: list[Stale] = ["skip", "skip", "raise"]
        stale = self.rng.choice(choices)
        await self.verbs.put_samples(there, FLOW, {"y": field}, timeout_s=self.patience(), stale=stale)
        return True


class Trainer(Consumer):
    """A task that claims scored samples, reads them, and pops or releases them."""

    role = "trains"
    task = "train"
    needs = ("x", "y")

    async def work(self, meta: KVBatchMeta) -> bool:
        """Read a batch, then pop or release it."""
        await self.read(meta)
        if self.rng.random() < 0.1:  # noqa: PLR2004 - some are given back
            with suppress(ClaimLost):  # a claim is released as a whole or not at all
                await self.verbs.release_claim(meta, timeout_s=self.patience())
                return True
        with suppress(ClaimLost):
            await self.verbs.pop(meta, FLOW, timeout_s=self.patience())
        return True


class Watcher(Worker):
    """A task that queries the flow and changes nothing, except for an occasional eviction."""

    role = "watches"

    def __init__(self, *args: Any) -> None:
        """Set up the queries."""
        super().__init__(*args)
        self.choices = [*[self.look] * 8, self.list, self.evict]

    async def look(self) -> None:
        """Make one query."""
        asked: tuple[Any, ...] = self.rng.choice(
            [
                ("ping",),
                ("depth", FLOW),
                ("check_consumption_status", FLOW, ["train"]),
                ("list_claims", FLOW, "train"),
                ("list_claims", FLOW, "score"),
                ("describe", FLOW),
                ("list_partitions",),
                ("wait_partition", FLOW),
            ]
        )
        await self.verbs.call(*asked, timeout_s=self.patience())

    async def list(self) -> list[Any]:
        """List the groups."""
        groups: list[Any] = await self.verbs.list_metadata(FLOW, timeout_s=self.patience())
        return groups

    async def evict(self) -> None:
        """Evict the oldest group, at random."""
        groups = await self.list()
        if len(groups) > 6:  # noqa: PLR2004 - it is no flow without samples
            keys = groups[0] if self.rng.random() < 0.5 else list(groups[0].keys)  # noqa: PLR2004
            await self.verbs.evict(keys, FLOW, timeout_s=self.patience())
