"""The waits of a client share one timer, and each ends at its own deadline."""

from __future__ import annotations

import asyncio
import math

import anyio
import pytest

from asyncdp.calls import OpenWaits
from asyncdp.testing.clock import VirtualLoop
from tests.layers.rig import virtual


async def _wait(waits: OpenWaits, seconds: float, ended: list[tuple[float, float]]) -> None:
    scope = waits.scope(anyio.current_time() + seconds)
    try:
        with scope:
            await anyio.sleep(math.inf)
    finally:
        waits.scopes.pop(scope, None)
    assert scope.cancelled_caught
    ended.append((seconds, anyio.current_time()))


@virtual
async def test_each_wait_ends_at_its_own_deadline() -> None:
    """Whatever the order in which they began: later, earlier, equal, and one whose deadline has passed."""
    waits = OpenWaits()
    ended: list[tuple[float, float]] = []
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        for seconds in (5.0, 2.0, 9.0, 2.5, -1.0, 5.0):
            group.start_soon(_wait, waits, seconds, ended)
    assert [seconds for seconds, _ in ended] == [-1.0, 2.0, 2.5, 5.0, 5.0, 9.0]
    assert [at - began for _, at in ended] == pytest.approx([0.0, 2.0, 2.5, 5.0, 5.0, 9.0], abs=0.01)
    assert not waits.scopes


@virtual
async def test_a_wait_after_one_that_ended_early_has_its_own_deadline() -> None:
    """The timer of a wait that ended before its deadline ends no later wait, and does not keep one from ending."""
    waits = OpenWaits()
    waits.scopes.pop(waits.scope(anyio.current_time() + 1.0))
    ended: list[tuple[float, float]] = []
    await anyio.sleep(0.5)
    began = anyio.current_time()
    await _wait(waits, 3.0, ended)
    await _wait(waits, 0.25, ended)
    assert [at - began for _, at in ended] == pytest.approx([3.0, 3.25], abs=0.01)


@virtual
async def test_a_closed_client_leaves_no_timer() -> None:
    """Closing ends the waits at once."""
    waits = OpenWaits()
    ended: list[tuple[float, float]] = []
    began = anyio.current_time()
    async with anyio.create_task_group() as group:
        group.start_soon(_wait, waits, 5.0, ended)
        await anyio.wait_all_tasks_blocked()
        waits.end()
    assert [at for _, at in ended] == [began]
    assert waits._timer is None


def test_two_loops_one_inside_the_waits_of_the_other() -> None:
    """A loop that runs while a wait of another loop is open keeps its deadlines, and so does the other loop."""
    waits, first, second = OpenWaits(), VirtualLoop(), VirtualLoop()
    ended: list[tuple[float, float]] = []
    outer = first.create_task(_wait(waits, 5.0, ended))
    first.run_until_complete(asyncio.sleep(1.0))
    second.run_until_complete(_wait(waits, 20.0, ended))
    first.run_until_complete(outer)
    third = VirtualLoop()
    third.run_until_complete(_wait(waits, 7.0, ended))
    assert ended == [
        (20.0, pytest.approx(20.0, abs=0.01)),
        (5.0, pytest.approx(5.0, abs=0.01)),
        (7.0, pytest.approx(7.0, abs=0.01)),
    ]
    for loop in (first, second, third):
        loop.close()
