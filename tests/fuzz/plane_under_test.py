"""A plane in memory under its layers, in virtual time, driven step by step from code that is not async."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from asyncdp import MemoryTransport, PartialReadError, SampleNotFound
from asyncdp.testing import FaultPlan, VirtualLoop, faulty_stack
from asyncdp.testing.contract.same import rows_of

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from asyncdp.client import Client

__all__ = ["FIELDS", "PlaneUnderTest", "column", "plain"]

T = TypeVar("T")
CONFIG = {
    "enabled": True,
    "impl": "memory",
    "backend": "simple",
    "storage_capacity": 1 << 20,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.01,
    "memory": {"rows_per_slot": 2, "checksum": True, "ports_per_host": 2},
}
WORDS = ("u", "v", "w")
FIELDS = ("x", "r", "e", "o")


def plain(name: str, number: int) -> Any:
    """Return the value that stands for a number in a field: dense, ragged, one of a vocabulary, or any object."""
    return {
        "x": (float(number), -float(number)),
        "r": (float(number),) * (number % 3),
        "e": WORDS[number % 3],
        "o": {"n": number},
    }[name]


def column(name: str, numbers: list[int]) -> Any:
    """Return such values as they are put."""
    values = [plain(name, number) for number in numbers]
    if name == "x":
        return torch.tensor(values, dtype=torch.float64)
    if name == "r":
        return torch.nested.nested_tensor([torch.tensor(v, dtype=torch.float64) for v in values], layout=torch.jagged)
    return values


def _plain_rows(name: str, leaf: Any) -> list[Any]:
    return [tuple(row.tolist()) if name in ("x", "r") else row for row in rows_of(leaf)]


class PlaneUnderTest:
    """One plane, an observer without faults, and clients by name; ``seed`` None: without faults as well."""

    def __init__(self, seed: int | None) -> None:
        self.seed = seed
        self.loop = VirtualLoop(seed or 0)
        self.made = 0
        self.owner = MemoryTransport(CONFIG)
        self.plane = self.owner.plane
        self.observer = faulty_stack(self.owner, FaultPlan())
        self.clients: dict[str, Client] = {}
        self.plans: dict[str, FaultPlan] = {}

    def run(self, work: Awaitable[T]) -> T:
        """Run a coroutine to its end."""

        async def main() -> T:
            return await work

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch about nested tensors; of clears that found nothing
            return self.loop.run_until_complete(main())

    def client(self, name: str) -> Client:
        """Return the client of this owner."""
        if name not in self.clients:
            self.made += 1
            plan = self.plans[name] = self._plan()
            transport = MemoryTransport({**self.owner.attach_config(), "owner": name}, bootstrap=False)
            self.clients[name] = faulty_stack(transport, plan, rng=random.Random(self.made), close_timeout_s=5.0)
        return self.clients[name]

    def _plan(self) -> FaultPlan:
        if self.seed is None:
            return FaultPlan()
        plan = FaultPlan(seed=self.seed * 1000 + self.made)
        plan.lose_reply(p=0.06).lose_request(p=0.04).refuse(p=0.04).reset(p=0.03).not_ready(p=0.03)
        plan.corrupt(p=0.05).truncate(p=0.03).delay(p50_s=0.01, p99_s=0.5)
        plan.on("claim_meta").lose_reply(p=0.3)  # four in a row are a claim that nobody knows of
        return plan.on("put_samples").silent(p=0.02)

    def replace(self, name: str) -> None:
        """Close a client, without faults, so that it settles what it owes; the next one has the same name."""
        self.plans.pop(name).stop()
        self.run(self.clients.pop(name).close())

    def end(self) -> None:
        """Close all, and look at what is left."""
        for name in list(self.clients):
            self.replace(name)
        left = [n for host in self.plane.hosts.values() for n, c in host.counts().items() if c and n != "ready"]
        busy = [n for n in left if n in ("writing", "reading")]
        self.run(self.observer.close())
        self.loop.close()
        assert not busy

    def view(self) -> dict[str, Any]:
        """Return what the observer sees of all partitions, in plain values."""
        return self.run(self._view())

    async def _view(self) -> dict[str, Any]:
        return {info.partition_id: await self._part(info) for info in await self.observer.list_partitions()}

    async def _part(self, info: Any) -> dict[str, Any]:
        look, pid = self.observer, info.partition_id
        metas = await look.list_metadata(pid)
        ids = sorted(key for meta in metas for key in meta.keys)
        cells: dict[str, dict[str, Any]] = {name: {} for name in ids}
        for name in FIELDS:
            for key, value in (await self.read(look, pid, ids, name)).items():
                cells[key][name] = value
        claims: dict[str, dict[str, str]] = {}
        for task in info.consumer_tasks:
            listed = await look.list_claims(pid, task)
            claims[task] = {key: claim.owner for claim in listed for key in claim.sample_ids}
            assert len(claims[task]) == sum(len(claim.sample_ids) for claim in listed), "a sample claimed twice"
        return {
            "fields": set(info.fields),
            "tasks": list(info.consumer_tasks),
            "enums": dict(info.enums),
            "size": info.size,
            "groups": {
                meta.group_id: {
                    "keys": list(meta.keys),
                    "version": meta.weight_version,
                    "committed": meta.committed,
                    "due": meta.expected_num_keys,
                    "tags": [
                        {k: v for k, v in tags.items() if k not in ("created_at", "size_bytes")} for tags in meta.tags
                    ],
                }
                for meta in metas
            },
            "depth": await look.depth(pid),
            "cells": cells,
            "claims": claims,
            "consumed": {task: await look.check_consumption_status(pid, [task]) for task in info.consumer_tasks},
        }

    @staticmethod
    async def read(client: Client, pid: str, ids: list[str], name: str) -> dict[str, Any]:
        """Read one field of what is there."""
        try:
            rows, there = await client.get_samples(ids, pid, [name]), ids
        except SampleNotFound:
            return {}
        except PartialReadError as err:
            strange = [one for one in err.errors.values() if not isinstance(one, SampleNotFound)]
            if strange:
                raise
            rows, there = err.rows, err.ok.sample_ids
        return dict(zip(there, _plain_rows(name, rows.get(name)), strict=True)) if ids else {}

    @staticmethod
    def values(rows: Any, fields: list[str]) -> list[dict[str, Any]]:
        """Return rows in plain values."""
        columns = {name: _plain_rows(name, rows.get(name)) for name in fields}
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
