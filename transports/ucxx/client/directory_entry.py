"""A slot host as the directory in Valkey knows it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from asyncdp.errors import DataPlaneBadRequest, DataPlaneUnavailable

from ..directory.hosts import HostInfo
from .greeting import greets

if TYPE_CHECKING:
    from ..directory.directory import Directory
    from ..host.registration import HostReport

__all__ = ["HostEntry"]

R = TypeVar("R")

#: How long the directory may take to answer a host. A paused one would hold up heartbeats for ever.
ANSWER_S: Final = 5.0
#: What no second try cures: a password that is wrong, an account that may not do what a host has to.
_REFUSALS: Final = (AuthenticationError, AuthorizationError, NoPermissionError)


class HostEntry:
    """The directory as a host sees it; a :class:`~.host_directory.HostDirectory`.

    Args:
        directory: A client of it.
    """

    def __init__(self, directory: Directory) -> None:
        """Hold the client; whoever made it closes it."""
        self._directory = directory

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no former life of this host has had.

        Raises:
            DataPlaneUnavailable: A host of this name lives: it greets whoever connects to where it says it is.
        """
        for info in await _typed(self._directory.hosts()):
            if info.id == host_id and info.alive and await greets(info.address, info.ports[:1]):
                msg = f"a host named {host_id!r} lives already, at {info.address}: give this one another name"
                raise DataPlaneUnavailable(msg, retryable=False, blames_port=False)
        return await _typed(self._directory.next_epoch(host_id))

    async def beat(self, report: HostReport) -> float:
        """Say that the host lives; returns unix seconds by the directory's clock."""
        told = asdict(report)
        supervised = told.pop("supervised")
        return await _typed(self._directory.beat(HostInfo(**told, extra={"supervised": True} if supervised else {})))

    async def leave(self, host_id: str, epoch: int) -> None:
        """Strike the host off."""
        await _typed(self._directory.leave(host_id, epoch))

    async def live(self, host_id: str, epoch: int) -> Mapping[tuple[int, int], Collection[int]]:
        """Return which rows of which (slot, generation) are somebody's content."""
        partitions = await _typed(self._directory.list_partitions())
        names = [partition.partition_id for partition in partitions]
        return await _typed(self._directory.cells_of(host_id, epoch, names), timeout_s=None)

    async def shared_secret(self) -> str | None:
        """Return what clients have to know, where the directory tells it."""
        return await _typed(self._directory.shared_secret())

    async def reap(self) -> tuple[str, ...]:
        """Strike off the hosts that have been silent for too long; return their names."""
        return await _typed(self._directory.reap())


async def _typed(answer: Awaitable[R], timeout_s: float | None = ANSWER_S) -> R:
    """Give what the connection raises its place among the plane's errors."""
    try:
        async with asyncio.timeout(timeout_s):
            return await answer
    except _REFUSALS as err:
        msg = f"the directory refuses this host: {err}"
        raise DataPlaneBadRequest(msg, cause=err) from err
    except TimeoutError as err:
        raise DataPlaneUnavailable("the directory does not answer", blames_port=False, cause=err) from err
    except (RedisError, OSError) as err:
        raise DataPlaneUnavailable(f"the directory does not answer: {err}", blames_port=False, cause=err) from err
