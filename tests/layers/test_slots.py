from typing import Any

import anyio
import pytest
import structlog
import torch

from asyncdp import (
    DataPlaneUnavailable,
    KVBatchMeta,
    MemoryTransport,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
)
from asyncdp.compose.reads import REREADS
from asyncdp.testing import FaultPlan
from asyncdp.transports.memory.host import GENERATIONS
from tests.layers.rig import Rig, rows, virtual


class Stalling(MemoryTransport):
    """Reads stall half-way, with their slot in READING, while ``gate`` is closed."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gate: anyio.Event | None = None
        self.stalled = 0

    async def _wire(self, call: Any) -> None:
        if self.gate is not None and type(call).__name__ == "ReadSlots" and self.stalled == 0:
            self.stalled += 1
            await self.gate.wait()
        await super()._wire(call)


def sent_for(rig: Rig, slot: int) -> int:
    """Count the wire requests that asked for a slot of host-0."""
    return sum(any(ref.slot == slot for ref in s.call.refs) for s in rig.wire("ReadSlots"))


@virtual
@pytest.mark.parametrize("how", ["cleared", "reborn"])
async def test_a_recycled_slot_is_stale_at_once(how: str) -> None:
    """S1: a slot recycled by another payload is StaleSlotError after one request; the batch's other rows arrive."""
    plan = FaultPlan().recycle("s3", how=how, times=1)
    async with Rig(plan) as rig:
        ids = await rig.fill(6)
        began = anyio.current_time()
        with pytest.raises(PartialReadError) as caught:
            await rig.get(ids)
        err = caught.value
        assert {at: type(e) for at, e in err.errors.items()} == {3: StaleSlotError}
        assert torch.equal(err.rows["x"], rows(6)[[0, 1, 2, 4, 5]])
        assert err.failed.sample_ids == ["s3"]
        assert sent_for(rig, 3) == 1
        assert anyio.current_time() == began
        assert rig.events == {"stale_slots": 1, "error.PartialReadError": 1}


@virtual
async def test_a_stale_slot_alone_is_the_error_itself() -> None:
    """S1: where no row came the StaleSlotError itself goes up, after one wire request for the slot."""
    plan = FaultPlan().recycle(times=1)
    async with Rig(plan) as rig:
        ids = await rig.fill(1)
        with pytest.raises(StaleSlotError) as caught:
            await rig.get(ids)
        assert caught.value.attempts == 1
        assert len(rig.wire("ReadSlots")) == 1
        assert rig.events["retry"] == rig.events["rotation"] == rig.events["quarantine"] == 0


@virtual
async def test_a_stale_answer_is_believed() -> None:
    """A host that calls a slot stale is asked once, even if the directory still knows the slot."""
    plan = FaultPlan().stale("s1")
    async with Rig(plan) as rig:
        with pytest.raises(PartialReadError) as caught:
            await rig.get(await rig.fill(4))
        assert caught.value.failed.sample_ids == ["s1"]
        assert sent_for(rig, 1) == 1


@virtual
@pytest.mark.parametrize("times", [1, REREADS])
async def test_a_moved_row_is_read_where_it_lies_now(times: int) -> None:
    """A row that was put again meanwhile, each time it is read, is looked up once more and read whole (P17)."""
    plan = FaultPlan().recycle("s2", how="moved", times=times)
    async with Rig(plan) as rig:
        assert torch.equal((await rig.get(await rig.fill(4)))["x"], rows(4))
        assert len(rig.wire("Locate")) == 1 + times
        assert len(rig.wire("ReadSlots")) == 1 + times
        assert rig.wire("Locate")[-1].call.sample_ids == ("s2",)


@virtual
async def test_a_row_that_moves_for_ever_is_stale() -> None:
    """The number of times that a row is read again has a limit; the other rows come."""
    plan = FaultPlan().recycle("s2", how="moved")
    async with Rig(plan) as rig:
        with pytest.raises(PartialReadError) as caught:
            await rig.get(await rig.fill(4))
        assert {at: type(err) for at, err in caught.value.errors.items()} == {2: StaleSlotError}
        assert len(rig.wire("Locate")) == 1 + REREADS


@virtual
async def test_a_row_is_never_put_together_from_two_lives() -> None:
    """Fields of one row in two slots, one of them recycled by a new life of the id: stale, never half and half."""
    plan = FaultPlan().on(call="ReadSlots").delay(1.0, times=1)
    async with Rig(plan) as rig:
        await rig.fill(1)
        await rig.plain.put_samples(["s0"], "p", {"y": rows(1)})

        async def replace() -> None:
            await anyio.sleep(0.5)
            await rig.plain.clear_samples(["s0"], "p")
            await rig.plain.put_samples(["s0"], "p", {"x": rows(1, 7), "y": rows(1, 7)})

        async with anyio.create_task_group() as group:
            group.start_soon(replace)
            with pytest.raises(StaleSlotError):
                await rig.client.get_samples(["s0"], "p", ["x", "y"])
        got = await rig.client.get_samples(["s0"], "p", ["x", "y"])
        assert float(got["x"].sum() + got["y"].sum()) == 28.0


@virtual
async def test_a_slot_under_read_is_read_by_others() -> None:
    """S2: while one reader stalls in a slot, another gets the data; busy is not stale."""
    async with Rig(transport=Stalling) as rig:
        ids = await rig.fill(1)
        rig.transport.gate = anyio.Event()
        async with anyio.create_task_group() as group:
            group.start_soon(rig.get, ids)
            await anyio.sleep(0.1)
            assert rig.slots()["reading"] == 1
            assert torch.equal((await rig.get(ids))["x"], rows(1))
            rig.transport.gate.set()
        assert rig.leftovers() == {}


@virtual
async def test_a_slot_cleared_under_its_reader_is_freed_by_it() -> None:
    """S2: a slot cleared while it is read is stale for the reader, kept until the reader ends, then free."""
    async with Rig(transport=Stalling, slots=2) as rig:
        ids = await rig.fill(1)
        rig.transport.gate = anyio.Event()
        caught: list[Exception] = []

        async def reader() -> None:
            try:
                await rig.get(ids)
            except StaleSlotError as err:
                caught.append(err)

        async with anyio.create_task_group() as group:
            group.start_soon(reader)
            await anyio.sleep(0.1)
            await rig.plain.clear_samples(ids, "p")
            assert rig.slots()["free"] == 0
            # S4: the stuck slot does not keep writers from the others.
            await rig.client.put_samples(["other"], "p", {"x": rows(1, 9)})
            rig.transport.gate.set()
        assert len(caught) == 1
        assert (rig.slots()["free"], rig.slots()["ready"]) == (1, 1)
        await rig.client.put_samples(["third"], "p", {"x": rows(1, 3)})


@virtual
async def test_a_late_finish_changes_nothing() -> None:
    """S3: a read attempt that ends after its slot was recycled, or twice, changes nothing and warns."""
    async with Rig() as rig:
        ids = await rig.fill(1)
        located = rig.transport.plane.locate("p", ids, ["x"], None)
        host = rig.hosts[0]
        attempt = host.begin_read(located.refs[0])
        slot = attempt.slot
        # The host forgets its orphan (it restarts and adopts its slots), and the slot goes to another sample.
        slot.readers.clear()
        await rig.plain.clear_samples(ids, "p")
        await rig.plain.put_samples(["new"], "p", {"x": rows(1, 5)})
        assert slot.state.value == "ready"
        other = host.begin_read(rig.transport.plane.locate("p", ["new"], ["x"], None).refs[0])
        before = (slot.state, slot.generation, set(slot.readers), set(slot.live))
        with structlog.testing.capture_logs() as logs:
            assert host.finish_read(attempt) is False
            assert host.finish_read(attempt) is False
        assert (slot.state, slot.generation, slot.readers, slot.live) == before
        assert [log["log_level"] for log in logs] == ["warning", "warning"]
        assert host.finish_read(other) is True
        assert torch.equal((await rig.get(["new"]))["x"], rows(1, 5))


@virtual
async def test_another_epoch_is_stale() -> None:
    """S9: a host that came back empty, in a new epoch, with other content in the same slots: StaleSlotError, once."""
    plan = FaultPlan().crash_host("host-0", at_s=10, restart_at_s=11, adopt=False)
    async with Rig(plan) as rig:
        ids = await rig.fill(4)
        await rig.get(ids)
        await anyio.sleep(12.0)
        await rig.client.ping()
        await rig.client.put_samples([f"new{i}" for i in range(4)], "p", {"x": rows(4, 50)})
        assert rig.slots()["ready"] == 4
        rig.sent.clear()
        with pytest.raises(StaleSlotError):
            await rig.get(ids)
        assert len(rig.wire("ReadSlots")) == 1
        assert torch.equal((await rig.get([f"new{i}" for i in range(4)]))["x"], rows(4, 50))


@virtual
async def test_an_adopted_host_serves_its_slots_again() -> None:
    """A host that adopts its slots is unavailable while it is down, with the real error, and serves afterwards."""
    plan = FaultPlan().crash_host("host-0", at_s=10, restart_at_s=20, adopt=True)
    async with Rig(plan) as rig:
        ids = await rig.fill(4)
        await rig.get(ids)
        await anyio.sleep(12.0)
        with pytest.raises(DataPlaneUnavailable):
            await rig.get(ids, timeout_s=2.0)
        await anyio.sleep(8.0)
        assert torch.equal((await rig.get(ids))["x"], rows(4))


@virtual
async def test_first_last_and_wrapped_slots_are_like_any_other() -> None:
    """S11: slot 0, the last slot and a generation that wraps to 0 are written, read, recycled and stale like any."""
    async with Rig(slots=3) as rig:
        ids = await rig.fill(3)
        assert torch.equal((await rig.get(ids))["x"], rows(3))
        host = rig.hosts[0]
        for slot in host.slots:
            await rig.plain.clear_samples([f"s{slot.number}"], "p")
            slot.generation = GENERATIONS - 1
        await rig.plain.put_samples(ids, "p", {"x": rows(3, 20)})
        assert {slot.generation for slot in host.slots} == {0}
        meta = await rig.client.claim_meta("p", "t", ["x"], 3)
        assert torch.equal((await rig.client.get_data(meta))["x"], rows(3, 20))
        await rig.plain.clear_samples(ids, "p")
        await rig.plain.put_samples(ids, "p", {"x": rows(3, 40)})
        assert {slot.generation for slot in host.slots} == {1}
        with pytest.raises(StaleSlotError):
            await rig.client.get_data(meta)


@virtual
async def test_a_meta_of_a_former_life_is_stale() -> None:
    """A claim whose rows were cleared and put anew is StaleSlotError; nothing is read (P8)."""
    async with Rig() as rig:
        ids = await rig.fill(2)
        meta: KVBatchMeta = await rig.client.claim_meta("p", "t", ["x"], 2)
        await rig.plain.clear_samples(ids, "p")
        await rig.fill(2, value=5.0)
        rig.sent.clear()
        with pytest.raises(StaleSlotError):
            await rig.client.get_data(meta)
        assert [s.kind for s in rig.sent] == ["Locate"]


@virtual
async def test_what_is_not_there_is_said_at_once() -> None:
    """An unknown id is SampleNotFound without any retry, beside the rows that are there."""
    async with Rig() as rig:
        await rig.fill(2)
        with pytest.raises(PartialReadError) as caught:
            await rig.get(["s0", "nobody", "s1"])
        assert isinstance(caught.value.errors[1], SampleNotFound)
        with pytest.raises(SampleNotFound):
            await rig.get(["nobody"])
        assert [s.kind for s in rig.sent] == ["Locate", "ReadSlots", "Locate"]


@virtual
async def test_a_corrupt_payload_comes_again() -> None:
    """A flipped bit is noticed by its checksum; the row is asked for again through another port, the rest is kept."""
    plan = FaultPlan().corrupt(times=1).corrupt(schema=True, times=1, after=5)
    async with Rig(plan, checksum=True) as rig:
        ids = await rig.fill(4)
        for _ in range(3):
            assert torch.equal((await rig.get(ids))["x"], rows(4))
        assert plan.counts["corrupt"] == 2
        assert [len(s.call.refs) for s in rig.wire("ReadSlots")] == [4, 1, 4, 1, 4]
        assert rig.events == {"retry": 2, "quarantine": 2}
