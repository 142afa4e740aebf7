"""Calls that touch thousands of groups at once: a server-side function runs whole or not at all."""

from typing import TYPE_CHECKING

import pytest

from asyncdp.calls import RegisterPartition
from tests.ucxx.test_directory import op, put

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

#: More than the stack of a Lua function holds.
GROUPS = 9000


@pytest.mark.parametrize("first", ["clear", "claim"])
async def test_thousands_of_groups_in_one_call(directory: "Directory", first: str) -> None:
    """Groups that all lose their oldest row in one clear; an error in mid-function would leave half of it done."""
    await directory.register(RegisterPartition("p", ("x",), 64, ("t",), 2))
    ids = [f"{at}_g{i}" for at in range(GROUPS) for i in range(2)]
    assert (await directory.claim(op(), "p", "t", ["x"], 2, 1, "me")).meta.size == 0  # from now on there is an index
    await put(directory, ids)
    if first == "claim":
        assert (await directory.claim(op(), "p", "t", ["x"], 2 * GROUPS, 1, "me")).meta.size == 2 * GROUPS
    assert (await directory.clear(op(), "p", ids[::2])).count == GROUPS
    assert (await directory.clear(op(), "p", ids)).count == GROUPS
    assert (await directory.describe("p")).size_bytes == 0
    await put(directory, ids[:2])
    assert (await directory.claim(op(), "p", "t", ["x"], 2, 1, "me")).meta.sample_ids == ids[:2]
    assert await directory.consumed("p", ["t"])
