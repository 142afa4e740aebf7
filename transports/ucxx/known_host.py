"""A slot host as the directory in Valkey knows it."""

from __future__ import annotations

from collections.abc import Awaitable, Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, TypeVar

from redis.exceptions import RedisError

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.transports.ucxx.directory.hosts import HostInfo

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory.directory import Directory
    from asyncdp.transports.ucxx.host_directory import HostReport

__all__ = ["KnownHost"]

R = TypeVar("R")


class KnownHost:
    """The directory as a host sees it; a :class:`~.host_directory.HostDirectory`.

    Args:
        directory: A client of it.
    """

    def __init__(self, directory: Directory) -> None:
        """Hold the client; whoever made it closes it."""
        self._directory = directory

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no former life of this host has had."""
        return await _typed(self._directory.next_epoch(host_id))

    async def beat(self, report: HostReport) -> float:
        """Say that the host lives; returns unix seconds by the directory's clock."""
        return await _typed(self._directory.beat(HostInfo(**asdict(report))))

    async def leave(self, host_id: str, epoch: int) -> None:
        """Strike the host off."""
        await _typed(self._directory.leave(host_id, epoch))

    async def live(self, host_id: str, epoch: int) -> Mapping[tuple[int, int], Collection[int]]:
        """Return which rows of which (slot, generation) are somebody's content."""
        partitions = await _typed(self._directory.list_partitions())
        names = [partition.partition_id for partition in partitions]
        return await _typed(self._directory.cells_of(host_id, epoch, names))


async def _typed(answer: Awaitable[R]) -> R:
    """Give what the connection raises its place among the plane's errors."""
    try:
        return await answer
    except (RedisError, OSError) as err:
        raise DataPlaneUnavailable(f"the directory does not answer: {err}", cause=err) from err
