"""Removals whose reply was lost: sent again they must not find what came meanwhile, and the hosts are told of them."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import Resolved
from asyncdp.errors import DataPlaneBadRequest
from tests.ucxx.seen_plane import seen_plane
from tests.ucxx.test_directory import mutation, put, slots

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory, EmbeddedServer

pytestmark = pytest.mark.anyio


async def remove(directory: "Directory", how: str) -> Any:
    """Send one and the same removal."""
    if how == "drop":
        return await directory.drop(mutation("again"), "p")
    if how == "owner":
        return await directory.clear(mutation("again"), "p", None, "me")
    if how == "release":
        return await directory.release_owner(mutation("again"), "p", "me")
    return await directory.clear(mutation("again"), "p", ["a"])


@pytest.mark.parametrize("registered", [True, False])
@pytest.mark.parametrize("how", ["clear", "owner", "drop", "release"])
async def test_a_removal_that_found_nothing_is_not_done_again(
    directory: "Directory", how: str, *, registered: bool
) -> None:
    """Its outcome is remembered like any other, also where there was no partition yet."""
    declare = RegisterPartition("p", ("x",), 10, ("t",))
    if registered:
        await directory.register(declare)
    first = await remove(directory, how)
    await directory.register(declare)
    await put(directory, ["a"], 2)
    claimed = await directory.claim(mutation("claim"), "p", "t", ["x"], 1, 1, "me")
    assert claimed.meta.size == 1
    assert await remove(directory, how) == first
    assert await slots(directory, ["a"]) == [2]
    assert [claim.claim_id for claim in await directory.list_claims("p", "t")] == ["claim"]
    assert await directory.resolve("again", "p") == Resolved("done")


async def test_whole_groups_cannot_be_declared_where_a_group_is_larger(directory: "Directory") -> None:
    """Its rows would never be claimed: refused, by the name of the largest group, and nothing is declared."""
    await directory.register(RegisterPartition("p", ("x",), 10, ("t",)))
    await put(directory, ["b_g0", "b_g1", "b_g2", "a_g0", "a_g1", "a_g2", "c_g0"])
    with pytest.raises(DataPlaneBadRequest, match="'a' has 3 rows already") as caught:
        await directory.register(RegisterPartition("p", ("y",), 10, ("u",), 2))
    assert caught.value.field == "grpo_group_size"
    there = await directory.describe("p")
    assert (there.grpo_group_size, there.consumer_tasks) == (None, ("t",))
    await directory.register(RegisterPartition("p", (), 10, (), 3))
    assert (await directory.claim(mutation(), "p", "t", ["x"], 9, 1, "me")).meta.size == 6


@pytest.mark.parametrize("how", ["clear_samples", "pop", "evict", "drop_partition"])
async def test_a_host_is_told_of_a_removal_of_which_a_claim_found_out(
    server: "EmbeddedServer", namespace: str, connect: Callable[..., "Directory"], how: str
) -> None:
    """The claim's own answer settles only the claim: the removed row's slot is free after the next mutation."""
    async with seen_plane(server, namespace, connect) as seen:
        client = seen.client
        for name in ("p", "q"):
            await client.register_partition(name, ["x"], 8, ["t"])
        await client.put_samples(["c"], "q", {"x": torch.zeros(1, 3)})
        meta = await client.claim_meta("q", "t", ["x"], 1)
        removal = client.drop_partition if how == "drop_partition" else getattr(client, how)
        await seen.cut(removal, *{"drop_partition": ("q",), "pop": (meta, "q")}.get(how, (["c"], "q")))
        assert seen.states() == {"ready": 2}
        await client.register_partition("q", ["x"], 8, ["t"])
        async with seen.other() as other:
            await other.put_samples(["d"], "q", {"x": torch.zeros(1, 3)})
        assert (await client.claim_meta("q", "t", ["x"], 1)).sample_ids == ["d"]
        await client.clear_samples(["nobody"], "p")
        assert seen.states() == {"ready": 2}, "that of p and that of d"
