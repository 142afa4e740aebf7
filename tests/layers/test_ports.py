from dataclasses import replace
from itertools import pairwise

import anyio
import pytest

from asyncdp import DataPlaneTimeout, DataPlaneUnavailable, MemoryTransport
from asyncdp.calls import CallContext, handles
from asyncdp.calls.slots import ReadResult, ReadSlots
from asyncdp.middleware.policy.permit import Health
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, read, rows, virtual

H = "host-0"


@virtual
async def test_a_dead_port_costs_one_refused_connection() -> None:
    """The first read on a dead port is refused once and goes on at once; later ones never try it before its time."""
    plan = FaultPlan().on(host=H, port=1).refuse()
    async with Rig(plan) as rig:
        ids = await rig.fill(4)
        took = await read(rig, ids, 40)
        assert max(took) == 0.0
        assert len(rig.wire("ReadSlots", port=1)) == 1
        assert len(rig.wire("ReadSlots")) == 41
        assert {s.port for s in rig.wire("ReadSlots")[-12:]} == {2, 3, 4}
        assert rig.events == {"rotation": 1, "quarantine": 1}


@virtual
async def test_a_dead_port_comes_back_after_a_good_probe() -> None:
    """After 30 s one request probes the port; it answers, and has its share of requests again."""
    plan = FaultPlan().on(host=H, port=1).refuse(times=1)
    async with Rig(plan) as rig:
        ids = await rig.fill(4)
        await read(rig, ids, 8)
        await anyio.sleep(28.0)
        await read(rig, ids, 8)
        assert len(rig.wire("ReadSlots", port=1)) == 1
        await anyio.sleep(2.0)
        await read(rig, ids, 12)
        assert len(rig.wire("ReadSlots", port=1)) == 4
        assert (rig.events["probe"], rig.events["recovered"]) == (1, 1)
        assert {state.health for state in rig.ports.values()} == {Health.HEALTHY}


@virtual
async def test_what_was_read_in_shared_memory_says_nothing_of_a_port() -> None:
    """A dead port stays in quarantine while rows are read without one; the first answer through it ends that."""
    shared = False

    class SharedMemory(MemoryTransport):
        """Reads without a port now and then."""

        @handles(ReadSlots)
        async def _read(self, call: ReadSlots, ctx: CallContext) -> ReadResult:
            return replace(await super()._read(call, ctx), through_port=not shared)

    async with Rig(FaultPlan().on(host=H, port=1).refuse(times=1), transport=SharedMemory) as rig:
        ids = await rig.fill(4)
        await read(rig, ids, 8)
        await anyio.sleep(40.0)
        shared = True
        await read(rig, ids, 8)
        assert (rig.events["quarantine"], rig.events["recovered"]) == (1, 0)
        shared = False
        await read(rig, ids, 8)
        assert rig.events["recovered"] == 1


@virtual
async def test_a_failed_probe_costs_one_request_and_doubles_the_time() -> None:
    """A port that stays dead is tried after 30, 60 and 120 s more, once each, and never by a call that then fails."""
    plan = FaultPlan().on(host=H, port=1).refuse()
    async with Rig(plan) as rig:
        ids = await rig.fill(1)
        await read(rig, ids, 250, every_s=1.0)
        gone = [round(s.at) for s in rig.wire("ReadSlots", port=1)]
        gaps = [b - a for a, b in pairwise(gone)]
        assert len(gaps) == 3
        assert gaps == [pytest.approx(30, abs=4), pytest.approx(60, abs=4), pytest.approx(120, abs=4)]


@virtual
async def test_a_silent_port_costs_one_attempt_timeout() -> None:
    """A port that accepts and never answers costs one attempt timeout, then it is left alone until its probe."""
    plan = FaultPlan().on(host=H, port=1).silent()
    async with Rig(plan, attempt_timeout_s=2.0) as rig:
        ids = await rig.fill(4)
        took = await read(rig, ids, 200)
        assert sorted(took)[-2:] == [0.0, pytest.approx(2.0)]
        assert len(rig.wire("ReadSlots", port=1)) == 1
        assert rig.events == {"rotation": 1}
        assert rig.ports[H, 1].health is Health.RESTING
        took = await read(rig, ids, 120)
        assert sorted(took)[-2:] == [0.0, pytest.approx(2.0)]
        assert rig.events == {"rotation": 2, "probe": 1, "quarantine": 1}


@virtual
async def test_a_port_that_answered_and_falls_silent_is_quarantined() -> None:
    """Once it has answered, a port has no patience left: its first timeout is a quarantine."""
    plan = FaultPlan().on(host=H, port=1).silent(after=1)
    async with Rig(plan, attempt_timeout_s=2.0) as rig:
        ids = await rig.fill(4)
        took = await read(rig, ids, 40)
        assert sorted(took)[-2:] == [0.0, pytest.approx(2.0)]
        assert rig.events == {"rotation": 1, "quarantine": 1}


@virtual
async def test_a_slow_first_contact_is_no_quarantine() -> None:
    """S12: a port whose first answer takes longer than an attempt is spared, not quarantined, and is used later."""
    plan = FaultPlan().on(host=H, port=1).delay(15.0, for_s=25.0)
    async with Rig(plan, attempt_timeout_s=10.0) as rig:
        ids = await rig.fill(4)
        took = await read(rig, ids, 400)
        assert sorted(took)[-2:] == [0.0, pytest.approx(10.0)]
        assert rig.events["quarantine"] == 0
        assert len(rig.wire("ReadSlots", port=1)) > 5
        assert {state.health for state in rig.ports.values()} == {Health.HEALTHY}


@virtual
async def test_a_cold_host_is_waited_for() -> None:
    """S12: where all ports are slow at first contact they are used in turn, and none is quarantined."""
    plan = FaultPlan().on(call="ReadSlots").silent(for_s=12.0)
    async with Rig(plan, attempt_timeout_s=3.0) as rig:
        ids = await rig.fill(2)
        (took,) = await read(rig, ids, 1)
        assert 12.0 < took < 20.0
        assert rig.events["quarantine"] == 0
        assert {s.port for s in rig.wire("ReadSlots")} == {1, 2, 3, 4}


@virtual
async def test_a_resetting_port_is_left() -> None:
    """S5: a reset is the port's fault: next port, quarantine."""
    plan = FaultPlan().on(host=H, port=2).reset()
    async with Rig(plan) as rig:
        took = await read(rig, await rig.fill(4), 20)
        assert max(took) == 0.0
        assert len(rig.wire("ReadSlots", port=2)) == 1
        assert rig.events == {"rotation": 1, "quarantine": 1}


@virtual
async def test_a_truncating_port_is_left() -> None:
    """S5: a short payload is noticed and is the port's fault; its rows come through another one."""
    plan = FaultPlan().on(host=H, port=2).truncate()
    async with Rig(plan) as rig:
        took = await read(rig, await rig.fill(4), 20)
        assert max(took) < 0.06
        assert len(rig.wire("ReadSlots", port=2)) == 1
        assert rig.events == {"retry": 1, "quarantine": 1}


@virtual
async def test_with_all_ports_out_the_least_bad_is_used() -> None:
    """S6: when every port is quarantined one is used all the same, and a success brings it back."""
    plan = FaultPlan().on(host=H).refuse(times=4)
    async with Rig(plan, ports=4) as rig:
        ids = await rig.fill(1)
        await read(rig, ids, 3)
        assert plan.counts["refuse"] == 4
        assert rig.events["quarantine"] == 4
        assert sum(s.health is Health.HEALTHY for s in rig.ports.values()) >= 1


@virtual
async def test_a_cancelled_probe_is_given_back() -> None:
    """S7: when the probe is cancelled, the next call may probe."""
    plan = FaultPlan().on(host=H, port=1).refuse(times=1).on(host=H, port=1).silent(times=1)
    async with Rig(plan, ports=2) as rig:
        ids = await rig.fill(1)
        await read(rig, ids, 2)
        await anyio.sleep(30.0)
        for _ in range(2):
            with anyio.move_on_after(1.0) as scope:
                await rig.get(ids)
            if scope.cancelled_caught:
                break
        assert scope.cancelled_caught
        assert rig.leftovers() == {}
        await read(rig, ids, 3)
        assert (rig.events["probe"], rig.events["recovered"]) == (2, 1)


@virtual
async def test_what_is_not_the_ports_fault_is_not_held_against_it() -> None:
    """S8: an old connection that had to be replaced is retried; its port stays in use."""
    plan = FaultPlan().on(call="ReadSlots").error(DataPlaneUnavailable, attributes={"blames_port": False}, times=1)
    async with Rig(plan, ports=2) as rig:
        await read(rig, await rig.fill(1), 4)
        assert rig.events == {"retry": 1}
        assert {s.port for s in rig.wire("ReadSlots")} == {1, 2}


@virtual
async def test_a_busy_host_is_not_held_against_its_port() -> None:
    """NotReady is no fault: it is waited out as long as asked, costs no token, quarantines nothing."""
    plan = FaultPlan().on(call="ReadSlots").not_ready(1.5, times=2)
    async with Rig(plan) as rig:
        before = rig.client.env.budget.balance(anyio.current_time())
        (took,) = await read(rig, await rig.fill(1), 1, every_s=0.0)
        assert 3.0 <= took < 3.2
        assert rig.events == {"retry": 2}
        assert rig.client.env.budget.balance(anyio.current_time()) >= before


@virtual
async def test_all_ports_dead_ends_with_the_real_error_in_time() -> None:
    """T10: with every port refusing the call ends with that error, long before its timeout."""
    plan = FaultPlan().on(host=H).refuse()
    async with Rig(plan) as rig:
        ids = await rig.fill(3)
        began = anyio.current_time()
        with pytest.raises(DataPlaneUnavailable, match="refused") as caught:
            await rig.get(ids, timeout_s=60.0)
        assert anyio.current_time() - began < 5.0
        assert not caught.value.retryable
        assert caught.value.host == H
        assert caught.value.port in (1, 2, 3, 4)
        assert len(rig.wire("ReadSlots")) <= 3 * 4 * 2


@virtual
async def test_all_ports_silent_ends_by_the_timeout() -> None:
    """T10: with every port silent the call ends with DataPlaneTimeout at its timeout, not a tick later."""
    plan = FaultPlan().on(host=H).silent()
    async with Rig(plan, attempt_timeout_s=2.0) as rig:
        ids = await rig.fill(3)
        began = anyio.current_time()
        with pytest.raises(DataPlaneTimeout) as caught:
            await rig.get(ids, timeout_s=9.0)
        assert anyio.current_time() - began <= 9.0 + 1e-6
        assert caught.value.host == H
        assert rig.leftovers() == {}


@virtual
async def test_one_bad_port_among_256_slots_costs_one_token() -> None:
    """256 slots behind one refusing port are one wire request, one failure, one retry token."""
    plan = FaultPlan().on(host=H, call="ReadSlots").refuse(times=1)
    async with Rig(plan, config={"storage_capacity": 1000}) as rig:
        ids = await rig.fill(256)
        before = rig.client.env.budget.balance(anyio.current_time())
        await read(rig, ids, 1, every_s=0.0)
        spent = before + 0.2 - rig.client.env.budget.balance(anyio.current_time())
        assert spent == pytest.approx(1.0)
        assert len(rig.wire("ReadSlots")) == 2
        assert all(len(s.call.refs) == 256 for s in rig.wire("ReadSlots") if isinstance(s.call, ReadSlots))


@virtual
async def test_256_slots_that_fail_as_values_cost_one_token() -> None:
    """256 errors in one answer are one retry, for all of them together."""
    plan = FaultPlan().on(host=H).truncate(times=256)
    async with Rig(plan, config={"storage_capacity": 1000}) as rig:
        ids = await rig.fill(256)
        before = rig.client.env.budget.balance(anyio.current_time())
        began = anyio.current_time()
        await read(rig, ids, 1, every_s=0.0)
        waited = anyio.current_time() - began
        spent = before + 0.2 - rig.client.env.budget.balance(anyio.current_time())
        assert spent == pytest.approx(1.0, abs=10.0 * waited + 0.01)
        assert [len(s.call.refs) for s in rig.wire("ReadSlots") if isinstance(s.call, ReadSlots)] == [256, 256]
        assert rig.events == {"retry": 1, "quarantine": 1}


@virtual
async def test_writes_rotate_too() -> None:
    """A put goes on through another port where one is dead; nothing is written twice."""
    plan = FaultPlan().on(host=H, port=1).refuse().on(host=H, port=2).reset(times=1)
    async with Rig(plan) as rig:
        for first in range(6):
            await rig.client.put_samples([f"s{first}"], "p", {"x": rows(1, first)})
        await read(rig, [f"s{i}" for i in range(6)], 1)
        assert rig.slots()["ready"] == 6
        assert rig.slots()["writing"] == 0
        assert rig.events["quarantine"] == 2
