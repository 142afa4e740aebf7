"""The sweep on a real TransferQueue, on the Ray of the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("transfer_queue", reason="needs the extra tq")

from asyncdp.testing.sweep import cancellation_sweep
from tests.sweep.slice import all_verbs, real
from tests.transfer_queue.opener import CLUSTER, on_ray

# The first one starts Ray, whose actors import torch.
pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]
PLANES = on_ray()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """TransferQueue is a library for asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def cluster_ends() -> Iterator[None]:
    """End the Ray cluster that the session started, if it did."""
    yield
    CLUSTER.close()


@all_verbs()
async def test_a_verb_cancelled_at_any_checkpoint_leaves_nothing(verb: str) -> None:
    """T2, promise 11, with real sockets: no permit, connection, task; no claim is forgotten."""
    for _ in range(10):  # a reply that is there already is no checkpoint
        swept = await cancellation_sweep(PLANES, verb, **real())
        if swept.cancels:
            return
    pytest.fail("the call had no checkpoint in any try")
