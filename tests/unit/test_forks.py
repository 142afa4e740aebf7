"""Programs that use a plane in memory and fork: promise 10b."""

import pytest

from asyncdp.testing.contract.rig import BASE
from tests.forks import combinations
from tests.forks.scenes import SCENES, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_program_that_forks() -> None:
    """U2: whatever its children do, at whatever moment they were forked, it goes on; so do they."""
    assert len(play(dict(BASE), *SCENES)) == len(SCENES)


@pytest.mark.timeout(combinations.LIMIT_S)
def test_a_blocking_client_among_new_processes() -> None:
    """Forked, spawned, loading data, closed in any order or never: the parent's plane goes on, and nothing is left."""
    assert combinations.play(dict(BASE), seed=1).endswith(" did no harm")
