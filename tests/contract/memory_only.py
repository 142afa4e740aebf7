"""Promises that only the transport in memory lets itself be tested for: its hosts and clock are at hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import anyio
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    PartialReadError,
    StaleSlotError,
)
from asyncdp.calls.slots import ReadSlots, WriteSlots
from asyncdp.testing.contract import Contract
from asyncdp.testing.contract.faults import Straggle, Tamper
from asyncdp.testing.contract.rig import declare
from asyncdp.testing.contract.same import check_same
from asyncdp.testing.contract.steps import IDS, fill

if TYPE_CHECKING:
    from asyncdp.calls.slots import ReadResult
    from asyncdp.testing.contract import Rig

__all__ = ["MemoryOnly"]


class MemoryOnly(Contract):
    """Promises that only the transport in memory lets itself be tested for."""

    async def test_rows_of_a_dead_host_fail_alone(self, rig: Rig) -> None:
        """One of two hosts is down: the rows of the other one come, each lost row has its error."""
        await fill(rig)
        hosts = list(rig.transport().plane.hosts.values())
        lost = {
            row.id
            for row in rig.transport().plane.partitions["p"].rows.values()
            if row.cells["x"].place.host is hosts[0]
        }
        assert 0 < len(lost) < len(IDS)
        hosts[0].crash()
        with pytest.raises(PartialReadError) as caught:
            await rig.client.get_samples(IDS, "p", ["x"], timeout_s=2)
        err = caught.value
        assert set(err.failed.sample_ids) == lost
        check_same(err.rows["x"], torch.tensor([i for i, name in enumerate(IDS) if name not in lost]))
        assert all(isinstance(e, DataPlaneUnavailable) for e in err.errors.values())
        with pytest.raises(DataPlaneUnavailable):
            await rig.client.get_samples(sorted(lost), "p", ["x"], timeout_s=1)
        hosts[0].restart(adopt=True)
        check_same((await rig.client.get_samples(IDS, "p", ["x"]))["x"], torch.arange(8))

    async def test_flipped_bits_are_noticed_where_checksums_are_on(self, rig: Rig) -> None:
        """P3: with checksum, a bit that flips on the way is read again."""
        client = await rig.open(memory={"checksum": True})

        def flip(result: ReadResult) -> ReadResult:
            result.parts[0].block.columns["x"].values[0] += 1
            return result

        harm = Tamper(ReadSlots, change=flip)
        reader = await rig.attach(harm, to=client)
        await declare(client)
        await client.put_samples(["a"], "p", {"x": torch.tensor([5])})
        check_same((await reader.get_samples(["a"], "p", ["x"]))["x"], torch.tensor([5]))
        assert harm.struck == 1

    async def test_a_clear_during_the_transfer_is_noticed(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """A row that dies while its bytes are on their way is not delivered as if it lived, and its slot comes back."""
        await fill(rig, ["a"])
        hosts = rig.transport().plane.hosts.values()
        during: list[int] = []

        async def wire(call: Any) -> None:
            if isinstance(call, ReadSlots):
                await rig.mate.clear_samples(["a"], "p")
                during.append(sum(host.counts()["ready"] for host in hosts))

        monkeypatch.setattr(rig.transport(), "_wire", wire)
        with pytest.raises(StaleSlotError):
            await rig.client.get_samples(["a"], "p", ["x"])
        assert during == [1], "doomed, not freed, while it is read"
        assert sum(host.counts()["ready"] for host in hosts) == 0

    async def test_a_host_that_came_back_empty_is_stale_not_wrong(self, rig: Rig) -> None:
        """S14: after a restart without adoption old references are StaleSlotError, and new puts work."""
        await fill(rig, ["a", "b"])
        for host in rig.transport().plane.hosts.values():
            host.crash()
            host.restart(adopt=False)
        with pytest.raises(StaleSlotError):
            await rig.client.get_samples(["a", "b"], "p", ["x"])
        await rig.client.put_samples(["a"], "p", {"x": torch.tensor([7])})
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.tensor([7]))
        (group,) = [g for g in await rig.client.list_metadata("p") if g.group_id == "b"]
        assert (group.lost_keys, group.is_complete) == (("b",), False)

    async def test_space_of_a_writer_that_vanished_comes_back(self, rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
        """P12: once its put can be neither finished nor published any more, what it reserved is anybody's."""
        owner = await rig.open(num_storage_units=1, memory={"slots_per_host": 2, "rows_per_slot": 1})
        late = Straggle(WriteSlots)
        gone = await rig.attach(late, to=owner)
        await declare(owner)
        await late.cut(gone.put_samples(["a", "b"], "p", {"x": torch.zeros(2)}, timeout_s=60))
        for outcome in gone.env.pending_outcomes:
            gone.env.pending_outcomes.resolved(outcome)  # killed, it settles nothing
        with pytest.raises(DataPlaneNotReady):
            await owner.put_samples(["c"], "p", {"x": torch.zeros(1)})
        clock = rig.transport(owner).plane.clock
        now = clock.time() + 62.0
        monkeypatch.setattr(rig.transport(owner).plane, "clock", SimpleNamespace(time=lambda: now))
        await owner.put_samples(["a", "b"], "p", {"x": torch.ones(2)})
        with pytest.raises(DataPlaneError):
            await late.arrive()
        check_same((await owner.get_samples(["a", "b"], "p", ["x"]))["x"], torch.ones(2))

    async def test_full_slots_are_given_back_by_clears(self, rig: Rig) -> None:
        """P4: where slots run out, a put is DataPlaneNotReady, and a clear makes room."""
        client = await rig.open(num_storage_units=1, memory={"slots_per_host": 2})
        await declare(client)
        await client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        await client.put_samples(["b"], "p", {"x": torch.zeros(1)})
        for _ in range(3):
            with pytest.raises(DataPlaneNotReady):
                await client.put_samples(["c"], "p", {"x": torch.zeros(1)})
        assert (await client.describe("p")).size == 2
        await client.clear_samples(["a"], "p")
        await client.put_samples(["c"], "p", {"x": torch.ones(1)})
        check_same((await client.get_samples(["c", "b"], "p", ["x"]))["x"], torch.tensor([1.0, 0.0]))

    async def test_slots_are_used_again(self, rig: Rig) -> None:
        """Replaced and cleared payloads leave their slots; the number in use does not grow."""
        await declare(rig.client)
        for _ in range(20):
            await rig.client.put_samples(list("abc"), "p", {"x": torch.ones(3)})
        await rig.client.put_samples(["a"], "p", {"y": torch.ones(1)})
        hosts = rig.transport().plane.hosts.values()
        assert sum(host.counts()["ready"] for host in hosts) <= 4
        await rig.client.clear_samples(list("abc"), "p")
        assert sum(host.counts()["ready"] for host in hosts) == 0

    async def test_a_partition_that_a_restarted_plane_forgot_is_unavailable(self, rig: Rig) -> None:
        """Promise 4: one that this client knew is DataPlaneUnavailable; one it never knew is DataPlaneBadRequest."""
        owner = await rig.open()
        worker = await rig.attach(to=owner)
        await declare(worker)
        await rig.end(owner)
        reborn = await rig.open(controller_address=owner.attach_config()["controller_address"])
        with pytest.raises(DataPlaneUnavailable, match="'p'"):
            await worker.claim_meta("p", "train", ["x"], 1, timeout_s=0.3)
        with pytest.raises(DataPlaneUnavailable):
            await worker.put_samples(["a"], "p", {"x": torch.zeros(1)}, timeout_s=0.3)
        with pytest.raises(DataPlaneBadRequest):
            await worker.depth("q")
        await declare(reborn)
        await worker.put_samples(["a"], "p", {"x": torch.zeros(1)})

    async def test_where_no_plane_is_nobody_answers(self, rig: Rig) -> None:
        """Attached to an address without a plane: DataPlaneUnavailable on every verb, within its time."""
        lost = await rig.attach(controller_address="memory://nowhere")
        with anyio.fail_after(60), pytest.raises(DataPlaneUnavailable, match="nowhere"):
            await lost.ping()
        with anyio.fail_after(60), pytest.raises(DataPlaneUnavailable):
            await lost.register_partition("p", ["x"], 1, [], timeout_s=1)

    @pytest.mark.parametrize("per_slot", [None, 1, 3])
    async def test_slots_of_rows_left_out_are_free_at_once(self, rig: Rig, per_slot: int | None) -> None:
        """3a: the slots of rows that a put leaves out are freed by its publish, also where some rows share them."""
        client = await rig.open(memory={"rows_per_slot": per_slot, "slots_per_host": 8}, num_storage_units=1)
        await declare(client, "x", "y")
        (host,) = rig.transport(client).plane.hosts.values()
        for gone, left in ((2, 4), (4, 0)):
            meta = await client.put_samples(list("abcd"), "p", {"x": torch.zeros(4)})
            await client.clear_samples(list("abcd")[:gone], "p")
            before = host.counts()["ready"], host.rows
            done = await client.put_samples(meta, "p", {"y": torch.zeros(4)}, stale="skip")
            assert done.size == 4 - gone
            assert host.rows == left
            more = len({at // (per_slot or 4) for at in range(gone, 4)})
            assert (host.counts()["ready"], host.counts()["writing"]) == (before[0] + more, 0)
            await client.clear_samples(list("abcd"), "p")
            assert (host.rows, host.counts()["ready"]) == (0, 0)
