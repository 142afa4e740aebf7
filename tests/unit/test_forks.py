"""Programs that use a plane in memory and fork: promise 10b."""

import pytest

from asyncdp.testing.contract.rig import BASE
from tests.forks.scenes import SCENES, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_a_program_that_forks() -> None:
    """U2: whatever its children do, at whatever moment they were forked, it goes on; so do they."""
    assert len(play(dict(BASE), *SCENES)) == len(SCENES)
