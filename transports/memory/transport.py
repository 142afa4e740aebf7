"""MemoryTransport: a client of a plane within this process."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.lowlevel

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.calls import slots as s
from asyncdp.calls import snapshots as sn
from asyncdp.calls.answers import claim_try, partition_state
from asyncdp.config import MemorySettings, parse_config, plain_config, shared_config
from asyncdp.errors import DataPlaneClosed, DataPlaneError, DataPlaneUnavailable
from asyncdp.meta import ClaimInfo, DataPlaneCapabilities, HostStatus, PartitionInfo
from asyncdp.service import Service
from asyncdp.settings.urls import without_password

from .plane import PLANES, Plane, Waker, start

if TYPE_CHECKING:
    from asyncdp.meta import DataPlaneGroupMeta

    from .host import Host

__all__ = ["MemoryTransport"]

R = TypeVar("R")


class MemoryTransport(Service):
    """Transport to a plane within this process that fulfils the whole contract, with hosts, ports and slots.

    With ``bootstrap=True`` it owns a plane, at ``controller_address`` of the config (a new address by default), and
    its close ends the plane. With ``bootstrap=False``, or unpickled, it attaches to the plane at that address; calls in
    another process, where there is no such plane, raise DataPlaneUnavailable. Runs under asyncio and trio.

    Args:
        config: See :class:`~asyncdp.config.DataPlaneConfig`; None: an unlimited plane, two hosts with four ports each.
        bootstrap: Whether to start a plane.

    Raises:
        ValueError: The config is invalid, has no address to attach to, or a plane with another config has that address
            already.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, *, bootstrap: bool = True) -> None:
        """Start a plane, or store the address to attach to."""
        super().__init__()
        whole = DEFAULTS if config is None else config
        parsed = parse_config(whole)
        self._settings = parsed.memory or MemorySettings()
        self.call_timeout_s = parsed.call_timeout_s
        self._lease_s = parsed.claim_lease_s
        if parsed.controller_address is None and not bootstrap:
            raise ValueError("controller_address: required to attach; the owner's attach_config() has it")
        self._address = parsed.controller_address or f"memory://{uuid.uuid4().hex}"
        self._owner = parsed.owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._config = {**plain_config(whole), "controller_address": self._address}
        self._owned: Plane | None = None
        self._attached: Plane | None = None
        self._known: dict[str, str] = {}
        if bootstrap:
            self._owned = self._attached = start(self._address, parsed)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as the config; the unpickled transport attaches to the same plane."""
        return _attach, (self.attach_config(),)

    # -- identity

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return the capabilities: all except surviving the process, and filters, which no verb supports yet."""
        return CAPABILITIES

    def attach_config(self) -> dict[str, Any]:
        """Return a config with which other clients of this process attach to the plane."""
        return shared_config(self._config)

    @property
    def owner(self) -> str:
        """Name of this client towards the plane, the owner of its claims and puts."""
        return self._owner

    @property
    def plane(self) -> Plane:
        """The plane it is attached to.

        Raises:
            DataPlaneUnavailable: This process has no plane at the address.
        """
        plane = self._attached
        if plane is None or plane.closed:
            plane = self._attached = PLANES.get(self._address)
            if plane is None or plane.closed:
                at = without_password(self._address)
                msg = f"no memory plane answers at {at} in this process, and impl memory reaches no other"
                raise DataPlaneUnavailable(msg)
        return plane

    def _known_plane(self, partition_id: str) -> Plane:
        """Return the plane; raise DataPlaneUnavailable if only an earlier plane had the partition."""
        plane = self.plane
        if partition_id in plane.partitions:
            self._known[partition_id] = plane.epoch
        elif self._known.get(partition_id, plane.epoch) != plane.epoch:
            msg = f"the plane was restarted and does not know partition {partition_id!r} any more"
            raise DataPlaneUnavailable(msg, partition_id=partition_id, blames_port=False)
        return plane

    async def _wire(self, call: Any) -> None:
        """Take the place of the network: run one checkpoint, so that a busy client does not starve its event loop."""
        del call
        await anyio.lowlevel.checkpoint()

    # -- slot calls

    def _host(self, ref: s.HostRef, port: int | None, plane: Plane | None = None) -> Host:
        host = (plane or self.plane).hosts[ref.id]
        host.answer(port)
        return host

    @handles(s.Probe)
    async def _probe(self, call: s.Probe, ctx: CallContext) -> bool:
        del ctx
        await self._wire(call)
        try:
            plane = self.plane
        except DataPlaneUnavailable:  # the plane was closed on purpose
            return False
        if call.host_id is None or plane.answers(call.host_id):
            return True
        if plane.expects(call.host_id):
            raise DataPlaneUnavailable("the slot host is still down", host=call.host_id)
        return False

    @handles(s.Locate)
    async def _locate(self, call: s.Locate, ctx: CallContext) -> s.Located:
        del ctx
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return plane.locate(call.partition_id, call.sample_ids, call.fields, call.handles)

    @handles(s.ReadSlots)
    async def _read(self, call: s.ReadSlots, ctx: CallContext) -> s.ReadResult:
        del ctx
        plane = self.plane
        host = self._host(call.host, call.port, plane)
        with plane.lock:
            attempts = [host.begin_read(ref) for ref in call.refs]
        errors: dict[int, DataPlaneError] = {}
        parts: list[s.Part] = []
        try:
            await self._wire(call)
            host.answer(call.port)
            with plane.lock:
                for at, (ref, attempt) in enumerate(zip(call.refs, attempts, strict=True)):
                    got = attempt if isinstance(attempt, DataPlaneError) else host.payload(attempt, ref)
                    if isinstance(got, DataPlaneError):
                        errors[at] = got
                        continue
                    block, schema = got
                    sums = (block.checksum(range(block.n)),) if self._settings.checksum else None
                    parts.append(s.Part((at,), block, (block.nbytes,), schema, sums))
        finally:
            with plane.lock:
                for attempt in attempts:
                    if not isinstance(attempt, DataPlaneError):
                        host.finish_read(attempt)
        return s.ReadResult(tuple(parts), errors)

    @handles(s.Place)
    async def _place(self, call: s.Place, ctx: CallContext) -> s.Placement:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return plane.place(call.partition_id, call.sample_ids, call.fields, call.only)

    @handles(s.Reserve)
    async def _reserve(self, call: s.Reserve, ctx: CallContext) -> tuple[s.SlotRef, ...]:
        plane = self.plane
        host = self._host(call.host, call.port, plane)
        now = plane.clock.time()
        with plane.lock:
            until = now + min(ctx.remaining(), 1e9) + 1.0
            return host.reserve(ctx.op_id, call.fields, len(call.sizes), call.first_row, until, now)

    @handles(s.WriteSlots)
    async def _write(self, call: s.WriteSlots, ctx: CallContext) -> None:
        host = self._host(call.host, call.port)
        await self._wire(call)
        host.answer(call.port)
        with self.plane.lock:
            host.write(ctx.op_id, call.refs, call.block)

    @handles(s.Publish)
    async def _publish(self, call: s.Publish, ctx: CallContext) -> s.Published:
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            done = plane.once(ctx.op_id, _not_after(plane, ctx), lambda: plane.publish(call, self._owner))
        self._known[call.partition_id] = plane.epoch
        return done

    @handles(s.Abort)
    async def _abort(self, call: s.Abort, ctx: CallContext) -> None:
        del ctx
        host = self._host(call.host, call.port)
        with self.plane.lock:
            host.abort(call.op_id, self.plane.clock.time())

    @handles(s.Resolve)
    async def _resolve(self, call: s.Resolve, ctx: CallContext) -> s.Resolved:
        del ctx
        await self._wire(call)
        with self.plane.lock:
            return s.Resolved(self.plane.resolve(call.op_id, call.age_s))

    # -- claims

    @handles(s.TryClaim)
    async def _try_claim(self, call: s.TryClaim, ctx: CallContext) -> s.ClaimTry:
        await self._wire(call)

        def look() -> s.ClaimTry:
            plane = self._known_plane(call.partition_id)
            what = (call.partition_id, call.task_name, call.required_fields, call.batch_size, call.min_rows)
            with plane.lock:
                args = (ctx.op_id, _not_after(plane, ctx), self._owner, self._lease_s)
                return claim_try(call, ctx.op_id, plane.claim(*what, *args))

        return await self._until(look, lambda got: got.meta.size > 0, call.wait_s, call.partition_id, ctx)

    @handles(s.TryPartition)
    async def _try_partition(self, call: s.TryPartition, ctx: CallContext) -> bool:
        await self._wire(call)
        there: Callable[[], bool] = lambda: call.partition_id in self.plane.partitions  # noqa: E731
        return await self._until(there, bool, call.wait_s, call.partition_id, ctx)

    async def _until(
        self, look: Callable[[], R], enough: Callable[[R], bool], wait_s: float, partition_id: str, ctx: CallContext
    ) -> R:
        """Repeat ``look`` at every change of the plane until ``enough`` accepts the result or ``wait_s`` has passed."""
        clock = ctx.env.clock
        until = clock.now() + wait_s
        while True:
            if self._closed:
                msg = "the client was closed while this call waited"
                raise DataPlaneClosed(msg, op=ctx.verb)
            waker = Waker()
            plane = self.plane
            plane.watch(waker, waker.wake)  # before the look, so that no change in between is missed
            try:
                got = look()
                left = until - clock.now()
                if enough(got) or left <= 0:
                    return got
                expiry = plane.next_expiry(partition_id)
                if expiry is not None:
                    left = min(left, max(0.0, expiry - plane.clock.time()) + 1e-3)
                with anyio.move_on_after(left):
                    await waker.wait()
            finally:
                plane.unwatch(waker)

    @handles(s.AbandonClaim)
    async def _abandon(self, call: s.AbandonClaim, ctx: CallContext) -> None:
        del ctx
        await self._wire(call)
        with self.plane.lock:
            self.plane.abandon(call.partition_id, call.claim_id)

    @handles(c.ReleaseClaim)
    async def _release(self, call: c.ReleaseClaim, ctx: CallContext) -> None:
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        args = (call.partition_id, call.task_name, call.sample_ids, call.claim_ids)
        with plane.lock:
            plane.release(*args, ctx.op_id, _not_after(plane, ctx))

    @handles(c.ReleaseClaims)
    async def _release_all(self, call: c.ReleaseClaims, ctx: CallContext) -> None:
        await self._wire(call)
        plane = self.plane
        with plane.lock:
            plane.release_owner(call.partition_id, call.owner, ctx.op_id, _not_after(plane, ctx))

    @handles(c.ListClaims)
    async def _claims_of(self, call: c.ListClaims, ctx: CallContext) -> list[ClaimInfo]:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return [ClaimInfo(*one) for one in plane.list_claims(call.partition_id, call.task_name)]

    # -- declarations, metadata, closing

    @handles(c.RegisterPartition)
    async def _register(self, call: c.RegisterPartition, ctx: CallContext) -> None:
        del ctx
        await self._wire(call)
        plane = self.plane
        args = (call.partition_id, call.fields, call.num_samples, call.consumer_tasks, call.grpo_group_size)
        with plane.lock:
            plane.register(*args, call.enums, call.anew)
        self._known[call.partition_id] = plane.epoch

    @handles(c.CheckConsumptionStatus)
    async def _consumed(self, call: c.CheckConsumptionStatus, ctx: CallContext) -> bool:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return plane.consumed(call.partition_id, call.task_names)

    @handles(c.ClearSamples, c.PopSamples, c.EvictSamples)
    async def _clear(self, call: c.ClearSamples, ctx: CallContext) -> int:
        await self._wire(call)
        plane = self.plane
        how = (call.owner, call.claims, call.lives)
        with plane.lock:
            return plane.clear(call.partition_id, call.sample_ids, ctx.op_id, _not_after(plane, ctx), *how)[0]

    @handles(c.Ping)
    async def _ping(self, call: c.Ping, ctx: CallContext) -> None:
        del ctx
        await self._wire(call)
        _ = self.plane

    @handles(c.ListMetadata)
    async def _list(self, call: c.ListMetadata, ctx: CallContext) -> list[DataPlaneGroupMeta]:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return plane.groups(call.partition_id)

    @handles(c.Depth)
    async def _depth(self, call: c.Depth, ctx: CallContext) -> int:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return plane.depth(call.partition_id, plane.gone())

    @handles(c.ListPartitions)
    async def _partitions(self, call: c.ListPartitions, ctx: CallContext) -> list[PartitionInfo]:
        del ctx
        await self._wire(call)
        plane = self.plane
        with plane.lock:
            return [PartitionInfo(*one) for one in plane.listing()]

    @handles(c.ListHosts)
    async def _hosts(self, call: c.ListHosts, ctx: CallContext) -> list[HostStatus]:
        del ctx
        await self._wire(call)
        plane = self.plane
        with plane.lock:
            hosts = [plane.hosts[name] for name in sorted(plane.hosts)]
            return [
                HostStatus(host.id, host.ref.epoch, host.up, ports=host.ref.ports, rows=host.rows, slots=host.counts())
                for host in hosts
            ]

    @handles(c.DescribePartition)
    async def _describe(self, call: c.DescribePartition, ctx: CallContext) -> PartitionInfo:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return PartitionInfo(*plane.describe(call.partition_id))

    @handles(sn.Snapshot)
    async def _snapshot(self, call: sn.Snapshot, ctx: CallContext) -> sn.PartitionState:
        del ctx
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        with plane.lock:
            return partition_state(plane.snapshot(call.partition_id), dict(plane.partition(call.partition_id).fields))

    @handles(sn.RestoreClaims)
    async def _restore_claims(self, call: sn.RestoreClaims, ctx: CallContext) -> None:
        await self._wire(call)
        plane = self._known_plane(call.partition_id)
        args = (call.partition_id, call.consumer_tasks, call.claims, ctx.op_id, _not_after(plane, ctx))
        with plane.lock:
            plane.restore_claims(*args)

    @handles(c.DropPartition)
    async def _drop(self, call: c.DropPartition, ctx: CallContext) -> None:
        await self._wire(call)
        plane = self.plane
        with plane.lock:
            plane.drop(call.partition_id, ctx.op_id, _not_after(plane, ctx))
        self._known.pop(call.partition_id, None)

    async def on_close(self) -> None:
        """Close the plane if this client owns it, and wake the calls that wait."""
        if self._owned is not None:
            self._owned.close()
        elif self._attached is not None:
            self._attached.changed()


def _not_after(plane: Plane, ctx: CallContext) -> float:
    """Return the deadline of a call, converted to the plane's clock."""
    return plane.monotonic() + ctx.remaining()


def _attach(config: dict[str, Any]) -> MemoryTransport:
    return MemoryTransport(config, bootstrap=False)


#: Config of the plane of ``MemoryTransport()`` without arguments.
DEFAULTS: Mapping[str, Any] = {
    "enabled": True,
    "impl": "memory",
    "backend": "simple",
    "storage_capacity": 1 << 40,
    "num_storage_units": 2,
    "claim_meta_poll_interval_s": 0.05,
}

CAPABILITIES = DataPlaneCapabilities(
    persistent_recovery=False,
    server_side_filtering=False,
    atomic_batch_put=True,
    verified_clear=True,
    mutation_dedup=True,
    claim_release=True,
    atomic_tags=True,
    slot_addressable=True,
    slot_writes=True,
    claim_dedup=True,
    bound_mutations=True,
    host_listing=True,
    directory_snapshots=True,
)
