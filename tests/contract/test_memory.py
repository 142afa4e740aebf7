"""The contract on the transport in memory, as it is and with a slot for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from asyncdp import MemoryTransport
from asyncdp.testing.contract import DataPlaneContract
from tests.contract.by_config import ByConfig
from tests.contract.memory_only import MemoryOnly
from tests.contract.memory_planes import memory

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener

PLANES = {
    "memory": memory(MemoryTransport),
    "memory-split": memory(MemoryTransport, rows_per_slot=1, checksum=True),
}


@pytest.fixture(scope="module", params=["asyncio", pytest.param("trio", marks=pytest.mark.slow)])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    """Make test runs on asyncio, make test-all on trio; layers, test kit and core run on both in make test."""
    backend: str = request.param
    return backend


class TestMemory(DataPlaneContract, ByConfig, MemoryOnly):
    """MemoryTransport keeps the contract."""

    @pytest.fixture(params=["memory", pytest.param("memory-split", marks=pytest.mark.slow)])
    def open_plane(self, request: pytest.FixtureRequest) -> Opener:
        """Open planes of each kind."""
        return PLANES[request.param]
