"""Promise 10: every call ends within its timeout, with the actual error."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import ClaimNotReady, DataPlaneTimeout, DataPlaneUnavailable

from ...verbs import VERBS
from ..faults import CLAIM, GET, Fail, Hold, Watch
from ..rig import at_once, declare
from ..same import check_same
from ..steps import TICK_S, put_floats

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Deadlines"]

LIMIT_S = 0.15


async def blocked(hold: Hold, deadline: float) -> bool:
    """Block the loop until ``deadline`` is over, once the reply is there; return whether it was there in time."""
    with anyio.move_on_after(deadline + 1.0 - time.monotonic()):
        await hold.holds()
    hold.go.set()
    in_time = hold.held.is_set() and time.monotonic() < deadline
    time.sleep(max(0.0, deadline + 0.1 - time.monotonic()))  # noqa: ASYNC251 - that is the point
    return in_time


class Deadlines(Contract):
    """Promise 10: every call ends within its timeout, with the actual error."""

    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_backend_that_never_answers_hangs_no_verb(self, rig: Rig, verb: str) -> None:
        """T1, promise 10: the call raises DataPlaneTimeout in time, ambiguous for mutations; the loop goes on."""
        hang = Hold(times=10_000)
        client = await rig.attach(hang)
        await put_floats(rig, 1)
        late: list[float] = []
        over = anyio.Event()

        async def tick() -> None:
            while not over.is_set():
                began = time.monotonic()
                await anyio.sleep(0.005)
                late.append(time.monotonic() - began)

        async def call() -> None:
            try:
                await VERBS[verb](client, LIMIT_S)
            finally:
                over.set()

        began = time.monotonic()
        err, _ = await at_once(call(), tick())
        took = time.monotonic() - began
        hang.times = 0
        hang.go.set()
        assert isinstance(err, DataPlaneTimeout)
        assert 0.9 * LIMIT_S <= took <= LIMIT_S + TICK_S
        assert max(late) < TICK_S
        assert (err.op, err.retryable) == (verb, False)
        whole_puts = not rig.client.get_capabilities().slot_writes
        assert err.ambiguous == (VERBS[verb].mutates and (whole_puts or verb != "put_samples"))
        assert isinstance(err, TimeoutError)
        assert err.elapsed_s == pytest.approx(took, abs=TICK_S)

    @pytest.mark.parametrize("verb", VERBS)
    async def test_no_time_at_all_is_a_timeout(self, rig: Rig, verb: str) -> None:
        """With timeout_s=0, claims and wait_partition look once; others raise DataPlaneTimeout without a request."""
        watch = Watch()
        client = await rig.attach(watch)
        await put_floats(rig, 1)
        before = await rig.client.describe("p")
        (result,) = await at_once(VERBS[verb](client, 0))
        if VERBS[verb].looks_once:
            assert not isinstance(result, Exception)
            return
        assert isinstance(result, DataPlaneTimeout)
        assert (result.op, result.ambiguous, result.retryable, result.blames_port) == (verb, False, False, False)
        assert not watch.seen
        assert await rig.client.describe("p") == before

    @pytest.mark.parametrize("least", [None, 2])
    async def test_a_claim_without_time_takes_one_look(self, rig: Rig, least: int | None) -> None:
        """U12: it claims the ready samples or raises ClaimNotReady with their number, after one request."""
        watch = Watch(CLAIM)
        client = await rig.attach(watch)
        await declare(rig.client)
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        with pytest.raises(ClaimNotReady) as caught:
            await client.claim_meta("p", "train", ["x"], 2, timeout_s=0, min_batch_size=least)
        assert (caught.value.ready, caught.value.requested, caught.value.attempts) == (1, 2, 1)
        assert len(watch.seen) == 1
        assert (await client.claim_meta("p", "train", ["x"], 2, timeout_s=0, blocking=False)).size == 1
        await rig.client.put_samples(["b", "c"], "p", {"x": torch.zeros(2)})
        assert (await client.claim_meta("p", "train", ["x"], 2, timeout_s=0.0, min_batch_size=least)).sample_ids == [
            "b",
            "c",
        ]

    @pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "at once"])
    async def test_a_claim_without_time_says_why_its_look_failed(self, rig: Rig, *, blocking: bool) -> None:
        """U12: if the plane is gone, the claim raises the error of its one attempt and claims nothing."""
        fail = Fail(CLAIM, times=10_000)
        client = await rig.attach(fail)
        await put_floats(rig, 1)
        with pytest.raises(DataPlaneUnavailable, match="refused"):
            await client.claim_meta("p", "train", ["x"], 1, blocking=blocking, timeout_s=0)
        assert fail.struck == 1
        fail.times = 0
        assert (await client.claim_meta("p", "train", ["x"], 1, timeout_s=0)).sample_ids == ["a"]

    async def test_the_one_look_of_a_claim_without_time_ends_with_its_attempt(self, rig: Rig) -> None:
        """U12: without an answer, it raises DataPlaneTimeout after attempt_timeout_s; the batch is not lost."""
        await put_floats(rig, 1)
        for attempt_timeout_s in (0.1, 1.0, 10.0):  # a busy machine may answer no attempt in a short time
            hold = Hold(CLAIM)
            client = await rig.attach(hold, settings={"attempt_timeout_s": attempt_timeout_s})
            (err,) = await at_once(client.claim_meta("p", "train", ["x"], 1, timeout_s=0))
            assert isinstance(err, DataPlaneTimeout)
            assert f"no answer within {attempt_timeout_s:g} s" in err.message
            assert err.ambiguous
            hold.go.set()
            (claimed,) = await at_once(client.claim_meta("p", "train", ["x"], 1, timeout_s=9))
            if not isinstance(claimed, DataPlaneTimeout):
                break
        else:
            pytest.fail("not answered in time")
        assert claimed.sample_ids == ["a"]

    async def test_waiting_for_a_partition_without_time_looks_once(self, rig: Rig) -> None:
        """U12: the partition exists, or DataPlaneTimeout says that it was not registered."""
        with pytest.raises(DataPlaneTimeout, match="'p'"):
            await rig.client.wait_partition("p", timeout_s=0)
        await declare(rig.mate)
        await rig.client.wait_partition("p", timeout_s=0)

    async def test_endless_time_is_time(self, rig: Rig) -> None:
        """timeout_s=inf is accepted by every kind of call."""
        await put_floats(rig, 2)
        await rig.client.put_samples(["b"], "p", {"x": torch.zeros(1)}, timeout_s=float("inf"))
        assert (await rig.client.claim_meta("p", "train", ["x"], 3, timeout_s=float("inf"))).size == 3
        await rig.client.get_samples(["a", "b"], "p", ["x"], timeout_s=float("inf"))
        await rig.client.clear_samples(["b"], "p", timeout_s=float("inf"))

    async def test_one_slow_answer_costs_an_attempt_not_the_call(self, rig: Rig) -> None:
        """An attempt that exceeds its timeout is given up, and the next attempt succeeds."""
        rig.need("slot_addressable")
        await put_floats(rig)
        for attempt_timeout_s in (0.1, 1.0, 10.0):  # a busy machine may answer no attempt in a short time
            hold = Hold(GET)
            client = await rig.attach(hold, settings={"attempt_timeout_s": attempt_timeout_s})
            (got,) = await at_once(client.get_samples(["s3"], "p", ["x"]))
            if not isinstance(got, DataPlaneTimeout):
                break
        else:
            pytest.fail("not answered in time")
        check_same(got["x"], torch.tensor([3.0]))
        assert hold.struck == 1

    async def test_retries_stay_within_the_calls_time(self, rig: Rig) -> None:
        """T10: all attempts, rounds and pauses end before the deadline of the call."""
        client = await rig.attach(Hold(GET, times=10_000), settings={"attempt_timeout_s": 0.02, "backoff_base_s": 0.05})
        await put_floats(rig)
        began = time.monotonic()
        with pytest.raises(DataPlaneTimeout):
            await client.get_samples(["s1", "s2"], "p", ["x"], timeout_s=LIMIT_S)
        assert time.monotonic() - began <= LIMIT_S + TICK_S

    async def test_a_reply_that_is_there_is_returned_though_the_loop_was_blocked(self, rig: Rig) -> None:
        """T8: if the loop is blocked beyond the deadline just after the reply arrived, the call returns the reply."""
        await put_floats(rig, 1)
        got: Any = None
        for timeout_s in (0.2, 2.0, 20.0):  # a busy machine may not have an answer in a short time
            hold = Hold(GET, after=True)
            client = await rig.attach(hold)
            # Opening the first connection may take longer than the call below.
            await client.put_samples(["b"], "p", {"x": torch.zeros(1)})
            deadline = time.monotonic() + timeout_s
            got, in_time = await at_once(
                client.get_samples(["a"], "p", ["x"], timeout_s=timeout_s), blocked(hold, deadline)
            )
            if in_time is True:
                break
        check_same(got["x"], torch.tensor([0.0]))

    async def test_the_default_timeout_is_the_configs(self, rig: Rig) -> None:
        """call_timeout_s of the config applies to a call without a timeout."""
        client = await rig.attach(Hold(GET, times=99), call_timeout_s=LIMIT_S)
        await put_floats(rig, 1)
        began = time.monotonic()
        with pytest.raises(DataPlaneTimeout):
            await client.get_samples(["a"], "p", ["x"])
        assert time.monotonic() - began <= LIMIT_S + TICK_S
