"""Calls that touch thousands of groups at once: a server-side function runs whole or not at all."""

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from asyncdp.calls import RegisterPartition
from tests.ucxx.test_directory import mutation, put

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory

pytestmark = pytest.mark.anyio

#: More than the stack of a Lua function holds.
GROUPS = 9000


@pytest.mark.slow
@pytest.mark.parametrize("first", ["clear", "claim"])
async def test_thousands_of_groups_in_one_call(directory: "Directory", first: str) -> None:
    """Groups that all lose their oldest row in one clear; an error in mid-function would leave half of it done."""
    await directory.register(RegisterPartition("p", ("x",), 64, ("t",), 2))
    ids = [f"{at}_g{i}" for at in range(GROUPS) for i in range(2)]
    assert (await directory.claim(mutation(), "p", "t", ["x"], 2, 1, "me")).meta.size == 0  # makes an index
    await put(directory, ids)
    if first == "claim":
        assert (await directory.claim(mutation(), "p", "t", ["x"], 2 * GROUPS, 1, "me")).meta.size == 2 * GROUPS
    assert (await directory.clear(mutation(), "p", ids[::2])).count == GROUPS
    assert (await directory.clear(mutation(), "p", ids)).count == GROUPS
    assert (await directory.describe("p")).size_bytes == 0
    await put(directory, ids[:2])
    assert (await directory.claim(mutation(), "p", "t", ["x"], 2, 1, "me")).meta.sample_ids == ids[:2]
    assert await directory.consumed("p", ["t"])


async def test_what_a_host_still_holds_is_found_in_pages(connect: Callable[..., "Directory"]) -> None:
    """All rows of many pages, by slot; not what was cleared, replaced, or lies on another host or in its past."""
    directory = connect(list_rows=100)
    await directory.register(RegisterPartition("p", ("x",), 64, ("t",)))
    await directory.register(RegisterPartition("q", ("x",), 64, ("t",)))
    for slot in (1, 2, 3):
        await put(directory, [f"{slot}_{at}" for at in range(1500)], slot)
    await put(directory, ["q0", "q1"], 9, p="q")
    await directory.clear(mutation(), "p", [f"1_{at}" for at in range(10)])
    await put(directory, [f"2_{at}" for at in range(1500)], 4)
    found = await directory.cells_of("host", 1, ["p", "q", "never"])
    assert found == {
        (1, 1): set(range(10, 1500)),
        (3, 1): set(range(1500)),
        (4, 1): set(range(1500)),
        (9, 1): {0, 1},
    }
    assert await directory.cells_of("host", 2, ["p", "q"]) == {}
    assert await directory.cells_of("other", 1, ["p", "q"]) == {}
