"""Invalidation: tell slot hosts which rows were cleared or replaced."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from asyncdp.calls.slots import HostRef
from asyncdp.compose.reads import fan_out
from asyncdp.errors import DataPlaneUnavailable, StaleSlotError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.calls import CallContext

    from ..directory import DeadCells
    from .host_resolver import HostResolver, Place

__all__ = ["Invalidator"]

#: Seconds that one port may take before another is tried; a running host needs milliseconds.
PORT_S: Final = 1.0
#: Most undelivered invalidations kept per host; older ones are left to the host's own reconciliation.
MOST_UNTOLD: Final = 10_000


class Invalidator:
    """Delivers invalidations of dead rows to the hosts that hold them.

    A clear, or a put that replaces rows, returns only after the hosts have marked the old rows as dead. From then on no
    reader, however old its reference, gets the old bytes. A host that is down cannot serve them, and frees them in its
    own reconciliation. Invalidations that a cancellation or a fault kept from a host are sent with the next ones.

    Args:
        resolver: Resolves and connects to the hosts.
    """

    def __init__(self, resolver: HostResolver) -> None:
        """Start with no undelivered invalidations."""
        self._resolver = resolver
        self._untold: dict[HostRef, list[DeadCells]] = {}

    async def tell(self, cells: Sequence[DeadCells], ctx: CallContext) -> None:
        """Send the invalidations and return once every running host has applied them.

        Raises:
            DataPlaneUnavailable: A host that seems to be running did not answer; the mutation itself has happened.
        """
        if not cells and not self._untold:
            return
        news, self._untold = self._untold, {}
        late = set(news)
        for cell in cells:
            host = HostRef(cell.slot.host, cell.slot.epoch, ())
            news.setdefault(host, []).append(cell)
            late.discard(host)

        async def one(host: HostRef, ctx: CallContext) -> None:
            del ctx
            await self._tell_one(host, news[host])
            del news[host]

        try:
            hosts = list(news)
            if len(hosts) == 1 and not late:
                await one(hosts[0], ctx)
                return
            for host, problem in zip(hosts, await fan_out(one, hosts, ctx), strict=True):
                if problem is not None and host not in late:
                    raise problem
        finally:
            self._keep(news)

    def _keep(self, news: dict[HostRef, list[DeadCells]]) -> None:
        """Keep the undelivered invalidations for the next call."""
        for host, cells in news.items():
            kept = self._untold.setdefault(host, [])
            kept += cells
            del kept[:-MOST_UNTOLD]

    async def _tell_one(self, host: HostRef, cells: Sequence[DeadCells]) -> None:
        try:
            place = await self._resolver.find(host)
        except StaleSlotError:
            return
        if place is None:  # not registered any more: no process serves those slots
            return
        await self._tell_at(host, place, cells)

    async def _tell_at(self, host: HostRef, place: Place, cells: Sequence[DeadCells]) -> None:
        news = [(cell.slot.slot, cell.slot.generation, cell.index, cell.fields or ()) for cell in cells]
        problem: DataPlaneUnavailable | None = None
        refused = True
        for port in place.info.ports:
            try:
                async with asyncio.timeout(PORT_S):
                    await self._resolver.host_client.drop(host, place.route, news, port)
            except StaleSlotError:  # another host answers there, or another incarnation of this one
                moved = await self._resolver.moved(host, place)
                if moved is not None:
                    await self._tell_at(host, moved, cells)
                return
            except TimeoutError as err:
                problem = DataPlaneUnavailable("the slot host does not answer", host=host.id, port=port, cause=err)
                refused = False
            except DataPlaneUnavailable as err:
                problem = err
                refused = refused and isinstance(err.__cause__, ConnectionRefusedError)
            else:
                return
        self._resolver.forget(host)
        if problem is not None and await self._may_serve(host, place, refused=refused):
            problem.ambiguous = True
            raise problem

    async def _may_serve(self, host: HostRef, before: Place, *, refused: bool) -> bool:
        """Return whether a host that did not get its invalidations may still serve, perhaps on other ports by now."""
        try:
            place = await self._resolver.find(host)
        except StaleSlotError:
            return False
        if place is None or not place.info.alive:
            return False
        return not refused or place.info.ports != before.info.ports
