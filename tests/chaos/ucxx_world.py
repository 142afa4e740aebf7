"""The plane under fault, the client that watches it, and the clock of the fault that is under way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from asyncdp import stack
from asyncdp.errors import DataPlaneError
from asyncdp.process.buffer_pool import BufferPool
from asyncdp.rows.block import PICKLE
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client.connection_pool import Pool
from asyncdp.transports.ucxx.wire.handshake import Secret
from tests.chaos.ucxx_plane import SECRET
from tests.chaos.ucxx_rows import fields_of
from tests.chaos.ucxx_tally import Tally
from tests.chaos.ucxx_verbs import TIMEOUT_S, Verbs

if TYPE_CHECKING:
    from asyncdp.client import Client
    from tests.chaos.ucxx_plane import ChaosPlane

__all__ = ["World"]

LOCAL = "127.0.0.1"
#: What a request that is not retried waits for an answer.
ASK_S = 0.5
SETTLE_S = 30.0


class World:
    """See the module.

    Args:
        plane: The processes.
        client: With all layers.
        once: A client that tries once.
        pool: Connections of our own to single ports.
    """

    def __init__(self, plane: ChaosPlane, client: Client, once: Client, pool: Pool) -> None:
        self.plane = plane
        self.client = client
        self.once = once
        self.pool = pool
        self.tally = Tally("")
        self.verbs = Verbs(client, self.tally)
        self.struck = asyncio.Event()
        self.struck_at = 0.0
        self.lossy_since: float | None = None
        self.lost: dict[str, set[str]] = {}
        self.released: set[str] = set()

    @classmethod
    @asynccontextmanager
    async def of(cls, plane: ChaosPlane) -> AsyncIterator[World]:
        """Attach to a plane that runs, and fill it."""
        config = {**plane.config, "owner": "controller"}
        config["ucxx"] = {**config["ucxx"], "secret": SECRET}
        once = stack(UCXXTransport({**config, "owner": "once"}), max_attempts=1, max_rounds=1)
        pool = Pool(None, Secret(SECRET), PICKLE, BufferPool())
        async with stack(UCXXTransport(config), attempt_timeout_s=1.0) as client:
            world = cls(plane, client, once, pool)
            await world.verbs.prepare()
            await once.ping()
            try:
                yield world
            finally:
                pool.close()
                await once.close()

    def begin(self, fault: str) -> Tally:
        """Count anew."""
        self.tally = self.verbs.tally = Tally(fault)
        self.struck.clear()
        return self.tally

    def hit(self, *, lossy: bool = False) -> None:
        """Say that the fault begins now; ``lossy``: rows are lost by it."""
        self.struck_at = time.monotonic()
        if lossy:
            self.verbs.may_lose = True
            self.lossy_since = self.lossy_since or time.time()
        self.struck.set()

    async def ask_directory(self) -> Any:
        """Ask the directory, once."""
        await self.once.depth("p", timeout_s=ASK_S)

    async def ask_port(self, host: int, port: int) -> Any:
        """Ask a port, once."""
        number = self.plane.hosts[host].told["ports"][port]
        async with asyncio.timeout(ASK_S), self.pool.use(LOCAL, number) as connection:
            return await connection.ask()

    async def notice(self, ask: Any, over: asyncio.Event) -> None:
        """Note how long after the fault a request first failed."""
        await self.struck.wait()
        while not over.is_set():
            try:
                await ask()
            except (DataPlaneError, TimeoutError):
                self.tally.notice_s = time.monotonic() - self.struck_at
                return
            await asyncio.sleep(0.005)

    async def until_well(self) -> None:
        """Wait until all is well again."""
        async with asyncio.timeout(SETTLE_S):
            while True:
                try:
                    await self.client.put_samples(["settled"], "p", fields_of(["settled"], 1), timeout_s=TIMEOUT_S)
                    await self.client.get_samples(["settled"], "p", ["x"], timeout_s=TIMEOUT_S)
                except DataPlaneError:
                    await asyncio.sleep(0.1)
                else:
                    return

    async def evict_lost(self) -> int:
        """Wait until lost rows are named as lost, evict them, and go on until there are none; returns how many."""
        count, quiet = 0, 0
        async with asyncio.timeout(SETTLE_S):
            while quiet < 3 or not count:
                found = 0
                for name in ("p", "c", "rollouts"):
                    groups = await self._asked(lambda name=name: self.client.list_metadata(name, timeout_s=TIMEOUT_S))
                    lost = {key for group in groups for key in group.lost_keys}
                    if lost:
                        self.lost.setdefault(name, set()).update(lost)
                        self.plane.journal.note("lost", partition=name, ids=sorted(lost))
                        found += len(lost)
                        if name == "p":
                            await self.verbs.restock(sorted(lost))
                        else:
                            await self.client.evict(sorted(lost), name, timeout_s=TIMEOUT_S)
                count += found
                quiet = 0 if found else quiet + 1
                await asyncio.sleep(0.2)
        return count

    async def _asked(self, ask: Any) -> Any:
        while True:
            try:
                return await ask()
            except DataPlaneError:
                await asyncio.sleep(0.1)
