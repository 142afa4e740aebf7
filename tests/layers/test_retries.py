import random
from itertools import pairwise

import anyio
import pytest
import torch

from asyncdp import (
    CorruptPayload,
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    PartialReadError,
    StaleSlotError,
)
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, rows, until, virtual

FLOOR = 100  # tokens: ten a second, saved up for ten seconds


@virtual
async def test_a_passing_fault_is_retried_with_full_jitter() -> None:
    """Three failures are cured by the fourth attempt; waits lie between 0 and 50, 100, 200 ms."""
    ceilings: list[list[float]] = [[], [], []]
    for seed in range(30):
        plan = FaultPlan().on("ping").refuse(times=3)
        async with Rig(plan, seed=seed) as rig:
            await rig.client.ping(timeout_s=60.0)
            at = [s.at for s in rig.wire("Ping")]
            assert len(at) == 4
            for number, (a, b) in enumerate(pairwise(at)):
                ceilings[number].append(b - a)
            assert rig.events == {"retry": 3}
    for number, waits in enumerate(ceilings):
        ceiling = 0.05 * 2**number
        assert max(waits) <= ceiling
        assert max(waits) > 0.8 * ceiling
        assert min(waits) < 0.2 * ceiling


@virtual
async def test_attempts_end() -> None:
    """After four attempts the real error goes up, with their number, and is not retryable any more."""
    plan = FaultPlan().on("ping").reset()
    async with Rig(plan) as rig:
        with pytest.raises(DataPlaneUnavailable, match="reset") as caught:
            await rig.client.ping(timeout_s=60.0)
        assert len(rig.wire("Ping")) == 4
        assert (caught.value.attempts, caught.value.retryable) == (4, False)
        assert caught.value.op == "ping"


@virtual
@pytest.mark.parametrize(
    "error", ["ValueError", "KeyError", "DataPlaneBadRequest", "StaleSlotError", "DataPlaneClosed", "SampleNotFound"]
)
async def test_what_may_not_pass_is_not_retried(error: str) -> None:
    """An allow-list: an error that is not known to be retryable is raised after one attempt."""
    plan = FaultPlan().on("list_metadata").error(error)
    async with Rig(plan) as rig:
        with pytest.raises(DataPlaneError):
            await rig.client.list_metadata("p")
        assert len(rig.wire("ListMetadata")) == 1


@virtual
async def test_no_attempt_begins_that_could_not_end_in_time() -> None:
    """A backoff that would outlast the call is not slept: the error goes up at once."""
    plan = FaultPlan().on("ping").refuse()
    async with Rig(plan, backoff_base_s=30.0, backoff_cap_s=30.0, max_attempts=10) as rig:
        began = anyio.current_time()
        with pytest.raises(DataPlaneUnavailable):
            await rig.client.ping(timeout_s=5.0)
        assert anyio.current_time() - began < 5.0


@virtual
async def test_only_the_slots_that_failed_are_asked_again() -> None:
    """Of a read of eight slots the two that failed are asked for again, until they come."""
    plan = FaultPlan().on("get_samples", sample="s2").error(DataPlaneUnavailable, times=2)
    plan.on("get_samples", sample="s5").error(CorruptPayload, times=1)
    async with Rig(plan) as rig:
        ids = await rig.fill(8)
        assert torch.equal((await rig.get(ids))["x"], rows(8))
        asked = [[ref.rows[0] for ref in s.call.refs] for s in rig.wire("ReadSlots")]
        assert asked == [[0, 1, 2, 3, 4, 5, 6, 7], [2, 5], [2]]


@virtual
async def test_a_slot_that_fails_otherwise_keeps_its_own_error() -> None:
    """Errors stay with their rows, however the retry of the others ends; attempts are counted."""
    plan = (
        FaultPlan().on("get_samples", sample="s2").error(DataPlaneUnavailable, "two", attributes={"blames_port": False})
    )
    plan.on("get_samples", sample="s5").error(DataPlaneReadError, "five").on("get_samples", sample="s6").stale()
    async with Rig(plan, max_rounds=1) as rig:
        with pytest.raises(PartialReadError) as caught:
            await rig.get(await rig.fill(8))
        errors = caught.value.errors
        assert {at: type(e) for at, e in errors.items()} == {
            2: DataPlaneUnavailable,
            5: DataPlaneReadError,
            6: StaleSlotError,
        }
        assert [errors[at].attempts for at in (2, 5, 6)] == [4, 1, 1]
        assert not any(e.retryable for e in errors.values())
        assert torch.equal(caught.value.rows["x"], rows(8)[[0, 1, 3, 4, 7]])


# --- budget


async def storm(rig: Rig, verb: str, calls: int, every_s: float) -> tuple[int, float, set[str]]:
    """Make many calls at a steady rate; count those that failed, how long all took, and with what errors."""
    failed = 0
    texts = set()
    began = anyio.current_time()

    async def one() -> None:
        nonlocal failed
        try:
            if verb == "ping":
                await rig.client.ping()
            else:
                await rig.get(["s0"])
        except DataPlaneError as err:
            failed += 1
            texts.add(f"{type(err).__name__}: {err.message}")

    async with anyio.create_task_group() as group:
        for _ in range(calls):
            group.start_soon(one)
            await anyio.sleep(every_s)
    return failed, anyio.current_time() - began, texts


@virtual
async def test_a_storm_does_not_feed_itself() -> None:
    """When every attempt fails with p=0.5, wire requests stay within 1.3 x calls + floor; errors are the real ones."""
    plan = FaultPlan(3).on("ping").error(DataPlaneUnavailable, "the real one", p=0.5)
    async with Rig(plan) as rig:
        calls = 2000
        failed, took, texts = await storm(rig, "ping", calls, 0.001)
        assert len(rig.wire("Ping")) <= 1.3 * calls + FLOOR + 10 * took
        assert len(rig.wire("Ping")) > 1.15 * calls
        assert texts == {"DataPlaneUnavailable: the real one"}
        assert failed > 0.2 * calls
        assert rig.events["budget_refused"] > 0


@virtual
async def test_slots_and_rounds_pay_from_one_purse() -> None:
    """Reads have retries on ports, slots and rounds; all of them together stay within the same bound."""
    plan = FaultPlan(3).on("get_samples", call="ReadSlots").error(DataPlaneUnavailable, "the real one", p=0.5)
    async with Rig(plan, ports=8) as rig:
        await rig.fill(1)
        calls = 1500
        failed, took, texts = await storm(rig, "get", calls, 0.001)
        # A read is two requests, a look-up and a read of slots; a round looks up again.
        assert len(rig.sent) - 2 * calls <= 0.3 * calls + FLOOR + 10 * took
        assert texts == {"DataPlaneUnavailable: the real one"}
        assert failed > 0.2 * calls


@virtual
async def test_rare_faults_are_all_cured() -> None:
    """With one attempt in twenty failing no call fails: there is always budget."""
    plan = FaultPlan(3).on("ping").refuse(p=0.05)
    async with Rig(plan) as rig:
        failed, _, _ = await storm(rig, "ping", 2000, 0.001)
        assert failed == 0
        assert rig.events["budget_refused"] == 0


@virtual
async def test_waiting_for_a_full_plane_costs_no_budget() -> None:
    """NotReady is asked again after retry_after_s and takes no token."""
    plan = FaultPlan().on("ping").not_ready(2.0, times=3)
    async with Rig(plan) as rig:
        balance = rig.client.env.budget.balance
        before = balance(anyio.current_time())
        await rig.client.ping(timeout_s=60.0)
        at = [s.at for s in rig.wire("Ping")]
        assert all(2.0 <= b - a <= 2.2 for a, b in pairwise(at))
        assert balance(anyio.current_time()) >= before


@virtual
async def test_a_plane_that_stays_full_is_the_error() -> None:
    """A put on a full plane ends with DataPlaneNotReady, nothing of it visible, no space lost (P4)."""
    async with Rig(slots=4) as rig:
        await rig.fill(4)
        with pytest.raises(DataPlaneNotReady):
            await rig.client.put_samples(["a", "b"], "p", {"x": rows(2)})
        assert rig.slots()["ready"] == 4
        assert len(rig.transport.plane.partitions["p"].rows) == 4
        await rig.plain.clear_samples(["s0", "s1"], "p")
        await rig.client.put_samples(["a", "b"], "p", {"x": rows(2)})
        assert len(rig.client.env.pending_outcomes) == 0


# --- batches


@virtual
async def test_a_second_round_asks_for_the_one_row() -> None:
    """P2: of 64 rows one fails beyond its attempts; the second round asks for that one only."""
    plan = (
        FaultPlan()
        .on("get_samples", sample="s33")
        .error(DataPlaneUnavailable, attributes={"blames_port": False}, times=4)
    )
    async with Rig(plan, config={"storage_capacity": 1000}) as rig:
        ids = await rig.fill(64)
        assert torch.equal((await rig.get(ids))["x"], rows(64))
        assert [len(s.call.sample_ids) for s in rig.wire("Locate")] == [64, 1]
        assert [len(s.call.refs) for s in rig.wire("ReadSlots")] == [64, 1, 1, 1, 1]
        assert rig.events == {"retry": 3, "round": 1}


@virtual
async def test_rounds_end_with_the_survivors() -> None:
    """After three rounds PartialReadError has the rows that came and the real error of those that did not."""
    plan = (
        FaultPlan()
        .on("get_samples", sample="s1")
        .error(DataPlaneUnavailable, "gone", attributes={"blames_port": False})
    )
    plan.on("get_samples", sample="s2").error(DataPlaneReadError, "rotten")
    async with Rig(plan) as rig:
        with pytest.raises(PartialReadError) as caught:
            await rig.get(await rig.fill(4))
        err = caught.value
        assert [len(s.call.sample_ids) for s in rig.wire("Locate")] == [4, 1, 1]
        assert {at: e.message for at, e in err.errors.items()} == {1: "gone", 2: "rotten"}
        assert torch.equal(err.rows["x"], rows(4)[[0, 3]])
        assert (err.ok.sample_ids, err.failed.sample_ids) == (["s0", "s3"], ["s1", "s2"])
        assert err.sample_ids == ("s1", "s2")
        assert not err.retryable


@virtual
async def test_no_row_is_of_two_lives_over_rounds() -> None:
    """A row that is cleared and put anew between two rounds is stale: the batch was of the life before."""
    plan = (
        FaultPlan()
        .on("get_samples", sample="s1")
        .error(DataPlaneUnavailable, attributes={"blames_port": False}, times=4)
    )
    async with Rig(plan, round_backoff_base_s=2.0) as rig:
        ids = await rig.fill(3)

        async def renew() -> None:
            await until(lambda: any(s.ctx.attempt == 4 for s in rig.wire("ReadSlots")))
            await rig.plain.clear_samples(["s1"], "p")
            await rig.plain.put_samples(["s1"], "p", {"x": rows(1, 99)})

        async with anyio.create_task_group() as group:
            group.start_soon(renew)
            with pytest.raises(PartialReadError) as caught:
                await rig.get(ids)
        assert isinstance(caught.value.errors[1], StaleSlotError)
        assert torch.equal(caught.value.rows["x"], rows(3)[[0, 2]])


@virtual
async def test_rounds_keep_the_order_and_the_shape() -> None:
    """Rows that came in several rounds are put together in the order asked: dense, ragged, text, duplicates."""
    plan = FaultPlan(5).on("get_samples", call="ReadSlots").truncate(p=0.4)
    async with Rig(plan, max_attempts=2, max_rounds=30, ports=8) as rig:
        n = 24
        ids = [f"r{i}" for i in range(n)]
        await rig.plain.register_partition("q", ["d", "j", "s", "e"], n, ["t"], enums={"e": ["lo", "hi"]})
        ragged = torch.nested.nested_tensor([torch.arange(i % 5) for i in range(n)], layout=torch.jagged)
        words = ["lo" if i % 2 else "hi" for i in range(n)]
        fields = {"d": rows(n), "j": ragged, "s": [f"text {i}" for i in range(n)], "e": words}
        await rig.plain.put_samples(ids, "q", fields)
        order = random.Random(1).choices(range(n), k=40)
        got = await rig.client.get_samples([ids[i] for i in order], "q", ["s", "e", "d", "j"])
        assert torch.equal(got["d"], rows(n)[order])
        assert [row.tolist() for row in got["j"].unbind()] == [list(range(i % 5)) for i in order]
        assert list(got["s"]) == [f"text {i}" for i in order]
        assert list(got["e"]) == [words[i] for i in order]
        assert got["j"].layout == torch.jagged
        assert rig.events["round"] >= 1


@virtual
async def test_rounds_respect_the_deadline() -> None:
    """A read that cannot be completed in time ends by its timeout with the real errors and what came."""
    plan = FaultPlan().on("get_samples", sample="s1").silent()
    async with Rig(plan, attempt_timeout_s=1.0, hosts=2) as rig:
        await rig.fill(1)
        await rig.plain.put_samples(["s1"], "p", {"x": rows(1, 1)})
        assert (
            len({c.place.host.id for r in rig.transport.plane.partitions["p"].rows.values() for c in r.cells.values()})
            == 2
        )
        began = anyio.current_time()
        with pytest.raises(PartialReadError) as caught:
            await rig.get(["s0", "s1"], timeout_s=7.0)
        assert anyio.current_time() - began <= 7.0 + 1e-6
        assert isinstance(caught.value.errors[1], DataPlaneTimeout)
        assert torch.equal(caught.value.rows["x"], rows(1))
        assert rig.leftovers() == {}


@virtual
async def test_a_bad_request_has_one_round() -> None:
    """What cannot get better is asked once."""
    async with Rig() as rig:
        with pytest.raises(DataPlaneBadRequest):
            await rig.client.get_samples(["a"], "nowhere", ["x"])
        assert [s.kind for s in rig.sent] == ["Locate"]
