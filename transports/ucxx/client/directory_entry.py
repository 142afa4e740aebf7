"""The entry of a slot host in the Valkey directory: its registration and heartbeats."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Final, TypeVar

from redis.exceptions import AuthenticationError, AuthorizationError, NoPermissionError, RedisError

from asyncdp.errors import DataPlaneBadRequest, DataPlaneUnavailable

from ..directory.requests.hosts import HostInfo
from .greeting import greets

if TYPE_CHECKING:
    from ..directory.directory import Directory
    from ..host.registration import HostReport

__all__ = ["HostEntry"]

R = TypeVar("R")

#: Seconds that the directory may take to answer a host; without a limit a paused one would block heartbeats for ever.
ANSWER_S: Final = 5.0
#: Errors that are not retried: the password is wrong, or the account lacks a right that a host needs.
_REFUSALS: Final = (AuthenticationError, AuthorizationError, NoPermissionError)


class HostEntry:
    """Implements :class:`~asyncdp.transports.ucxx.host.registration.HostDirectory` on the Valkey directory.

    Args:
        directory: Client of the directory; whoever created it closes it.
    """

    def __init__(self, directory: Directory) -> None:
        """Keep the client."""
        self._directory = directory

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no previous incarnation of this host has had.

        Raises:
            DataPlaneUnavailable: A host of this name is running: it answers at its registered address.
        """
        for info in await _typed(self._directory.hosts()):
            if info.id == host_id and info.alive and await greets(info.address, info.ports[:1]):
                msg = f"a host named {host_id!r} runs already, at {info.address}: give this one another name"
                raise DataPlaneUnavailable(msg, retryable=False, blames_port=False)
        return await _typed(self._directory.next_epoch(host_id))

    async def beat(self, report: HostReport) -> float:
        """Register the host or renew its heartbeat; return unix seconds by the directory's clock."""
        told = asdict(report)
        extra = {name: told.pop(name) for name in ("supervised", "slots")}
        return await _typed(self._directory.beat(HostInfo(**told, extra={k: v for k, v in extra.items() if v})))

    async def leave(self, host_id: str, epoch: int) -> None:
        """Remove the host's registration."""
        await _typed(self._directory.leave(host_id, epoch))

    async def live(self, host_id: str, epoch: int) -> Mapping[tuple[int, int], Collection[int]]:
        """Return the rows that are published and not cleared, by (slot, generation)."""
        names = await _typed(self._directory.partition_names())
        return await _typed(self._directory.cells_of(host_id, epoch, names), timeout_s=None)

    async def shared_secret(self) -> str | None:
        """Return the shared secret where the directory stores one, else None."""
        return await _typed(self._directory.shared_secret())

    async def reap(self) -> tuple[str, ...]:
        """Remove the registrations of hosts without a heartbeat for too long; return their names."""
        return await _typed(self._directory.reap())


async def _typed(answer: Awaitable[R], timeout_s: float | None = ANSWER_S) -> R:
    """Await a request to the directory; turn errors of the connection into DataPlaneErrors."""
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
