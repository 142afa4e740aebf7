"""Fixtures of the TransferQueue tests; without the extra ``asyncdp[tq]`` only test_extra.py is collected."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from asyncdp.client import Client
    from tests.transfer_queue.ray_cluster import RayCluster
    from tests.transfer_queue.servers import Servers

collect_ignore: list[str] = []
if importlib.util.find_spec("transfer_queue") is None:
    collect_ignore = [path.name for path in Path(__file__).parent.glob("test_*.py") if path.name != "test_extra.py"]

_NAMESPACE = itertools.count()


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """TransferQueue is a library for asyncio."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
def cluster_ends() -> Iterator[None]:
    """End the servers and the Ray cluster that the session started, if it did."""
    yield
    if not collect_ignore:
        from tests.transfer_queue.opener import CLUSTER, FOREIGN, SERVERS

        for started in (CLUSTER, FOREIGN, SERVERS):
            started.close()


@pytest.fixture
def lasting() -> RayCluster:
    """Give servers that no test hurts: those of the session's Ray, begun anew where a test had to end it."""
    from tests.transfer_queue.opener import CLUSTER

    cluster: RayCluster = CLUSTER()
    return cluster


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Give servers of one test's own, to kill and pause."""
    from tests.transfer_queue.servers import Servers

    mine = Servers()
    yield mine
    mine.close()


@pytest.fixture
async def plane(anyio_backend: str) -> AsyncIterator[Callable[..., Client]]:
    """Give a function ``(servers, settings of layers, **config)`` that begins a plane and returns its owner."""
    from asyncdp import stack
    from asyncdp.transports.transfer_queue import TQTransport
    from tests.transfer_queue.servers import config_for

    made = []

    def begin(servers: Servers, layers: dict[str, Any] | None = None, **config: Any) -> Client:
        transport = TQTransport(config_for(servers.endpoints, f"own-{next(_NAMESPACE)}", **config))
        client = stack(transport, **(layers or {}))
        made.append(client)
        return client

    yield begin
    for client in made:
        await client.close()
