"""The contract on TransferQueue: a real one in a real Ray cluster, which lives as long as the session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar

import pytest

from asyncdp.testing.contract import (
    Claims,
    Closing,
    Contract,
    DataPlaneContract,
    Puts,
    Reads,
    Rows,
    Stale,
)
from tests.contract.by_config import ByConfig
from tests.contract.nemo import NemoMode

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


#: Themes that make test shows on it; the rest of them is slow.
SLICE = (Rows, Reads, Stale, Puts, Claims, Closing)


class OnRay:
    """The contract on a cluster, as far as its capabilities say."""

    loops = ("asyncio",)

    @pytest.fixture(params=PLANES)
    def open_plane(self, request: pytest.FixtureRequest) -> Opener:
        """Open planes on the cluster."""
        return PLANES[request.param]


class TestTransferQueue(OnRay, *SLICE, ByConfig, NemoMode):
    """TQTransport keeps the contract."""


class TestTransferQueueInFull(OnRay, *(theme for theme in DataPlaneContract.__bases__ if theme not in SLICE)):
    """What is left of the contract."""

    pytestmark: ClassVar = [*Contract.pytestmark, pytest.mark.slow]
