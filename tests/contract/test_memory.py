"""The contract on the transport in memory, as it is and with a slot for each row."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import pytest

from asyncdp import MemoryTransport
from asyncdp.testing.contract import Contract, DataPlaneContract
from tests.contract.by_config import ByConfig
from tests.contract.memory_only import MemoryOnly
from tests.contract.memory_planes import memory
from tests.contract.nemo import NemoMode

if TYPE_CHECKING:
    from asyncdp.testing.contract import Opener

PLANES = {
    "memory": memory(MemoryTransport),
    "memory-split": memory(MemoryTransport, rows_per_slot=1, checksum=True),
}


class InMemory(DataPlaneContract, ByConfig, NemoMode, MemoryOnly):
    """The contract on planes in memory."""

    @pytest.fixture(params=["memory", pytest.param("memory-split", marks=pytest.mark.slow)])
    def open_plane(self, request: pytest.FixtureRequest) -> Opener:
        """Open planes of each kind."""
        return PLANES[request.param]


class TestMemory(InMemory):
    """MemoryTransport keeps the contract on asyncio."""

    loops = ("asyncio",)


class TestMemoryOnTrio(InMemory):
    """And on trio: in make test the core, the test kit and cancels run on it."""

    loops = ("trio",)
    pytestmark: ClassVar = [*Contract.pytestmark, pytest.mark.slow]
