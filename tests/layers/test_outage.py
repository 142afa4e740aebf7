"""Promise 10a: a host that is known to come back is waited for, by one probe for all, for no longer than patience."""

from collections.abc import Callable
from typing import Any

import anyio
import pytest
import torch

from asyncdp.errors import DataPlaneClosed, DataPlaneUnavailable
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, rows, virtual

VERBS: dict[str, Callable[[Rig], Any]] = {
    "get_samples": lambda rig: rig.get(["s0", "s1"]),
    "put_samples": lambda rig: rig.client.put_samples(["new"], "p", {"x": rows(1)}),
}


@virtual
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("hosts", [1, 2])
async def test_a_host_that_restarts_is_ridden_out(*, verb: str, hosts: int) -> None:
    """U24: all hosts are down for 3 s under a call of 60 s: it succeeds, within a second of their return."""
    plan = FaultPlan()
    for number in range(hosts):
        plan.crash_host(f"host-{number}", at_s=1, restart_at_s=4, adopt=True)
    async with Rig(plan, hosts=hosts) as rig:
        await rig.fill(2)
        await rig.client.ping()
        await anyio.sleep(1.5)
        began = anyio.current_time()
        await VERBS[verb](rig)
        assert 2.0 < anyio.current_time() - began < 4.0
        assert rig.events["outage_over"]
        assert rig.leftovers() == {}


@virtual
async def test_all_who_wait_share_one_probe() -> None:
    """256 callers that wait for a host for 3 s ask it about as often as one, and all of them are served."""
    probes = []
    for callers in (1, 256):
        plan = FaultPlan().crash_host("host-0", at_s=1, restart_at_s=4, adopt=True)
        async with Rig(plan) as rig:
            await rig.fill(2)
            await rig.client.ping()
            await anyio.sleep(1.5)
            async with anyio.create_task_group() as group:
                for _ in range(callers):
                    group.start_soon(rig.get, ["s0", "s1"])
            probes.append(len(rig.wire("Probe")))
            assert rig.leftovers() == {}
    assert 4 <= probes[0] <= 15
    assert probes[1] <= probes[0] + 5


@virtual
async def test_patience_ends_with_the_first_error() -> None:
    """A host that does not come back: the call ends after outage_patience_s with the error that began it."""
    plan = FaultPlan().crash_host("host-0", at_s=1)
    async with Rig(plan, outage_patience_s=4.0) as rig:
        await rig.fill(2)
        await rig.client.ping()
        await anyio.sleep(1.0)
        began = anyio.current_time()
        with pytest.raises(DataPlaneUnavailable, match="the slot host is down") as caught:
            await rig.get(["s0"])
        assert 4.0 <= anyio.current_time() - began < 6.0  # over all rounds
        assert not caught.value.retryable
        await anyio.sleep(10.0)  # by now nobody expects it any more
        began = anyio.current_time()
        with pytest.raises(DataPlaneUnavailable, match="the slot host is down"):
            await rig.get(["s0"])
        assert anyio.current_time() - began < 2.0


@virtual
async def test_zero_patience_and_a_single_attempt_wait_for_nothing() -> None:
    """outage_patience_s=0 switches waiting off, and so does max_attempts=1: no probe is sent."""
    for settings in ({"outage_patience_s": 0}, {"max_attempts": 1}):
        plan = FaultPlan().crash_host("host-0", at_s=1, restart_at_s=4, adopt=True)
        async with Rig(plan, **settings) as rig:
            await rig.fill(1)
            await rig.client.ping()
            await anyio.sleep(1.0)
            with pytest.raises(DataPlaneUnavailable):
                await rig.get(["s0"])
            assert rig.wire("Probe") == []


@virtual
async def test_recovery_does_not_wait() -> None:
    """A ping and the verbs of recovery fail as fast as ever: no probe, no wait."""
    plan = FaultPlan()
    for verb in ("ping", "list_metadata", "depth", "pop", "evict", "list_claims", "drop_partition", "describe"):
        plan.on(verb).refuse()
    async with Rig(plan) as rig:
        calls = [
            lambda: rig.client.ping(timeout_s=60),
            lambda: rig.client.list_metadata("p"),
            lambda: rig.client.depth("p"),
            lambda: rig.client.pop(["s0"], "p"),
            lambda: rig.client.evict(["s0"], "p"),
            lambda: rig.client.list_claims("p", "t"),
            lambda: rig.client.describe("p"),
            lambda: rig.client.drop_partition("p"),
        ]
        for call in calls:
            began = anyio.current_time()
            with pytest.raises(DataPlaneUnavailable):
                await call()
            assert anyio.current_time() - began < 2.0
        assert rig.wire("Probe") == []


@virtual
async def test_a_put_goes_to_another_host_at_once() -> None:
    """Where another host can take the rows, none is waited for."""
    plan = FaultPlan().crash_host("host-0", at_s=1, restart_at_s=9, adopt=True)
    async with Rig(plan, hosts=2) as rig:
        await rig.client.ping()
        await anyio.sleep(1.0)
        for i in range(8):
            began = anyio.current_time()
            await rig.client.put_samples([f"new{i}"], "p", {"x": rows(1)})
            assert anyio.current_time() - began < 2.0


@virtual
async def test_who_asks_may_be_cancelled() -> None:
    """The caller that asks is cancelled: another takes its place, nobody waits longer for it, nothing is left."""
    plan = FaultPlan().crash_host("host-0", at_s=1, restart_at_s=4, adopt=True)
    async with Rig(plan) as rig:
        await rig.fill(2)
        await rig.client.ping()
        await anyio.sleep(1.0)
        came: list[Any] = []

        async def get() -> None:
            came.append(await rig.get(["s0", "s1"]))

        async with anyio.create_task_group() as group:
            scopes = [anyio.CancelScope() for _ in range(20)]

            async def cancelled(scope: anyio.CancelScope) -> None:
                with scope:
                    await get()

            for scope in scopes:
                group.start_soon(cancelled, scope)
            group.start_soon(get)
            for scope in scopes:
                await anyio.sleep(0.1)
                scope.cancel()
        assert len(came) == 1
        assert torch.equal(came[0]["x"], rows(2))
        assert anyio.current_time() < 6.0
        assert rig.leftovers() == {}


@virtual
async def test_close_ends_a_wait() -> None:
    """A client that is closed while its calls wait for a host ends them at once."""
    plan = FaultPlan().crash_host("host-0", at_s=1)
    async with Rig(plan) as rig:
        await rig.fill(1)
        await rig.client.ping()
        await anyio.sleep(1.0)

        async def get() -> None:
            with pytest.raises(DataPlaneClosed):
                await rig.get(["s0"])

        async with anyio.create_task_group() as group:
            group.start_soon(get)
            group.start_soon(get)
            await anyio.sleep(2.0)
            began = anyio.current_time()
            await rig.client.close()
        assert anyio.current_time() - began < 0.5


@virtual
async def test_the_call_is_over_when_its_time_is() -> None:
    """Patience is longer than what is left of the call: it ends with the call, with the error that began it."""
    plan = FaultPlan().crash_host("host-0", at_s=1)
    async with Rig(plan) as rig:
        await rig.fill(1)
        await rig.client.ping()
        await anyio.sleep(1.0)
        began = anyio.current_time()
        with pytest.raises(DataPlaneUnavailable, match="the slot host is down"):
            await rig.get(["s0"], timeout_s=3.0)
        assert anyio.current_time() - began <= 3.0 + 1e-6


@virtual
async def test_a_state_that_the_backend_names_is_asked_about_until_the_deadline() -> None:
    """U6: a backend that says that it is loading is asked again for the whole call, without a token; a ping is not."""

    async def count(verb: str, call: Callable[[Rig], Any]) -> tuple[int, float]:
        plan = FaultPlan()
        plan.on(verb).error(DataPlaneUnavailable, "loading", attributes={"retry_after_s": 0.1, "blames_port": False})
        async with Rig(plan) as rig:
            began = anyio.current_time()
            with pytest.raises(DataPlaneUnavailable, match="loading"):
                await call(rig)
            assert rig.events["budget_refused"] == 0
            assert rig.wire("Probe") == []
            return len(rig.sent), anyio.current_time() - began

    sent, took = await count("depth", lambda rig: rig.client.depth("p", timeout_s=60))
    assert sent > 30
    assert 50.0 < took <= 60.0 + 1e-6
    sent, took = await count("ping", lambda rig: rig.client.ping(timeout_s=60))
    assert sent == 4
    assert took < 2.0
