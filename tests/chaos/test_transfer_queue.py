"""Faults on a real Ray cluster, every verb under way: typed errors or right answers in time, nothing lost."""

from __future__ import annotations

import os

import pytest

from tests.chaos.transfer_queue import FAULTS, TIMEOUT_S, on_ray
from tests.transfer_queue.opener import CLUSTER

pytestmark = pytest.mark.slow


@pytest.mark.timeout(300)
def test_every_verb_survives_faults_of_a_real_cluster() -> None:
    """T1: all faults with ASYNCDP_CHAOS=full; by default those that need no second bootstrap."""
    CLUSTER.close()  # one Ray at a time
    faults = FAULTS if os.environ.get("ASYNCDP_CHAOS") == "full" else FAULTS[:-1]
    for report in on_ray(faults):
        assert not report.wrong
        assert report.slowest_s < TIMEOUT_S + 1.0
        if report.fault != "none":  # how soon: the program's report says it; a busy machine must not fail this
            assert report.notice_s is not None
            assert report.notice_s < TIMEOUT_S
