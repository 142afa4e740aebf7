"""Promise 11: a cancelled call leaves nothing behind, and the next one gets its own reply."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import PortRotation
from asyncdp.calls.slots import Reserve, Resolve, WriteSlots
from asyncdp.service import layers_of

from ...verbs import VERBS
from ..faults import PUT, Hold, Straggle
from ..rig import declare
from ..same import check_same
from ..steps import TICK_S, put_floats

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Cancels"]


def tasks() -> int:
    """Count the tasks of this loop, except those named as belonging to a client, which end with the client."""
    return sum(not (task.name or "").startswith("asyncdp ") for task in anyio.get_running_tasks())


class Cancels(Contract):
    """Promise 11: a cancelled call leaves nothing behind, and the next one gets its own reply."""

    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "release_claim"])
    async def test_a_cancelled_call_leaves_nothing_and_the_next_gets_its_own_reply(
        self, rig: Rig, verb: str, *, after: bool
    ) -> None:
        """T2, promise 11: no task, slot or permit is left, and the client can be used at once."""
        rig.need(*VERBS[verb].needs)
        hold = Hold(after=after)
        client = await rig.attach(hold)
        await put_floats(rig, 3)
        before = tasks()
        await hold.cut(VERBS[verb](client, 60))
        assert tasks() == before
        got = await client.get_samples(["s2", "s1"], "p", ["x"], timeout_s=30)
        check_same(got["x"], torch.tensor([2.0, 1.0]))
        await client.put_samples(["b"], "p", {"x": torch.ones(1)}, timeout_s=30)
        await client.close()
        assert not rig.leftovers()
        assert len(client.env.pending_outcomes) == 0

    async def test_of_many_cancelled_calls_none_disturbs_the_others(self, rig: Rig) -> None:
        """T2, T6: with 200 randomly cancelled reads, each reply is the right one, and ports and slots become free."""
        await put_floats(rig)
        rng = random.Random(1)
        client = rig.mate
        wrong: list[Any] = []

        async def read(i: int, wait_s: float) -> None:
            name = "a" if not i else f"s{i}"
            with anyio.move_on_after(wait_s):
                got = await client.get_samples([name], "p", ["x"])
                if float(got["x"]) != i:
                    wrong.append((i, got["x"]))

        async with anyio.create_task_group() as group:
            for _ in range(200):
                group.start_soon(read, rng.randrange(8), rng.choice([0, 0.0005, 0.001, 0.002, 5]))
        assert not wrong
        assert not rig.leftovers()
        for layer in layers_of(client):
            if isinstance(layer, PortRotation):
                ports = layer.ports(client.env.clock.now())
                assert not [port for port, state in ports.items() if state.in_flight]
        check_same((await client.get_samples(["s7"], "p", ["x"]))["x"], torch.tensor([7.0]))

    @pytest.mark.parametrize("step", [Reserve, WriteSlots, PUT], ids=["reserve", "write", "publish"])
    async def test_puts_cancelled_at_random_leave_no_slot(self, rig: Rig, step: Any) -> None:
        """T6: after fifty cancelled puts and one more put, no slot is reserved and each id is whole or absent."""
        rig.need("slot_writes", "mutation_dedup")
        await declare(rig.client, "x", "y")
        rng = random.Random(2)
        client = await rig.attach(Hold(step, times=25, after=True))

        async def put(i: int) -> None:
            with anyio.move_on_after(rng.choice([0, 0.001, 0.003])):
                data = {"x": torch.full((2,), float(i)), "y": torch.full((2, 2), float(i))}
                await client.put_samples([f"a{i}", f"b{i}"], "p", data)

        async with anyio.create_task_group() as group:
            for i in range(50):
                group.start_soon(put, i)
        await client.clear_samples(["nobody"], "p")
        await client.close()
        assert not rig.leftovers()
        there = {key for group_ in await rig.client.list_metadata("p") for key in group_.keys}
        assert all((f"a{i}" in there) == (f"b{i}" in there) for i in range(50))
        for i in range(50):
            if f"a{i}" in there:
                got = await rig.client.get_samples([f"a{i}", f"b{i}"], "p", ["x", "y"])
                check_same(got["y"], torch.full((2, 2), float(i)))

    async def test_a_cancel_during_clean_up_waits_for_no_io(self, rig: Rig) -> None:
        """T7: a cancel during the reconciliation of an earlier put takes effect at once; the clean-up happens later."""
        rig.need("mutation_dedup")
        late, hold = Straggle(PUT), Hold(Resolve, times=2)
        client = await rig.attach(late, hold)
        await declare(client)
        for fault in (late, hold, hold):
            began = time.monotonic()
            await fault.cut(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
            assert time.monotonic() - began < TICK_S
        hold.go.set()
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert len(client.env.pending_outcomes) == 0 or not rig.leftovers()
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))
