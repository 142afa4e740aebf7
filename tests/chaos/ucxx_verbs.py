"""Every verb, again and again, each answer compared with what it has to be."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from asyncdp.errors import (
    ClaimNotReady,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
)
from tests.chaos.ucxx_rows import FIELDS, WrongBytesError, fields_of, versions

if TYPE_CHECKING:
    from asyncdp.client import Client
    from tests.chaos.ucxx_tally import Tally

__all__ = ["TIMEOUT_S", "Verbs"]

TIMEOUT_S = 4.0
KEPT = [f"k{at}" for at in range(8)]
#: What may be said of a row that is there, while a fault lasts.
CONNECTIVITY = (DataPlaneUnavailable, DataPlaneTimeout, DataPlaneNotReady)
BREATH_S = 0.02


class Verbs:
    """What one client asks, and what it knows about the answers.

    Attributes:
        tally: Counts of the fault that is under way.
        may_lose: Whether rows may be gone: a host was killed for good, or began anew.
        absent: Ids that were removed, or never put: they must not come back.
    """

    def __init__(self, client: Client, tally: Tally) -> None:
        self.client = client
        self.tally = tally
        self.may_lose = False
        self.kept = list(KEPT)
        self.absent: set[str] = set()
        self._kept_meta: Any = None
        self._numbers = itertools.count()
        self._version = 0
        self._possible = {0}
        self._held: set[str] = set()
        self._given: set[str] = set()

    async def _call(self, verb: str, work: Any) -> Any:
        return await self.tally.call(verb, work)

    def _wrong(self, what: str) -> None:
        self.tally.wrong.append(what)

    async def prepare(self) -> None:
        """Put what stays, so that each host has some of it; claim half of it, for its handles."""
        for name in ("p", "c", "rollouts"):
            await self.client.register_partition(name, FIELDS, 64, ["train", "score"])
        for sample_id in self.kept:
            await self.client.put_samples([sample_id], "p", fields_of([sample_id], 1))
        self._kept_meta = await self.client.claim_meta("p", "score", FIELDS, len(self.kept), timeout_s=10)
        await self.client.put_samples(["r"], "p", fields_of(["r"], 0))

    def loops(self) -> list[Any]:
        """What runs at the same time: one round each."""
        return [self.reads, self.writes, self.put_to_pop, self.removals, self.looks]

    async def until(self, over: asyncio.Event) -> None:
        """Run all of it until the event is set; rounds are finished."""

        async def again(work: Any) -> None:
            while not over.is_set():
                await work()
                await asyncio.sleep(BREATH_S)

        async with asyncio.TaskGroup() as group:
            for work in self.loops():
                group.create_task(again(work))

    async def restock(self, lost: Sequence[str]) -> None:
        """Evict what is lost, and put it anew."""
        gone = [sample_id for sample_id in self.kept if sample_id in lost]
        held = [sample_id for sample_id in self._kept_meta.sample_ids if sample_id not in gone]
        self._kept_meta = self._kept_meta.subset(
            [at for at, sample_id in enumerate(self._kept_meta.sample_ids) if sample_id in held]
        )
        await self.client.evict(sorted(lost), "p", timeout_s=TIMEOUT_S)
        for sample_id in gone:
            await self.client.put_samples([sample_id], "p", fields_of([sample_id], 1), timeout_s=TIMEOUT_S)

    # -- reads

    def _rows(self, verb: str, ids: Sequence[str], answer: Any) -> dict[str, int]:
        """Check what a read brought; returns the versions."""
        errors: list[Any] = []
        came: dict[str, int] = {}
        try:
            if isinstance(answer, PartialReadError):
                came = versions(answer.ok.sample_ids, answer.rows)
                errors = list(answer.errors.values())
            elif isinstance(answer, DataPlaneError):
                errors = [answer]
            else:
                came = versions(ids, answer)
        except WrongBytesError as err:
            self._wrong(f"{verb}: {err}")
        for err in errors:
            if not isinstance(err, CONNECTIVITY) and not (
                self.may_lose and isinstance(err, (SampleNotFound, StaleSlotError))
            ):
                self._wrong(f"{verb}: a row that is there is {err!r}")
        return came

    async def reads(self) -> None:
        """Read rows that nobody touches: by id, and by a claim of long ago."""
        got = await self._call("get_samples", self.client.get_samples(self.kept, "p", FIELDS, timeout_s=TIMEOUT_S))
        first = self._rows("get_samples", self.kept, got)
        meta = self._kept_meta
        got = await self._call("get_data", self.client.get_data(meta, FIELDS, timeout_s=TIMEOUT_S))
        second = self._rows("get_data", meta.sample_ids, got)
        if set(first.values()) | set(second.values()) > {1}:
            self._wrong("a row that nobody replaced has another version")

    # -- writes

    async def writes(self) -> None:
        """Replace a row and read it: the newest version that was acknowledged, or one whose fate is open."""
        self._version += 1
        put = self.client.put_samples(["r"], "p", fields_of(["r"], self._version), timeout_s=TIMEOUT_S)
        answer = await self._call("put_samples (replace)", put)
        if not isinstance(answer, DataPlaneError):
            self._possible = {self._version}
        elif answer.ambiguous:
            self._possible.add(self._version)
        got = await self._call("get_samples", self.client.get_samples(["r"], "p", FIELDS, timeout_s=TIMEOUT_S))
        for version in self._rows("get_samples", ["r"], got).values():
            if version not in self._possible:
                self._wrong(f"version {version} of a row came where {sorted(self._possible)} were possible")
        await self._call(
            "put_samples (tags)",
            self.client.put_samples(["r"], "p", tags=[{"version": self._version}], timeout_s=TIMEOUT_S),
        )

    # -- claims

    async def put_to_pop(self) -> None:
        """Put, claim, give back, claim again, pop: nothing is claimed twice."""
        number = next(self._numbers)
        ids = [f"c{number}-{at}" for at in range(2)]
        put = await self._call("put_samples", self.client.put_samples(ids, "c", fields_of(ids, 1), timeout_s=TIMEOUT_S))
        if isinstance(put, DataPlaneError) and not put.ambiguous:
            return  # whoever claims them from now on is wrong
        self._given.update(ids)
        meta = await self._claim(sure=not isinstance(put, DataPlaneError))
        if meta is None:
            return
        answer = await self._call("release_claim", self.client.release_claim(meta, timeout_s=TIMEOUT_S))
        if not isinstance(answer, DataPlaneError) or answer.ambiguous:
            self._held.difference_update(meta.sample_ids)
        if isinstance(answer, DataPlaneError):
            return
        meta = await self._claim(sure=True)
        if meta is None:
            return
        rows = await self._call("get_data", self.client.get_data(meta, FIELDS, timeout_s=TIMEOUT_S))
        self._rows("get_data", meta.sample_ids, rows)
        await self._call("pop", self.client.pop(meta, "c", timeout_s=TIMEOUT_S))

    async def _claim(self, *, sure: bool) -> Any:
        claim = self.client.claim_meta("c", "train", FIELDS, 4, timeout_s=TIMEOUT_S, min_batch_size=1)
        meta = await self._call("claim_meta", claim)
        if isinstance(meta, DataPlaneError):
            if sure and isinstance(meta, ClaimNotReady):
                self._wrong(f"claim_meta: rows that are ready were not given: {meta}")
            return None
        if self._held & set(meta.sample_ids):
            self._wrong(f"claimed twice: {sorted(self._held & set(meta.sample_ids))}")
        if not set(meta.sample_ids) <= self._given:
            self._wrong(f"claimed though nobody put it: {sorted(set(meta.sample_ids) - self._given)}")
        self._held.update(meta.sample_ids)
        return meta

    # -- removals

    async def removals(self) -> None:
        """Put three rows and remove them in three ways: they are gone, and stay so."""
        number = next(self._numbers)
        for how in ("clear_samples", "pop", "evict"):
            sample_id = f"z{number}-{how}"
            put = self.client.put_samples([sample_id], "p", fields_of([sample_id], 1), timeout_s=TIMEOUT_S)
            answer = await self._call("put_samples", put)
            if isinstance(answer, DataPlaneError) and not answer.ambiguous:
                self.absent.add(sample_id)
            answer = await self._call(how, getattr(self.client, how)([sample_id], "p", timeout_s=TIMEOUT_S))
            if not isinstance(answer, DataPlaneError):
                self.absent.add(sample_id)
            if sample_id in self.absent:
                await self._gone(sample_id)

    async def _gone(self, sample_id: str) -> None:
        got = self.client.get_samples([sample_id], "p", FIELDS, timeout_s=TIMEOUT_S)
        answer = await self._call("get_samples (gone)", got)
        if not isinstance(answer, (SampleNotFound, *CONNECTIVITY)):
            self._wrong(f"{sample_id!r} was removed, and a read says {answer!r}")

    async def still_gone(self) -> None:
        """Look for everything that was ever removed: nothing came back."""
        for sample_id in sorted(self.absent):
            await self._gone(sample_id)

    # -- looks

    async def looks(self) -> None:
        """Ask what is there."""
        client, t = self.client, TIMEOUT_S
        await self._call("ping", client.ping(timeout_s=t))
        silent = await self._listed()
        depth = await self._call("depth", client.depth("p", timeout_s=t))
        silent |= await self._listed()
        if not isinstance(depth, DataPlaneError) and depth < len(self.kept) and not self.may_lose and not silent:
            self._wrong(f"depth says {depth} where {len(self.kept)} rows stay")
        claims = await self._call("list_claims", client.list_claims("p", "score", timeout_s=t))
        if not isinstance(claims, DataPlaneError) and not self.may_lose and not claims:
            self._wrong("list_claims names none of the claims that are held")
        partitions = await self._call("list_partitions", client.list_partitions(timeout_s=t))
        if not isinstance(partitions, DataPlaneError) and not {"p", "c"} <= {one.partition_id for one in partitions}:
            self._wrong(f"list_partitions says {partitions!r}")
        await self._call("check_consumption_status", client.check_consumption_status("p", ["train"], timeout_s=t))
        await self._call("describe", client.describe("p", timeout_s=t))
        await self._call("wait_partition", client.wait_partition("p", timeout_s=t))
        await self._call("register_partition", client.register_partition("p", FIELDS, 1, ["train"], timeout_s=t))
        await self._call("release_claims", client.release_claims("c", "nobody", timeout_s=t))
        await self._call("register_partition", client.register_partition("o", [], 1, [], timeout_s=t))
        await self._call("drop_partition", client.drop_partition("o", timeout_s=t))

    async def _listed(self) -> bool:
        """Whether rows are named as lost, or might be: a host that is silent holds them, until it speaks again."""
        groups = await self._call("list_metadata", self.client.list_metadata("p", timeout_s=TIMEOUT_S))
        if isinstance(groups, DataPlaneError):
            return True
        missing = {*self.kept, "r"}.difference(*[group.keys for group in groups])
        if missing and not self.may_lose:
            self._wrong(f"list_metadata does not name {sorted(missing)}")
        return any(group.lost_keys for group in groups)
