"""Telling slot hosts which rows are nobody's content any more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from asyncdp.errors import DataPlaneError, DataPlaneUnavailable, StaleSlotError
from asyncdp.reads import fan_out
from asyncdp.slots import HostRef

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdp.calls import CallContext
    from asyncdp.transports.ucxx.directory import DeadCells
    from asyncdp.transports.ucxx.reach import Reach

__all__ = ["Obituary"]

#: How long one port may take to hear of it before another is tried, in seconds. A living host needs milliseconds.
PORT_S: Final = 1.0
#: Deaths that are remembered at the most for hosts that could not be told; the rest is left to their reconciliation.
MOST_UNTOLD: Final = 10_000


class Obituary:
    """Brings the news of dead rows to the hosts that hold them.

    A clear, or a put that replaces, returns only after the hosts changed their rows' live words: from then on no
    reader, however old its reference, gets the old bytes. A host that is dead cannot serve them and learns by its own
    reconciliation. What a cancel or a fault kept from a host is told with the next news.

    Args:
        reach: The way to hosts.
    """

    def __init__(self, reach: Reach) -> None:
        """Nobody died yet."""
        self._reach = reach
        self._untold: dict[HostRef, list[DeadCells]] = {}

    def note(self, cells: Iterable[DeadCells]) -> None:
        """Write down who died, to be told."""
        for cell in cells:
            host = HostRef(cell.slot.host, cell.slot.epoch, ())
            self._untold.setdefault(host, []).append(cell)
        if sum(map(len, self._untold.values())) > MOST_UNTOLD:
            del self._untold[next(iter(self._untold))]

    async def tell(self, cells: Sequence[DeadCells], ctx: CallContext) -> None:
        """Return when each host that lives did it.

        Raises:
            DataPlaneUnavailable: A host that seems to live did not answer; the mutation itself has happened.
        """
        old = set(self._untold)
        self.note(cells)
        if not self._untold:
            return
        hosts = list(self._untold)
        if len(hosts) == 1:
            answers: list[object] = [await self._value(hosts[0], ctx)]
        else:
            answers = await fan_out(self._value, hosts, ctx)
        for host, answer in zip(hosts, answers, strict=True):
            mine = host not in old or any((c.slot.host, c.slot.epoch) == (host.id, host.epoch) for c in cells)
            if isinstance(answer, Exception) and mine:
                raise answer

    async def _value(self, host: HostRef, ctx: CallContext) -> DataPlaneError | None:
        del ctx
        try:
            await self._tell_one(host)
        except DataPlaneError as err:
            err.ambiguous = True
            return err
        return None

    async def _tell_one(self, host: HostRef) -> None:
        told = list(self._untold[host])
        try:
            place = await self._reach.find(host)
        except StaleSlotError:
            place = None
        if place is None:  # struck off, or another life: nobody can read those slots
            self._untold.pop(host, None)
            return
        news = [(cell.slot.slot, cell.slot.generation, cell.index, cell.fields or ()) for cell in told]
        problem: DataPlaneError | None = None
        refused = True
        for port in place.info.ports:
            try:
                async with asyncio.timeout(PORT_S):
                    await self._reach.access.drop(host, place.door, news, port)
            except StaleSlotError:
                break
            except TimeoutError as err:
                problem = DataPlaneUnavailable("the slot host does not answer", host=host.id, port=port, cause=err)
                refused = False
            except DataPlaneUnavailable as err:
                problem = err
                refused = refused and isinstance(err.__cause__, ConnectionRefusedError)
            else:
                break
        else:
            self._reach.forget(host)
            if problem is not None and not refused and await self._lives(host):
                raise problem
        left = self._untold.get(host, [])[len(told) :]
        if left:
            self._untold[host] = left
        else:
            self._untold.pop(host, None)

    async def _lives(self, host: HostRef) -> bool:
        try:
            place = await self._reach.find(host)
        except StaleSlotError:
            return False
        return place is not None and place.info.alive
