"""The directory as slot hosts use it: registration, heartbeats, the clock, and which rows are live."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping

__all__ = ["HostDirectory", "HostReport", "NoDirectory"]

SlotUse = tuple[int, int]


@dataclass(frozen=True, slots=True)
class HostReport:
    """Describes a host; sent with each heartbeat.

    Attributes:
        id, epoch: Name of the host, and the epoch of its slots.
        address, ports: Address and TCP port numbers that clients connect to.
        free_bytes: Free bytes in its arena.
        load: Bytes in use in its arena; clients prefer hosts that are less loaded.
        boot_id, arena: Boot id of its machine and name of its shared-memory segment, for the lane.
        draining: Whether it only serves what it has and accepts no new rows.
        supervised: Whether a supervisor restarts it when it dies.
        slots: Number of its slots by state.
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
    slots: Mapping[str, int] = field(default_factory=dict)


class HostDirectory(Protocol):
    """The directory's operations for a host. All methods raise DataPlaneError."""

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch that no previous incarnation of this host has had."""

    async def beat(self, report: HostReport) -> float:
        """Register the host or renew its heartbeat; return unix seconds by the directory's clock."""

    async def leave(self, host_id: str, epoch: int) -> None:
        """Remove the host's registration."""

    async def live(self, host_id: str, epoch: int) -> Mapping[SlotUse, Collection[int]]:
        """Return the rows that are published and not cleared, by (slot, generation).

        Rows that are published during the call may be missing. Therefore only slots older than the longest put may be
        freed because they are absent here.
        """

    async def shared_secret(self) -> str | None:
        """Return the shared secret where the directory stores one, as that of an embedded plane does; else None."""

    async def reap(self) -> tuple[str, ...]:
        """Remove the registrations of hosts without a heartbeat for too long; return their names."""


class NoDirectory:
    """Replaces the directory where there is none: no rows are published, and the clock is this machine's."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        """Start with no reports; ``now`` is the clock, in unix seconds."""
        self._now = now
        self.reports: list[HostReport] = []

    async def next_epoch(self, host_id: str) -> int:
        """Return an epoch drawn from the clock."""
        del host_id
        return time.time_ns()

    async def beat(self, report: HostReport) -> float:
        """Keep the latest report; return the time."""
        self.reports[:] = [report]
        return self._now()

    async def leave(self, host_id: str, epoch: int) -> None:
        """Do nothing: no registration exists."""

    async def live(self, host_id: str, epoch: int) -> Mapping[SlotUse, Collection[int]]:
        """Return no rows."""
        del host_id, epoch
        return {}

    async def shared_secret(self) -> str | None:
        """Return None: no secret is stored."""
        return None

    async def reap(self) -> tuple[str, ...]:
        """Return no names: no host is removed."""
        return ()
