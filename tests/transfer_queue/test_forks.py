"""Programs that use a plane on TransferQueue and fork: promise 10b."""

from __future__ import annotations

from typing import TYPE_CHECKING

import anyio
import pytest

from asyncdp.transports.transfer_queue import TQTransport
from tests.forks.scenes import SCENES, play
from tests.transfer_queue.servers import config_for

if TYPE_CHECKING:
    from tests.transfer_queue.ray_cluster import RayCluster


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_program_that_forks(lasting: RayCluster) -> None:
    """U2, U3: whatever its children do, sys.exit as well, it goes on, and so do they."""
    config = config_for(lasting.endpoints, "forks")
    plane = TQTransport(config)
    try:
        *said, small, last = play(config, *SCENES)
        assert [*said, last] == [f"played {name}" for name in SCENES]
        assert small == "read small rows"
    finally:
        anyio.run(plane.close)
