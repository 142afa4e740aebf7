"""The client of the directory, the metadata service of a plane."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from asyncdp.calls import ClearSamples, DropPartition
from asyncdp.calls.slots import Publish
from asyncdp.errors import DataPlaneBadRequest

from .encoding.cells import dead_cells, replaced_cells
from .encoding.msgpack_codec import load
from .requests.claiming import Claiming
from .requests.clearing import Clearing
from .requests.locating import Locating
from .requests.publishing import Publishing
from .requests.snapshots import Snapshots
from .server.acl import excess_rights
from .server.link import DirectoryLink, lines_of
from .settings import DirectorySettings

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from asyncdp.calls import Call

    from .encoding.cells import DeadCells

__all__ = ["Directory"]


class Directory(Publishing, Locating, Clearing, Claiming, Snapshots):
    """Client of a plane's metadata: samples, their places and claims, on a Valkey or Redis server, 7.0 or newer.

    Every call is one atomic function on the server. Every mutation carries an
    :class:`~.encoding.operation_ids.OperationId`: sent twice under one id it is executed once, and both replies are
    those of the first; after its deadline, or once it was resolved as not executed, it is refused. The client runs on
    asyncio.

    Errors of the connection (redis-py's ConnectionError, TimeoutError, ...) are raised unchanged, for the layer that
    translates them by ``ERROR_TABLE``. A request that could not be sent at all is ConnectionRefusedError.

    Args:
        url: ``redis://[user:password@]host:port/db``, ``rediss://`` for TLS, ``unix://[user:password@]/path``.
        capacity: Most samples of the plane, over all partitions.
        group_pattern: Regular expression with a group named ``group``, which extracts a sample's group from its id.
        strict_schema: Whether fields must be declared before they are written.
        auto_register: Whether a put declares an unknown partition.
        settings: Configuration of the client; None: the defaults.
        setting: Name of the setting that holds the URL, for errors.
        now: Monotonic clock in seconds; replaced in tests.
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
        setting: str = "controller_address",
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """Keep the settings; the first call connects."""
        chosen = DirectorySettings() if settings is None else settings
        super().__init__(
            DirectoryLink(url, chosen, setting=setting, now=now),
            chosen,
            capacity=capacity,
            group_pattern=group_pattern,
            strict_schema=strict_schema,
            auto_register=auto_register,
        )

    async def dead_of(self, mutation: Call[Any], answer: bytes) -> tuple[DeadCells, ...]:
        """Return the cells that died in a mutation that is done; ``answer`` is what :meth:`resolve` found."""
        if not isinstance(mutation, ClearSamples | DropPartition | Publish):
            return ()
        found = load(answer)
        if isinstance(mutation, ClearSamples):
            return dead_cells(found[1])
        if isinstance(mutation, DropPartition):
            return dead_cells(found)
        if not found[4]:
            return ()
        try:
            schema = await self._fetch(mutation.partition_id)
        except DataPlaneBadRequest:  # the partition was dropped since, and with it the whole rows
            return replaced_cells(found[4], ())
        return replaced_cells(found[4], tuple(schema.fields))

    async def ping(self) -> None:
        """Check that the server answers, by a call of a function."""
        await self.hosts()

    @property
    def expected(self) -> bool:
        """Whether a directory that does not answer is expected back: it is supervised, or answered not long ago."""
        return self._link.expected

    async def tell_supervised(self, *, supervised: bool) -> None:
        """Record for clients whether a supervisor restarts this directory's server when it dies."""
        await self._link.tell_supervised(supervised=supervised)

    async def epoch(self) -> str:
        """Return the id of this plane; a server that was restarted without its data has another one."""
        return await self._link.forget()

    async def server_time(self) -> float:
        """Return unix seconds by the server's clock, as measured at most ``sync_clock_s`` ago."""
        await self._open()
        return self._link.server_us(0.0) / 1e6

    async def state(self) -> tuple[tuple[int, int, str] | None, bool | None]:
        """Return the server's used bytes, its limit (0: none) and its maxmemory-policy, and whether it keeps its data.

        None in the place of what this client's user may not ask for.
        """
        found: list[dict[str, str] | None] = []
        for reply in await self._link.pipeline(
            [("INFO", "memory"), ("INFO", "persistence"), ("CONFIG", "GET", "save")]
        ):
            if isinstance(reply, Exception):
                found.append(None)
            elif isinstance(reply, bytes):
                found.append(lines_of(reply))
            else:
                found.append({"save": bytes(reply[1]).decode() if len(reply) > 1 else ""})
        told, kept, save = found
        memory = None
        if told is not None:
            limit = int(told.get("maxmemory", "0"))
            memory = int(told.get("used_memory", "0")), limit, told.get("maxmemory_policy", "")
        if kept is None:
            return memory, None
        if kept.get("aof_enabled") == "1":
            return memory, True
        return memory, None if save is None else bool(save["save"])

    async def share_secret(self, text: str) -> str:
        """Store the slot hosts' secret for all users of this directory; return the one that was stored first."""
        key = f"{self._settings.namespace}:secret"
        await self._link.command("SET", key, text, "NX")
        return await self.shared_secret() or text

    async def shared_secret(self) -> str | None:
        """Return the slot hosts' secret that is stored in the directory, as by an embedded plane, or None."""
        blob: bytes | None = await self._link.command("GET", f"{self._settings.namespace}:secret")
        return None if blob is None else blob.decode()

    @property
    def embedded(self) -> bool:
        """Whether the connection uses a unix socket; the server then runs on this machine, usually for one plane."""
        return self._link.is_local

    async def excess_rights(self) -> list[str]:
        """Return the commands that this client's user may send although a plane does not need them."""
        return await excess_rights(self._link)

    async def close(self) -> None:
        """Close all connections and wake waiting calls. Idempotent."""
        self._closed = True
        await self._notices.close()
        await self._link.close()
