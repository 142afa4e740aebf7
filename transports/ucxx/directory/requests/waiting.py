"""Waits for changes of a partition on the server."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from asyncdp.errors import DataPlaneClosed

from ..server.notices import Notices
from .base import NO_OP, OK
from .partitions import Partitions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from ..server.link import DirectoryLink
    from ..settings import DirectorySettings

__all__ = ["Waiting"]

T = TypeVar("T")


class Waiting(Partitions):
    """Sends requests that wait: they are repeated when the server notifies of a change of the partition."""

    def __init__(self, link: DirectoryLink, settings: DirectorySettings) -> None:
        """Start without subscriptions."""
        super().__init__(link, settings)
        self._notices = Notices(link)

    async def _until(
        self,
        partition_id: str,
        wait_s: float,
        look: Callable[[float], Awaitable[tuple[T, float | None]]],
        enough: Callable[[T], bool],
    ) -> T:
        """Repeat a request until its result suffices or ``wait_s`` is over; return the last result.

        Args:
            partition_id: Partition whose changes end a pause early.
            wait_s: Seconds to wait.
            look: Sends the request, given the seconds that have passed; returns the result, and in how many seconds
                the state will change without a notice, or None where that is unknown.
            enough: Returns whether a result suffices.
        """
        if wait_s <= 0:
            return (await look(0.0))[0]
        began = self._link.now()
        await self._open()
        with self._notices.ear(self._key(partition_id) + "n") as ear:
            await ear.listen()  # before the request, so that no change in between is missed
            while True:
                ear.clear()
                seen, soon = await look(self._link.now() - began)
                left = wait_s - (self._link.now() - began)
                if left <= 0 or enough(seen):
                    return seen
                pause = min(left, self._settings.wake_s)
                await ear.wait(pause if soon is None else min(pause, max(0.0, soon) + 1e-3))
                if self._closed:
                    raise DataPlaneClosed("the client was closed while this call waited")

    async def exists(self, partition_id: str, wait_s: float = 0.0) -> bool:
        """Return whether the partition is registered, waiting up to ``wait_s`` seconds for it."""

        async def look(passed_s: float) -> tuple[bool, None]:
            del passed_s
            await self._open()
            reply = await self._send("describe", partition_id, b"", b"", NO_OP)
            return reply[0] == OK, None

        return await self._until(partition_id, wait_s, look, bool)
