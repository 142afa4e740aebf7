"""A slot host seen from outside: its memory, descriptors, log, and whether its directory hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.directory import Directory

__all__ = ["HostWatch", "Seen"]

PAUSE_S: Final = 0.1
#: A directory that does not answer for so long has missed what the host had to say.
ANSWER_S: Final = 2.0


class Seen(msgspec.Struct):
    """What was seen of a host during some time.

    Attributes:
        memory_mib, descriptors: The most that there was.
        silent_s: Longest time without a heartbeat.
        unregistered: How often the directory did not know the host, or counted it as dead.
    """

    memory_mib: int = 0
    descriptors: int = 0
    silent_s: float = 0.0
    unregistered: int = 0


class HostWatch:
    """Looks at a host ten times a second.

    Args:
        pid: Of its process.
        name: Of the host.
        directory: Where it is registered.
    """

    def __init__(self, pid: int, name: str, directory: Directory) -> None:
        """Have seen nothing yet."""
        self.seen = Seen()
        self._pid = pid
        self._name = name
        self._directory = directory

    def memory_mib(self) -> int:
        """Memory that the process has to itself: resident, without shared pages."""
        with contextlib.suppress(OSError, ValueError):
            _, resident, shared, *_ = map(int, Path(f"/proc/{self._pid}/statm").read_text().split())
            return (resident - shared) * os.sysconf("SC_PAGE_SIZE") >> 20
        return 0

    def descriptors(self) -> int:
        """Descriptors that are open."""
        with contextlib.suppress(OSError):
            return len(os.listdir(f"/proc/{self._pid}/fd"))  # noqa: PTH208 - names are enough
        return 0

    def begin(self) -> None:
        """Forget what was seen."""
        self.seen = Seen(self.memory_mib(), self.descriptors())

    async def run(self) -> None:
        """Look until cancelled; the directory every fifth time."""
        turn = 0
        while True:
            seen = self.seen
            seen.memory_mib = max(seen.memory_mib, self.memory_mib())
            seen.descriptors = max(seen.descriptors, self.descriptors())
            if not turn % 5:
                await self._ask()
            turn += 1
            await asyncio.sleep(PAUSE_S)

    async def _ask(self) -> None:
        found: Any = None
        began = time.monotonic()
        with contextlib.suppress(Exception):
            async with asyncio.timeout(ANSWER_S):
                found = next((host for host in await self._directory.hosts() if host.id == self._name), None)
        if found is None or not found.alive:
            self.seen.unregistered += 1
        age = time.monotonic() - began if found is None else found.age_s
        self.seen.silent_s = max(self.seen.silent_s, age)
