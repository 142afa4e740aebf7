"""Promises 4 and 5 under lost answers, refusals and cancels: no sample is claimed twice, and none is lost."""

from __future__ import annotations

from itertools import count
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import pytest

from asyncdp import (
    DataPlaneTimeout,
    DataPlaneUnavailable,
)

from ..faults import CLAIM, Fail, Hold, LoseReply, LoseRequest
from ..rig import at_once, declare
from ..steps import SHORT_S, claim, claimed_by, put

if TYPE_CHECKING:
    from asyncdp.client import Client

    from ..rig import Rig
from ..base import Contract

__all__ = ["ClaimFaults"]


async def claim_until_cancelled(client: Client, got: list[str], checkpoints: int) -> None:
    """Claim one sample and append it to ``got``; cancel the claim after some checkpoints."""
    with anyio.CancelScope() as scope:
        async with anyio.create_task_group() as group:

            async def cancel() -> None:
                for _ in range(checkpoints):
                    await anyio.lowlevel.checkpoint()
                scope.cancel()

            group.start_soon(cancel)
            got += (await client.claim_meta("p", "train", ["x"], 1)).sample_ids


class ClaimFaults(Contract):
    """Promises 4 and 5 under lost answers, refusals and cancels: no sample is claimed twice, and none is lost."""

    async def test_eight_claimers_get_each_of_a_thousand_samples_once(self, rig: Rig) -> None:
        """C4: in spite of lost requests, lost answers and refusals, each sample is claimed exactly once."""
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

        async def consume(client: Client) -> None:
            while len(got) < 1000:
                try:
                    meta = await client.claim_meta("p", "train", ["x"], 20, blocking=False)
                except (DataPlaneTimeout, DataPlaneUnavailable):
                    continue  # an undelivered batch is released before this client's next claim
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

    async def test_a_claim_survives_faults_until_its_time_is_up(self, rig: Rig) -> None:
        """A blocking claim continues after looks that the layers gave up on; only the last look's error is raised."""
        fail = Fail(CLAIM, times=9)
        client = await rig.attach(fail)
        await declare(rig.client)
        await put(rig.client, "a")
        rig.need("slot_addressable")
        assert (await client.claim_meta("p", "train", ["x"], 1, timeout_s=30)).sample_ids == ["a"]
        fail.times = 10_000
        with pytest.raises(DataPlaneUnavailable):
            await client.claim_meta("p", "train", ["x"], 1, timeout_s=SHORT_S)
        assert set(await claimed_by(rig.client)) == {"a"}

    async def test_a_claim_whose_answer_is_lost_is_the_same_batch(self, rig: Rig) -> None:
        """C3: a repeated claim returns the same batch and never a second one."""
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

    async def test_a_claim_that_is_never_answered_is_ambiguous_and_given_back(self, rig: Rig) -> None:
        """C3: the error is ambiguous; list_claims shows the batch, and the client's next claim releases it."""
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

    async def test_closing_gives_back_what_nobody_got(self, rig: Rig) -> None:
        """C2: a client that is closed after a cancelled claim releases the samples."""
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

    @pytest.mark.parametrize("after", [None, False, True], ids=["anywhere", "before", "after"])
    async def test_cancelled_at_any_point_no_sample_of_a_claim_is_lost(self, rig: Rig, after: bool | None) -> None:  # noqa: FBT001
        """C2: each sample was returned, is claimable again, or is listed by list_claims."""
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
