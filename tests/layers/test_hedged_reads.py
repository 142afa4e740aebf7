"""Hedged reads: one that takes long is also sent through another port, and the first good answer is the result."""

from __future__ import annotations

from itertools import pairwise

import anyio
import pytest

from asyncdp import DataPlaneTimeout
from asyncdp.middleware.policy.permit import Health
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, read, virtual

H = "host-0"


class Empty:
    """A retry budget that is spent."""

    def deposit(self, now: float) -> None:
        """Count nothing."""

    def withdraw(self, now: float, tokens: int = 1) -> bool:
        """Refuse."""
        del now, tokens
        return False


def silent_after_ten(p99_s: float) -> FaultPlan:
    """All ports answer after 0.05 s (median); port 1 never again after its tenth call."""
    plan = FaultPlan()
    plan.on(host=H, port=1).silent(after=10)
    for port in (1, 2, 3, 4):
        plan.on(host=H, port=port).delay(p50_s=0.05, p99_s=p99_s)
    return plan


@virtual
async def test_a_mute_port_costs_the_delay_from_the_first_read_on() -> None:
    """Not a whole attempt, and it is not blamed: nobody waited long enough to know. After three times it rests."""
    async with Rig(FaultPlan().on(host=H, port=1).silent(), hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        took = await read(rig, ids, 40, every_s=0.01)
        assert sorted(took) == pytest.approx([0.0] * 37 + [0.2] * 3)
        assert rig.events == {"hedge": 3, "outrun": 1}
        assert len(rig.wire("ReadSlots")) == 43
        assert {key[1]: state.health for key, state in rig.ports.items()} == {
            **dict.fromkeys((2, 3, 4), Health.HEALTHY),
            1: Health.RESTING,
        }
        assert rig.leftovers() == {}


@virtual
async def test_rests_get_longer_and_end_with_an_answer() -> None:
    """One read probes after 1 s, the next one 2 s later; the first answer makes the port as good as any."""
    plan = FaultPlan()
    plan.on(host=H, port=1).silent(times=5)
    async with Rig(plan, hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        sent: list[float] = []
        for _ in range(100):
            await read(rig, ids, 1, every_s=0.1)
            sent = [one.at for one in rig.wire("ReadSlots", port=1)]
            if rig.ports[H, 1].health is Health.HEALTHY and len(sent) > 5:
                break
        assert [round(b - a, 1) for a, b in pairwise(sent[2:6])] == pytest.approx([1.2, 2.2, 4.2], abs=0.35)
        before = len(rig.wire("ReadSlots", port=1))
        await read(rig, ids, 40)
        assert len(rig.wire("ReadSlots", port=1)) - before == 10
        assert rig.events == {"hedge": 5, "outrun": 3, "probe": 3}
        assert rig.leftovers() == {}


@virtual
async def test_a_port_that_is_outrun_now_and_then_is_used_like_any_other() -> None:
    """Each answer of it begins the count anew."""
    plan = FaultPlan()
    for first in (0, 3, 6, 9, 12):
        plan.on(host=H, port=1).silent(after=first, times=2)
    async with Rig(plan, hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        await read(rig, ids, 80)
        assert rig.events == {"hedge": 10}
        assert rig.ports[H, 1].health is Health.HEALTHY


@virtual
async def test_a_quarantined_port_that_is_outrun_as_a_probe_rests() -> None:
    """Else each read would probe it again."""
    plan = FaultPlan()
    plan.on(host=H, port=1).refuse(times=1)
    plan.on(host=H, port=1).silent()
    async with Rig(plan, hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        await read(rig, ids, 8)
        assert rig.events["quarantine"] == 1
        await anyio.sleep(40.0)
        await read(rig, ids, 100, every_s=0.01)
        assert 3 <= len(rig.wire("ReadSlots", port=1)) <= 6


@virtual
async def test_the_delay_follows_how_long_reads_take() -> None:
    """With a quantile: first hedge_after_s holds, then what the latest reads of as many rows took."""
    async with Rig(silent_after_ten(p99_s=0.06), hedge_after_s=3.0, hedge_quantile=0.95) as rig:
        ids = await rig.fill(16)
        await read(rig, ids, 40)
        assert rig.events["hedge"] <= 4  # those of the silent port, until it rests
        took = await read(rig, ids, 4)
        assert 0.14 < max(took) < 0.2
        await anyio.sleep(40.0)  # port 1 may rest
        assert max(await read(rig, ids[:2], 4)) > 3.0  # of two rows it knows nothing yet


@virtual
async def test_healthy_ports_get_each_read_once() -> None:
    """And without the setting a slow port is waited for."""
    for settings in ({"hedge_after_s": 0.2}, {}):
        async with Rig(**settings) as rig:
            ids = await rig.fill(4)
            assert max(await read(rig, ids, 20)) == 0.0
            assert (len(rig.wire("ReadSlots")), rig.events) == (20, {})
    async with Rig(FaultPlan().on(host=H, port=1).delay(p50_s=3.0, p99_s=3.0)) as rig:
        ids = await rig.fill(4)
        assert max(await read(rig, ids, 4)) == pytest.approx(3.0)
        assert rig.events["hedge"] == 0


@virtual
async def test_the_first_answer_is_the_result() -> None:
    """Of the slow port too, where it comes before that of the other one; the other request ends at once."""
    plan = FaultPlan()
    plan.on(host=H, port=1).delay(p50_s=0.5, p99_s=0.5)
    for port in (2, 3, 4):
        plan.on(host=H, port=port).delay(p50_s=2.0, p99_s=2.0)
    async with Rig(plan, hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        took = await read(rig, ids, 8)
        assert max(took) < 2.5
        sent = rig.wire("ReadSlots", port=1)
        assert {one.error for one in sent} == {""}
        assert {one.error for one in rig.wire("ReadSlots") if one.ended} >= {
            "",
            "CancelledError",
        } or rig.leftovers() == {}
        assert rig.leftovers() == {}


@virtual
async def test_a_port_that_refuses_is_rotated_as_ever() -> None:
    """Before the delay is over an error is the usual error; also where the other port of a hedge fails."""
    async with Rig(FaultPlan().on(host=H, port=1).refuse(), hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        assert max(await read(rig, ids, 12)) == 0.0
        assert rig.events == {"rotation": 1, "quarantine": 1}
    plan = FaultPlan()
    plan.on(host=H, port=1).silent()
    plan.on(host=H, port=2).refuse()
    async with Rig(plan, hedge_after_s=0.2, attempt_timeout_s=1.0) as rig:
        ids = await rig.fill(4)
        assert max(await read(rig, ids, 12)) == pytest.approx(1.0, abs=0.3)
        assert rig.leftovers() == {}


@virtual
async def test_if_both_fail_the_call_fails_with_a_typed_error() -> None:
    """And no port is left in use."""
    plan = FaultPlan()
    for port in (1, 2, 3, 4):
        plan.on(host=H, port=port).silent()
    async with Rig(plan, hedge_after_s=0.2, attempt_timeout_s=1.0) as rig:
        ids = await rig.fill(4)
        with pytest.raises(DataPlaneTimeout):
            await rig.get(ids, timeout_s=5.0)
        assert rig.leftovers() == {}


@virtual
async def test_a_cancelled_read_leaves_nothing() -> None:
    """Cancelled before, at and after the second request."""
    async with Rig(FaultPlan().on(host=H).silent(times=1000), hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        for after_s in (0.0, 0.1, 0.2, 0.3, 1.0):
            with anyio.move_on_after(after_s) as scope:
                await rig.get(ids)
            assert scope.cancelled_caught
            assert rig.leftovers() == {}


@virtual
async def test_no_port_is_used_as_a_last_resort_nor_beyond_the_budget() -> None:
    """A quarantined port is no better than a slow one, and hedges are retries."""
    plan = FaultPlan()
    for port in (2, 3, 4):
        plan.on(host=H, port=port).refuse()
    plan.on(host=H, port=1).delay(p50_s=0.5, p99_s=0.5)
    async with Rig(plan, hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        await read(rig, ids, 8)  # quarantines the others
        before = rig.events["hedge"]
        assert sorted(await read(rig, ids, 8)) == pytest.approx([0.5] * 8)
        assert rig.events["hedge"] == before
    async with Rig(FaultPlan().on(host=H, port=1).delay(p50_s=0.5, p99_s=0.5), hedge_after_s=0.2) as rig:
        ids = await rig.fill(4)
        rig.client.env.budget = Empty()
        took = await read(rig, ids, 4)
        assert max(took) == pytest.approx(0.5)
        assert rig.events["budget_refused"] == 1


@virtual
async def test_each_time_in_a_row_a_port_is_waited_for_twice_as_long() -> None:
    """Its connection was given up, and to open another one may take longer than a read; never longer than asked for."""
    async with Rig(silent_after_ten(p99_s=0.0501), hedge_after_s=0.35, hedge_quantile=0.9) as rig:
        ids = await rig.fill(4)
        await read(rig, ids, 36)
        took = [seconds for seconds in await read(rig, ids, 40, every_s=0.01) if seconds > 0.07]
        assert took == pytest.approx([0.15, 0.25, 0.4, 0.4][: len(took)], abs=0.002)
        assert len(took) >= 3


def test_the_delay_is_checked() -> None:
    """When the layer is made."""
    for wrong in (-1.0, float("inf"), float("nan"), "soon"):
        with pytest.raises((ValueError, TypeError), match="hedge_after_s"):
            Rig(hedge_after_s=wrong)
    for wrong in (-0.1, 1.0, 95, float("nan")):
        with pytest.raises(ValueError, match="hedge_quantile"):
            Rig(hedge_after_s=1.0, hedge_quantile=wrong)
    with pytest.raises(ValueError, match="hedge_quantile needs hedge_after_s"):
        Rig(hedge_quantile=0.95)
