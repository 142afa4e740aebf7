"""Promise 5: a claim returns the requested batch, or an error that says what is missing."""

from __future__ import annotations

import pickle
import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneBadRequest,
    DataPlaneUnavailable,
)

from ..faults import CLAIM, Fail, Watch
from ..rig import at_once, declare
from ..steps import SHORT_S, TICK_S, claim, claimed_by, not_ready, put

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..rig import Rig
from ..base import Contract

__all__ = ["ClaimWaits"]


async def blocked(struck: Callable[[], int], deadline: float) -> bool:
    """Block the loop until ``deadline`` is over, once a look was answered; return whether that was in time."""
    while not struck() and anyio.current_time() < deadline + 1.0:
        await anyio.lowlevel.checkpoint()
    await anyio.lowlevel.checkpoint()
    in_time = anyio.current_time() < deadline
    time.sleep(max(0.0, deadline + 0.1 - anyio.current_time()))  # noqa: ASYNC251 - that is the point
    return in_time


class ClaimWaits(Contract):
    """Promise 5: a claim returns the requested batch, or an error that says what is missing."""

    async def test_a_claim_returns_at_most_batch_size(self, rig: Rig) -> None:
        """The remaining samples stay claimable."""
        await declare(rig.client)
        await put(rig.client, *"abcde")
        meta = await rig.client.claim_meta("p", "train", ["x"], 2)
        assert meta.sample_ids == ["a", "b"]
        meta = await rig.client.claim_meta("p", "train", ["x"], 2, min_batch_size=1)
        assert meta.sample_ids == ["c", "d"]
        assert await claim(rig.client) == ["e"]

    async def test_min_batch_size_returns_what_is_ready(self, rig: Rig) -> None:
        """C7: a claim of 3 with min_batch_size=1 returns the 2 ready samples at once."""
        await declare(rig.client)
        await put(rig.client, "a", "b")
        with anyio.fail_after(60):
            meta = await rig.client.claim_meta("p", "train", ["x"], 3, min_batch_size=1, timeout_s=300)
        assert meta.sample_ids == ["a", "b"]

    async def test_non_blocking_returns_what_is_ready_maybe_nothing(self, rig: Rig) -> None:
        """blocking=False never waits and never raises ClaimNotReady."""
        await declare(rig.client)
        meta = await rig.client.claim_meta("p", "train", ["x"], 3, None, False)  # noqa: FBT003 - the seeds' order
        assert (meta.size, meta.sample_ids, meta.task_name) == (0, [], "train")
        assert (await rig.client.get_data(meta, ["x"])).batch_size == torch.Size([0])
        await put(rig.client, "a")
        assert (await rig.client.claim_meta("p", "train", ["x"], 3, blocking=False)).sample_ids == ["a"]

    async def test_a_blocking_claim_waits_for_the_whole_batch(self, rig: Rig) -> None:
        """C5: it claims nothing until batch_size samples are ready, and does not block other calls meanwhile."""
        await declare(rig.client)
        pings: list[float] = []

        async def others() -> None:
            await put(rig.mate, "a")
            await anyio.sleep(0.02)
            for _ in range(5):
                began = anyio.current_time()
                await rig.client.ping()
                pings.append(anyio.current_time() - began)
            await put(rig.client, "b")

        claimed, problem = await at_once(rig.client.claim_meta("p", "train", ["x"], 2, timeout_s=50), others())
        assert problem is None
        assert claimed.sample_ids == ["a", "b"]
        assert min(pings) < 40.0, "they waited for the claim"

    async def test_too_few_in_time_is_claim_not_ready_with_nothing_claimed(self, rig: Rig) -> None:
        """C6: the error has the required and ready counts and the waiting ids; nothing is retried or claimed."""
        watch = Watch(CLAIM)
        client = await rig.attach(watch)
        await declare(rig.client, "x", "y")
        await put(rig.client, "full", "half")
        await rig.client.put_samples(["full"], "p", {"y": torch.zeros(1)})
        err = await not_ready(lambda: client.claim_meta("p", "train", ["x", "y"], 2, timeout_s=SHORT_S))
        assert err.elapsed_s is not None
        assert 0.75 * SHORT_S <= err.elapsed_s <= SHORT_S + TICK_S
        assert isinstance(err, TimeoutError)
        assert err.required_fields == ("x", "y")
        assert (err.ready, err.requested) == (1, 2)
        assert err.waiting_ids == ("half",)
        assert err.oldest_wait_s is not None
        assert 0.75 * SHORT_S <= err.oldest_wait_s <= 60
        assert (err.op, err.partition_id) == ("claim_meta", "p")
        assert (err.retryable, err.blames_port, err.ambiguous, err.attempts) == (False, False, False, 1)
        assert await claimed_by(rig.client) == {}
        assert await claim(rig.client, 9, "train", "x", "y") == ["full"]

    async def test_claim_not_ready_names_the_fields_that_are_missing(self, rig: Rig) -> None:
        """U14: for each field, the error has the number of waiting samples that lack it; ready ones do not count."""
        await declare(rig.client, "x", "y", "reward")
        ids = [f"s{at}" for at in range(6)]
        await rig.client.put_samples(ids, "p", {"x": torch.zeros(6), "rewrad": torch.zeros(6)}, [{"n": 1}] * 6)
        await rig.client.put_samples(ids[:2], "p", {"reward": torch.zeros(2), "y": torch.zeros(2)})
        await rig.client.put_samples(ids[2:3], "p", {"y": torch.zeros(1)})
        await rig.client.put_samples(["tags"], "p", tags=[{"n": 1}])
        fields = ["x", "y", "reward"]
        assert await claim(rig.client, 1, "train", *fields) == ["s0"]
        for timeout_s in (SHORT_S, 0):
            err = await not_ready(lambda t=timeout_s: rig.mate.claim_meta("p", "train", fields, 2, timeout_s=t))  # type: ignore[misc]
            assert (err.ready, err.missing_fields) == (1, {"reward": 5, "x": 1, "y": 4})
            assert all(text in err.message for text in ("'reward' in 5", "'x' in 1", "'y' in 4"))
            assert pickle.loads(pickle.dumps(err)).missing_fields == err.missing_fields

    async def test_claim_not_ready_names_no_field_where_none_is_missing(self, rig: Rig) -> None:
        """U14: rows that wait for their group or to be committed lack no field."""
        await declare(rig.client, grpo_group_size=2)
        await put(rig.client, "g_g0")
        await put(rig.client, "h_g0", "h_g1", committed=False)
        err = await not_ready(lambda: rig.client.claim_meta("p", "train", ["x"], 2, timeout_s=SHORT_S))
        assert (len(err.waiting_ids), err.missing_fields) == (3, {})
        assert "missing" not in err.message

    async def test_a_claim_on_an_empty_partition_says_that_nothing_waits(self, rig: Rig) -> None:
        """C6: the error has no oldest wait and no ids."""
        await declare(rig.client)
        err = await not_ready(lambda: rig.client.claim_meta("p", "train", ["x"], 1, timeout_s=SHORT_S))
        assert (err.ready, err.oldest_wait_s, err.waiting_ids) == (0, None, ())

    @pytest.mark.parametrize(
        ("partition", "task", "field"),
        [("mistyped", "train", "x"), ("p", "mistyped", "x"), ("p", "train", "mistyped")],
        ids=["partition", "task", "field"],
    )
    @pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "at once"])
    async def test_a_misspelt_name_is_refused_at_once(
        self, rig: Rig, partition: str, task: str, field: str, *, blocking: bool
    ) -> None:
        """C1: an unknown partition, task or field raises DataPlaneBadRequest with its name, without waiting."""
        await declare(rig.client)
        await put(rig.client, "a")
        with anyio.fail_after(60), pytest.raises(DataPlaneBadRequest, match="'mistyped'") as caught:
            await rig.client.claim_meta(partition, task, [field], 1, blocking=blocking)
        assert not caught.value.ambiguous
        assert await claimed_by(rig.client) == {}

    async def test_a_field_that_was_only_written_may_be_required(self, rig: Rig) -> None:
        """A required field has to be declared or to have been written once."""
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"new": torch.zeros(1)})
        assert await claim(rig.client, 9, "train", "new") == ["a"]
        await rig.client.clear_samples(["a"], "p")
        assert await claim(rig.client, 9, "train", "new") == []

    async def test_tasks_and_fields_may_be_declared_while_a_claim_waits(self, rig: Rig) -> None:
        """A second registration adds a task, which can claim samples that were put before."""
        await declare(rig.client)
        await put(rig.client, "a")
        assert await claim(rig.client) == ["a"]
        await declare(rig.mate, "z", tasks=("late",))
        assert await claim(rig.mate, 9, "late") == ["a"]

    async def test_a_claim_that_overslept_says_what_its_last_look_saw(self, rig: Rig) -> None:
        """Promise 10: if the loop is blocked beyond the deadline, the claim raises the error of its last look."""
        await declare(rig.client)
        claimed: Any = None
        for timeout_s in (0.2, 2.0, 20.0):  # a busy machine may not have looked once in a short time
            fail = Fail(CLAIM, times=10_000)
            client = await rig.attach(fail, settings={"max_attempts": 1})
            deadline = anyio.current_time() + timeout_s
            claiming = client.claim_meta("p", "train", ["x"], 1, timeout_s=timeout_s)
            claimed, in_time = await at_once(claiming, blocked(lambda f=fail: f.struck, deadline))  # type: ignore[misc]
            if in_time:
                break
        assert isinstance(claimed, DataPlaneUnavailable)
        assert "refused" in claimed.message
