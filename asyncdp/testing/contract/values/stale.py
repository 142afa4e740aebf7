"""Promise 6: a reference to removed data raises StaleSlotError and never returns bytes of another sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from asyncdp import PartialReadError, StaleSlotError
from asyncdp.calls.slots import Locate

from ..faults import GET, Hold, Watch
from ..rig import at_once, declare, table
from ..same import check_same
from ..steps import IDS, fill

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Stale"]


class Stale(Contract):
    """Promise 6: a reference to removed data raises StaleSlotError and never returns bytes of another sample."""

    async def test_a_meta_whose_row_was_cleared_is_stale(self, rig: Rig) -> None:
        """P8: get_data of a claim whose rows were cleared raises StaleSlotError at once, without retries."""
        rig.need("verified_clear")
        watch = Watch(Locate, GET)
        client = await rig.attach(watch)
        await fill(rig)
        meta = await client.claim_meta("p", "train", ["x"], 2)
        await rig.client.clear_samples(meta.sample_ids, "p")
        await rig.client.put_samples(["n0", "n1"], "p", {"x": torch.tensor([70, 71])})
        with pytest.raises(StaleSlotError) as caught:
            await client.get_data(meta)
        err = caught.value
        assert (err.op, err.retryable, err.blames_port) == ("get_data", False, False)
        assert err.attempts == 1
        # A transport that remembers from the claim where the rows lie may look there first.
        assert sum(isinstance(call, Locate) for call in watch.seen) <= 2

    async def test_a_meta_whose_row_lives_again_is_stale(self, rig: Rig) -> None:
        """Promise 6: an id that was put anew is another sample, which only a read by id returns, not the old meta."""
        await fill(rig)
        meta = await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.mate.clear_samples(["s0"], "p")
        await rig.mate.put_samples(["s0"], "p", {"x": torch.tensor([70])})
        with pytest.raises(PartialReadError) as caught:
            await rig.client.get_data(meta)
        assert isinstance(caught.value.errors[0], StaleSlotError)
        check_same(caught.value.rows["x"], torch.tensor([1]))
        check_same((await rig.client.get_samples(["s0"], "p", ["x"]))["x"], torch.tensor([70]))
        alone = meta.drop(["s1"])
        assert alone is not None
        with pytest.raises(StaleSlotError, match="'s0'"):
            await rig.client.get_data(alone)

    async def test_a_meta_of_another_plane_is_stale(self, rig: Rig) -> None:
        """Promise 6: a meta of another plane, or of this plane before a restart, is stale even for the same ids."""
        other = await rig.open()
        metas = []
        for at, client in enumerate((rig.client, other)):
            await declare(client)
            metas.append(await client.put_samples(["a", "b"], "p", {"x": torch.tensor([at, at])}))
        with pytest.raises(StaleSlotError):
            await other.get_data(metas[0])
        with pytest.raises(StaleSlotError):
            await rig.client.get_data(metas[1])

    async def test_the_meta_of_a_put_is_a_reference_too(self, rig: Rig) -> None:
        """Promise 6: the meta of a put refers to the rows that it wrote, not to later rows with the same ids."""
        await declare(rig.client)
        meta = await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        await rig.client.clear_samples(["a"], "p")
        await rig.client.put_samples(["a"], "p", {"x": torch.ones(1)})
        with pytest.raises(StaleSlotError):
            await rig.client.get_data(meta)

    async def test_a_row_whose_fields_were_replaced_is_read(self, rig: Rig) -> None:
        """Promise 6: replacing fields does not start a new life, so the meta reads the new values."""
        await fill(rig)
        meta = await rig.client.claim_meta("p", "train", ["x"], 2)
        await rig.mate.put_samples(["s0"], "p", {"x": torch.tensor([70])})
        check_same((await rig.client.get_data(meta))["x"], torch.tensor([70, 1]))

    @pytest.mark.parametrize("rows", [1, 3])
    async def test_a_row_replaced_between_look_up_and_read_is_read_whole(self, rig: Rig, rows: int) -> None:
        """P17: a read whose field is replaced after the look-up returns the whole new row."""
        hold = Hold(GET)
        client = await rig.attach(hold)
        await declare(rig.client, "x", "y")
        ids = IDS[:rows]
        await rig.client.put_samples(ids, "p", table(x=torch.zeros(rows), y=torch.zeros(rows, 2)))

        async def put() -> None:
            await hold.holds()
            await rig.client.put_samples(["s0"], "p", table(x=torch.ones(1), y=torch.ones(1, 2)))
            hold.go.set()

        got, _ = await at_once(client.get_samples(ids, "p", ["x", "y"]), put())
        check_same(got["x"], torch.tensor([1.0, 0.0, 0.0][:rows]))
        check_same(got["y"], torch.tensor([[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]][:rows]))

    @pytest.mark.parametrize("again", [False, True], ids=["cleared", "lives again"])
    async def test_a_row_cleared_between_look_up_and_read_is_stale(self, rig: Rig, *, again: bool) -> None:
        """Promise 6: a read never returns bytes of a recycled slot, nor a row of two lives."""
        rig.need("slot_addressable")
        hold = Hold(GET, times=9)
        client = await rig.attach(hold)
        await fill(rig)

        async def clear() -> None:
            await hold.holds()
            await rig.client.clear_samples(["s0"], "p")
            if again:
                await rig.client.put_samples(["s0"], "p", {"x": torch.tensor([70])})
            await rig.client.put_samples(["other"], "p", {"x": torch.tensor([71])})
            hold.go.set()

        got, _ = await at_once(client.get_samples(["s1", "s0"], "p", ["x"]), clear())
        assert isinstance(got, PartialReadError)
        assert isinstance(got.errors[1], StaleSlotError)
        check_same(got.rows["x"], torch.tensor([1]))

    async def test_the_other_rows_of_a_slot_are_read_though_one_was_cleared(self, rig: Rig) -> None:
        """Promise 6: if one row of a shared slot is cleared meanwhile, the other rows can still be read."""
        hold = Hold(GET, times=9)
        client = await rig.attach(hold)
        await declare(rig.client)
        await rig.client.put_samples(IDS, "p", {"x": torch.arange(8)})

        async def clear() -> None:
            await hold.holds()
            await rig.client.clear_samples(["s3"], "p")
            hold.go.set()

        got, _ = await at_once(client.get_samples(IDS, "p", ["x"]), clear())
        assert isinstance(got, PartialReadError)
        assert got.failed.sample_ids == ["s3"]
        check_same(got.rows["x"], torch.tensor([0, 1, 2, 4, 5, 6, 7]))
