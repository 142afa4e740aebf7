"""Directory: the client of the metadata service."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from .acl import excess_rights
from .claiming import Claiming
from .clearing import Clearing
from .link import Link
from .locating import Locating
from .publishing import Publishing
from .settings import DirectorySettings

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Directory"]


class Directory(Publishing, Locating, Clearing, Claiming):
    """Who produced what, where it lies, who claimed it: kept by a Valkey or Redis server, 7.0 or newer.

    Every call is one atomic function on the server. Every mutation carries an :class:`~.op.Op`: sent twice under one
    id it happens once and gets the first answer; after its deadline, or once given up, it is refused. Runs on asyncio.

    What the connection raises (redis-py's ConnectionError, TimeoutError, ...) is left as it is, for the layer that
    translates by ``ERROR_TABLE``; what could not be sent at all is ConnectionRefusedError.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` for TLS, ``unix://[user:password@]/path``.
        capacity: Samples that the plane holds at most, over all partitions.
        group_pattern: Regular expression with a group named ``group``: reads a sample's group off its id.
        strict_schema: Whether fields must be declared before they are written.
        auto_register: Whether a put declares an unknown partition.
        settings: See :class:`~.settings.DirectorySettings`.
        now: Monotonic seconds; for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        capacity: int = 1 << 40,
        group_pattern: str = r"(?P<group>.+)_g\d+",
        strict_schema: bool = False,
        auto_register: bool = False,
        settings: DirectorySettings | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Connect to nothing yet."""
        chosen = DirectorySettings() if settings is None else settings
        super().__init__(
            Link(url, chosen, now=now),
            chosen,
            capacity=capacity,
            group_pattern=group_pattern,
            strict_schema=strict_schema,
            auto_register=auto_register,
        )

    async def ping(self) -> None:
        """Go to the server and back, through the library."""
        await self.hosts()

    @property
    def expected(self) -> bool:
        """Whether a directory that does not answer is known to come back: supervised, or heard of a while ago."""
        return self._link.expected

    async def tell_supervised(self, *, supervised: bool) -> None:
        """Let clients know whether somebody starts this directory's server again when it dies."""
        await self._link.tell_supervised(supervised=supervised)

    async def epoch(self) -> str:
        """Return which plane this is; a server that was restarted without its data is another one."""
        return await self._link.forget()

    async def server_time(self) -> float:
        """Return unix seconds by the server's clock, as measured at most ``sync_clock_s`` ago."""
        await self._open()
        return self._link.server_us(0.0) / 1e6

    async def share_secret(self, text: str) -> str:
        """Let whoever may use this directory know the slot hosts' secret; returns the one that was shared first."""
        key = f"{self._settings.namespace}:secret"
        await self._link.command("SET", key, text, "NX")
        return await self.shared_secret() or text

    async def shared_secret(self) -> str | None:
        """Return the slot hosts' secret, where it is shared: an embedded plane does, for it has no other way."""
        blob: bytes | None = await self._link.command("GET", f"{self._settings.namespace}:secret")
        return None if blob is None else blob.decode()

    @property
    def embedded(self) -> bool:
        """Whether the server is reached by a unix socket: it is this machine's, and as a rule one plane's."""
        return self._link.is_local

    async def excess_rights(self) -> list[str]:
        """Return the commands that this client's user may send although no plane needs them."""
        return await excess_rights(self._link)

    async def close(self) -> None:
        """Close all connections and wake who waits; twice is fine."""
        self._closed = True
        await self._notices.close()
        await self._link.close()
