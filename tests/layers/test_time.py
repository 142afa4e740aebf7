import asyncio
import random
from collections.abc import Awaitable
from typing import Any

import anyio
import pytest
import torch

from asyncdp import (
    ClaimNotReady,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    MemoryTransport,
)
from asyncdp.testing import FaultPlan, run_virtual
from asyncdp.testing.verbs import VERBS, Arguments
from tests.layers.rig import Rig, rows, until, virtual

#: What the calls are about: a plane with s0 and s1 in it.
ABOUT = Arguments(task="t", read=["s0"], put=["a"], values=rows(1), remove=["s0"], drop="p")
#: Each call: the verb, and arguments that are its own.
CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in VERBS},
    "register_partition": ("register_partition", {"partition": "q"}),
    "claim_meta, not blocking": ("claim_meta", {"blocking": False}),
    "get_data, of a claim": ("get_data", {"batch": ABOUT.to_release()}),
    "put_samples, tags": ("put_samples", {"values": None, "tags": [{"k": 1}]}),
}


@virtual
@pytest.mark.parametrize("verb", CALLS)
@pytest.mark.parametrize("fault", ["silent", "refuse", "reset", "lost replies"])
async def test_every_verb_ends_within_its_timeout(verb: str, fault: str) -> None:
    """T1: whatever never answers, each verb ends by its timeout with a typed error, and the loop ticks meanwhile."""
    name, arguments = CALLS[verb]
    plan = FaultPlan()
    if fault == "lost replies":
        plan.lose_reply(raises=None)
    else:
        getattr(plan, fault)()
    async with Rig(plan, attempt_timeout_s=2.0) as rig:
        await rig.fill(2)
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await anyio.sleep(0.1)
                ticks += 1

        async with anyio.create_task_group() as group:
            group.start_soon(tick)
            began = anyio.current_time()
            with pytest.raises((DataPlaneTimeout, DataPlaneUnavailable)) as caught:
                await VERBS[name](rig.client, 7.0, ABOUT, **arguments)
            took = anyio.current_time() - began
            group.cancel_scope.cancel()
        assert took <= 7.0 + 1e-6
        assert ticks >= int(took * 10) - 1
        silent = fault in ("silent", "lost replies")
        assert type(caught.value) is (DataPlaneTimeout if silent else DataPlaneUnavailable)
        assert caught.value.op == name
        assert caught.value.elapsed_s == pytest.approx(took)
        assert rig.leftovers() == {}


@virtual
@pytest.mark.parametrize("adopt", [True, False])
async def test_a_killed_host_is_the_error_of_reads_and_writes(*, adopt: bool) -> None:
    """T1: with the only host down reads and writes are DataPlaneUnavailable, metadata goes on; then it comes back."""
    plan = FaultPlan().crash_host("host-0", at_s=1, restart_at_s=30, adopt=adopt)
    async with Rig(plan) as rig:
        ids = await rig.fill(2)
        await rig.client.ping()
        await anyio.sleep(1.0)
        for call in (rig.get(ids, timeout_s=3.0), rig.client.put_samples(["a"], "p", {"x": rows(1)}, timeout_s=3.0)):
            began = anyio.current_time()
            with pytest.raises(DataPlaneUnavailable):
                await call
            assert anyio.current_time() - began <= 3.0
        (group,) = [g for g in await rig.client.list_metadata("p") if g.group_id == "s0"]
        assert group.lost_keys == ("s0",)
        await anyio.sleep(60.0)
        await rig.client.put_samples(["a"], "p", {"x": rows(1)})


@virtual
async def test_an_attempt_has_its_own_limit() -> None:
    """An attempt ends after attempt_timeout_s, the last one with the call."""
    plan = FaultPlan().on("ping").silent()
    async with Rig(plan, attempt_timeout_s=3.0, backoff_base_s=0.001, backoff_cap_s=0.001) as rig:
        with pytest.raises(DataPlaneTimeout, match="ran out of time") as caught:
            await rig.client.ping(timeout_s=8.0)
        at = [s.at for s in rig.wire("Ping")]
        assert at == [pytest.approx(x, abs=0.01) for x in (0.0, 3.0, 6.0)]
        assert caught.value.attempts == 3


@virtual
async def test_the_error_is_that_of_an_attempt_with_time() -> None:
    """A last attempt that the call had no time for says nothing: the error before it is the real one."""
    plan = FaultPlan().on("ping").refuse(times=1).on("clear_samples").reset(times=1).on("get_samples", port=1).refuse()
    plan.silent(at_s=0.001)
    async with Rig(plan, ports=2) as rig:
        ids = await rig.fill(1)
        calls = (rig.client.ping(0.3), rig.client.clear_samples(ids, "p", timeout_s=0.3))
        for call, text in zip(calls, ("refused", "reset"), strict=True):
            with pytest.raises(DataPlaneUnavailable, match=text) as caught:
                await call
            assert caught.value.attempts == 2
            assert caught.value.ambiguous == (text == "reset")
        assert anyio.current_time() == pytest.approx(0.6)


@virtual
async def test_the_error_is_that_of_the_port_with_time() -> None:
    """A second port that the call had no time left for does not hide what the first one said."""
    plan = (
        FaultPlan().on(call="ReadSlots").error("ConnectionResetError", "first", times=1).on(call="ReadSlots").silent()
    )
    async with Rig(plan, ports=2) as rig:
        ids = await rig.fill(1)
        with pytest.raises(DataPlaneUnavailable, match="first") as caught:
            await rig.get(ids, timeout_s=0.5)
        assert caught.value.attempts == 2
        assert rig.events["quarantine"] == 1


@virtual
async def test_waiting_in_the_backend_is_no_silence() -> None:
    """A long poll gets its waiting time on top of the attempt's; a blocking claim makes no errors and no retries."""
    async with Rig(attempt_timeout_s=0.2) as rig:
        await rig.fill(1)
        with pytest.raises(ClaimNotReady) as caught:
            await rig.client.claim_meta("p", "t", ["x"], 2, timeout_s=10.0)
        assert (caught.value.ready, caught.value.requested) == (1, 2)
        assert caught.value.required_fields == ("x",)
        assert rig.events == {"error.ClaimNotReady": 1}
        assert len(rig.wire("TryClaim")) <= 12
        assert rig.leftovers() == {}


@virtual
async def test_a_claim_waits_through_an_outage() -> None:
    """A blocking claim goes on after faults that the layers below gave up on, and returns when samples are there."""
    plan = FaultPlan().on("claim_meta").refuse(for_s=20.0)
    async with Rig(plan) as rig:
        async with anyio.create_task_group() as group:

            async def later() -> None:
                await anyio.sleep(30.0)
                await rig.fill(2)

            group.start_soon(later)
            meta = await rig.client.claim_meta("p", "t", ["x"], 2, timeout_s=60.0)
        assert meta.size == 2
        assert anyio.current_time() < 30.1


@virtual
async def test_a_call_without_time_makes_no_harm() -> None:
    """timeout_s=0 ends at once with the timeout: nothing is sent, no port is blamed, nothing is ambiguous or left."""
    async with Rig() as rig:
        ids = await rig.fill(1)
        for _ in range(8):
            with pytest.raises(DataPlaneTimeout):
                await rig.get(ids, timeout_s=0.0)
        with pytest.raises(DataPlaneTimeout) as caught:
            await rig.client.put_samples(["a"], "p", {"x": rows(1)}, timeout_s=0.0)
        assert not caught.value.ambiguous
        with pytest.raises(DataPlaneTimeout) as caught:
            await rig.client.clear_samples(["a"], "p", timeout_s=0.0)
        assert not caught.value.ambiguous
        assert rig.sent == []
        assert rig.events["quarantine"] == 0
        assert rig.leftovers() == {}
        assert len(rig.client.env.pending_outcomes) == 0
        assert torch.equal((await rig.get(ids))["x"], rows(1))


@virtual
async def test_b_gets_bs_reply() -> None:
    """T2: call A is cancelled or times out, call B on the same client: B gets B's reply."""
    plan = FaultPlan().on("get_samples", call="ReadSlots").delay(5.0, reply=True, times=2)
    async with Rig(plan, attempt_timeout_s=2.0, max_attempts=1, max_rounds=1, ports=1) as rig:
        await rig.fill(3)
        with anyio.move_on_after(1.0) as scope:
            await rig.get(["s0"])
        assert scope.cancelled_caught
        with pytest.raises(DataPlaneTimeout):
            await rig.get(["s1"], timeout_s=1.0)
        assert torch.equal((await rig.get(["s2"]))["x"], rows(1, 2))


class Gated(MemoryTransport):
    """Every request is answered when ``gate`` opens, where there is one."""

    gate: anyio.Event | None = None

    async def _wire(self, call: Any) -> None:
        if self.gate is not None:
            await self.gate.wait()
        else:
            await super()._wire(call)


def test_an_event_and_a_cancel_in_one_tick_is_a_cancel() -> None:
    """T4: the reply arrives and the task is cancelled in the same tick of the loop: cancelled, not swallowed."""

    async def main() -> None:
        async with Rig(transport=Gated) as rig:
            for reply_first in (True, False):
                rig.transport.gate = anyio.Event()
                task = asyncio.create_task(rig.client.ping())
                await asyncio.sleep(0.1)
                if reply_first:
                    rig.transport.gate.set()
                    task.cancel()
                else:
                    task.cancel()
                    rig.transport.gate.set()
                with pytest.raises(asyncio.CancelledError):
                    await task
                assert task.cancelled()
                rig.transport.gate = None
                await rig.client.ping()
                assert rig.leftovers() == {}

    run_virtual(main, "asyncio")


def test_a_cancel_in_the_tick_of_a_deadline_is_a_cancel() -> None:
    """T4: the attempt's time is over and the task is cancelled in the same tick: cancelled, and no further attempt."""

    async def main() -> None:
        for gap_s in (-1e-9, 0.0, 1e-9):
            async with Rig(FaultPlan().on("ping").silent(), attempt_timeout_s=1.0) as rig:
                task = asyncio.create_task(rig.client.ping(5.0))
                await asyncio.sleep(0)
                loop = asyncio.get_running_loop()
                loop.call_at(loop.time() + 1.0 + gap_s, task.cancel)
                with pytest.raises(asyncio.CancelledError):
                    await task
                await asyncio.sleep(10.0)
                assert len(rig.sent) == 1
                assert rig.leftovers() == {}

    run_virtual(main, "asyncio")


@pytest.mark.parametrize("when", ["attempt", "backoff", "between"])
@pytest.mark.parametrize("verb", ["get_samples", "put_samples", "claim_meta"])
def test_a_native_cancel_is_obeyed_at_once(when: str, verb: str) -> None:
    """T5: task.cancel() in an attempt, a backoff, or between rounds or looks: CancelledError at once, and the end."""

    async def main() -> None:
        plan = FaultPlan()
        call = {"get_samples": "ReadSlots", "put_samples": "Publish", "claim_meta": "TryClaim"}[verb]
        wanted = plan.on(verb, call=call)
        wanted.silent() if when == "attempt" else wanted.refuse()
        settings: dict[str, Any] = {"max_attempts": 1, "round_backoff_base_s": 40.0, "round_backoff_cap_s": 40.0}
        if when == "backoff" or verb == "put_samples":
            settings = {"backoff_base_s": 40.0, "backoff_cap_s": 40.0}
        async with Rig(plan, ports=1, **settings) as rig:
            rig.client.env.claim_poll_s = 40.0
            await rig.fill(1)
            task = asyncio.create_task(VERBS[verb](rig.client, 300.0, ABOUT))
            await asyncio.sleep(0.01)
            assert rig.sent[-1].kind == call
            before = len(rig.sent)
            began = anyio.current_time()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert anyio.current_time() == began
            await asyncio.sleep(400.0)
            assert len(rig.sent) == before
            assert rig.leftovers() == {}

    run_virtual(main, "asyncio")


@virtual
async def test_200_cancelled_tasks_leave_both_ports_usable() -> None:
    """T6: of 200 calls on two ports, cancelled at random moments, none keeps a place."""
    plan = FaultPlan(5).delay(p50_s=0.05, p99_s=1.0).on(call="ReadSlots").refuse(p=0.1)
    async with Rig(plan, ports=2) as rig:
        ids = await rig.fill(4)
        rng = random.Random(5)
        ended = {"done": 0, "cancelled": 0, "failed": 0}

        async def one(patience: float) -> None:
            with anyio.move_on_after(patience) as scope:
                try:
                    await rig.get([rng.choice(ids)])
                    ended["done"] += 1
                except DataPlaneError:
                    ended["failed"] += 1
            ended["cancelled"] += scope.cancelled_caught

        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(one, rng.uniform(0.0, 0.4))
        assert min(ended["done"], ended["cancelled"]) > 30
        assert rig.leftovers() == {}
        rig.plan.stop()
        await anyio.sleep(700.0)
        rig.sent.clear()
        for _ in range(8):
            await rig.get(ids)
        assert {s.port for s in rig.wire("ReadSlots")} == {1, 2}


def test_two_cancels_in_a_row_do_not_break_the_clean_up() -> None:
    """T7: a second cancel while the first is being cleaned up: the call ends, and nothing is left but what is owed."""

    async def main() -> None:
        for verb in ("put_samples", "get_samples", "claim_meta"):
            for gap in range(4):
                plan = FaultPlan().lose_reply(verb, raises=None, times=1)
                async with Rig(plan) as rig:
                    await rig.fill(1)
                    task = asyncio.create_task(VERBS[verb](rig.client, 60.0, ABOUT))
                    await asyncio.sleep(1.0)
                    task.cancel()
                    for _ in range(gap):
                        await asyncio.sleep(0)
                    task.cancel()
                    with pytest.raises(asyncio.CancelledError):
                        await task
                    assert rig.leftovers() == {}
                    await VERBS[verb](rig.client, 60.0, ABOUT)
                    assert len(rig.client.env.pending_outcomes) == 0
                    assert rig.slots()["writing"] == 0

    run_virtual(main, "asyncio")


@virtual
async def test_a_reply_that_came_in_time_counts() -> None:
    """T8: the loop is blocked for a second just after the reply came, the timeout passes meanwhile: the reply wins."""
    async with Rig(transport=Gated, attempt_timeout_s=0.5) as rig:
        rig.transport.gate = anyio.Event()

        async def reply_then_block() -> None:
            await anyio.sleep(0.4)
            rig.transport.gate.set()
            _block(1.0)

        async with anyio.create_task_group() as group:
            group.start_soon(reply_then_block)
            await rig.client.ping(timeout_s=0.5)
        assert anyio.current_time() >= 1.4
        assert rig.events == {}


def _block(seconds: float) -> None:
    """Let time pass without giving the loop a chance."""
    try:
        asyncio.get_running_loop()._virtual.now += seconds
    except RuntimeError:
        import trio

        trio.lowlevel.current_clock().jump(seconds)


@virtual
async def test_close_ends_what_waits() -> None:
    """close() under waiting calls: each ends at once with DataPlaneClosed, in an attempt, a backoff or a long poll."""
    plan = FaultPlan().on("depth").silent().on("ping").refuse()
    async with Rig(plan, backoff_base_s=40.0, backoff_cap_s=40.0) as rig:
        ended: list[str] = []

        async def one(call: Awaitable[Any]) -> None:
            try:
                await call
            except DataPlaneError as err:
                ended.append(type(err).__name__)

        client = rig.attach(MemoryTransport(rig.transport.attach_config(), bootstrap=False))
        async with anyio.create_task_group() as group:
            group.start_soon(one, client.depth("p"))
            group.start_soon(one, client.ping(timeout_s=100.0))
            group.start_soon(one, client.claim_meta("p", "t", ["x"], 1))
            await anyio.sleep(0.5)
            began = anyio.current_time()
            await client.close()
        assert ended == ["DataPlaneClosed"] * 3
        assert anyio.current_time() == began
        with pytest.raises(DataPlaneClosed):
            await client.ping()
        assert not client.env.open_waits.scopes


@virtual
async def test_nothing_is_claimed_twice_by_waiting() -> None:
    """Eight blocking claimers, faults on: each sample goes to one of them (C4)."""
    plan = FaultPlan(9).on("claim_meta").lose_reply(p=0.2).on("claim_meta").reset(p=0.1)
    plan.on("claim_meta").delay(p50_s=0.01, p99_s=0.3)
    async with Rig(plan, config={"storage_capacity": 1000}) as rig:
        got: list[str] = []

        async def claimer() -> None:
            while True:
                try:
                    got.extend((await rig.client.claim_meta("p", "t", ["x"], 5, timeout_s=20.0)).sample_ids)
                except ClaimNotReady:
                    return

        async with anyio.create_task_group() as group:
            for _ in range(8):
                group.start_soon(claimer)
            for first in range(0, 200, 20):
                await anyio.sleep(0.5)
                await rig.fill(20, first)
            await until(lambda: len(got) >= 200)
            group.cancel_scope.cancel()
        assert sorted(got) == sorted(f"s{i}" for i in range(200))
        assert plan.counts["lose_reply"] > 5
