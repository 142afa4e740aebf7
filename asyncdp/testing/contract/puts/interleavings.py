"""Mutations that are repeated, late or abandoned while others continue: no old value ever reappears."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import DataPlaneError, DataPlaneUnavailable, SampleNotFound
from asyncdp.calls import DropPartition, ReleaseClaim, ReleaseClaims
from asyncdp.calls.slots import Reserve, Resolve, WriteSlots

from ..faults import CLAIM, CLEAR, PUT, Fail, Hold, LoseReply, Straggle
from ..rig import at_once, declare

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..rig import Rig
from ..base import Contract

__all__ = ["Interleavings"]


async def put(client: Client, value: float, *ids: str, **tags: Any) -> None:
    """Put ``x`` with the same value for each id."""
    await client.put_samples(ids, "p", {"x": torch.full((len(ids),), value)}, [dict(tags) for _ in ids])


async def value_of(rig: Rig, name: str) -> float:
    """Read ``x`` of one id."""
    return float((await rig.mate.get_samples([name], "p", ["x"]))["x"][0])


class Flaky(LoseReply):
    """Loses every third answer."""

    async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
        """Lose every third answer."""
        return await (send(call, ctx) if self.struck % 3 else super().strike(call, ctx, send))


class Interleavings(Contract):
    """Mutations that are repeated, late or abandoned while others continue: no old value ever reappears."""

    @pytest.mark.parametrize("verb", ["clear_samples", "pop", "evict"])
    async def test_a_clear_that_is_sent_again_spares_a_newer_row(self, rig: Rig, verb: str) -> None:
        """P13: a clear whose answer was lost does not remove a row that was put before the clear is sent again."""
        rig.need("mutation_dedup")
        lost = LoseReply(CLEAR, meanwhile=lambda: put(rig.mate, 2.0, "a"))
        client = await rig.attach(lost)
        await declare(client)
        await put(client, 1.0, "a", "b")
        await getattr(client, verb)(["a", "b"], "p")
        assert len(lost.seen) == 2
        assert await value_of(rig, "a") == 2.0
        with pytest.raises(SampleNotFound):
            await value_of(rig, "b")

    async def test_clearing_all_again_spares_newer_rows(self, rig: Rig) -> None:
        """P13: this holds for a clear without ids, even if the newer row belongs to the same owner."""
        rig.need("mutation_dedup")
        twin = await rig.attach(owner="twin")
        lost = LoseReply(CLEAR, meanwhile=lambda: put(twin, 2.0, "a"))
        client = await rig.attach(lost, owner="twin")
        await declare(client)
        await put(client, 1.0, "a", "b")
        await client.clear_samples(None, "p")
        assert await value_of(rig, "a") == 2.0
        assert (await rig.client.describe("p")).size == 1

    async def test_a_clear_that_found_nothing_spares_newer_rows(self, rig: Rig) -> None:
        """P13: a clear that found no row does not remove a row that was put before the clear is sent again."""
        rig.need("mutation_dedup")
        lost = LoseReply(CLEAR, meanwhile=lambda: put(rig.mate, 2.0, "a"))
        client = await rig.attach(lost)
        await declare(client)
        await client.clear_samples(["a"], "p")
        assert len(lost.seen) == 2
        assert await value_of(rig, "a") == 2.0

    async def test_a_put_that_is_sent_again_spares_a_newer_value(self, rig: Rig) -> None:
        """P14: a put whose answer was lost does not overwrite a newer put when it is sent again."""
        rig.need("mutation_dedup")
        lost = LoseReply(PUT, meanwhile=lambda: put(rig.mate, 2.0, "a", who="mate"))
        client = await rig.attach(lost)
        await declare(client)
        await put(client, 1.0, "a", "b", who="client")
        assert len(lost.seen) == 2
        assert await value_of(rig, "a") == 2.0
        assert await value_of(rig, "b") == 1.0
        (group,) = [g for g in await rig.client.list_metadata("p") if g.keys == ("a",)]
        assert group.tags[0]["who"] == "mate"

    async def test_a_put_that_is_sent_again_does_not_revive_a_cleared_row(self, rig: Rig) -> None:
        """P14: a row that another client cleared in between stays removed."""
        rig.need("mutation_dedup")
        lost = LoseReply(PUT, meanwhile=lambda: rig.mate.clear_samples(["a"], "p"))
        client = await rig.attach(lost)
        await declare(client)
        await put(client, 1.0, "a", "b")
        with pytest.raises(SampleNotFound):
            await value_of(rig, "a")
        assert await value_of(rig, "b") == 1.0

    async def test_a_claim_that_is_asked_again_does_not_take_a_second_batch(self, rig: Rig) -> None:
        """C3: if its samples were released and claimed by another client, a repeated claim is refused."""
        rig.need("claim_dedup", "claim_release")

        async def rescue() -> None:
            await rig.client.release_claims("p", "lost")
            meta = await rig.mate.claim_meta("p", "train", ["x"], 2)
            assert meta.sample_ids == ["a", "b"]

        lost = LoseReply(CLAIM, meanwhile=rescue)
        client = await rig.attach(lost, owner="lost")
        await declare(rig.client)
        await put(rig.client, 1.0, "a", "b", "c", "d")
        with pytest.raises(DataPlaneError):
            await client.claim_meta("p", "train", ["x"], 2, blocking=False)
        owners = {name: info.owner for info in await rig.client.list_claims("p", "train") for name in info.sample_ids}
        assert owners == {"a": "mate", "b": "mate"}
        assert (await client.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["c", "d"]

    @pytest.mark.parametrize("step", [PUT, WriteSlots, Reserve], ids=["publish", "write", "reserve"])
    async def test_nothing_comes_back_after_a_cancelled_put_and_a_clear(self, rig: Rig, step: Any) -> None:
        """P15: a cancelled put that arrives after a clear of its ids does not restore the rows."""
        rig.need("mutation_dedup", *(() if step is PUT else ("slot_writes",)))
        late = Straggle(step)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(put(client, 1.0, "a"))
        await client.clear_samples(["a"], "p")
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert (await rig.client.describe("p")).size == 0
        await put(client, 2.0, "a")
        assert await value_of(rig, "a") == 2.0
        assert not rig.leftovers()

    async def test_an_abandoned_put_of_tags_does_not_come_back(self, rig: Rig) -> None:
        """P15: this holds for a put of tags, which has no slots that could be reclaimed."""
        rig.need("mutation_dedup")
        late = Straggle(PUT)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(client.put_samples(["a"], "p", tags=[{"k": 1}]))
        await client.clear_samples(["a"], "p")
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert (await rig.client.describe("p")).size == 0

    async def test_an_abandoned_put_does_not_undo_a_newer_one(self, rig: Rig) -> None:
        """P15: a cancelled put that arrives after a newer put does not overwrite its value."""
        rig.need("mutation_dedup")
        late = Straggle(PUT)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(put(client, 1.0, "a", "b"))
        await put(client, 2.0, "a")
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert await value_of(rig, "a") == 2.0
        assert (await rig.client.describe("p")).size == 1

    async def test_a_cancelled_put_that_did_arrive_is_found_and_cleared(self, rig: Rig) -> None:
        """P15: a clear removes the rows of a put that had happened when it was cancelled."""
        rig.need("mutation_dedup")
        hold = Hold(PUT, after=True)
        client = await rig.attach(hold)
        await declare(client)
        await hold.cut(put(client, 1.0, "a"))
        assert await value_of(rig, "a") == 1.0
        await client.clear_samples(["a"], "p")
        assert (await rig.client.describe("p")).size == 0

    async def test_an_abandoned_clear_does_not_remove_a_newer_row(self, rig: Rig) -> None:
        """P13, P15: a cancelled clear that arrives after the id was put anew does not remove the new row."""
        rig.need("mutation_dedup")
        late = Straggle(CLEAR)
        client = await rig.attach(late)
        await declare(client)
        await put(client, 1.0, "a")
        await late.cut(client.clear_samples(["a"], "p"))
        await put(client, 2.0, "a")
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert await value_of(rig, "a") == 2.0

    async def test_an_abandoned_clear_of_all_does_not_remove_newer_rows(self, rig: Rig) -> None:
        """P15: this holds for a clear without ids."""
        rig.need("mutation_dedup")
        late = Straggle(CLEAR)
        client = await rig.attach(late)
        await declare(client)
        await put(client, 1.0, "a")
        await late.cut(client.clear_samples(None, "p"))
        await put(client, 2.0, "b")
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert await value_of(rig, "b") == 2.0

    async def test_an_abandoned_claim_takes_nothing_when_it_arrives(self, rig: Rig) -> None:
        """C2: a cancelled claim that arrives after another claim of this client is refused."""
        rig.need("claim_dedup")
        late = Straggle(CLAIM)
        client = await rig.attach(late)
        await declare(client)
        await put(rig.client, 1.0, *"abcd")
        await late.cut(client.claim_meta("p", "train", ["x"], 2))
        assert (await client.claim_meta("p", "train", ["x"], 2)).sample_ids == ["a", "b"]
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert (await rig.mate.claim_meta("p", "train", ["x"], 9, blocking=False)).sample_ids == ["c", "d"]

    async def test_a_drop_that_was_given_up_does_not_drop_a_new_partition(self, rig: Rig) -> None:
        """P13 for partitions: an abandoned drop that arrives after the partition was used again is refused."""
        rig.need("mutation_dedup")
        late = Straggle(DropPartition)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(client.drop_partition("p"))
        await put(client, 1.0, "a")
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert await value_of(rig, "a") == 1.0

    async def test_a_release_that_is_sent_again_does_not_release_anothers_claim(self, rig: Rig) -> None:
        """A release whose answer was lost succeeds, and does not release another client's newer claim."""
        rig.need("claim_release", "mutation_dedup")

        async def take() -> None:
            await rig.mate.claim_meta("p", "train", ["x"], 2)

        lost = LoseReply(ReleaseClaim, meanwhile=take)
        lost_all = LoseReply(ReleaseClaims, meanwhile=take)
        client = await rig.attach(lost, lost_all, owner="client")
        await declare(client)
        await put(client, 1.0, "a", "b")
        await client.release_claim(await client.claim_meta("p", "train", ["x"], 2))
        (info,) = await rig.client.list_claims("p", "train")
        assert info.owner == "mate"
        await client.release_claims("p", "mate")
        (info,) = await rig.client.list_claims("p", "train")
        assert info.owner == "mate"

    async def test_mutations_of_other_ids_do_not_wait_for_what_is_open(self, rig: Rig) -> None:
        """Promise 3: a pending mutation is reconciled only before a mutation of the same ids."""
        rig.need("mutation_dedup")
        late = Straggle(PUT)
        client = await rig.attach(late)
        await declare(client)
        await late.cut(put(client, 1.0, "a"))
        await put(client, 1.0, "other")
        assert len(client.env.pending_outcomes) == 1
        await client.clear_samples(["a"], "p")
        assert len(client.env.pending_outcomes) == 0

    async def test_what_cannot_be_settled_holds_up_what_depends_on_it(self, rig: Rig) -> None:
        """Promise 3: while the outcome of a put cannot be determined, the next put on its ids fails."""
        rig.need("mutation_dedup")
        late, down = Straggle(PUT), Fail(Resolve, times=999)
        client = await rig.attach(late, down)
        await declare(client)
        await late.cut(put(client, 1.0, "a"))
        with pytest.raises(DataPlaneUnavailable) as caught:
            await put(client, 2.0, "a")
        assert not caught.value.ambiguous, "it was not sent"
        down.times = 0
        await put(client, 2.0, "a")
        assert await value_of(rig, "a") == 2.0

    @pytest.mark.parametrize("faults", [(), (PUT, CLEAR)], ids=["no faults", "answers lost"])
    async def test_the_last_acknowledged_write_of_one_client_wins(self, rig: Rig, faults: tuple[Any, ...]) -> None:
        """After puts and clears of one id with lost answers, the state is that of the last acknowledged step."""
        rig.need("mutation_dedup")
        client = await rig.attach(*(Flaky(kind, times=99) for kind in faults))
        await declare(client)
        for step in range(20):
            await put(client, float(step), "a")
            assert await value_of(rig, "a") == step
            if step % 4 == 3:
                await client.clear_samples(["a"], "p")
                with pytest.raises(SampleNotFound):
                    await value_of(rig, "a")

    async def test_puts_clears_and_reads_at_once_never_mix_lives(self, rig: Rig) -> None:
        """Promise 6 under concurrency: every row that is read was put as a whole under its id."""
        await declare(rig.client)
        done = anyio.Event()

        async def churn(client: Client, sign: int) -> None:
            for k in range(1, 15):
                await client.put_samples(["a", "b"], "p", {"x": torch.full((2, 3), sign * k)})
                await client.clear_samples(["a"], "p")
            done.set()

        async def read() -> int:
            rows = 0
            while not done.is_set():
                try:
                    got = await rig.mate.get_samples(["a"], "p", ["x"])
                except DataPlaneError:
                    await anyio.lowlevel.checkpoint()
                    continue
                assert bool((got["x"] == got["x"][0, 0]).all())
                rows += 1
            return rows

        results = await at_once(churn(rig.client, 1), churn(rig.mate, -1), read(), read())
        assert results[:2] == [None, None]
        assert all(isinstance(r, int) for r in results[2:])

    async def test_a_straggler_of_a_closed_client_is_refused(self, rig: Rig) -> None:
        """close() reconciles pending outcomes, so that an abandoned put that arrives later is refused."""
        rig.need("mutation_dedup")
        late = Straggle(PUT)
        client = await rig.attach(late)
        await declare(rig.client)
        await late.cut(put(client, 1.0, "a"))
        await client.close()
        assert len(client.env.pending_outcomes) == 0
        assert not rig.leftovers()
        with pytest.raises(DataPlaneError):
            await late.arrive()
        assert (await rig.client.describe("p")).size == 0
