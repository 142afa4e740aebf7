"""The slot calls of the transport: locate and place rows, and move them into and out of slots."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

from asyncdp.calls import CallContext, handles
from asyncdp.calls import slots as s
from asyncdp.compose.invalidations import record
from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    StaleSlotError,
)
from asyncdp.service import Service

from ..directory import OperationId
from ..wire.messages import LONGEST_PUT_S
from .invalidation import invalidations

if TYPE_CHECKING:
    from ..directory import Directory
    from .host_resolver import HostAddress, HostResolver
    from .lane import Lane
    from .placing import Placing

__all__ = ["SlotCalls", "op_of"]

R = TypeVar("R")

#: Limits of the time that a full host may keep a put waiting: a share of the call's remaining time, and seconds.
FULL_SHARE: Final = 0.25
FULL_S: Final = 1.0


def op_of(ctx: CallContext) -> OperationId:
    """Return the operation id and remaining time by which the directory identifies the user's call."""
    return OperationId(ctx.op_id, ctx.remaining())


class SlotCalls(Service):
    """Handles the slot calls of the transport, which is a subclass and sets the attributes."""

    sees_reads = False
    _owner: str
    _boot_id: str
    _checksum: bool
    _directory: Directory
    _resolver: HostResolver
    _placing: Placing
    #: Whether the rows of the last read of noted ones were not where they had been.
    _moved = False

    # -- where

    @handles(s.Locate)
    async def _locate(self, call: s.Locate, ctx: CallContext) -> s.Located:
        del ctx
        if call.read and call.handles and self._resolver.has_lanes and (places := self._directory.at_once).value:
            noted = self._directory.noted(call.partition_id, call.sample_ids, call.fields, call.handles)
            if noted is not None:
                async with places:
                    read = await self._read_noted(call, *noted)
                if read is not None:
                    return read
        located = await self._directory.locate(call.partition_id, call.sample_ids, call.fields, call.handles)
        if call.read and located.refs:
            reads = self._over_lanes(located.refs, borrow=call.borrow)
            return (await _read(located, reads) or located) if reads else located
        return located

    async def _read_noted(self, call: s.Locate, located: s.Located, mark: bytes) -> s.Located | None:
        """Read rows over the lane where they lay at ``mark``, while the directory says whether they lie there still.

        None where they do not, or another host's memory or anything else stands in the way: they are looked up then.
        """
        reads = self._over_lanes(located.refs, borrow=call.borrow)
        if not reads:
            return None
        async with self._directory.unmoved(call.partition_id, mark) as unmoved:
            asked = self._moved  # where rows have moved once, they are not copied in vain again
            if asked and not await unmoved():
                return None
            read = await _read(located, reads)
            self._moved = not (asked or await unmoved())
            return None if self._moved else read

    def _over_lanes(self, refs: Sequence[s.SlotRef], *, borrow: bool) -> list[tuple[Lane, s.ReadSlots]]:
        """Return one read per host, and its lane; none where one of the hosts has no lane that is known."""
        by_host: dict[s.HostRef, list[s.SlotRef]] = {}
        for ref in refs:
            by_host.setdefault(ref.host, []).append(ref)
        reads = []
        for host, mine in by_host.items():
            address = self._resolver.known(host)
            lane = None if address is None else self._resolver.host_client.lane_of(host, address.route)
            if lane is None:
                return []
            reads.append((lane, s.ReadSlots(host, tuple(mine), borrow=borrow)))
        return reads

    @handles(s.Place)
    async def _place(self, call: s.Place, ctx: CallContext) -> s.Placement:
        named = call.partition_id, call.sample_ids, call.fields, call.only
        given = await self._directory.place(*named, by_specs=call.by_specs)
        taking = [host for host in given.hosts if not host.draining]
        hosts = self._placing.order(taking, self._boot_id, ctx.env.clock.now(), ctx.env.rng)
        if not hosts:
            silent = next(
                (host.id for host in await self._directory.hosts() if host.supervised and not host.alive), None
            )
            msg = "no slot host is registered that takes rows"
            told: dict[str, Any] = {"host": silent, "blames_port": silent is not None}  # Probe waits for it
            raise DataPlaneUnavailable(msg, partition_id=call.partition_id, **told)
        shares, spare = ((hosts[0].ref, len(call.sample_ids)),), tuple(host.ref for host in hosts[1:])
        return s.Placement(shares, spare, given.specs, current=given.new is not None)

    # -- slots

    async def _find(self, host: s.HostRef, port: int | None) -> HostAddress:
        address = await self._resolver.find(host)
        if address is None:
            msg = f"slot host {host.id!r} is not registered"
            raise DataPlaneUnavailable(msg, host=host.id, port=port, blames_port=False)
        return address

    async def _at(
        self, host: s.HostRef, port: int | None, work: Callable[[HostAddress, int | None], Awaitable[R]]
    ) -> R:
        """Run a request at a host.

        Where no host answers, drop the cached address, so that the next attempt resolves the host again: it may have
        been restarted.

        Raises:
            DataPlaneUnavailable: Another host or incarnation answers there, and this one has moved to other ports; the
                next attempt uses those.
            StaleSlotError: The contents of its slots are lost.
        """
        address = await self._find(host, port)
        try:
            return await work(address, address.port(port))
        except (StaleSlotError, DataPlaneUnavailable) as err:
            await self._lost(host, port, address, err)
            raise

    async def _lost(
        self, host: s.HostRef, port: int | None, address: HostAddress, err: StaleSlotError | DataPlaneUnavailable
    ) -> None:
        """Note that a host did not answer, or is another one; raise an error if it has moved, see :meth:`_at`."""
        if isinstance(err, DataPlaneUnavailable):
            self._resolver.forget(host)
            return
        if not await self._resolver.moved(host, address):
            return
        msg = f"slot host {host.id!r} has moved: {err.message}"
        raise DataPlaneUnavailable(msg, host=host.id, port=port, cause=err) from err

    @handles(s.ReadSlots)
    async def _read(self, call: s.ReadSlots, ctx: CallContext) -> s.ReadResult:
        """Read as :meth:`_at` would, but with fewer coroutines and closures: there are many reads at a time."""
        del ctx
        try:
            address = self._resolver.known(call.host) or await self._find(call.host, call.port)
            try:
                client, port = self._resolver.host_client, address.port(call.port)
                return await client.read(call.host, address.route, call.refs, port, borrow=call.borrow)
            except (StaleSlotError, DataPlaneUnavailable) as err:
                await self._lost(call.host, call.port, address, err)
                raise
        except StaleSlotError as err:
            return s.ReadResult((), dict.fromkeys(range(len(call.refs)), err))

    @handles(s.Reserve)
    async def _reserve(self, call: s.Reserve, ctx: CallContext) -> tuple[s.SlotRef, ...]:
        for name in call.fields:
            _refuse_unwritable(name)
        left = ctx.remaining()

        async def reserve(address: HostAddress, port: int | None) -> tuple[s.SlotRef, ...]:
            return await self._resolver.host_client.reserve(
                call.host,
                address.route,
                ctx.op_id,
                call.fields,
                call.sizes,
                call.first_row,
                ttl_s=max(0.0, min(left, LONGEST_PUT_S)),
                wait_s=max(0.0, min(left * FULL_SHARE, FULL_S)),
                port=port,
            )

        try:
            refs = await self._at(call.host, call.port, reserve)
        except DataPlaneError as err:
            self._directory.forget_hosts()  # it does not do what its last heartbeat says
            if isinstance(err, DataPlaneNotReady):
                self._placing.full(call.host.id, ctx.env.clock.now())
            if isinstance(err, StaleSlotError):
                raise _replaced(call.host, err) from err
            raise
        self._placing.reserved(call.host.id, sum(call.sizes))
        return refs

    @handles(s.WriteSlots)
    async def _write(self, call: s.WriteSlots, ctx: CallContext) -> bool:
        async def write(address: HostAddress, port: int | None) -> bool:
            told: dict[str, Any] = {"port": port, "checksum": self._checksum}
            given = call.host, address.route, ctx.op_id, call.refs, call.block
            return await self._resolver.host_client.write(*given, **told)

        try:
            return await self._at(call.host, call.port, write)
        except StaleSlotError as err:
            raise _replaced(call.host, err) from err

    @handles(s.Abort)
    async def _abort(self, call: s.Abort, ctx: CallContext) -> None:
        del ctx

        async def abort(address: HostAddress, port: int | None) -> None:
            await self._resolver.host_client.abort(call.host, address.route, call.op_id, port)

        try:
            if await self._resolver.find(call.host) is None:  # it frees expired reservations when it is back
                self._resolver.host_client.stop(call.host, call.op_id)
                return
            await self._at(call.host, call.port, abort)
        except StaleSlotError:
            return

    @handles(s.Invalidate)
    async def _invalidate(self, call: s.Invalidate, ctx: CallContext) -> None:
        """Tell a host; one that is down, or began anew, cannot serve the rows, and frees them itself.

        So does one that is paused. No caller waits for it longer than until the directory counts it as dead: from then
        on its rows are lost to all clients, and if it goes on, it compares its slots with the directory.
        """
        rows = [(ref.slot, ref.generation, tuple(ref.index), ref.fields) for ref in call.refs]

        async def drop(address: HostAddress, port: int | None) -> None:
            ports = address.info.ports
            if port is None and ports:  # the ports were not known when the call was made
                port = ports[(ctx.attempt - 1) % len(ports)]
            await self._resolver.host_client.drop(call.host, address.route, rows, port)

        try:
            if await self._resolver.serves(call.host):
                await self._resolver.while_alive(call.host, lambda: self._at(call.host, call.port, drop))
        except StaleSlotError:
            return
        except DataPlaneUnavailable:
            if await self._resolver.serves(call.host):
                raise
        except BaseException:
            self._resolver.forget(call.host)  # it did not answer in time, so the next attempt asks the directory
            raise

    @handles(s.Publish)
    async def _publish(self, call: s.Publish, ctx: CallContext) -> s.Published:
        left_s = ctx.remaining()
        if call.refs and ctx.began:  # later the host may have reused the slots, so the directory refuses the put
            left_s = min(left_s, ctx.began + LONGEST_PUT_S - ctx.env.clock.now())
        done = await self._directory.publish(OperationId(ctx.op_id, left_s), call, self._owner)
        self._resolver.leases.done(ctx.op_id)
        record(invalidations(done.dead, self._directory), ctx, call)
        return s.Published(done.handles, done.created)


async def _read(located: s.Located, reads: Sequence[tuple[Lane, s.ReadSlots]]) -> s.Located | None:
    """Return rows with what was read of them; None where a slot could not be read, of which ReadSlots says why."""
    done = [(call, await lane.read(call.refs, borrow=call.borrow)) for lane, call in reads]
    if any(result.errors for _, result in done):
        return None
    return s.Located(located.refs, located.missing, located.handles, located.specs, tuple(done))


def _refuse_unwritable(name: str) -> None:
    """Refuse a field name that cannot be encoded as UTF-8, which payloads need."""
    try:
        name.encode()
    except UnicodeEncodeError as err:
        raise DataPlaneBadRequest(f"field {name!r}: a name with lone surrogates cannot be kept", field=name) from err


def _replaced(host: s.HostRef, err: StaleSlotError) -> DataPlaneUnavailable:
    """Return the error that a put needs instead: the host is unavailable, and other hosts may take the put."""
    return DataPlaneUnavailable(f"slot host {host.id!r} is not there: {err.message}", host=host.id, blames_port=False)
