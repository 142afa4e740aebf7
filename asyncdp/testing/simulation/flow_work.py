"""Work on a flow of samples: they are produced, scored, trained on, and watched."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar

import anyio

from asyncdp.errors import ClaimLost, DataPlaneError, PartialReadError, SampleNotFound, StaleSlotError

from .worker import FLOW, Worker

if TYPE_CHECKING:
    from asyncdp.meta import KVBatchMeta

__all__ = ["Producer", "Scorer", "Trainer", "Watcher"]

#: Groups in the flow above which nobody produces.
ENOUGH = 12
#: Every so many groups one comes in two puts.
IN_TWO = 4
#: What says that a sample is gone.
GONE = (SampleNotFound, StaleSlotError, ClaimLost)


class Producer(Worker):
    """Puts groups of new samples into the flow."""

    role = "produces"

    def __init__(self, *args: Any) -> None:
        """Begin with the first group."""
        super().__init__(*args)
        self.count = self.depth = 0
        self.choices = [self.produce, self.produce, self.look]

    async def produce(self) -> None:
        """Put a group, mostly all of it at once, unless enough is waiting."""
        if self.depth > ENOUGH:
            await self.look()
            return
        self.count += 1
        size = self.scenario.group_size
        n = size or self.rng.randint(1, 4)
        group = f"{self.name}-{self.count}"
        # Some groups come in two puts: until the second nobody may claim the first.
        cut = 1 if size is not None and self.count % IN_TWO == 0 else n
        for first, stop in ((0, cut), (cut, n)):
            if first < stop:
                numbers, field = self.values.take(stop - first)
                tags = [{"v": v, "group_id": group, "weight_version": self.count} for v in numbers]
                ids = [f"{group}_g{i}" for i in range(first, stop)]
                await self.verbs.put_samples(ids, FLOW, {"x": field}, tags, timeout_s=self.patience())

    async def look(self) -> None:
        """See how much is waiting."""
        self.depth = await self.verbs.call("depth", FLOW, timeout_s=self.patience())


class Consumer(Worker):
    """Claims batches of the flow and does something with each."""

    task: ClassVar[str]
    needs: ClassVar[tuple[str, ...]]

    def __init__(self, *args: Any) -> None:
        """Begin with nothing in hand."""
        super().__init__(*args)
        self.held: list[KVBatchMeta] = []
        self.choices = [self.claim, self.claim, self.go_on]

    async def claim(self) -> None:
        """Claim a batch and work on it."""
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
        """Work on what is in hand, oldest first."""
        if self.held and await self.work(self.held[0]):
            del self.held[0]

    async def work(self, meta: KVBatchMeta) -> bool:
        """Do it; returns whether it is done."""
        raise NotImplementedError

    async def read(self, meta: KVBatchMeta) -> KVBatchMeta | None:
        """Read a batch; returns the part of it that is there, None where nothing is."""
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
        """Finish all that is in hand; what a fault took away is let go."""
        while self.held:
            meta = self.held[0]
            try:
                done = await self.work(meta)
            except DataPlaneError:
                done = True
            if done and self.held and self.held[0] is meta:
                del self.held[0]


class Scorer(Consumer):
    """Claims what is produced and adds a field to it."""

    role = "scores"
    task = "score"
    needs = ("x",)

    async def work(self, meta: KVBatchMeta) -> bool:
        """Read x, put y, to the rows that are still there; sometimes to all of them or none."""
        there = await self.read(meta)
        if there is None:
            return True
        _, field = self.values.take(there.size)
        stale = self.rng.choice(["skip", "skip", "raise"])
        await self.verbs.put_samples(there, FLOW, {"y": field}, timeout_s=self.patience(), stale=stale)
        return True


class Trainer(Consumer):
    """Claims what is scored, reads it, pops it; gives some of it back."""

    role = "trains"
    task = "train"
    needs = ("x", "y")

    async def work(self, meta: KVBatchMeta) -> bool:
        """Read, then pop or release."""
        await self.read(meta)
        if self.rng.random() < 0.1:  # noqa: PLR2004 - some are given back
            with suppress(ClaimLost):  # a claim is given back whole, or not at all
                await self.verbs.release_claim(meta, timeout_s=self.patience())
                return True
        with suppress(ClaimLost):
            await self.verbs.pop(meta, timeout_s=self.patience())
        return True


class Watcher(Worker):
    """Looks at the flow and changes nothing, but for an eviction now and then."""

    role = "watches"

    def __init__(self, *args: Any) -> None:
        """Know what to ask."""
        super().__init__(*args)
        self.choices = [*[self.look] * 8, self.list, self.evict]

    async def look(self) -> None:
        """Ask one thing."""
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
        """Evict the oldest group, sometimes."""
        groups = await self.list()
        if len(groups) > 6:  # noqa: PLR2004 - it is no flow without samples
            keys = groups[0] if self.rng.random() < 0.5 else list(groups[0].keys)  # noqa: PLR2004
            await self.verbs.evict(keys, FLOW, timeout_s=self.patience())
