"""The contract on TransferQueue: a real one in a real Ray cluster, which lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.contract.by_config import ByConfig
from tests.contract.nemo import NemoMode
from tests.contract.on_servers import SLICE, Slow, others

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener

pytest.importorskip("transfer_queue", reason="needs the extra tq")

from tests.transfer_queue.opener import CLUSTER, on_ray

PLANES = {"transfer_queue": on_ray()}


@pytest.fixture(scope="session", autouse=True)
def cluster_ends() -> Iterator[None]:
    """End the Ray cluster that the session started, if it did."""
    yield
    CLUSTER.close()


class OnRay:
    """The contract on a cluster, as far as its capabilities say."""

    loops = ("asyncio",)

    @pytest.fixture(params=PLANES)
    def open_plane(self, request: pytest.FixtureRequest) -> Opener:
        """Open planes on the cluster."""
        return PLANES[request.param]


class TestTransferQueue(OnRay, *SLICE, ByConfig, NemoMode):
    """TQTransport keeps the contract."""


class TestTransferQueueInFull(OnRay, Slow, *others(*SLICE)):
    """What is left of the contract."""
