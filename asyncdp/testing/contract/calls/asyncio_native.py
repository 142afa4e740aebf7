"""Promise 11 under asyncio's own means of cancelling: task.cancel(), wait_for, timeout()."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp import DataPlaneTimeout
from asyncdp.calls.slots import Resolve

from ...verbs import VERBS
from ..faults import CLAIM, GET, PUT, Fail, Hold, Straggle, Watch
from ..rig import declare, until
from ..same import check_same
from ..steps import TICK_S

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract, asyncio_only

__all__ = ["AsyncioNative"]

#: Layer settings with pauses between retries that are too long for any test to wait for.
SLOW = {f"{prefix}backoff_{what}_s": 60.0 for prefix in ("", "round_") for what in ("base", "cap")}


async def fill(rig: Rig) -> None:
    """Put ``x`` for a few ids; the value is the number of the row."""
    await declare(rig.client)
    await rig.client.put_samples(["a", "s1", "s2"], "p", {"x": torch.arange(3.0)})


def _two_ports(rig: Rig) -> dict[str, Any]:
    is_memory = rig.client.attach_config()["impl"] == "memory"
    return {"memory": {"ports_per_host": 2}} if is_memory else {}


class AsyncioNative(Contract):
    """Promise 11 under asyncio's own means of cancelling: task.cancel(), wait_for, timeout()."""

    @asyncio_only
    @pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
    @pytest.mark.parametrize("verb", [verb for verb in VERBS if verb != "release_claim"])
    async def test_task_cancel_ends_any_verb_at_once(self, rig: Rig, verb: str, *, after: bool) -> None:
        """T2: the call raises CancelledError and leaves no task or slot; the client's next call gets its own reply."""
        rig.need(*VERBS[verb].needs)
        hold = Hold(after=after)
        client = await rig.attach(hold)
        await fill(rig)
        before = asyncio.all_tasks()
        task = asyncio.ensure_future(VERBS[verb](client, 60))
        await hold.holds()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        # Tasks of a client have this prefix and end with the client.
        assert not [left for left in asyncio.all_tasks() - before if not left.get_name().startswith("asyncdp ")]
        check_same((await client.get_samples(["s2"], "p", ["x"], timeout_s=30))["x"], torch.tensor([2.0]))
        await client.close()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() <= before
        assert not rig.leftovers()

    @asyncio_only
    async def test_a_cancel_in_the_same_tick_as_the_answer_is_a_cancel(self, rig: Rig) -> None:
        """T4: a task that is cancelled in the tick in which the answer arrives is cancelled."""
        hold = Hold(GET, after=True)
        client = await rig.attach(hold)
        await fill(rig)
        task = asyncio.ensure_future(client.get_samples(["s1"], "p", ["x"]))
        await hold.holds()
        hold.go.set()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()

    @asyncio_only
    async def test_a_claim_cancelled_in_the_tick_of_its_answer_is_not_lost(self, rig: Rig) -> None:
        """T4, C2: the sample of a claim that is cancelled in the tick of its answer can be claimed again."""
        rig.need("claim_dedup")
        client = await rig.attach(owner="c")
        await declare(rig.client)
        for step in range(20):
            task = asyncio.ensure_future(client.claim_meta("p", "train", ["x"], 1))
            await asyncio.sleep(0.001)
            await rig.client.put_samples([f"s{step}"], "p", {"x": torch.zeros(1)})
            for _ in range(step % 5):
                await asyncio.sleep(0)
            task.cancel()
            try:
                got = (await task).sample_ids
            except asyncio.CancelledError:
                got = (await client.claim_meta("p", "train", ["x"], 1, timeout_s=30)).sample_ids
            assert got == [f"s{step}"]

    @asyncio_only
    async def test_cancelled_during_an_attempt_there_is_one_attempt(self, rig: Rig) -> None:
        """T5: the call raises CancelledError at once and sends no further request."""
        hold = Hold(GET, times=9)
        client = await rig.attach(hold)
        await fill(rig)
        task = asyncio.ensure_future(client.get_samples(["s1"], "p", ["x"]))
        await hold.holds()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < TICK_S
        await asyncio.sleep(0.01)
        assert len(hold.seen) == 1

    @asyncio_only
    async def test_cancelled_during_backoff_nothing_is_sent_any_more(self, rig: Rig) -> None:
        """T5: tenacity does not swallow a cancel that arrives during its wait."""
        fail = Fail(GET, times=99)
        client = await rig.attach(fail, settings=SLOW)
        await fill(rig)
        task = asyncio.ensure_future(client.get_samples(["s1"], "p", ["x"]))
        await until(lambda: fail.seen)
        await asyncio.sleep(0.03)
        sent = len(fail.seen)
        assert not task.done()
        began = time.monotonic()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert time.monotonic() - began < TICK_S
        await asyncio.sleep(0.01)
        assert len(fail.seen) == sent

    @asyncio_only
    async def test_two_cancels_in_a_row_still_clean_up(self, rig: Rig) -> None:
        """T7: the second cancel arrives during the clean-up of the first."""
        rig.need("mutation_dedup")
        late, hold = Straggle(PUT), Hold(Resolve)
        client = await rig.attach(late, hold)
        await declare(client)
        for kind in (late, hold):
            task = asyncio.ensure_future(client.put_samples(["a"], "p", {"x": torch.zeros(1)}))
            await kind.holds()
            task.cancel()
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        hold.go.set()
        await client.put_samples(["a"], "p", {"x": torch.ones(1)})
        await client.close()
        assert not rig.leftovers()
        check_same((await rig.client.get_samples(["a"], "p", ["x"]))["x"], torch.ones(1))

    @asyncio_only
    async def test_a_users_wait_for_ends_a_claim_and_loses_nothing(self, rig: Rig) -> None:
        """C2: whenever wait_for cancels a claim, each sample is returned, claimable, or listed by list_claims."""
        rig.need("claim_dedup")
        client = await rig.attach(owner="w")
        await declare(rig.client)
        rng = random.Random(3)
        got: list[str] = []
        for step in range(30):

            async def put(name: str, wait_s: float) -> None:
                await asyncio.sleep(wait_s)
                await rig.client.put_samples([name], "p", {"x": torch.zeros(1)})

            putting = asyncio.ensure_future(put(f"s{step}", rng.choice([0.0, 0.002, 0.004])))
            try:
                claim = client.claim_meta("p", "train", ["x"], 1)
                got += (await asyncio.wait_for(claim, rng.choice([0.002, 0.003, 0.004]))).sample_ids  # noqa: TID251
            except TimeoutError:
                pass
            await putting
        reported = {name for info in await rig.client.list_claims("p", "train") for name in info.sample_ids}
        left = (await client.claim_meta("p", "train", ["x"], 99, blocking=False)).sample_ids
        assert {*got, *reported, *left} == {f"s{i}" for i in range(30)}
        assert not set(got) & set(left)
        assert len(set(got)) == len(got)

    @asyncio_only
    async def test_a_users_timeout_wins_over_the_calls_own(self, rig: Rig) -> None:
        """asyncio.timeout() around a call raises the user's TimeoutError, not DataPlaneTimeout."""
        client = await rig.attach(Hold(GET, times=9))
        await fill(rig)
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.02):
                await client.get_samples(["s1"], "p", ["x"], timeout_s=60)
        assert not isinstance(caught.value, DataPlaneTimeout)
        with pytest.raises(DataPlaneTimeout):
            async with asyncio.timeout(60):
                await client.get_samples(["s1"], "p", ["x"], timeout_s=0.02)

    @asyncio_only
    async def test_gathered_calls_fail_alone(self, rig: Rig) -> None:
        """With asyncio.gather over one client, a failing call does not affect the others."""
        await fill(rig)
        calls = [rig.client.get_samples([name], "p", ["x"]) for name in ("a", "nobody", "s2")]
        results: list[Any] = await asyncio.gather(*calls, return_exceptions=True)
        first, second, third = results
        assert isinstance(second, KeyError)
        check_same(first["x"], torch.tensor([0.0]))
        check_same(third["x"], torch.tensor([2.0]))

    @asyncio_only
    async def test_two_hundred_tasks_cancelled_at_random(self, rig: Rig) -> None:
        """T6: after random task.cancel() calls, each of the two ports is usable, and every reply was the right one."""
        client = await rig.open(num_storage_units=1, **_two_ports(rig))
        await declare(client)
        await client.put_samples(["a", "b"], "p", {"x": torch.arange(2)})
        rng = random.Random(4)
        running = [asyncio.ensure_future(client.get_samples(["ab"[i % 2]], "p", ["x"])) for i in range(200)]
        for _ in range(20):
            await asyncio.sleep(0)
            for task in rng.sample(running, 10):
                task.cancel()
        results: list[Any] = await asyncio.gather(*running, return_exceptions=True)
        for i, result in enumerate(results):
            if not isinstance(result, BaseException):
                check_same(result["x"], torch.tensor([i % 2]))
            else:
                assert isinstance(result, asyncio.CancelledError)
        for _ in range(4):
            check_same((await client.get_samples(["b"], "p", ["x"], timeout_s=8))["x"], torch.tensor([1]))
        assert not rig.leftovers()

    @asyncio_only
    async def test_the_client_starts_no_task_of_its_own(self, rig: Rig) -> None:
        """Promise 11: no task per call is left; a transport's own, which wakes waiting claims, ends with the client."""
        before = asyncio.all_tasks()
        await fill(rig)
        await rig.client.get_samples(["a", "s1"], "p", ["x"])
        assert asyncio.all_tasks() == before
        watch = Watch(CLAIM)
        client = await rig.attach(watch)
        left: list[set[asyncio.Task[Any]]] = []
        for _ in range(2):
            watch.seen.clear()
            task = asyncio.ensure_future(client.claim_meta("p", "train", ["x"], 9))
            await until(lambda: watch.seen)
            await asyncio.sleep(0.2)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            left.append(asyncio.all_tasks())
        assert left[0] == left[1]
        await client.close()
        await until(lambda: asyncio.all_tasks() == before)
