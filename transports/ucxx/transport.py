"""UCXXTransport: the client of a plane that consists of slot hosts and a directory."""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.calls import slots as s
from asyncdp.calls import snapshots as sn
from asyncdp.compose.invalidations import record
from asyncdp.config import UcxxSettings, parse_config, plain_config
from asyncdp.errors import DataPlaneUnavailable
from asyncdp.meta import DataPlaneCapabilities, HostStatus

from .client.host_resolver import HostResolver, on_asyncio, running_loop
from .client.invalidation import invalidations
from .client.placing import Placing
from .client.slot_calls import SlotCalls, op_of
from .directory import ERROR_TABLE, Directory
from .payload.objects import MsgpackCodec
from .process.embedded import EmbeddedPlane, attach_config, directory_settings
from .slots.writer_process import this_machine
from .wire.handshake import Secret

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from asyncdp.calls import Call
    from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, PartitionInfo
    from asyncdp.rows.block import ObjectCodec
    from asyncdp.service import R

__all__ = ["CAPABILITIES", "UCXXTransport"]


class UCXXTransport(SlotCalls):
    """Transport over slot hosts, which keep payload in shared memory, and a directory in Valkey or Redis.

    ``controller_address`` of the config is the directory's URL (``redis://``, ``rediss://``, ``unix://``); slot hosts
    are registered there. Without it, and with ``bootstrap=True``, the constructor starts a Valkey server and
    ``num_storage_units`` slot hosts as children of this process, which takes seconds, blocks, and needs the extra
    ``embedded``; closing the transport stops them. With ``bootstrap=False``, or unpickled, the transport attaches at
    its first call. It runs under asyncio only.

    Args:
        config: Mapping with the keys of :class:`~asyncdp.config.DataPlaneConfig`; its key ``ucxx`` has those of
            :class:`~asyncdp.config.UcxxSettings`.
        bootstrap: Whether to start a plane where the config has no ``controller_address``.

    Raises:
        ValueError: The config is invalid; the message names the key.
        ImportError: The extra ``embedded`` is needed and not installed.
        DataPlaneUnavailable: A child process did not start.
    """

    error_table = ERROR_TABLE

    def __init__(self, config: Mapping[str, Any], *, bootstrap: bool = True) -> None:
        """Start a plane, or keep the URL to attach to."""
        super().__init__()
        parsed = parse_config(config)
        raw = plain_config(config)
        settings = parsed.ucxx or UcxxSettings()
        options = directory_settings(settings)
        self._codec = MsgpackCodec(allow_pickle=settings.allow_pickle)
        self.call_timeout_s = parsed.call_timeout_s
        self._lease_s = parsed.claim_lease_s
        self._owner = parsed.owner or f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._boot_id = this_machine().boot_id
        self._checksum = settings.checksum
        self._placing = Placing()
        self._plane: EmbeddedPlane | None = None
        url = parsed.controller_address
        if url is None:
            if not bootstrap:
                msg = "controller_address: required to attach; the owner's attach_config() has it"
                raise ValueError(msg)
            self._plane = EmbeddedPlane(settings, parsed.num_storage_units)
            self._plane.start()
            url = self._plane.url
        self._config = {**raw, "controller_address": url}
        self._directory = Directory(
            url,
            capacity=parsed.storage_capacity,
            group_pattern=parsed.group_id_pattern,
            strict_schema=parsed.strict_schema,
            auto_register=parsed.auto_register,
            settings=options,
        )
        self._resolver = HostResolver(self._directory, settings, Secret(settings.secret), self._codec)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the transport as its config; the unpickled one attaches to the same plane."""
        own = {"allow_pickle": True} if self._codec.allow_pickle else {}  # unpickling this runs code in any case
        config = self.attach_config()
        return _attach, ({**config, "ucxx": {**config.get("ucxx", {}), **own}},)

    # -- properties

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return the guarantees of the backend: all but server-side filters, which no verb has yet."""
        return CAPABILITIES

    @property
    def object_codec(self) -> ObjectCodec:
        """Codec of values that are no tensors: it encodes them exactly as msgpack, or refuses them."""
        return self._codec

    @property
    def owner(self) -> str:
        """Name of this client in the plane: the owner of its claims and rows."""
        return self._owner

    @property
    def plane(self) -> EmbeddedPlane | None:
        """Plane that this client started and will stop; None where it attached to one."""
        return self._plane

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which other processes attach.

        It contains the directory's URL, including a password, but not the slot hosts' secret: other processes get that
        from ``ASYNCDP_SECRET``, and the random secret of an embedded plane from its directory.
        """
        return attach_config(self._config)

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Execute a call; raise DataPlaneUnsupported under another event loop than asyncio's."""
        running_loop()
        return super().execute(call, ctx)

    # -- claims

    @handles(s.TryClaim)
    async def _try_claim(self, call: s.TryClaim, ctx: CallContext) -> s.ClaimTry:
        return await self._directory.claim(
            op_of(ctx),
            call.partition_id,
            call.task_name,
            call.required_fields,
            call.batch_size,
            call.min_rows,
            self._owner,
            lease_s=self._lease_s,
            wait_s=call.wait_s,
            explain=call.explain,
        )

    @handles(s.TryPartition)
    async def _try_partition(self, call: s.TryPartition, ctx: CallContext) -> bool:
        del ctx
        return await self._directory.exists(call.partition_id, call.wait_s)

    @handles(s.AbandonClaim)
    async def _abandon(self, call: s.AbandonClaim, ctx: CallContext) -> None:
        del ctx
        await self._directory.abandon(call.partition_id, call.claim_id)

    @handles(c.ReleaseClaim)
    async def _release(self, call: c.ReleaseClaim, ctx: CallContext) -> None:
        named = (call.partition_id, call.sample_ids, call.claim_ids, call.task_name)
        await self._directory.release(op_of(ctx), *named)

    @handles(c.ReleaseClaims)
    async def _release_all(self, call: c.ReleaseClaims, ctx: CallContext) -> None:
        await self._directory.release_owner(op_of(ctx), call.partition_id, call.owner)

    @handles(c.ListClaims)
    async def _claims_of(self, call: c.ListClaims, ctx: CallContext) -> list[ClaimInfo]:
        del ctx
        return await self._directory.list_claims(call.partition_id, call.task_name)

    @handles(c.CheckConsumptionStatus)
    async def _consumed(self, call: c.CheckConsumptionStatus, ctx: CallContext) -> bool:
        del ctx
        return await self._directory.consumed(call.partition_id, call.task_names)

    # -- removals

    @handles(c.ClearSamples, c.PopSamples, c.EvictSamples)
    async def _clear(self, call: c.ClearSamples, ctx: CallContext) -> int:
        named = (call.partition_id, call.sample_ids, call.owner, call.claims, call.lives)
        cleared = await self._directory.clear(op_of(ctx), *named)
        record(invalidations(cleared.freed, self._directory), ctx, call)
        return cleared.count

    @handles(c.DropPartition)
    async def _drop(self, call: c.DropPartition, ctx: CallContext) -> None:
        dropped = await self._directory.drop(op_of(ctx), call.partition_id)
        record(invalidations(dropped, self._directory), ctx, call)

    @handles(s.Resolve)
    async def _resolve(self, call: s.Resolve, ctx: CallContext) -> s.Resolved:
        resolved = await self._directory.resolve(call.op_id, call.partition_id, call.age_s)
        if resolved.state == "done":
            self._resolver.leases.done(call.op_id)
        if call.of is not None and resolved.answer is not None:
            dead = await self._directory.dead_of(call.of, resolved.answer)
            record(invalidations(dead, self._directory), replace(ctx, op_id=call.op_id), call.of)
        return resolved

    # -- declarations and recovery

    @handles(c.RegisterPartition)
    async def _register(self, call: c.RegisterPartition, ctx: CallContext) -> None:
        del ctx
        await self._directory.register(call)

    @handles(s.Probe)
    async def _probe(self, call: s.Probe, ctx: CallContext) -> bool:
        del ctx
        return await self._resolver.answers(call.host_id)

    @handles(c.Ping)
    async def _ping(self, call: c.Ping, ctx: CallContext) -> None:
        del call, ctx
        hosts = await self._directory.hosts()
        self._resolver.know(hosts)
        if not any(host.alive for host in hosts):
            msg = "the directory answers, but no slot host is there"
            if any(host.supervised for host in hosts):
                msg += "; their supervisor starts them again"
            raise DataPlaneUnavailable(msg, blames_port=False)

    @handles(c.ListMetadata)
    async def _list(self, call: c.ListMetadata, ctx: CallContext) -> list[DataPlaneGroupMeta]:
        del ctx
        return await self._directory.list_metadata(call.partition_id)

    @handles(c.Depth)
    async def _depth(self, call: c.Depth, ctx: CallContext) -> int:
        del ctx
        return await self._directory.depth(call.partition_id)

    @handles(c.ListPartitions)
    async def _partitions(self, call: c.ListPartitions, ctx: CallContext) -> list[PartitionInfo]:
        del call, ctx
        return await self._directory.list_partitions()

    @handles(c.ListHosts)
    async def _hosts(self, call: c.ListHosts, ctx: CallContext) -> list[HostStatus]:
        del call, ctx
        return [
            HostStatus(
                *(host.id, host.epoch, host.alive, host.address, host.ports, host.age_s),
                capacity_bytes=host.free_bytes + int(host.load),
                free_bytes=host.free_bytes,
                slots=host.slots,
                draining=host.draining,
                supervised=host.supervised,
            )
            for host in await self._directory.hosts()
        ]

    @handles(c.DescribePartition)
    async def _describe(self, call: c.DescribePartition, ctx: CallContext) -> PartitionInfo:
        del ctx
        return await self._directory.describe(call.partition_id)

    @handles(sn.Snapshot)
    async def _snapshot(self, call: sn.Snapshot, ctx: CallContext) -> sn.PartitionState:
        del ctx
        return await self._directory.snapshot(call.partition_id)

    @handles(sn.RestoreClaims)
    async def _restore_claims(self, call: sn.RestoreClaims, ctx: CallContext) -> None:
        await self._directory.restore_claims(op_of(ctx), call)

    async def on_close(self) -> None:
        """Wake waiting calls, close all connections, and stop the plane where this client started it."""
        try:
            if on_asyncio():  # otherwise nothing is open that could be closed here
                await self._directory.close()
                await self._resolver.close()
        finally:
            plane, self._plane = self._plane, None
            if plane is not None:
                await plane.stop()


def _attach(config: dict[str, Any]) -> UCXXTransport:
    return UCXXTransport(config, bootstrap=False)


CAPABILITIES = DataPlaneCapabilities(
    persistent_recovery=True,
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
