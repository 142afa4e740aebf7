"""Writers and readers of the stress run, each in a process of its own.

Rows of partition ``train`` are put, claimed by one reader, read and popped; some are cleared or put again meanwhile.
Rows of ``store`` belong to one writer, which replaces, clears and reads them, while the readers read them as well.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from asyncdp import stack
from asyncdp.errors import (
    ClaimLost,
    ClaimNotReady,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.directory.requests import locating
from tests.chaos.ucxx_stress_rows import FIELDS, WrongBytesError, fields_of, lengths, versions_of

__all__ = ["FLOORS", "GROUP", "GROUPS", "STORE", "TRAIN", "play", "store_ids"]

TRAIN, STORE = "train", "store"
#: Groups of stored rows per writer, and rows of a group, which are always put together.
GROUPS, GROUP = 6, 3
#: File in which each writer tells the readers what it knows to be stored: one int64 per group.
FLOORS = "floors"
CUT = object()
TIMEOUT_S = 20.0


def store_ids(writer: int, group: int) -> list[str]:
    """Ids of a group of stored rows."""
    return [f"s{writer}-{group}-{at}" for at in range(GROUP)]


class Role:
    """What both kinds have: a client, a random source, a journal, an order to stop."""

    def __init__(self, number: int, told: dict[str, Any], order: Connection) -> None:
        self.number = number
        self.name = f"{type(self).__name__.lower()}{number}"
        self.rng = Random(f"{told['seed']} {self.name}")
        self.cut_chance: float = told["cut_chance"]
        self.counts: Counter[str] = Counter()
        self.stopping = False
        self._order = order
        folder = Path(told["folder"])
        self._journal = (folder / f"{self.name}.journal").open("w", encoding="utf-8")
        self.floors = np.memmap(folder / FLOORS, np.int64, "r+", shape=(told["writers"], GROUPS))
        transport = UCXXTransport({**told["config"], "owner": self.name}, bootstrap=False)
        self.client = stack(transport, attempt_timeout_s=8.0)

    def note(self, what: str, ids: list[str]) -> None:
        """Write down what became of rows."""
        self._journal.write(json.dumps([what, ids]) + "\n")

    async def cut(self, what: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a call, or cancel it at a random moment: then CUT. Typed errors are the caller's."""
        self.counts[what] += 1
        task = asyncio.ensure_future(make())
        if self.rng.random() < self.cut_chance:
            await asyncio.sleep(0.05 * self.rng.random() ** 3)
            task.cancel()
        try:
            return await task
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            return CUT
        except DataPlaneError as err:
            self.counts[f"{type(err).__name__} of {what}"] += 1
            raise

    async def rows(self, what: str, make: Callable[[], Coroutine[Any, Any, Any]], ids: list[str]) -> dict[str, int]:
        """Read and check rows; versions of those that came. Only rows that are gone may be missing."""
        try:
            came = await self.cut(what, make)
        except PartialReadError as err:
            for problem in err.errors.values():
                self.check_gone(problem)
            versions = versions_of(err.ok.sample_ids, err.rows)
        except (SampleNotFound, StaleSlotError):
            return {}
        else:
            if came is CUT:
                return await self.rows(what, make, ids)
            versions = versions_of(ids, came)
        self.counts["rows read"] += len(versions)
        return versions

    @staticmethod
    def check_gone(problem: DataPlaneError) -> None:
        """Any other error than that the row is gone goes up."""
        if not isinstance(problem, (SampleNotFound, StaleSlotError)):
            raise problem

    async def work(self) -> None:
        """Do one thing."""
        raise NotImplementedError

    async def finish(self) -> None:
        """Bring to an end what others wait for."""

    async def run(self) -> None:
        """Work until told to stop; then tell what was done."""
        torch.set_num_threads(1)
        while not self._order.poll():
            await self.work()
        self._order.recv()
        self.cut_chance = 0.0
        self.stopping = True
        await self.finish()
        await self.client.close()
        self._journal.close()
        self._order.send(dict(self.counts))


class Writer(Role):
    """Puts rows to train on, and keeps rows of its own."""

    def __init__(self, number: int, told: dict[str, Any], order: Connection) -> None:
        super().__init__(number, told, order)
        self._next = 0
        self._recent: list[list[str]] = []
        self._version = 0
        #: Per group the versions that it may have; None: absent.
        self._may_be: list[set[int | None]] = [{None} for _ in range(GROUPS)]

    async def work(self) -> None:
        """Choose."""
        work = self.rng.choices(
            (self.put, self.put_again, self.clear, self.keep, self.drop, self.check), (8, 1, 1, 4, 1, 4)
        )
        await work[0]()

    async def _put(self, partition: str, ids: list[str], version: int) -> str:
        """Put rows: acked, maybe, or absent."""
        fields = fields_of(ids, version, lengths(self.rng, len(ids)))
        try:
            done = await self.cut("put", lambda: self.client.put_samples(ids, partition, fields, timeout_s=TIMEOUT_S))
        except DataPlaneNotReady:
            await asyncio.sleep(0.05 * self.rng.random())
            return "absent"
        except DataPlaneError as err:
            return "maybe" if err.ambiguous else "absent"
        return "maybe" if done is CUT else "acked"

    async def put(self) -> None:
        """Put rows that nobody ever put."""
        self._next += 1
        ids = [f"{self.name}-{self._next}-{at}" for at in range(self.rng.randint(1, 6))]
        self.note("put", ids)
        became = await self._put(TRAIN, ids, self._next)
        self.note(became, ids)
        if became != "absent":
            self._recent = [*self._recent[-9:], ids]

    async def put_again(self) -> None:
        """Put rows again; whoever claimed them meanwhile gets the newer ones, or has popped them already."""
        if self._recent:
            ids = self.rng.choice(self._recent)
            self._next += 1
            self.note("put", ids)
            self.note(await self._put(TRAIN, ids, self._next), ids)

    async def clear(self) -> None:
        """Clear rows that may be claimed, read or popped by now."""
        if self._recent:
            ids = self._recent.pop(self.rng.randrange(len(self._recent)))
            self.note("clearing", ids)
            await self.cut("clear", lambda: self.client.clear_samples(ids, TRAIN))

    async def keep(self) -> None:
        """Put or replace a group of rows."""
        group = self.rng.randrange(GROUPS)
        self._version += 1
        version = self._version
        became = await self._put(STORE, store_ids(self.number, group), version)
        if became == "acked":
            self._may_be[group] = {version}
            self.floors[self.number, group] = version
        elif became == "maybe":
            self._may_be[group].add(version)

    async def drop(self) -> None:
        """Clear a group."""
        group = self.rng.randrange(GROUPS)
        ids = store_ids(self.number, group)
        done = await self.cut("clear", lambda: self.client.clear_samples(ids, STORE))
        self._may_be[group] = {None} if done is not CUT else {*self._may_be[group], None}

    async def check(self) -> None:
        """Read a group of its own: what nobody else changes is just as it was left, and whole."""
        group = self.rng.randrange(GROUPS)
        ids = store_ids(self.number, group)
        may_be = self._may_be[group]
        came = await self.rows("get", lambda: self.client.get_samples(ids, STORE, FIELDS, timeout_s=TIMEOUT_S), ids)
        seen = {came.get(sample_id) for sample_id in ids}
        if not seen <= may_be or (len(may_be) == 1 and len(seen) > 1):
            raise WrongBytesError(f"{ids} came as {came} where {may_be} were possible")

    async def finish(self) -> None:
        """Clear what it keeps, so that nothing is left."""
        for group in range(GROUPS):
            await self.client.clear_samples(store_ids(self.number, group), STORE)


class Reader(Role):
    """Claims, reads and pops rows to train on, and looks at what writers keep."""

    def __init__(self, number: int, told: dict[str, Any], order: Connection) -> None:
        super().__init__(number, told, order)
        self._seen = np.zeros_like(self.floors)

    async def work(self) -> None:
        """Choose."""
        await (self.train() if self.rng.random() < 0.6 else self.look())

    async def train(self) -> bool:
        """Claim a batch and see it through; whether there was one."""
        try:
            meta = await self.cut(
                "claim",
                lambda: self.client.claim_meta(TRAIN, "train", FIELDS, 8, timeout_s=1.0, min_batch_size=1),
            )
        except ClaimNotReady:
            return False
        except DataPlaneTimeout:  # on a busy machine; what it may have claimed is given back, as after a cancel
            return True
        if meta is CUT:
            return True
        ids = list(meta.sample_ids)
        self.note("claimed", ids)
        if not self.stopping and self.rng.random() < 0.1:
            await self.each("release", self.client.release_claim, meta)
            self.note("released", ids)
            return True
        came = await self.rows("get_data", lambda: self.client.get_data(meta, timeout_s=TIMEOUT_S), ids)
        gone = [sample_id for sample_id in ids if sample_id not in came]
        self.note("gone", gone)
        await self.each("pop", lambda rows: self.client.pop(rows, TRAIN), meta)
        if self.rng.random() < 0.2:
            await self.late(meta, ids)
        return True

    async def each(self, what: str, verb: Callable[[Any], Coroutine[Any, Any, Any]], meta: Any) -> None:
        """Pop or release a batch; row by row where some of it, cleared and put anew, is not this reader's any more."""
        if not await self.through(what, lambda: verb(meta)) and meta.size > 1:
            for at in range(meta.size):
                await self.each(what, verb, meta.subset([at]))

    async def through(self, what: str, make: Callable[[], Coroutine[Any, Any, Any]]) -> bool:
        """Do something whatever it takes; False where the claim was lost, perhaps to the call that was cut off."""
        while True:
            try:
                done = await self.cut(what, make)
            except ClaimLost:
                return False
            except DataPlaneError as err:
                if not err.ambiguous:
                    raise
            else:
                if done is not CUT:
                    return True

    async def late(self, meta: Any, ids: list[str]) -> None:
        """Read by a reference to rows that were popped: nothing may come, even if they live again."""
        came = await self.rows("late get_data", lambda: self.client.get_data(meta, timeout_s=TIMEOUT_S), ids)
        if came:
            raise WrongBytesError(f"rows that were popped came as {came}")

    async def look(self) -> None:
        """Read rows of writers: never older than what the writer, or this reader itself, knows to be stored."""
        writer, group = self.rng.randrange(len(self.floors)), self.rng.randrange(GROUPS)
        least = max(int(self.floors[writer, group]), int(self._seen[writer, group]))
        ids = store_ids(writer, group)
        came = await self.rows("get", lambda: self.client.get_samples(ids, STORE, FIELDS, timeout_s=TIMEOUT_S), ids)
        if came and min(came.values()) < least:
            raise WrongBytesError(f"{ids} came as {came}, though version {least} was stored before")
        self._seen[writer, group] = max([least, *came.values()])

    async def finish(self) -> None:
        """Train on what is left, until there has been nothing for a while."""
        empty_since = time.monotonic()
        while time.monotonic() - empty_since < 1.5:
            if await self.train():
                empty_since = time.monotonic()


def play(kind: str, number: int, order: Connection) -> None:
    """Be a writer or a reader; the first thing that is heard is what to know, the next that it is time to stop."""
    role: type[Role] = Writer if kind == "writer" else Reader
    if number % 2:  # no rows are too few to be read while the directory is asked whether they moved
        locating.SMALL = 0
    try:
        asyncio.run(role(number, order.recv(), order).run())
    except BaseException as err:
        order.send(f"{kind} {number}: {type(err).__name__}: {err}")
        raise
