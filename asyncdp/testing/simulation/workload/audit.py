"""The final audit of a run: after the faults, all samples can be claimed and removed, and all slots become free."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

import anyio

from asyncdp.errors import DataPlaneError
from asyncdp.middleware.policy.permit import Health

from ..recording.violation import Violation
from .flow_work import Scorer, Trainer
from .worker import FLOW, REGISTERS, TAGS, Values

if TYPE_CHECKING:
    from asyncdp import KVBatchMeta

    from ..fabric.fabric import Fabric
    from ..scenario import Scenario

__all__ = ["Audit"]

NAME = "liveness"
#: Name of the client that audits the plane after all others have been closed.
AUDITOR = "auditor"
#: Maximum number of claims while the flow is drained.
MOST = 2000
#: Maximum number of rows that the auditor claims at a time.
FEW = 8


class Audit:
    """Checks what must hold at the end of a run.

    Args:
        fabric: The fabric to audit.
        scenario: The scenario that was run.
        values: Source of unique values.
    """

    def __init__(self, fabric: Fabric, scenario: Scenario, values: Values) -> None:
        """Attach a new client, which has not seen any fault."""
        self.fabric = fabric
        self.scenario = scenario
        self.values = values
        fabric.client(AUDITOR)
        self.verbs = fabric.recorded(AUDITOR, tags=TAGS)

    async def run(self) -> list[Violation]:
        """Run the audit and return the violations."""
        found = [*await self._exercise()]
        for name, client in self.fabric.clients.items():
            if client.alive and name != AUDITOR:
                await self.fabric.close(name)
        try:
            found += await self._drain()
            found += await self._clear()
        except DataPlaneError as err:
            found.append(Violation(NAME, f"the plane could not be emptied: {type(err).__name__} ({err})"))
        await self.fabric.close(AUDITOR)
        return found

    # -- ports

    async def _exercise(self) -> list[Violation]:
        """Read until every client must have used every port again; check health and permits of the ports."""
        for attempt in range(8 * self.scenario.hosts):
            if len({host for host, _ in self.fabric.homes(REGISTERS, "x")}) == self.scenario.hosts:
                break
            _, field = self.values.take(1)
            await self.verbs.put_samples([f"spread-{attempt}"], REGISTERS, {"x": field}, timeout_s=10.0)
        homes = dict(self.fabric.homes(REGISTERS, "x"))
        found = []
        await self._end_hedging()
        for name, client in self.fabric.clients.items():
            if not client.alive or client.rotation is None:
                continue
            since = len(self.fabric.history.requests)
            for host, sample_id in homes.items():
                await self._read_often(name, sample_id, 2 * len(self.fabric.hosts[host].ref.ports) + 2)
            used = {(r.host, r.port) for r in self.fabric.history.requests[since:] if r.client == name}
            for host in homes:
                unused = [port for port in self.fabric.hosts[host].ref.ports if (host, port) not in used]
                if unused:
                    text = f"client {name} does not use ports {unused} of {host} any more, which have long been well"
                    found.append(Violation("ports", text))
            ports = client.rotation.ports(self.fabric.clock.now())
            out = {k: s.health.value for k, s in ports.items() if k[0] in homes and s.health is not Health.HEALTHY}
            if out:
                text = f"client {name} still thinks ill of ports that have long been well, and answered: {out}"
                found.append(Violation("ports", text))
            held = {k: s.in_flight for k, s in ports.items() if s.in_flight}
            if held:
                found.append(Violation("ports", f"client {name} holds permits although it is idle: {held}"))
        return found

    async def _end_hedging(self) -> None:
        """Hedge no more, and wait for rests to end: a port that another one outruns rests, however well it is."""
        rotations = [client.rotation for client in self.fabric.clients.values() if client.rotation is not None]
        hedging = [rotation for rotation in rotations if rotation.hedge_after_s]
        for rotation in hedging:
            rotation.hedge_after_s = 0.0
        await anyio.sleep(max((rotation.rules.base_s for rotation in hedging), default=0.0))

    async def _read_often(self, client: str, sample_id: str, times: int) -> None:
        verbs = self.fabric.recorded(client, tags=TAGS)
        for _ in range(times):
            with suppress(DataPlaneError):  # reported by the check of liveness
                await verbs.get_samples([sample_id], REGISTERS, ["x"], timeout_s=10.0)

    # -- the flow

    async def _drain(self) -> list[Violation]:
        """Release the claims of killed clients, unless leases did; then score, train and pop all remaining samples."""
        for name, client in self.fabric.clients.items():
            if not client.alive and self.scenario.lease_s is None:
                await self.verbs.release_claims(FLOW, name, timeout_s=10.0)
        found = [*await self._orphans()]
        scorer = Scorer(self.verbs, self.scenario, self.values, "auditor.scores")
        trainer = Trainer(self.verbs, self.scenario, self.values, "auditor.trains")
        for _ in range(MOST):
            if not await self._score(scorer) + await self._train(trainer):
                break
        found += self._left_over()
        return found

    async def _claimed(self, worker: Scorer | Trainer) -> KVBatchMeta:
        """Claim a few rows; not all, since the plane may be full of unscored samples and scores need room."""
        return await self.verbs.claim_meta(
            FLOW, worker.task, worker.needs, FEW, blocking=False, min_batch_size=1, timeout_s=10.0
        )

    async def _score(self, worker: Scorer) -> int:
        meta = await self._claimed(worker)
        there = await worker.read(meta) if meta.size else None
        if there is not None:
            _, field = self.values.take(there.size)
            await self.verbs.put_samples(there, FLOW, {"y": field}, stale="skip", timeout_s=10.0)
        return meta.size

    async def _train(self, worker: Trainer) -> int:
        meta = await self._claimed(worker)
        if meta.size:
            await worker.read(meta)
            await self.verbs.pop(meta, FLOW, timeout_s=10.0)
        return meta.size

    async def _orphans(self) -> list[Violation]:
        """Find active claims that no client ever received."""
        found = []
        known = {claim for op in self.fabric.history.operations if op.verb == "claim_meta" for claim in op.claims}
        for task in ("score", "train"):
            for claim in await self.verbs.call("list_claims", FLOW, task, timeout_s=10.0):
                if claim.claim_id not in known:
                    text = f"{claim.owner} holds claim {claim.claim_id} of task {task!r}, which it was never given"
                    found.append(Violation("claim", text, FLOW, claim.sample_ids))
        return found

    def _left_over(self) -> Iterator[Violation]:
        """Find remaining samples, which should have been claimable."""
        lost = {i for each in self.fabric.history.lost if each.partition == FLOW for i in each.ids}
        part = self.fabric.plane.partitions[FLOW]
        for group in part.groups.values():
            rows = list(group.rows.values())
            revived = [row.id for row in rows if "x" not in row.cells]
            if revived:
                yield Violation("life", f"late scores made {revived} anew", FLOW, revived)
                continue
            size = self.scenario.group_size
            if any(row.id in lost for row in rows) or (size is not None and len(rows) < size):
                continue  # a fault removed a part of the group
            ids = [row.id for row in rows]
            states = {row.id: dict(row.claimed) for row in rows}
            yield Violation(NAME, f"nobody could claim {ids}: {states}", FLOW, ids)

    # -- everything

    async def _clear(self) -> list[Violation]:
        """Remove all remaining samples and check that every slot is free."""
        for partition in (FLOW, REGISTERS):
            groups = await self.verbs.list_metadata(partition, timeout_s=10.0)
            ids = [key for group in groups for key in group.keys]
            if ids:
                await self.verbs.clear_samples(ids, partition, timeout_s=10.0)
        left = {state: count for state, count in self.fabric.slots().items() if state != "free" and count}
        if left:
            where = {
                host.id: [
                    (slot.number, slot.state.value, slot.op_id, sorted(slot.live))
                    for slot in host.slots
                    if slot.state.value != "free"
                ][:4]
                for host in self.fabric.hosts.values()
            }
            return [Violation(NAME, f"slots are not free although nothing is left: {left}: {where}")]
        return []
