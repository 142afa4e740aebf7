"""Opens planes on TransferQueue for the contract suite: servers for the whole session, a namespace per plane."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import sniffio

from asyncdp.testing.contract import Opener, Plane
from asyncdp.testing.pytest.leaks import lasting
from tests.transfer_queue.mooncake_servers import SIZES, MooncakeServers
from tests.transfer_queue.ray_cluster import RayCluster
from tests.transfer_queue.servers import Servers, config_for

__all__ = ["CLUSTER", "FOREIGN", "MOONCAKE", "SERVERS", "foreign", "on_mooncake", "on_ray", "without_ray"]

_NUMBER = itertools.count()


class _Lazy:
    """Starts something when it is first asked for; ``close`` ends it, if it was started."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._made: Any = None

    def __call__(self) -> Any:
        if self._made is None:
            with lasting():
                self._made = self._make()
        return self._made

    def close(self) -> None:
        made, self._made = self._made, None
        if made is not None:
            made.close()


#: TransferQueue's classes without Ray, and with it; both live as long as the test session, once asked for.
SERVERS = _Lazy(Servers)
CLUSTER = _Lazy(RayCluster)
#: Servers whose controller does not run our sampler.
FOREIGN = _Lazy(lambda: Servers(ours=False))
MOONCAKE = _Lazy(MooncakeServers)


def _opener(servers: Callable[[], Any], base: dict[str, Any] | None = None, **own: Any) -> Opener:
    @asynccontextmanager
    async def opened(config: dict[str, Any]) -> AsyncIterator[Plane]:
        if sniffio.current_async_library() != "asyncio":
            pytest.skip("TransferQueue is a library for asyncio")
        from asyncdp.transports.transfer_queue import TQTransport

        more = {**(base or {}), **config, "transfer_queue": {**own, **config.get("transfer_queue", {})}}
        whole = config_for(servers().endpoints, f"test-{next(_NUMBER)}", **more)
        transport = TQTransport(whole)

        def attach(differing: dict[str, Any]) -> Any:
            return TQTransport({**transport.attach_config(), **differing}, bootstrap=False)

        yield Plane(transport, attach)

    return opened


def without_ray(**own: Any) -> Opener:
    """Open planes on TransferQueue's own classes, in processes of their own but without Ray; ``own``: its settings."""
    return _opener(SERVERS, **own)


def on_mooncake() -> Opener:
    """Open planes on TransferQueue's own controller, with rows in Mooncake, without Ray."""
    return _opener(MOONCAKE, {"backend": "mooncake_cpu", **SIZES})


def foreign() -> Opener:
    """Open planes on a controller that runs a sampler of somebody else's."""
    return _opener(FOREIGN)


def on_ray() -> Opener:
    """Open planes on a TransferQueue in a real Ray cluster."""
    return _opener(CLUSTER)
