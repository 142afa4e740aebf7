"""Removals that found nothing, and whose reply was lost: sent again they must not find what came meanwhile."""

from typing import TYPE_CHECKING, Any

import pytest

from asyncdp.calls import RegisterPartition
from asyncdp.calls.slots import Resolved
from asyncdp.errors import DataPlaneBadRequest
from tests.ucxx.test_directory import mutation, put, slots

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory

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
