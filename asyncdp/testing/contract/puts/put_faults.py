"""Promise 3 under faults: a put is whole or absent, and leaves nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import (
    DataPlaneError,
    DataPlaneUnavailable,
    DataPlaneWriteError,
    SampleNotFound,
)
from asyncdp.calls.slots import Abort, Place, Reserve, Resolve, WriteSlots

from ..faults import PUT, Fail, Hold, LoseReply, LoseRequest, Straggle
from ..rig import declare, table
from ..same import check_same
from ..steps import tags_of

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["PutFaults"]


class PutFaults(Contract):
    """Promise 3 under faults: a put is whole or absent, and leaves nothing behind."""

    @pytest.mark.parametrize("fault", [LoseRequest, LoseReply])
    async def test_a_put_whose_answer_is_lost_is_sent_again_and_is_there_once(self, rig: Rig, fault: Any) -> None:
        """P5: whether the request or the answer was lost, the put succeeds and is whole."""
        rig.need("mutation_dedup")
        lost = fault(PUT)
        client = await rig.attach(lost)
        await declare(client)
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)}, [{"k": 1}, {"k": 2}])
        assert lost.struck == 1
        check_same((await rig.client.get_samples(["a", "b"], "p", ["x"]))["x"], torch.arange(2))
        assert (await tags_of(rig, "b"))["k"] == 2
        assert (await rig.client.claim_meta("p", "train", ["x"], 5, blocking=False)).sample_ids == ["a", "b"]

    @pytest.mark.parametrize(("fault", "rows"), [(LoseRequest, 0), (LoseReply, 2)])
    async def test_a_put_that_is_never_answered_is_ambiguous_and_whole_or_absent(
        self, rig: Rig, fault: Any, rows: int
    ) -> None:
        """P5: the error of the put is ambiguous; it is whole or absent, and the next put reconciles the outcome."""
        lost = fault(PUT, times=99)
        client = await rig.attach(lost)
        await declare(client)
        with pytest.raises(DataPlaneError) as caught:
            await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        assert caught.value.ambiguous
        assert not caught.value.retryable
        assert caught.value.op == "put_samples"
        assert caught.value.attempts > 1
        assert (await rig.client.describe("p")).size == rows
        lost.times = 0
        await client.put_samples(["b"], "p", {"x": torch.tensor([9])})
        got = await rig.client.get_samples(["b"], "p", ["x"])
        check_same(got["x"], torch.tensor([9]))

    @pytest.mark.parametrize("step", [Place, Reserve, WriteSlots, PUT], ids=["place", "reserve", "write", "publish"])
    async def test_a_put_that_fails_at_any_step_leaves_nothing(self, rig: Rig, step: Any) -> None:
        """If any step fails permanently, nothing is visible, no slot is held, and the put can be repeated."""
        rig.need("slot_writes")
        fail = Fail(step, make=lambda: DataPlaneWriteError("disk on fire"), times=99)
        client = await rig.attach(fail)
        await declare(client)
        with pytest.raises(DataPlaneWriteError, match="disk on fire") as caught:
            await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, [{"k": 1}] * 2)
        assert not caught.value.ambiguous
        assert (await rig.client.describe("p")).size == 0
        assert await rig.client.list_metadata("p") == []
        assert not rig.leftovers()
        fail.times = 0
        await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)})

    @pytest.mark.parametrize("step", [Reserve, WriteSlots], ids=["reserve", "write"])
    async def test_a_host_that_fails_is_left_for_another(self, rig: Rig, step: Any) -> None:
        """A put uses a spare host if no port of the first host answers."""
        rig.need("slot_writes")
        first: list[str] = []

        class Down(Fail):
            async def serve(self, call: Any, ctx: Any, send: Any) -> Any:
                if type(call) in self.kinds:
                    first.append(call.host.id)
                    if call.host.id != first[0]:
                        return await send(call, ctx)
                return await super().serve(call, ctx, send)

        client = await rig.attach(Down(step, times=99))
        await declare(client)
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert len(set(first)) == 2
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))
        assert not rig.leftovers()

    async def test_a_failed_put_of_one_more_field_keeps_the_others(self, rig: Rig) -> None:
        """P16: if a put of C to existing ids fails and is rolled back, A and B are still present."""
        fail = Fail(PUT, make=lambda: DataPlaneWriteError("refused"), times=0)
        client = await rig.attach(fail)
        await declare(client, "a", "b", "c")
        await client.put_samples(["s", "t"], "p", table(a=torch.zeros(2), b=torch.ones(2)), [{"k": 1}, {"k": 2}])
        fail.times = 99
        with pytest.raises(DataPlaneWriteError):
            await client.put_samples(["s", "t"], "p", {"c": torch.ones(2)}, [{"k": 3}] * 2)
        got = await rig.client.get_samples(["s", "t"], "p", ["a", "b"])
        check_same(got["b"], torch.ones(2))
        with pytest.raises(SampleNotFound):
            await rig.client.get_samples(["s"], "p", ["c"])
        assert (await tags_of(rig, "s"))["k"] == 1

    async def test_a_cancelled_put_is_whole_or_absent(self, rig: Rig) -> None:
        """A put that is cancelled at any moment is whole or absent; the next put on these ids takes effect."""
        hold = Hold(PUT, times=99)
        client = await rig.attach(hold)
        await declare(client)
        await hold.cut(client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}))
        assert (await rig.client.describe("p")).size == 0
        hold.go.set()
        await client.put_samples(["b"], "p", {"x": torch.ones(1)})
        assert [g.keys for g in await rig.client.list_metadata("p")] == [("b",)]

    @pytest.mark.parametrize("step", [Reserve, WriteSlots, PUT], ids=["reserve", "write", "publish"])
    async def test_a_cancelled_put_gives_its_space_back_with_the_next_one(self, rig: Rig, step: Any) -> None:
        """P15: this holds even if a request in transit arrives later."""
        rig.need("slot_writes", "mutation_dedup")
        late = Straggle(step)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(client.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}))
        await client.put_samples(["c"], "p", {"x": torch.zeros(1)})
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        assert not rig.leftovers()
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert not rig.leftovers()
        assert (await rig.client.describe("p")).size == 2
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))

    async def test_a_cancel_while_older_debts_are_settled_leaves_no_slot(self, rig: Rig) -> None:
        """A put that is cancelled during the reconciliation of an earlier one releases the slots that it reserved."""
        rig.need("mutation_dedup")
        late, hold = Straggle(PUT), Hold(Resolve)
        client = await rig.attach(late, hold)
        await declare(client)
        for fault in (late, hold):
            await fault.cut(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
        hold.go.set()
        await client.put_samples(["b"], "p", {"x": torch.zeros(1)})
        await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        assert not rig.leftovers()

    async def test_a_host_that_cannot_be_told_to_free_slots_holds_nobody_up(self, rig: Rig) -> None:
        """Slots of failed puts on a silent host are freed by occasional requests, not before each mutation."""
        rig.need("slot_writes")
        fail, silent = Fail(WriteSlots, times=10_000), Fail(Abort, times=10_000)
        client = await rig.attach(fail, silent)
        await declare(client)
        for i in range(5):
            with pytest.raises(DataPlaneUnavailable):
                await client.put_samples([f"s{i}"], "p", {"x": torch.zeros(1)})
        await client.clear_samples(["a"], "p")
        told = len(silent.seen)
        for _ in range(5):
            await client.clear_samples(["a"], "p")
        assert len(silent.seen) == told
        silent.times = 0
        await client.close()
        assert not rig.leftovers()

    async def test_a_writer_that_vanished_in_mid_put_blocks_nobody(self, rig: Rig) -> None:
        """P12: the ids of its put can be written at once."""
        late = Straggle(PUT)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
        await rig.mate.put_samples(["a"], "p", {"x": torch.ones(1)})
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))

    async def test_a_put_that_nobody_can_take_says_so_unambiguously(self, rig: Rig) -> None:
        """If all ports of all hosts refuse, the put raises DataPlaneUnavailable, not ambiguous, and writes nothing."""
        fail = Fail(Reserve, PUT, times=999)
        client = await rig.attach(fail)
        await declare(client)
        with pytest.raises(DataPlaneUnavailable) as caught:
            await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        assert not caught.value.ambiguous
        assert (await rig.client.describe("p")).size == 0
