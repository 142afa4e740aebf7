from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import anyio
import anyio.to_thread
import pytest
import torch

from asyncdp import Client, DataPlaneGroupMeta, DataPlaneNotReady, KVBatchMeta
from asyncdp.examples.grpo_account import Account
from asyncdp.examples.grpo_controller import SingleController
from asyncdp.examples.grpo_faults import fault_plan
from asyncdp.examples.grpo_plane import ADVANTAGE, POLICY, ROLLOUTS, WEIGHTS, DemoConfig, attach, register, start
from asyncdp.examples.grpo_progress import Progress
from asyncdp.examples.grpo_trainer import Trainer, _whole_groups
from asyncdp.examples.grpo_worker import RolloutWorker
from asyncdp.examples.policy import make_task
from asyncdp.testing import KINDS, FaultPlan, run_virtual

CONFIG = DemoConfig(workers=1, group_size=4, groups_per_rollout=2, groups_per_step=4, capacity=64)
BACKENDS = pytest.mark.parametrize("backend", ["asyncio", "trio"])


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not wait for threads: what would run in one runs at once."""

    async def at_once(step: Callable[..., Any], *args: Any) -> Any:
        return step(*args)

    monkeypatch.setattr(anyio.to_thread, "run_sync", at_once)


class _Roles:
    """One of each, on a plane of their own; the faults hit the worker and the trainer, not the onlooker ``plane``."""

    def __init__(self, plane: Client, plan: FaultPlan) -> None:
        self.plane = plane
        self.account, self.progress = Account(), Progress()
        task = make_task(0)
        self.worker = RolloutWorker(0, attach(plane.attach_config(), "worker", plan), CONFIG, task, self.account)
        self.trainer = Trainer(
            attach(plane.attach_config(), "trainer", plan), CONFIG, task, self.account, self.progress
        )
        self.controller = SingleController(plane, CONFIG, self.account, self.progress)

    async def put(self, version: int = 0) -> list[str]:
        """Let the worker put two groups; returns their ids."""
        self.worker.version = version
        samples = self.worker._roll_out()
        await self.worker._put(samples, anyio.Event())
        return samples.sample_ids

    async def left(self) -> set[str]:
        return set(await self.controller.left())


@asynccontextmanager
async def _roles(plan: FaultPlan | None = None) -> AsyncIterator[_Roles]:
    async with start(CONFIG, "controller", None) as plane:
        await register(plane, CONFIG)
        roles = _Roles(plane, plan or FaultPlan())
        async with roles.worker.plane, roles.trainer.plane:
            yield roles


@BACKENDS
def test_weights_reach_a_worker_with_their_version(backend: str) -> None:
    """What the trainer publishes replaces what was there; a worker fetches the newest and knows which it is."""

    async def main() -> None:
        async with _roles() as roles:
            for version in (1, 2):
                roles.trainer.version = version
                with torch.no_grad():
                    next(roles.trainer.policy.parameters()).fill_(version)
                await roles.trainer._publish()
            await roles.worker._refresh()
            assert roles.worker.version == 2
            assert next(roles.worker.policy.parameters()).unique().tolist() == [2.0]
            (group,) = await roles.plane.list_metadata(WEIGHTS)
            assert (group.keys, group.weight_version) == ((POLICY,), 2)

    run_virtual(main, backend)


@BACKENDS
def test_a_full_plane_only_makes_a_worker_wait(backend: str) -> None:
    """NotReady that outlasts the layers' patience: the same samples are put later, and once."""

    async def main() -> None:
        plan = FaultPlan().on("put_samples", call="Place").not_ready(0.05, times=9)
        async with _roles(plan) as roles:
            ids = await roles.put()
            assert plan.counts["not_ready"] == 9
            assert await roles.left() == set(ids)
            assert roles.account.balance(ids).adds_up

    run_virtual(main, backend)


@BACKENDS
@pytest.mark.parametrize("arrives", [True, False])
def test_a_put_without_an_answer_is_not_repeated(backend: str, arrives: bool) -> None:  # noqa: FBT001
    """A worker that cannot know leaves it; the samples count if, and only if, they turn up."""

    async def main() -> None:
        plan = FaultPlan()
        if arrives:
            plan.lose_reply("put_samples")
        else:
            plan.lose_request("put_samples")
        async with _roles(plan) as roles:
            ids = await roles.put()
            await roles.worker.plane.close()
            left = await roles.left()
            assert left == (set(ids) if arrives else set())
            balance = roles.account.balance(left)
            assert balance.adds_up
            assert balance.produced == len(left)
            assert roles.account.puts["unanswered"] == len(ids)

    run_virtual(main, backend)


@BACKENDS
def test_a_worker_stops_adding_to_a_plane_that_does_not_answer(backend: str) -> None:
    """Not knowing how deep the plane is counts as too deep."""

    async def main() -> None:
        async with _roles(FaultPlan().on("depth").refuse()) as roles:
            assert await roles.worker._crowded()

    run_virtual(main, backend)


@BACKENDS
def test_a_group_with_a_row_that_is_gone_goes_as_a_whole(backend: str) -> None:
    """The trainer evicts the group of a row that is gone, counts it, and goes on with the others."""

    async def main() -> None:
        plan = FaultPlan()
        async with _roles(plan) as roles:
            first = await roles.put()  # one put: its two groups share a slot
            second = await roles.put()
            plan.on("get_data").stale(sample=first[0])
            claimed = await roles.trainer.plane.claim_meta(ROLLOUTS, ADVANTAGE, ["rewards"], 16, blocking=False)
            batch = await roles.trainer._read(claimed)
            assert batch is not None
            assert set(batch[0].sample_ids) == set(second)
            assert batch[1].batch_size == torch.Size([8])
            assert await roles.left() == set(second)
            assert roles.account.evicted_by_reason == {"gone": 8}

    run_virtual(main, backend)


def test_one_row_stands_for_its_group() -> None:
    """Of a group that has a row less the others are no use either."""
    meta = KVBatchMeta("p", sample_ids=["a0", "b0", "a1", "c0"], tags=[{"group_id": g} for g in "abac"])
    assert _whole_groups(meta, ["a1", "c0"]) == {0, 2, 3}
    assert _whole_groups(meta, []) == set()


@BACKENDS
def test_a_group_that_is_out_of_reach_is_claimed_again_later(backend: str) -> None:
    """An error that says nothing about the data gives the claim back; nothing is evicted."""

    async def main() -> None:
        plan = FaultPlan().on("get_data", call="ReadSlots").refuse(times=40)
        async with _roles(plan) as roles:
            ids = await roles.put()
            assert await roles.trainer._claim(ADVANTAGE, ["rewards"], wait_s=0.0) is None
            assert await roles.left() == set(ids)
            assert await roles.plane.list_claims(ROLLOUTS, ADVANTAGE) == []
            for _ in range(9):
                if batch := await roles.trainer._claim(ADVANTAGE, ["rewards"], wait_s=0.0):
                    break
            assert batch is not None
            assert set(batch[0].sample_ids) == set(ids)

    run_virtual(main, backend)


def _loses(monkeypatch: pytest.MonkeyPatch, plane: Client, lost: str) -> None:
    """Let the plane say of one sample that it was lost with the storage that held it."""
    list_metadata = plane.list_metadata

    async def listed(partition_id: str) -> list[DataPlaneGroupMeta]:
        groups = await list_metadata(partition_id)
        return [replace(group, lost_keys=tuple(key for key in group.keys if key == lost)) for group in groups]

    monkeypatch.setattr(plane, "list_metadata", listed)


@BACKENDS
def test_a_group_with_a_row_that_was_lost_is_evicted(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """Rows that do not come: the plane says which of them are lost; their group goes, the others are given back."""

    async def main() -> None:
        plan = FaultPlan().on("get_data", call="ReadSlots").refuse(times=40)
        async with _roles(plan) as roles:
            ids = await roles.put()
            _loses(monkeypatch, roles.trainer.plane, ids[1])
            assert await roles.trainer._claim(ADVANTAGE, ["rewards"], wait_s=0.0) is None
            assert await roles.left() == set(ids[4:])
            assert roles.account.evicted_by_reason == {"gone": 4}

    run_virtual(main, backend)


@BACKENDS
def test_lost_groups_that_nobody_claimed_are_evicted_at_the_end(monkeypatch: pytest.MonkeyPatch, backend: str) -> None:
    """The controller leaves them alone until it is told that the trainer has ended."""

    async def main() -> None:
        async with _roles() as roles:
            ids = await roles.put()
            _loses(monkeypatch, roles.plane, ids[1])
            await roles.controller._look()
            assert await roles.left() == set(ids)
            await roles.controller.evict_lost()
            assert await roles.left() == set(ids[4:])
            assert roles.account.evicted_by_reason == {"gone": 4}

    run_virtual(main, backend)


@BACKENDS
def test_groups_are_evicted_when_they_are_too_old(backend: str) -> None:
    """Controller and trainer judge the age alike: a group at the limit stays, one beyond it goes."""

    async def main() -> None:
        async with _roles() as roles:
            newest = 10
            beyond, at_limit = await roles.put(newest - CONFIG.max_age - 1), await roles.put(newest - CONFIG.max_age)
            roles.trainer.version = newest
            batch = await roles.trainer._claim(ADVANTAGE, ["rewards"], wait_s=0.0)
            assert batch is not None
            assert batch[0].sample_ids == at_limit
            assert await roles.left() == set(at_limit)
            more = await roles.put(newest - CONFIG.max_age - 1)
            await roles.trainer._publish()
            await roles.controller._look()
            assert await roles.left() == set(at_limit)
            assert roles.account.evicted_by_reason == {"stale": len(beyond) + len(more)}

    run_virtual(main, backend)


@BACKENDS
def test_a_pop_is_repeated_until_it_is_answered(backend: str) -> None:
    """Trained samples leave the plane before the next weights do, whatever happens to the request."""

    async def main() -> None:
        plan = FaultPlan().on("pop").reset(times=13)
        async with _roles(plan) as roles:
            ids = [*await roles.put(), *await roles.put()]
            await roles.trainer._add_advantages()
            assert await roles.trainer._train()
            assert await roles.left() == set()
            assert roles.trainer.version == 1
            assert roles.account.balance([]).trained == len(ids)

    run_virtual(main, backend)


@BACKENDS
def test_weights_are_published_after_the_pop(backend: str) -> None:
    """While a batch cannot be popped, no newer version makes it look old to others."""

    async def main() -> None:
        async with _roles(FaultPlan().on("pop").refuse()) as roles:
            await roles.put()
            await roles.put()
            await roles.trainer._add_advantages()
            with anyio.move_on_after(30.0):
                await roles.trainer._train()
            assert roles.progress.steps == 1
            assert await roles.plane.list_metadata(WEIGHTS) == []

    run_virtual(main, backend)


def test_the_plan_has_faults_of_every_kind() -> None:
    """The demo lives through all that the test kit can inject."""
    assert {rule.kind for rule in fault_plan(0, 45.0).rules} == set(KINDS)


def test_not_ready_that_is_ambiguous_is_not_repeated() -> None:
    """A plane that is full now may have taken the samples on an earlier try: what is ambiguous is left alone."""

    class _Plane:
        calls = 0

        async def put_samples(self, *_: Any, **__: Any) -> None:
            self.calls += 1
            raise DataPlaneNotReady("full", ambiguous=True)

    async def main() -> None:
        async with _roles() as roles:
            real, roles.worker.plane = roles.worker.plane, _Plane()  # type: ignore[assignment]
            await roles.put()
            assert roles.worker.plane.calls == 1  # type: ignore[attr-defined]
            assert roles.account.puts["unanswered"] == 8
            roles.worker.plane = real

    run_virtual(main)


def test_a_put_is_noted_before_it_is_sent() -> None:
    """A worker that is killed before it has an answer has said already what it was about to put."""

    async def main() -> None:
        async with _roles() as roles:
            noted: list[int] = []

            class _Plane:
                async def put_samples(self, *_: Any, **__: Any) -> None:
                    noted.append(roles.account.puts["unanswered"])

            real, roles.worker.plane = roles.worker.plane, _Plane()  # type: ignore[assignment]
            await roles.put()
            assert noted == [8]
            assert roles.account.puts["unanswered"] == 0
            roles.worker.plane = real

    run_virtual(main)
