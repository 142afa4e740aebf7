"""Promise 11: close() ends every call, reconciles pending outcomes if possible, and is bounded in time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest
import torch

from asyncdp import (
    DataPlaneClosed,
)
from asyncdp.calls.slots import Resolve

from ...verbs import VERBS
from ..faults import CLAIM, CLEAR, GET, PUT, Hold, Straggle
from ..rig import at_once, declare, until
from ..steps import TICK_S, put_floats

if TYPE_CHECKING:
    from ..rig import Rig
from ..base import Contract

__all__ = ["Closing"]


class Closing(Contract):
    """Promise 11: close() ends every call, reconciles pending outcomes if possible, and is bounded in time."""

    async def test_close_is_idempotent(self, rig: Rig) -> None:
        """X2: close() may be called twice, and from two tasks concurrently."""
        client = await rig.attach()
        await client.ping()
        assert await at_once(client.close(), client.close()) == [None, None]
        await client.close()
        async with await rig.attach() as again:
            await again.ping()
            await again.close()

    @pytest.mark.parametrize("verb", VERBS)
    async def test_a_closed_client_says_so(self, rig: Rig, verb: str) -> None:
        """X2: use after close raises DataPlaneClosed at once, with the name of the verb."""
        await put_floats(rig, 1)
        await rig.mate.close()
        with pytest.raises(DataPlaneClosed) as caught:
            await VERBS[verb](rig.mate, 5)
        assert (caught.value.op, caught.value.retryable, caught.value.ambiguous) == (verb, False, False)

    @pytest.mark.parametrize("kinds", [CLAIM, GET, PUT, CLEAR, ()], ids=["claim", "read", "publish", "clear", "any"])
    @pytest.mark.parametrize("verb", ["claim_meta", "get_samples", "put_samples", "clear_samples"])
    async def test_closing_under_a_call_ends_it_promptly(self, rig: Rig, verb: str, kinds: Any) -> None:
        """X2: in any state, a running call raises DataPlaneClosed and leaves nothing in the plane."""
        hold = Hold(*kinds, times=9)
        client = await rig.attach(hold, settings={"close_timeout_s": 60.0})  # enough for a slow backend
        await put_floats(rig, 1)
        ended: list[Any] = []

        async def call() -> None:
            ended.extend(await at_once(VERBS[verb](client, 60)))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            with anyio.move_on_after(0.02):
                await hold.holds()
            began = time.monotonic()
            hold.times = 0
            await client.close()
            await until(lambda: ended)
            assert time.monotonic() - began < 2 * TICK_S
        if hold.struck:
            assert isinstance(ended[0], DataPlaneClosed)
            assert ended[0].op == verb
        assert not rig.leftovers()
        assert len(client.env.pending_outcomes) == 0
        await rig.client.ping()
        assert await rig.client.list_claims("p", "train") == [] or not hold.struck

    async def test_close_while_a_claim_waits_in_the_backend(self, rig: Rig) -> None:
        """X2: a claim that waits for samples raises DataPlaneClosed, promptly."""
        await declare(rig.client)

        async def close() -> None:
            await anyio.sleep(0.02)
            await rig.mate.close()

        began = time.monotonic()
        claimed, _ = await at_once(rig.mate.claim_meta("p", "train", ["x"], 1, timeout_s=60), close())
        assert isinstance(claimed, DataPlaneClosed)
        assert time.monotonic() - began < 2 * TICK_S
        await rig.client.put_samples(["a"], "p", {"x": torch.zeros(1)})
        assert (await rig.client.claim_meta("p", "train", ["x"], 1, blocking=False)).sample_ids == ["a"]

    async def test_close_while_a_retry_pauses(self, rig: Rig) -> None:
        """X2: a call that waits for its next attempt raises DataPlaneClosed, promptly."""
        client = await rig.attach(
            Hold(GET, times=99), settings={"attempt_timeout_s": 0.01, "backoff_base_s": 60.0, "backoff_cap_s": 60.0}
        )
        await put_floats(rig, 1)

        async def close() -> None:
            await anyio.sleep(0.1)
            await client.close()

        began = time.monotonic()
        got, _ = await at_once(client.get_samples(["a"], "p", ["x"]), close())
        assert isinstance(got, DataPlaneClosed)
        assert time.monotonic() - began < 0.1 + 2 * TICK_S

    async def test_a_close_that_cannot_settle_is_bounded(self, rig: Rig) -> None:
        """Promise 11: close() ends within its limit even if the plane never answers, and the client stays closed."""
        rig.need("mutation_dedup")
        late, hang = Straggle(CLEAR), Hold(Resolve, times=99)
        client = await rig.attach(late, hang, settings={"close_timeout_s": 0.1})
        await declare(client)
        await late.cut(client.clear_samples(["a"], "p"))
        began = time.monotonic()
        await client.close()
        assert 0.05 < time.monotonic() - began < 0.1 + TICK_S
        for outcome in client.env.pending_outcomes:
            client.env.pending_outcomes.resolved(outcome)
        with pytest.raises(DataPlaneClosed):
            await client.ping()

    async def test_a_cancelled_close_still_ends_the_plane(self, rig: Rig) -> None:
        """T7: an owner whose close is cancelled during reconciliation still ends its plane."""
        rig.need("mutation_dedup")
        late, hang = Straggle(CLEAR), Hold(Resolve, times=99)
        owner = await rig.open(late, hang)
        worker = await rig.attach(to=owner)
        await declare(owner)
        await late.cut(owner.clear_samples(["a"], "p"))
        await hang.cut(owner.close())
        (problem,) = await at_once(worker.ping(timeout_s=1))
        assert isinstance(problem, Exception)
        for outcome in owner.env.pending_outcomes:
            owner.env.pending_outcomes.resolved(outcome)
        hang.go.set()
