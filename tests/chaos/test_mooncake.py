"""Faults of Mooncake on a real Ray cluster, every verb under way: typed or right answers in time, nothing lost."""

from __future__ import annotations

import psutil
import pytest

from tests.chaos.mooncake import on_ray
from tests.chaos.transfer_queue import TIMEOUT_S
from tests.transfer_queue.needs_mooncake import needs_mooncake
from tests.transfer_queue.opener import CLUSTER

needs_mooncake()
pytestmark = pytest.mark.slow


@pytest.mark.timeout(600)
def test_every_verb_survives_faults_of_mooncake() -> None:
    """T1: its master paused and killed, a unit paused and killed, its segments full; then the plane begins anew."""
    CLUSTER.close()  # one Ray at a time
    for report in on_ray():
        assert not report.wrong
        assert report.slowest_s < TIMEOUT_S + 1.0
    left = [one.name() for one in psutil.Process().children(recursive=True)]
    assert "mooncake_master" not in left, "closing the owner ends the master that it started"
