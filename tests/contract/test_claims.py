"""Promises 4 and 5: each task gets each sample once, when all of it is there; or is told what it waits for."""

from __future__ import annotations

import pickle
import time
from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    ClaimLost,
    ClaimNotReady,
    DataPlaneBadRequest,
    DataPlaneTimeout,
    DataPlaneUnavailable,
    KVBatchMeta,
)
from tests.contract.faults import CLAIM, Fail, Hold, LoseReply, LoseRequest, Watch
from tests.contract.rig import at_once, declare, table
from tests.contract.same import check_same

if TYPE_CHECKING:
    from asyncdp.client import BaseClient
    from tests.contract.rig import Rig

pytestmark = pytest.mark.anyio

#: Long enough for the last look to be answered well before the end, on a busy machine too.
SHORT_S = 0.3


async def put(client: BaseClient, *ids: str, **tags: Any) -> KVBatchMeta:
    """Put ``x`` of some ids."""
    return await client.put_samples(ids, "p", {"x": torch.zeros(len(ids))}, [dict(tags) for _ in ids])


async def claim(client: BaseClient, most: int = 99, task: str = "train", *fields: str) -> list[str]:
    """Claim what is ready."""
    meta = await client.claim_meta("p", task, fields or ("x",), most, blocking=False)
    return meta.sample_ids


async def claimed_by(client: BaseClient, task: str = "train") -> dict[str, str]:
    """Return {sample: owner} of all claims that live."""
    return {name: info.owner for info in await client.list_claims("p", task) for name in info.sample_ids}


# --- what is claimable


async def test_a_claim_tells_what_was_claimed(rig: Rig) -> None:
    """The meta has partition, task, ids, fields, tags, lengths; it reads its data, pickled as well."""
    await declare(rig.client, "x", "y")
    await rig.client.put_samples(
        ["a", "b"],
        "p",
        table(x=torch.arange(2), y=torch.ones(2)),
        [{"input_lengths": 4}, {"input_lengths": 7, "k": "v"}],
    )
    meta = await rig.mate.claim_meta("p", "train", ["x"], 2)
    assert (meta.partition_id, meta.task_name, meta.sample_ids, meta.fields) == ("p", "train", ["a", "b"], ["x"])
    assert meta.sequence_lengths == [4, 7]
    assert meta.tags is not None
    assert meta.tags[1]["k"] == "v"
    again = pickle.loads(pickle.dumps(meta))
    assert again == meta
    check_same((await rig.client.get_data(again))["x"], torch.arange(2))


async def test_a_claim_right_after_a_put_has_the_tags(rig: Rig) -> None:
    """P6: not once in fifty times does a claim see a sample before its tags."""
    await declare(rig.client)
    for i in range(25):
        claimed, _ = await at_once(
            rig.mate.claim_meta("p", "train", ["x"], 2, timeout_s=5),
            rig.client.put_samples([f"a{i}", f"b{i}"], "p", {"x": torch.zeros(2)}, [{"i": i}, {"i": i}]),
        )
        assert [tags.get("i") for tags in claimed.tags] == [i, i]


async def test_a_sample_is_claimable_once_all_required_fields_are_there(rig: Rig) -> None:
    """Fields may come from different puts and clients; each task waits for its own."""
    await declare(rig.client, "x", "y", tasks=("one", "both"))
    await put(rig.client, "a", "b")
    assert await claim(rig.client, 9, "both", "x", "y") == []
    assert await claim(rig.client, 9, "one", "x") == ["a", "b"]
    await rig.mate.put_samples(["b"], "p", {"y": torch.zeros(1)})
    assert await claim(rig.client, 9, "both", "x", "y") == ["b"]
    await rig.mate.put_samples(["a"], "p", {"y": torch.zeros(1)})
    assert await claim(rig.mate, 9, "both", "y", "x") == ["a"]


@pytest.mark.parametrize("tags", [{"committed": False}, {"status": "failed"}], ids=str)
async def test_uncommitted_and_failed_samples_are_skipped(rig: Rig, tags: dict[str, Any]) -> None:
    """A tag-only put commits them; then they are claimable."""
    await declare(rig.client)
    await put(rig.client, "a", **tags)
    await put(rig.client, "b")
    assert await claim(rig.mate) == ["b"]
    await rig.client.put_samples(["a"], "p", tags=[{"committed": True, "status": "ok"}])
    assert await claim(rig.mate) == ["a"]


async def test_what_was_ready_first_is_claimed_first(rig: Rig) -> None:
    """Readiness counts, not the order of the first put; given back, a sample is the first again."""
    await declare(rig.client, "x", "y")
    for name in "abc":
        await put(rig.client, name)
    for name in "cab":
        await rig.client.put_samples([name], "p", {"y": torch.zeros(1)})
    first = await rig.client.claim_meta("p", "train", ["x", "y"], 2, blocking=False)
    assert first.sample_ids == ["c", "a"]
    rig.need("claim_release")
    await rig.client.release_claim(first)
    assert await claim(rig.mate, 3, "train", "x", "y") == ["c", "a", "b"]


async def test_rows_of_one_put_are_claimed_in_their_order(rig: Rig) -> None:
    """Within one put the order of the ids counts."""
    await declare(rig.client)
    await put(rig.client, "d", "b", "c", "a")
    assert await claim(rig.client, 3) == ["d", "b", "c"]
    assert await claim(rig.client, 3) == ["a"]


async def test_each_task_gets_each_sample_once(rig: Rig) -> None:
    """Cursors of tasks are their own; put again, a claimed sample is not claimable again."""
    await declare(rig.client, tasks=("train", "log"))
    await put(rig.client, "a", "b")
    assert await claim(rig.client) == ["a", "b"]
    assert await claim(rig.mate) == []
    assert await claim(rig.mate, 1, "log") == ["a"]
    await put(rig.client, "a", "b", again=True)  # C10
    await rig.client.put_samples(["a"], "p", {"new": torch.zeros(1)})
    assert await claim(rig.client) == []
    assert await claim(rig.client, 9, "log") == ["b"]


async def test_a_sample_put_again_while_it_waits_is_claimed_once(rig: Rig) -> None:
    """Replaced before anybody claimed it, a sample is still one sample."""
    await declare(rig.client)
    for _ in range(3):
        await put(rig.client, "a")
    assert await claim(rig.client) == ["a"]
    assert await claim(rig.client) == []


async def test_cleared_and_put_anew_a_sample_is_claimable_again(rig: Rig) -> None:
    """C10: another life of the id is another sample."""
    await declare(rig.client)
    await put(rig.client, "a")
    assert await claim(rig.client) == ["a"]
    await rig.mate.clear_samples(["a"], "p")
    await put(rig.mate, "a")
    assert await claim(rig.client) == ["a"]


async def test_a_cleared_sample_is_not_claimed(rig: Rig) -> None:
    """What was cleared while it waited is gone from the queue."""
    await declare(rig.client)
    await put(rig.client, "a", "b")
    await rig.client.clear_samples(["a"], "p")
    assert await claim(rig.client) == ["b"]


async def test_eight_claimers_get_each_of_a_thousand_samples_once(rig: Rig) -> None:
    """C4: with lost requests, lost answers and refusals all the way, each exactly once."""
    rig.need("claim_dedup")
    await declare(rig.client)
    numbers = count()

    def striking(kind: Any) -> Any:
        class Sometimes(kind):  # type: ignore[misc]
            async def strike(self, call: Any, ctx: Any, send: Any) -> Any:
                if next(numbers) % 7:
                    return await send(call, ctx)
                return await super().strike(call, ctx, send)

        return Sometimes(CLAIM, times=10_000)

    clients = [await rig.attach(striking(kind)) for kind in (LoseReply, LoseRequest, Fail) for _ in range(3)][:8]
    got: list[str] = []

    async def consume(client: BaseClient) -> None:
        while len(got) < 1000:
            try:
                meta = await client.claim_meta("p", "train", ["x"], 20, blocking=False)
            except (DataPlaneTimeout, DataPlaneUnavailable):
                continue  # what nobody got is given back before this client's next claim
            got.extend(meta.sample_ids)
            await anyio.sleep(0.0005)

    async def produce() -> None:
        for i in range(0, 1000, 50):
            await put(rig.client, *(f"s{j}" for j in range(i, i + 50)))

    problems = [p for p in await at_once(produce(), *(consume(c) for c in clients)) if p is not None]
    assert not problems
    assert len(got) == 1000
    assert len(set(got)) == 1000
    assert await rig.client.check_consumption_status("p", ["train"])


# --- how many, and when


async def test_a_claim_returns_at_most_batch_size(rig: Rig) -> None:
    """The rest stays for the next one."""
    await declare(rig.client)
    await put(rig.client, *"abcde")
    meta = await rig.client.claim_meta("p", "train", ["x"], 2)
    assert meta.sample_ids == ["a", "b"]
    meta = await rig.client.claim_meta("p", "train", ["x"], 2, min_batch_size=1)
    assert meta.sample_ids == ["c", "d"]
    assert await claim(rig.client) == ["e"]


async def test_min_batch_size_returns_what_is_ready(rig: Rig) -> None:
    """C7: 3 asked, 2 ready, min_batch_size=1: 2, at once."""
    await declare(rig.client)
    await put(rig.client, "a", "b")
    with anyio.fail_after(2):
        meta = await rig.client.claim_meta("p", "train", ["x"], 3, min_batch_size=1, timeout_s=60)
    assert meta.sample_ids == ["a", "b"]


async def test_non_blocking_returns_what_is_ready_maybe_nothing(rig: Rig) -> None:
    """blocking=False never waits and never raises ClaimNotReady."""
    await declare(rig.client)
    meta = await rig.client.claim_meta("p", "train", ["x"], 3, None, False)  # noqa: FBT003 - the seeds' order
    assert (meta.size, meta.sample_ids, meta.task_name) == (0, [], "train")
    assert (await rig.client.get_data(meta, ["x"])).batch_size == torch.Size([0])
    await put(rig.client, "a")
    assert (await rig.client.claim_meta("p", "train", ["x"], 3, blocking=False)).sample_ids == ["a"]


async def test_a_blocking_claim_waits_for_the_whole_batch(rig: Rig) -> None:
    """C5: it takes nothing until batch_size are ready; the plane serves others meanwhile; then it returns at once."""
    await declare(rig.client)
    pings: list[float] = []

    async def others() -> None:
        await put(rig.mate, "a")
        await anyio.sleep(0.02)
        began = anyio.current_time()
        await rig.client.ping()
        pings.append(anyio.current_time() - began)
        await rig.client.ping()
        await put(rig.client, "b")

    claimed, problem = await at_once(rig.client.claim_meta("p", "train", ["x"], 2, timeout_s=9), others())
    assert problem is None
    assert claimed.sample_ids == ["a", "b"]
    assert pings[0] < 0.1


async def test_too_few_in_time_is_claim_not_ready_with_nothing_claimed(rig: Rig) -> None:
    """C6: it says what was required, how many were ready, who waits and for how long; no port, no retry, no claim."""
    watch = Watch(CLAIM)
    client = await rig.attach(watch)
    await declare(rig.client, "x", "y")
    await put(rig.client, "full", "half")
    await rig.client.put_samples(["full"], "p", {"y": torch.zeros(1)})
    began = anyio.current_time()
    with pytest.raises(ClaimNotReady) as caught:
        await client.claim_meta("p", "train", ["x", "y"], 2, timeout_s=SHORT_S)
    err = caught.value
    assert 0.8 * SHORT_S <= anyio.current_time() - began <= SHORT_S + 0.1
    assert isinstance(err, TimeoutError)
    assert err.required_fields == ("x", "y")
    assert (err.ready, err.requested) == (1, 2)
    assert err.waiting_ids == ("half",)
    assert err.oldest_wait_s is not None
    assert 0.8 * SHORT_S <= err.oldest_wait_s <= 5
    assert (err.op, err.partition_id) == ("claim_meta", "p")
    assert (err.retryable, err.blames_port, err.ambiguous, err.attempts) == (False, False, False, 1)
    assert await claimed_by(rig.client) == {}
    assert await claim(rig.client, 9, "train", "x", "y") == ["full"]


async def test_a_claim_on_an_empty_partition_says_that_nothing_waits(rig: Rig) -> None:
    """C6: no oldest, no ids."""
    await declare(rig.client)
    with pytest.raises(ClaimNotReady) as caught:
        await rig.client.claim_meta("p", "train", ["x"], 1, timeout_s=SHORT_S)
    assert (caught.value.ready, caught.value.oldest_wait_s, caught.value.waiting_ids) == (0, None, ())


async def test_a_claim_survives_faults_until_its_time_is_up(rig: Rig) -> None:
    """Refusals that the layers give up on do not end a blocking claim; of the last look the error is raised."""
    fail = Fail(CLAIM, times=9)
    client = await rig.attach(fail)
    await declare(rig.client)
    await put(rig.client, "a")
    rig.need("slot_addressable")
    assert (await client.claim_meta("p", "train", ["x"], 1, timeout_s=9)).sample_ids == ["a"]
    fail.times = 10_000
    with pytest.raises(DataPlaneUnavailable):
        await client.claim_meta("p", "train", ["x"], 1, timeout_s=SHORT_S)
    assert set(await claimed_by(rig.client)) == {"a"}


@pytest.mark.parametrize(
    ("partition", "task", "field"),
    [("mistyped", "train", "x"), ("p", "mistyped", "x"), ("p", "train", "mistyped")],
    ids=["partition", "task", "field"],
)
@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "at once"])
async def test_a_misspelt_name_is_refused_at_once(
    rig: Rig, partition: str, task: str, field: str, *, blocking: bool
) -> None:
    """C1: unknown partition, task or field: DataPlaneBadRequest that names it, without any wait."""
    await declare(rig.client)
    await put(rig.client, "a")
    with anyio.fail_after(2), pytest.raises(DataPlaneBadRequest, match="'mistyped'") as caught:
        await rig.client.claim_meta(partition, task, [field], 1, blocking=blocking)
    assert not caught.value.ambiguous
    assert await claimed_by(rig.client) == {}


async def test_a_field_that_was_only_written_may_be_required(rig: Rig) -> None:
    """Declared or ever written: either will do."""
    await declare(rig.client)
    await rig.client.put_samples(["a"], "p", {"new": torch.zeros(1)})
    assert await claim(rig.client, 9, "train", "new") == ["a"]
    await rig.client.clear_samples(["a"], "p")
    assert await claim(rig.client, 9, "train", "new") == []


async def test_tasks_and_fields_may_be_declared_while_a_claim_waits(rig: Rig) -> None:
    """A second registration adds a task; samples that were there before are claimable by it."""
    await declare(rig.client)
    await put(rig.client, "a")
    assert await claim(rig.client) == ["a"]
    await declare(rig.mate, "z", tasks=("late",))
    assert await claim(rig.mate, 9, "late") == ["a"]


# --- lost answers


async def test_a_claim_whose_answer_is_lost_is_the_same_batch(rig: Rig) -> None:
    """C3: asked again, the same batch; never a second one."""
    rig.need("claim_dedup")
    lost = LoseReply(CLAIM)
    client = await rig.attach(lost)
    await declare(rig.client)
    await put(rig.client, *"abcd")
    meta = await client.claim_meta("p", "train", ["x"], 2)
    assert lost.struck == 1
    assert meta.sample_ids == ["a", "b"]
    assert set(await claimed_by(rig.client)) == {"a", "b"}
    assert await claim(rig.client) == ["c", "d"]


async def test_a_claim_that_is_never_answered_is_ambiguous_and_given_back(rig: Rig) -> None:
    """C3: nobody knows, says the error; list_claims shows the batch; the client's next claim gives it back first."""
    rig.need("claim_dedup")
    lost = LoseReply(CLAIM, times=10_000)
    client = await rig.attach(lost, owner="unlucky")
    await declare(rig.client)
    await put(rig.client, *"abcd")
    with pytest.raises(DataPlaneTimeout) as caught:
        await client.claim_meta("p", "train", ["x"], 2, blocking=False)
    assert caught.value.ambiguous
    assert await claimed_by(rig.client) == {"a": "unlucky", "b": "unlucky"}
    lost.times = 0
    assert (await client.claim_meta("p", "train", ["x"], 4)).sample_ids == ["a", "b", "c", "d"]
    assert len(await rig.client.list_claims("p", "train")) == 1


async def test_closing_gives_back_what_nobody_got(rig: Rig) -> None:
    """C2: a client that closes after a cancelled claim returns its samples."""
    rig.need("claim_dedup")
    hold = Hold(CLAIM, after=True)
    client = await rig.attach(hold)
    await declare(rig.client)
    await put(rig.client, "a")
    await hold.cut(client.claim_meta("p", "train", ["x"], 1))
    assert set(await claimed_by(rig.client)) == {"a"}
    await client.close()
    assert await claimed_by(rig.client) == {}
    assert await claim(rig.client) == ["a"]


async def claim_until_cancelled(client: BaseClient, got: list[str], checkpoints: int) -> None:
    """Claim one sample into ``got``; cancelled after some checkpoints."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                for _ in range(checkpoints):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()

            group.start_soon(cancel)
            got += (await client.claim_meta("p", "train", ["x"], 1)).sample_ids


@pytest.mark.parametrize("after", [None, False, True], ids=["anywhere", "before", "after"])
async def test_cancelled_at_any_point_no_sample_of_a_claim_is_lost(rig: Rig, after: bool | None) -> None:  # noqa: FBT001
    """C2: each sample was returned, is claimable again, or is reported by list_claims."""
    rig.need("claim_dedup", "claim_release")
    await declare(rig.client)
    got: list[str] = []
    for step in range(30):
        await put(rig.client, f"s{step}")
        faults = () if after is None else (Hold(CLAIM, after=after),)
        client = await rig.attach(*faults, owner=f"o{step}")
        await claim_until_cancelled(client, got, step % 6)
        if step % 2:
            await client.close()
    reported = await claimed_by(rig.client)
    left = await claim(rig.client)
    assert sorted({*got, *reported, *left}) == sorted(f"s{i}" for i in range(30))
    assert not set(got) & set(left)
    assert len(set(got)) == len(got)


# --- giving back


async def test_claims_are_listed_by_owner(rig: Rig) -> None:
    """C8: who took what when; final, without a lease."""
    await declare(rig.client)
    await put(rig.client, *"abc")
    await rig.client.claim_meta("p", "train", ["x"], 2)
    await rig.mate.claim_meta("p", "train", ["x"], 1)
    one, two = await rig.mate.list_claims("p", "train")
    assert (one.owner, one.sample_ids, one.task_name, one.expires_at) == ("owner", ("a", "b"), "train", None)
    assert (two.owner, two.sample_ids) == ("mate", ("c",))
    assert one.claim_id != two.claim_id
    assert one.claimed_at <= two.claimed_at


async def test_claims_of_a_dead_consumer_are_released_by_owner(rig: Rig) -> None:
    """C8: release_claims gives them back, and only them."""
    rig.need("claim_release")
    await declare(rig.client, tasks=("train", "log"))
    await put(rig.client, *"abc")
    meta = await rig.mate.claim_meta("p", "train", ["x"], 2)
    await rig.mate.claim_meta("p", "log", ["x"], 1)
    await rig.client.claim_meta("p", "train", ["x"], 1)
    await rig.client.release_claims("p", "mate")
    assert await claimed_by(rig.client) == {"c": "owner"}
    assert await claimed_by(rig.client, "log") == {}
    assert await claim(rig.client) == ["a", "b"]
    with pytest.raises(ClaimLost):
        await rig.mate.release_claim(meta)
    await rig.client.release_claims("p", "nobody")
    await rig.client.release_claims("nowhere", "mate")


async def test_a_released_claim_is_claimable_again(rig: Rig) -> None:
    """release_claim gives back all rows of a meta, or a part of them; then it is lost."""
    rig.need("claim_release")
    await declare(rig.client)
    await put(rig.client, *"abc")
    meta = await rig.client.claim_meta("p", "train", ["x"], 3)
    await rig.client.release_claim(meta.subset([1]))
    assert await claim(rig.mate) == ["b"]
    with pytest.raises(ClaimLost, match="'b'") as caught:
        await rig.client.release_claim(meta)
    assert caught.value.sample_ids == ("b",)
    assert set(await claimed_by(rig.client)) == {"a", "b", "c"}, "all or none of it"
    await rig.client.release_claim(meta.subset([0, 2]))
    assert await claim(rig.mate) == ["a", "c"]


async def test_a_meta_without_a_claim_cannot_be_released(rig: Rig) -> None:
    """What a put returned, or a meta made by hand, is DataPlaneBadRequest."""
    rig.need("claim_release")
    await declare(rig.client)
    meta = await put(rig.client, "a")
    meta.task_name = "train"
    with pytest.raises(DataPlaneBadRequest, match="'a'"):
        await rig.client.release_claim(meta)


@pytest.mark.parametrize("by", ["ids", "meta"])
async def test_pop_checks_that_the_claim_is_still_ones_own(rig: Rig, by: str) -> None:
    """Promise 5: popped by ids or by meta, rows that another claimed meanwhile are ClaimLost, and all of them stay."""
    rig.need("claim_release")
    await declare(rig.client)
    await put(rig.client, *"ab")
    meta = await rig.client.claim_meta("p", "train", ["x"], 2)
    await rig.mate.release_claims("p", "owner")
    await rig.mate.claim_meta("p", "train", ["x"], 1)
    with pytest.raises(ClaimLost, match="'a'"):
        await rig.client.pop(meta if by == "meta" else meta.sample_ids, "p")
    assert (await rig.client.describe("p")).size == 2
    await rig.mate.pop(["a"], "p")
    await rig.client.evict(["b"], "p")
    assert (await rig.client.describe("p")).size == 0


async def test_pop_of_ids_that_were_never_claimed_goes_unchecked(rig: Rig) -> None:
    """A controller pops what others claimed and trained."""
    await declare(rig.client)
    await put(rig.client, *"ab")
    await rig.client.claim_meta("p", "train", ["x"], 1)
    await rig.mate.pop(["a", "b"], "p")
    assert (await rig.client.describe("p")).size == 0


async def test_a_popped_sample_may_be_popped_again(rig: Rig) -> None:
    """Promise 7: gone is gone: no ClaimLost for what this claim or an evict removed."""
    await declare(rig.client)
    await put(rig.client, *"ab")
    meta = await rig.client.claim_meta("p", "train", ["x"], 2)
    await rig.mate.evict(["b"], "p")
    await rig.client.pop(meta, "p")
    await rig.client.pop(meta, "p")
    assert await rig.client.list_claims("p", "train") == []


async def test_a_consumer_that_outlives_its_lease_has_lost_its_claim(rig: Rig) -> None:
    """C9: another claims; the first one's release and pop are refused, and touch nothing."""
    rig.need("claim_release")
    client = await rig.open(claim_lease_s=0.1, owner="slow")
    mate = await rig.attach(to=client, owner="fast")
    await declare(client)
    await put(client, "a", "b")
    meta = await client.claim_meta("p", "train", ["x"], 2)
    (info,) = await mate.list_claims("p", "train")
    assert info.expires_at is not None
    assert info.expires_at == pytest.approx(info.claimed_at + 0.1)
    with anyio.fail_after(5):  # a waiting claim is woken by the end of the lease
        again = await mate.claim_meta("p", "train", ["x"], 2)
    assert again.sample_ids == ["a", "b"]
    with pytest.raises(ClaimLost):
        await client.release_claim(meta)
    for keys in (meta, ["a"]):
        with pytest.raises(ClaimLost):
            await client.pop(keys, "p")
    assert await claimed_by(mate) == {"a": "fast", "b": "fast"}
    await mate.pop(again, "p")


async def test_closing_while_a_claim_waits_gives_up_nothing(rig: Rig) -> None:
    """Final claims stay with a client that closed in order: list_claims still shows them."""
    client = await rig.attach(owner="gone")
    await declare(rig.client)
    await put(rig.client, "a")
    await client.claim_meta("p", "train", ["x"], 1)
    await client.close()
    assert await claimed_by(rig.client) == {"a": "gone"}


async def test_batches_iterates_over_claims_with_their_data(rig: Rig) -> None:
    """batches() yields metas with data, ahead of the caller where asked; leaving gives back what was not taken."""
    await declare(rig.client)
    await put(rig.client, *"abcdef")
    seen = []
    async with rig.client.batches("p", "train", ["x"], 2, prefetch=2, timeout_s=5) as batches:
        async for meta, data in batches:
            seen += meta.sample_ids
            assert data.batch_size == torch.Size([2])
            break
    assert seen == ["a", "b"]
    rig.need("claim_release")
    assert set(await claimed_by(rig.client)) == {"a", "b"}
    async for meta, _ in rig.client.batches("p", "train", ["x"], 2, timeout_s=5):
        seen += meta.sample_ids
        if len(seen) == 6:
            break
    assert sorted(seen) == list("abcdef")


async def test_a_claim_that_overslept_says_what_its_last_look_saw(rig: Rig) -> None:
    """Promise 10: the loop is blocked beyond the deadline between two looks: the real error, not just a timeout."""
    fail = Fail(CLAIM, times=10_000)
    client = await rig.attach(fail, settings={"max_attempts": 1})
    await declare(rig.client)

    async def block() -> None:
        while not fail.struck:
            await anyio.lowlevel.checkpoint()
        await anyio.lowlevel.checkpoint()
        time.sleep(0.3)  # noqa: ASYNC251 - that is the point

    claimed, _ = await at_once(client.claim_meta("p", "train", ["x"], 1, timeout_s=0.2), block())
    assert isinstance(claimed, DataPlaneUnavailable)
    assert "refused" in claimed.message
