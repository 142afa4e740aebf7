"""An honest client of a slot host under attack: what each of its verbs took, and whether it got what it had put."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, Final

import msgspec

from asyncdp.calls.slots import SlotRef
from asyncdp.errors import DataPlaneError
from tests.ucxx.clients import LOCAL, get, value
from tests.ucxx.hosts import pool_of
from tests.ucxx.segments import rows

if TYPE_CHECKING:
    from asyncdp.calls.slots import HostRef
    from asyncdp.transports.ucxx.client.connection_pool import Pool

__all__ = ["Honest", "Took"]

#: A verb that does not succeed by then has failed; until then it is tried again, as the layers do.
PATIENCE_S: Final = 10.0
#: Connects anew at each of so many turns.
ANEW: Final = 2
PAUSE_S: Final = 0.002


class Took(msgspec.Struct):
    """What a client felt during some time.

    Attributes:
        ms: Milliseconds of each call, tries again among them, by verb.
        again: How often a call had to be tried again.
        failed: Calls that did not succeed, or gave other rows than were put.
    """

    ms: dict[str, list[float]] = msgspec.field(default_factory=dict)
    again: int = 0
    failed: list[str] = msgspec.field(default_factory=list)

    def percentile(self, verb: str, percent: int) -> float:
        """Milliseconds that so many percent of the calls took at the most."""
        ms = self.ms.get(verb, [])
        return statistics.quantiles(ms, n=100, method="inclusive")[percent - 1] if len(ms) > 1 else float(sum(ms))


class Honest:
    """Reads 4 KiB in the frame and 64 KiB over UCX, puts, reads back and drops 64 KiB, and connects anew now and then.

    Args:
        pool: Its connections.
        host: Where it reads and puts.
    """

    def __init__(self, pool: Pool, host: HostRef) -> None:
        """Put nothing yet."""
        self.took = Took()
        self._pool = pool
        self._host = host
        self._number = 0
        self._kept: list[Any] = []

    async def begin(self) -> tuple[int, int]:
        """Put what is read later; returns slot and generation of a row of 1 MiB."""
        self._kept = [await self._put(rows(1, 1 << 10)), await self._put(rows(1, 1 << 14))]
        (large,) = await self._put(rows(1, 1 << 18))
        return large.slot, large.generation

    async def run(self, seconds: float) -> Took:
        """Work for so long; returns what it took."""
        self.took, until, turn = Took(), time.monotonic() + seconds, 0
        while time.monotonic() < until:
            await self._timed("read", self._read)
            await self._timed("put", self._put_and_drop)
            if not turn % ANEW:
                await self._timed("connect", self._connect)
            turn += 1
            await asyncio.sleep(PAUSE_S)
        return self.took

    async def _timed(self, verb: str, work: Callable[[], Awaitable[object]]) -> None:
        began, took = time.perf_counter(), self.took
        try:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        await work()
                        break
                    except DataPlaneError as err:
                        took.again += 1
                        await asyncio.sleep(getattr(err, "retry_after_s", None) or 0.005)
        except Exception as err:  # noqa: BLE001 - counted, whatever it is
            took.failed.append(f"{verb}: {type(err).__name__}: {err}"[:120])
        took.ms.setdefault(verb, []).append((time.perf_counter() - began) * 1e3)

    async def _read(self) -> None:
        for refs in self._kept:
            assert (value(await get(self._pool, self._host, refs)) == 1.0).all(), "other rows than were put"

    async def _put(self, block: Any) -> tuple[SlotRef, ...]:
        host, fields = self._host, tuple(block.columns)
        self._number += 1
        op_id, sizes = f"honest-{self._number}", block.row_nbytes().tolist()
        async with self._pool.use(LOCAL, host.ports[0]) as connection:
            granted = await connection.reserve(host, op_id, fields, sizes, 0, ttl_s=60.0, wait_s=0.0, lane=False)
            refs = tuple(
                SlotRef(host, slot, generation, fields, range(count), range(first, first + count))
                for slot, generation, count, first in granted.grants
            )
            await connection.write(host, op_id, refs, block)
        return refs

    async def _put_and_drop(self) -> None:
        fill = float(self._number)
        refs = await self._put(rows(1, 1 << 14, fill=fill))
        try:
            assert (value(await get(self._pool, self._host, refs)) == fill).all(), "other rows than were put"
        finally:
            async with self._pool.use(LOCAL, self._host.ports[0]) as connection:
                await connection.drop(self._host, [(ref.slot, ref.generation, [0], ()) for ref in refs])

    async def _connect(self) -> None:
        with pool_of() as pool:
            async with pool.use(LOCAL, self._host.ports[0]) as connection:
                await connection.ask()
