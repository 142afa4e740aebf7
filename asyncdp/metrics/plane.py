"""PlaneWatch: asks a plane at intervals how much it holds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio

from asyncdp.errors import DataPlaneError

from .published import PARTITION

if TYPE_CHECKING:
    from asyncdp.client import Client
    from asyncdp.meta import HostStatus, PartitionInfo

__all__ = ["PlaneWatch"]


@dataclass(frozen=True, slots=True)
class PlaneState:
    """What a plane holds.

    Attributes:
        partitions: Its partitions.
        depths: By partition, the number of groups that are committed and complete.
        hosts: Its slot hosts; empty where the backend cannot list them.
        error: Why the plane could not be asked; empty if it could. The rest is then as it was before.
        asked_at: When it was asked, in unix seconds by this machine's clock.
    """

    partitions: list[PartitionInfo] = field(default_factory=list)
    depths: dict[str, int] = field(default_factory=dict)
    hosts: list[HostStatus] = field(default_factory=list)
    error: str = ""
    asked_at: float = 0.0


class PlaneWatch:
    """Asks a plane how much it holds; never fails.

    Args:
        client: A client of the plane.
        timeout_s: Seconds that each question may take.
        most: Most partitions whose depth is asked for.

    Attributes:
        state: The latest answer.
    """

    def __init__(self, client: Client, *, timeout_s: float = 5.0, most: int = 100) -> None:
        """Start with an empty state."""
        self._client = client
        self._timeout_s = timeout_s
        self._most = most
        self.state = PlaneState()

    async def ask(self) -> PlaneState:
        """Ask once; return the new state."""
        client, timeout_s = self._client, self._timeout_s
        try:
            listed = await client.list_partitions(timeout_s=timeout_s)
            partitions = [one for one in listed if one.partition_id != PARTITION]
            names = [one.partition_id for one in partitions[: self._most]]
            depths = {name: await client.depth(name, timeout_s=timeout_s) for name in names}
            hosts: list[HostStatus] = []
            if client.get_capabilities().host_listing:
                hosts = await client.list_hosts(timeout_s=timeout_s)
            self.state = PlaneState(partitions, depths, hosts, "", time.time())
        except DataPlaneError as err:
            before = self.state
            told = f"{type(err).__name__}: {err}"
            self.state = PlaneState(before.partitions, before.depths, before.hosts, told, time.time())
        return self.state

    async def run(self, every_s: float = 15.0) -> None:
        """Ask every so many seconds, until cancelled; run it in a task group."""
        while True:
            await self.ask()
            await anyio.sleep(every_s)
