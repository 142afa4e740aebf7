"""What a slot host needs of the directory: to be known there, the time, and what is live."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["HostDirectory", "HostReport", "NoDirectory"]

Place = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HostReport:
    """What a host says with each heartbeat.

    Attributes:
        id, epoch: Which host, in which life of its slots.
        address, ports: Where it listens.
        free_bytes: Space in its arena.
        load: Bytes in use; the least loaded host gets the next put.
        boot_id, arena: Its machine and segment, for the shared-memory lane.
        draining: It serves what it has and takes no more.
        supervised: Somebody starts it again when it dies.
    """

    id: str
    epoch: int
    address: str
    ports: tuple[int, ...]
    free_bytes: int
    load: float
    boot_id: str
    arena: str
    draining: bool = False
    supervised: bool = False


class HostDirectory(Protocol):
    """The directory as a host sees it. All raise DataPlaneError."""

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no former life of this host has had."""

    async def beat(self, report: HostReport) -> float:
        """Say that the host lives; returns unix seconds by the directory's clock."""

    async def leave(self, host_id: str, epoch: int) -> None:
        """Strike the host off."""

    async def live(self, host_id: str, epoch: int) -> Mapping[Place, Collection[int]]:
        """Return which rows of which (slot, generation) are somebody's content.

        What is published while this runs may be missing: only of slots that are older than any put may take does it
        tell what is nobody's.
        """

    async def shared_secret(self) -> str | None:
        """Return what clients have to know, where the directory tells it: that of an embedded plane."""

    async def reap(self) -> tuple[str, ...]:
        """Strike off the hosts that have been silent for too long; return their names."""


class NoDirectory:
    """Stands in where there is none: nothing is known to be published, time is this machine's."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """Keep the clock."""
        self._now = now
        self.reports: list[HostReport] = []

    async def next_epoch(self, host_id: str) -> int:
        """Return one drawn from the clock."""
        del host_id
        return time.time_ns()

    async def beat(self, report: HostReport) -> float:
        """Remember the latest report."""
        self.reports[:] = [report]
        return self._now()

    async def leave(self, host_id: str, epoch: int) -> None:
        """Do nothing."""

    async def live(self, host_id: str, epoch: int) -> Mapping[Place, Collection[int]]:
        """None."""
        del host_id, epoch
        return {}

    async def shared_secret(self) -> str | None:
        """Tell none."""
        return None

    async def reap(self) -> tuple[str, ...]:
        """Strike off nobody."""
        return ()
