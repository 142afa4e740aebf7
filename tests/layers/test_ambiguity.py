from dataclasses import replace
from typing import Any

import anyio
import pytest
import torch

from asyncdp import Client, DataPlaneError, DataPlaneTimeout, DataPlaneUnavailable, MemoryTransport, SampleNotFound
from asyncdp.calls import Call, CallContext, PutSamples, handles
from asyncdp.calls.slots import AbandonClaim, Resolve, TryClaim
from asyncdp.compose.writes import write_rows
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, rows, until, virtual


async def value(rig: Rig, sample: str) -> float | None:
    """Read a row by the plain client; None where there is none."""
    try:
        return float((await rig.plain.get_samples([sample], "p", ["x"]))["x"][0, 0])
    except SampleNotFound:
        return None


# --- a backend that remembers op_ids


@virtual
async def test_a_put_whose_reply_was_lost_happens_once() -> None:
    """The put is sent again under its op_id and answered with the first result."""
    plan = FaultPlan().lose_reply("put_samples", times=1)
    async with Rig(plan) as rig:
        meta = await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        first, second = rig.wire("Publish")
        assert first.ctx.op_id == second.ctx.op_id
        assert await value(rig, "a") == 3.0
        assert meta.handles is not None
        assert meta.handles[0].incarnation == rig.transport.plane.partitions["p"].rows["a"].incarnation
        assert rig.slots()["ready"] == 1
        assert len(rig.client.env.pending_outcomes) == 0


@virtual
async def test_a_lost_put_reply_does_not_bring_the_old_value_back() -> None:
    """P14: put's reply lost, a newer put of another writer acknowledged, the old one sent again: the newer stays."""
    plan = FaultPlan().lose_reply("put_samples", times=1)
    async with Rig(plan) as rig:

        async def newer() -> None:
            await until(lambda: plan.counts["lose_reply"])
            await rig.plain.put_samples(["a"], "p", {"x": rows(1, 8)})

        async with anyio.create_task_group() as group:
            group.start_soon(newer)
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert len(rig.wire("Publish")) == 2
        assert await value(rig, "a") == 8.0


@virtual
async def test_a_lost_clear_reply_does_not_delete_a_newer_row() -> None:
    """P13: clear's reply lost, a new put of another writer acknowledged, the clear sent again: the new row lives."""
    plan = FaultPlan().lose_reply("clear_samples", times=1)
    async with Rig(plan) as rig:
        await rig.fill(1)

        async def newer() -> None:
            await until(lambda: plan.counts["lose_reply"])
            await rig.plain.put_samples(["s0"], "p", {"x": rows(1, 8)})

        async with anyio.create_task_group() as group:
            group.start_soon(newer)
            await rig.client.clear_samples(["s0"], "p")
        assert len(rig.wire("ClearSamples")) == 2
        assert await value(rig, "s0") == 8.0


@virtual
async def test_a_cancelled_put_that_arrives_late_is_refused() -> None:
    """P15: a put is cancelled, the user clears the id, then the abandoned put arrives: nothing comes back."""
    plan = FaultPlan().on(call="Publish").silent(times=1)
    async with Rig(plan) as rig:
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert len(rig.client.env.pending_outcomes) > 0
        late = rig.wire("Publish")[0]
        await rig.client.clear_samples(["a"], "p")
        assert [s.kind for s in rig.sent if s.ctx.verb == "clear_samples"] == ["Resolve", "Abort", "ClearSamples"]
        with pytest.raises(DataPlaneError, match="refused"):
            await rig.transport.execute(late.call, late.ctx)
        assert await value(rig, "a") is None
        assert len(rig.client.env.pending_outcomes) == 0
        assert rig.slots()["writing"] == 0


@virtual
async def test_a_cancelled_put_that_had_arrived_is_done() -> None:
    """A put whose reply was lost and that was then cancelled is found to be done, before the next put of the id."""
    plan = FaultPlan().lose_reply("put_samples", raises=None, times=1)
    async with Rig(plan) as rig:
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert await value(rig, "a") == 3.0
        await rig.client.put_samples(["a"], "p", {"x": rows(1, 4)})
        assert await value(rig, "a") == 4.0
        assert rig.events["settled"] == 1
        assert len(rig.client.env.pending_outcomes) == 0


@virtual
async def test_outcomes_of_ids_that_never_come_again_do_not_add_up() -> None:
    """Cancelled puts of other ids are resolved after their deadlines, one by each mutation, which frees their slots."""
    plan = FaultPlan().on(call="Publish").silent(times=3)
    async with Rig(plan) as rig:
        for name in "abc":
            with anyio.move_on_after(1.0):
                await rig.client.put_samples([name], "p", {"x": rows(1, 3)}, timeout_s=10.0)
        assert len(rig.client.env.pending_outcomes) == 3
        await anyio.sleep(10)
        for left in (2, 1, 0, 0):
            await rig.client.put_samples(["d"], "p", {"x": rows(1, 4)})
            assert len(rig.client.env.pending_outcomes) == left
        assert rig.slots() == {**rig.slots(), "ready": 1, "writing": 0}
        assert await value(rig, "a") is None


@virtual
async def test_a_put_that_was_cancelled_before_its_publish_counts_no_bytes() -> None:
    """The Abort that frees its slots says that it did not happen."""
    plan = FaultPlan().on(call="WriteSlots").silent(times=1)
    async with Rig(plan) as rig:
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        await rig.client.put_samples(["b"], "p", tags=[{"k": 1}])
        assert rig.wire("Abort")
        assert rig.client.snapshot()["bytes_outstanding"] == 0


@virtual
async def test_slots_of_a_host_that_was_skipped_are_freed_later() -> None:
    """Where the Abort fails too, it stays pending although the put succeeds on another host."""
    plan = FaultPlan().on(call="WriteSlots").refuse(times=1).on(call="Abort").refuse(times=1)
    async with Rig(plan, hosts=2, ports=1, max_attempts=1) as rig:
        await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert rig.events["host_skipped"] == 1
        assert len(rig.client.env.pending_outcomes) == 1
        await anyio.sleep(31)
        await rig.client.put_samples(["b"], "p", {"x": rows(1, 4)})
        assert not len(rig.client.env.pending_outcomes)
        assert await value(rig, "a") == 3.0


@virtual
async def test_debts_are_paid_by_mutations_of_the_same_ids_only() -> None:
    """Reads and mutations of other ids do not wait for what a cancel left; the same ids, and close, settle it."""
    plan = FaultPlan().on(call="Publish").silent(times=1)
    async with Rig(plan) as rig:
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        await rig.client.ping()
        await rig.client.depth("p")
        await rig.client.put_samples(["b"], "p", {"x": rows(1, 4)})
        await rig.client.clear_samples(["b"], "p")
        assert rig.wire("Resolve") == []
        await rig.client.close()
        assert len(rig.wire("Resolve")) == 1
        assert len(rig.client.env.pending_outcomes) == 0


@virtual
async def test_a_debt_that_cannot_be_settled_holds_the_mutation_up() -> None:
    """While nobody says what became of a put, the next one of that id fails with the real error and is not sent."""
    plan = FaultPlan().on(call="Publish").silent(times=1).on(call="Resolve").refuse(times=8)
    async with Rig(plan) as rig:
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        with pytest.raises(DataPlaneUnavailable) as caught:
            await rig.client.clear_samples(["a"], "p")
        assert not caught.value.ambiguous
        assert rig.wire("ClearSamples") == []
        await anyio.sleep(1.0)
        with pytest.raises(DataPlaneUnavailable):
            await rig.client.clear_samples(["a"], "p")
        await rig.client.clear_samples(["a"], "p")
        assert len(rig.wire("ClearSamples")) == 1


@virtual
async def test_a_put_that_is_never_answered_is_ambiguous_and_settled() -> None:
    """A put whose every reply is lost goes up as ambiguous; the next mutation of the id settles it first."""
    plan = FaultPlan().lose_reply("put_samples", times=4)
    async with Rig(plan) as rig:
        with pytest.raises(DataPlaneUnavailable) as caught:
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert caught.value.ambiguous
        assert await value(rig, "a") == 3.0
        await rig.client.clear_samples(["a"], "p")
        assert await value(rig, "a") is None
        assert rig.events["settled"] == 1
        assert rig.slots()["ready"] == rig.slots()["writing"] == 0


@virtual
async def test_a_put_that_failed_before_its_publish_is_not_ambiguous() -> None:
    """Nothing is visible before the publish: lost writes fail without doubt, and their slots come back."""
    plan = FaultPlan().on(call="WriteSlots").lose_reply()
    async with Rig(plan, hosts=2) as rig:
        with pytest.raises(DataPlaneUnavailable) as caught:
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert not caught.value.ambiguous
        assert await value(rig, "a") is None
        assert rig.slots()["writing"] == 0
        assert len(rig.client.env.pending_outcomes) == 0


@virtual
async def test_a_dead_host_is_left_for_another() -> None:
    """A put goes to a spare host where the first one fails; nothing stays behind on the first."""
    plan = FaultPlan().on(host="host-0", call="WriteSlots").reset()
    async with Rig(plan, hosts=2, ports=2) as rig:
        await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert await value(rig, "a") == 3.0
        assert rig.hosts[0].counts()["writing"] == 0
        assert rig.events["host_skipped"] == 1


@virtual
@pytest.mark.parametrize("raises", ["ConnectionResetError", "TimeoutError", None])
async def test_a_lost_claim_is_the_same_batch_again(raises: str | None) -> None:
    """C3: a claim whose reply was lost is asked for again under its id: the same batch, never a second one."""
    plan = FaultPlan().lose_reply("claim_meta", raises=raises, times=2)
    async with Rig(plan, attempt_timeout_s=2.0) as rig:
        await rig.fill(6)
        meta = await rig.client.claim_meta("p", "t", ["x"], 3)
        assert meta.sample_ids == ["s0", "s1", "s2"]
        assert [c.sample_ids for c in await rig.plain.list_claims("p", "t")] == [("s0", "s1", "s2")]
        assert len(rig.client.env.pending_outcomes) == 0
        assert (await rig.plain.claim_meta("p", "t", ["x"], 3)).sample_ids == ["s3", "s4", "s5"]


@virtual
async def test_a_claim_under_way_is_not_given_back_by_another() -> None:
    """A blocking claim that lost its replies and goes on asking keeps its batch while other claims come and go."""
    plan = FaultPlan().lose_reply("claim_meta", times=4)
    async with Rig(plan) as rig:
        await rig.fill(6)
        got: list[list[str]] = []

        async def claim() -> None:
            got.append((await rig.client.claim_meta("p", "t", ["x"], 3, timeout_s=20.0)).sample_ids)

        rig.client.env.claim_poll_s = 5.0
        async with anyio.create_task_group() as group:
            group.start_soon(claim)
            await until(lambda: len(rig.client.env.pending_outcomes))
            await claim()
        assert sorted(got) == [["s0", "s1", "s2"], ["s3", "s4", "s5"]]
        assert len(rig.client.env.pending_outcomes) == 0
        assert len(await rig.plain.list_claims("p", "t")) == 2


@virtual
async def test_a_claim_that_may_have_happened_stays_ambiguous() -> None:
    """A claim whose first reply was lost and that then reaches nobody fails as ambiguous, whatever its last error."""
    plan = FaultPlan().lose_reply("claim_meta", times=4).on("claim_meta").refuse()
    async with Rig(plan, outage_patience_s=0) as rig:
        await rig.fill(3)
        with pytest.raises(DataPlaneUnavailable, match="refused") as caught:
            await rig.client.claim_meta("p", "t", ["x"], 3, timeout_s=5.0)
        assert caught.value.ambiguous


@virtual
async def test_a_cancelled_claim_is_given_back() -> None:
    """A claim that was cancelled after the backend granted it is given back before this client's next claim."""
    plan = FaultPlan().lose_reply("claim_meta", raises=None, times=1)
    async with Rig(plan) as rig:
        await rig.fill(3)
        with anyio.move_on_after(1.0):
            await rig.client.claim_meta("p", "t", ["x"], 3)
        assert len(await rig.plain.list_claims("p", "t")) == 1
        assert (await rig.client.claim_meta("p", "t", ["x"], 3)).sample_ids == ["s0", "s1", "s2"]
        assert len(rig.wire("AbandonClaim")) == 1
        assert len(await rig.plain.list_claims("p", "t")) == 1


@virtual
async def test_a_claim_that_arrives_late_is_refused() -> None:
    """A claim that was cancelled before it arrived takes nothing when it arrives after all."""
    plan = FaultPlan().on(call="TryClaim").silent(times=1)
    async with Rig(plan) as rig:
        await rig.fill(3)
        client = rig.attach(MemoryTransport(rig.transport.attach_config(), bootstrap=False))
        with anyio.move_on_after(1.0):
            await client.claim_meta("p", "t", ["x"], 3)
        late = rig.wire("TryClaim")[0]
        await client.close()
        assert len(client.env.pending_outcomes) == 0
        with pytest.raises(DataPlaneError, match="refused"):
            await rig.transport.execute(late.call, late.ctx)
        assert await rig.plain.list_claims("p", "t") == []


@virtual
async def test_a_claim_that_failed_is_given_back() -> None:
    """A blocking claim whose every reply is lost ends at its timeout with the real error; close gives it back."""
    plan = FaultPlan().lose_reply("claim_meta")
    async with Rig(plan) as rig:
        await rig.fill(3)
        began = anyio.current_time()
        with pytest.raises(DataPlaneUnavailable) as caught:
            await rig.client.claim_meta("p", "t", ["x"], 3, timeout_s=5.0)
        assert anyio.current_time() - began <= 5.0
        assert caught.value.ambiguous
        watcher = Client(MemoryTransport(rig.transport.attach_config(), bootstrap=False))
        assert len(await watcher.list_claims("p", "t")) == 1
        assert len({s.ctx.op_id for s in rig.wire("TryClaim")}) == 1
        unresolved = list(rig.client.env.pending_outcomes)
        assert [type(d.call) for d in unresolved] == [AbandonClaim]
        await rig.client.close()
        assert rig.transport._owned is not None
        assert rig.transport._owned.partitions["p"].claims == {}


@virtual
async def test_what_is_past_its_record_stays_ambiguous() -> None:
    """Resolved after the backend forgot, a mutation stays unknown, and holds nobody up."""
    plan = FaultPlan().on(call="Publish").silent(times=1)
    async with Rig(plan) as rig:
        with anyio.move_on_after(1.0):
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)}, timeout_s=10.0)
        await anyio.sleep(2000.0)
        await rig.client.put_samples(["a"], "p", {"x": rows(1, 4)})
        (asked,) = rig.wire("Resolve")
        assert isinstance(asked.call, Resolve)
        assert asked.call.age_s == pytest.approx(1991.0, abs=1.0)
        assert await value(rig, "a") == 4.0


@virtual
async def test_close_is_bounded() -> None:
    """close() settles what it can within close_timeout_s; a silent plane cannot hold it."""
    plan = FaultPlan().on(call="Publish").silent(times=2).on(call="Resolve").silent()
    async with Rig(plan, close_timeout_s=3.0) as rig:
        for name in ("a", "b"):
            with anyio.move_on_after(1.0):
                await rig.client.put_samples([name], "p", {"x": rows(1, 3)})
        began = anyio.current_time()
        await rig.client.close()
        assert anyio.current_time() - began <= 3.0 + 1e-6


# --- a backend that does not


class Forgetful(MemoryTransport):
    """A plane that cannot tell a repeated mutation from a new one, and takes puts as a whole."""

    claim_dedup = False

    def get_capabilities(self) -> Any:
        """Say so."""
        told = super().get_capabilities()
        return replace(told, mutation_dedup=False, claim_dedup=self.claim_dedup, slot_writes=False)

    def execute(self, call: Call[Any], ctx: CallContext) -> Any:
        """Serve each request as one that was never seen before."""
        if isinstance(call, PutSamples) or (call.mutates and hasattr(call, "sample_ids") and ctx.verb != "put_samples"):
            ctx = replace(ctx, op_id=ctx.env.next_op_id())
        if isinstance(call, TryClaim) and not self.claim_dedup:
            ctx = replace(ctx, op_id=ctx.env.next_op_id())
        return super().execute(call, ctx)

    @handles(PutSamples)
    async def put(self, call: PutSamples, ctx: CallContext) -> Any:
        """Put as a whole."""
        return await write_rows(self.execute, call, ctx)


class TokensOnly(Forgetful):
    """As TransferQueue with claim tokens: claims may be sent again, puts and clears not."""

    claim_dedup = True


@virtual
async def test_an_untouched_put_is_sent_again() -> None:
    """Without op_ids a lost put is sent again while nothing else touched its ids in this client."""
    plan = FaultPlan().lose_reply("put_samples", times=2)
    async with Rig(plan, transport=Forgetful) as rig:
        await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
        assert len(rig.wire("PutSamples")) == 3
        assert await value(rig, "a") == 3.0
        assert len(rig.client.env.pending_outcomes) == 0


@virtual
@pytest.mark.parametrize("bound", ["new", "existing", "meta"])
async def test_a_bound_put_is_not_sent_again_without_op_ids(bound: str) -> None:
    """Sent again it would be decided anew, and take its own rows for others: it goes up as ambiguous."""
    plan = FaultPlan().lose_reply("put_samples", times=1)
    async with Rig(plan, transport=Forgetful) as rig:
        meta = await rig.plain.put_samples(["a"], "p", {"x": rows(1, 1)})
        named: Any = {"new": ["b"], "existing": ["a"], "meta": meta}[bound]
        how: dict[str, Any] = {} if bound == "meta" else {"only": bound}
        with pytest.raises(DataPlaneError) as caught:
            await rig.client.put_samples(named, "p", {"x": rows(1, 3)}, **how)
        assert caught.value.ambiguous
        assert len(rig.wire("PutSamples")) == 1
        assert await value(rig, "b" if bound == "new" else "a") == 3.0


@virtual
@pytest.mark.parametrize("other", ["put", "clear", "clear all"])
async def test_a_touched_put_is_not_sent_again(other: str) -> None:
    """Without op_ids a lost put is not sent again once this client changed the same id: it goes up as ambiguous."""
    plan = FaultPlan().lose_reply("put_samples", times=1)
    async with Rig(plan, transport=Forgetful) as rig:
        await rig.fill(1)
        caught: list[DataPlaneError] = []

        async def first() -> None:
            try:
                await rig.client.put_samples(["a"], "p", {"x": rows(1, 3)})
            except DataPlaneError as err:
                caught.append(err)

        async with anyio.create_task_group() as group:
            group.start_soon(first)
            await until(lambda: plan.counts["lose_reply"])
            if other == "put":
                await rig.client.put_samples(["a"], "p", {"x": rows(1, 8)})
            elif other == "clear":
                await rig.client.clear_samples(["a"], "p")
            else:
                await rig.client.drop_partition("p")
        assert [(type(e), e.ambiguous) for e in caught] == [(DataPlaneUnavailable, True)]
        if other != "clear all":
            assert await value(rig, "a") == (8.0 if other == "put" else None)


@virtual
async def test_a_touched_clear_is_not_sent_again() -> None:
    """Without op_ids a lost clear is not sent again over a newer put of this client: the new row lives."""
    plan = FaultPlan().lose_reply("clear_samples", times=1)
    async with Rig(plan, transport=Forgetful) as rig:
        await rig.fill(1)
        caught: list[DataPlaneError] = []

        async def clear() -> None:
            try:
                await rig.client.clear_samples(["s0"], "p")
            except DataPlaneError as err:
                caught.append(err)

        async with anyio.create_task_group() as group:
            group.start_soon(clear)
            await until(lambda: plan.counts["lose_reply"])
            await rig.client.put_samples(["s0"], "p", {"x": rows(1, 8)})
        assert [e.ambiguous for e in caught] == [True]
        assert await value(rig, "s0") == 8.0


@virtual
async def test_other_ids_do_not_count_as_touched() -> None:
    """Mutations of other ids do not keep a lost put from being sent again."""
    plan = FaultPlan().lose_reply("put_samples", times=1)
    async with Rig(plan, transport=Forgetful) as rig:
        async with anyio.create_task_group() as group:
            group.start_soon(rig.client.put_samples, ["a"], "p", {"x": rows(1, 3)})
            await until(lambda: plan.counts["lose_reply"])
            await rig.client.put_samples(["b"], "p", {"x": rows(1, 8)})
        assert (await value(rig, "a"), await value(rig, "b")) == (3.0, 8.0)


@virtual
async def test_a_request_that_was_never_sent_may_be_sent_always() -> None:
    """Refused is not ambiguous: without op_ids it is sent again, whatever else happened."""
    plan = FaultPlan().on("put_samples").refuse(times=1)
    async with Rig(plan, transport=Forgetful) as rig:
        async with anyio.create_task_group() as group:
            group.start_soon(rig.client.put_samples, ["a"], "p", {"x": rows(1, 3)})
            await until(lambda: plan.counts["refuse"])
            await rig.client.put_samples(["a"], "p", {"x": rows(1, 8)})
        assert await value(rig, "a") == 3.0


@virtual
@pytest.mark.parametrize("blocking", [True, False])
async def test_a_lost_claim_without_tokens_is_not_asked_again(*, blocking: bool) -> None:
    """C3 without claim_dedup: an ambiguous error, never a second batch; the lost one shows in list_claims."""
    plan = FaultPlan().lose_reply("claim_meta", times=1)
    async with Rig(plan, transport=Forgetful) as rig:
        await rig.fill(6)
        with pytest.raises(DataPlaneUnavailable) as caught:
            await rig.client.claim_meta("p", "t", ["x"], 3, blocking=blocking, timeout_s=5.0)
        assert caught.value.ambiguous
        assert [c.sample_ids for c in await rig.plain.list_claims("p", "t")] == [("s0", "s1", "s2")]
        assert len(rig.client.env.pending_outcomes) == 0


@virtual
async def test_a_lost_claim_with_tokens_is_asked_again() -> None:
    """With claim_dedup alone a lost claim is the same batch again."""
    plan = FaultPlan().lose_reply("claim_meta", times=1)
    async with Rig(plan, transport=TokensOnly) as rig:
        await rig.fill(6)
        assert (await rig.client.claim_meta("p", "t", ["x"], 3)).sample_ids == ["s0", "s1", "s2"]
        assert len(await rig.plain.list_claims("p", "t")) == 1


@virtual
async def test_an_attempt_that_timed_out_may_have_acted() -> None:
    """A mutation that nobody answers is ambiguous, a read is not."""
    plan = FaultPlan().on("clear_samples").silent().on("depth").silent()
    async with Rig(plan, transport=Forgetful, attempt_timeout_s=1.0, max_attempts=1) as rig:
        with pytest.raises(DataPlaneTimeout) as caught:
            await rig.client.clear_samples(["a"], "p")
        assert caught.value.ambiguous
        with pytest.raises(DataPlaneTimeout) as caught:
            await rig.client.depth("p")
        assert not caught.value.ambiguous


@virtual
async def test_whole_puts_of_all_kinds_arrive() -> None:
    """A plane without slot writes gets its puts as they are."""
    async with Rig(transport=Forgetful) as rig:
        await rig.client.put_samples(["a", "b"], "p", {"x": rows(2)}, [{"n": 1}, {"n": 2}])
        await rig.client.put_samples(["a"], "p", tags=[{"m": 3}])
        assert torch.equal((await rig.get(["a", "b"]))["x"], rows(2))
        assert [s.kind for s in rig.sent][:2] == ["PutSamples", "PutSamples"]
