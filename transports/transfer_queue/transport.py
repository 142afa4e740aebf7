"""TQTransport: a client of a plane that runs on TransferQueue."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.calls import slots as s
from asyncdp.calls import snapshots as sn
from asyncdp.calls.answers import claim_try, group_meta, partition_state
from asyncdp.errors import DataPlaneUnavailable, DataPlaneUnsupported
from asyncdp.meta import ClaimInfo, DataPlaneCapabilities, DataPlaneGroupMeta, HostStatus, PartitionInfo

from .private import ERROR_TABLE
from .rows import RowCodec, spec_from_wire
from .transfers import Transfers

if TYPE_CHECKING:
    from asyncdp.rows.block import ObjectCodec

__all__ = ["CAPABILITIES", "TQTransport"]


class TQTransport(Transfers):
    """Transport to TransferQueue: its controller runs the directory, its storage units hold the rows.

    With ``bootstrap=True`` it starts a controller and storage units, unless they run already, in the present Ray or in
    one that it starts; this blocks for most of a minute. Closing it stops what it started. With ``bootstrap=False``, or
    unpickled, it attaches on first use. Runs under asyncio only.

    Args:
        config: See :class:`~asyncdp.config.DataPlaneConfig` and :class:`~asyncdp.config.TransferQueueSettings`.
        bootstrap: Whether to start a plane.

    Raises:
        ValueError: The config is invalid, or a plane with another config is running already.
        DataPlaneNotReady: Ray has too few CPUs for the actors.
        DataPlaneBadRequest: Neither config nor environment names the plane to attach to.
    """

    error_table = ERROR_TABLE

    # -- identity

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return the capabilities: all except surviving its controller, writes by slot, and filters."""
        return CAPABILITIES

    @property
    def object_codec(self) -> ObjectCodec:
        """Return a codec that pickles non-tensor values, as TransferQueue does."""
        return CODEC

    # -- claims

    @handles(s.TryClaim)
    async def _try_claim(self, call: s.TryClaim, ctx: CallContext) -> s.ClaimTry:
        args = (
            *(call.partition_id, call.task_name, call.required_fields, call.batch_size, call.min_rows),
            *(ctx.op_id, await self._not_after(ctx), self.owner, self._lease_s),
        )
        return claim_try(call, ctx.op_id, await self._mutate("claim", args, ctx, call.partition_id))

    @handles(s.AbandonClaim)
    async def _abandon(self, call: s.AbandonClaim, ctx: CallContext) -> None:
        await self._ask("abandon", (call.partition_id, call.claim_id), ctx)

    @handles(c.ReleaseClaim)
    async def _release(self, call: c.ReleaseClaim, ctx: CallContext) -> None:
        args = (
            call.partition_id,
            call.task_name,
            call.sample_ids,
            call.claim_ids,
            ctx.op_id,
            await self._not_after(ctx),
        )
        await self._mutate("release", args, ctx, call.partition_id)

    @handles(c.ReleaseClaims)
    async def _release_all(self, call: c.ReleaseClaims, ctx: CallContext) -> None:
        await self._mutate("release_owner", (call.partition_id, call.owner, ctx.op_id, await self._not_after(ctx)), ctx)

    @handles(c.ListClaims)
    async def _claims_of(self, call: c.ListClaims, ctx: CallContext) -> list[ClaimInfo]:
        found = await self._ask("list_claims", (call.partition_id, call.task_name), ctx, call.partition_id)
        return [ClaimInfo(*one) for one in found]

    @handles(c.CheckConsumptionStatus)
    async def _consumed(self, call: c.CheckConsumptionStatus, ctx: CallContext) -> bool:
        answer: bool = await self._ask("consumed", (call.partition_id, call.task_names), ctx, call.partition_id)
        return answer

    # -- clears

    @handles(c.ClearSamples, c.PopSamples, c.EvictSamples)
    async def _clear(self, call: c.ClearSamples, ctx: CallContext) -> int:
        args = (call.partition_id, call.sample_ids, ctx.op_id, await self._not_after(ctx), call.owner)
        return await self._removed("clear", (*args, call.claims, call.lives), ctx)

    @handles(c.DropPartition)
    async def _drop(self, call: c.DropPartition, ctx: CallContext) -> None:
        await self._removed("drop", (call.partition_id, ctx.op_id, await self._not_after(ctx)), ctx)
        self._connection.forget(call.partition_id)

    # -- declarations and recovery

    @handles(c.RegisterPartition)
    async def _register(self, call: c.RegisterPartition, ctx: CallContext) -> None:
        args = (call.partition_id, call.fields, call.num_samples, call.consumer_tasks, call.grpo_group_size)
        anew = (True,) if call.anew else ()  # a directory shipped by an earlier release takes no such argument
        await self._mutate("register", (*args, dict(call.enums), *anew), ctx, call.partition_id)

    @handles(s.TryPartition)
    async def _try_partition(self, call: s.TryPartition, ctx: CallContext) -> bool:
        there: bool = await self._ask("has", (call.partition_id,), ctx)
        return there

    @handles(s.Resolve)
    async def _resolve(self, call: s.Resolve, ctx: CallContext) -> s.Resolved:
        return s.Resolved(await self._ask("resolve", (call.op_id, call.age_s), ctx))

    @handles(c.Ping)
    async def _ping(self, call: c.Ping, ctx: CallContext) -> None:
        del call
        facts = await self._ask("hello", (), ctx)
        if "config" not in facts:
            msg = "the controller answers, but the plane has ended"
            raise DataPlaneUnavailable(msg, blames_port=False)

    async def _silent(self, ctx: CallContext) -> frozenset[str]:
        """Return the ids of the storage units that do not answer; waits until the state of each is known."""
        link = await self._connection.link(ctx.deadline)
        await link.heard()
        return link.silent()

    @handles(c.ListMetadata)
    async def _list(self, call: c.ListMetadata, ctx: CallContext) -> list[DataPlaneGroupMeta]:
        groups: dict[str, DataPlaneGroupMeta] = {}
        after: int | None = 0
        while after is not None:
            page, after = await self._ask("groups", (call.partition_id, after), ctx, call.partition_id)
            silent = await self._silent(ctx)
            groups.update((group[0], group_meta(call.partition_id, group, silent)) for group in page)
        return sorted(groups.values(), key=lambda group: group.created_at)

    @handles(c.Depth)
    async def _depth(self, call: c.Depth, ctx: CallContext) -> int:
        args = (call.partition_id, await self._silent(ctx))
        count: int = await self._ask("depth", args, ctx, call.partition_id)
        return count

    @handles(c.ListPartitions)
    async def _partitions(self, call: c.ListPartitions, ctx: CallContext) -> list[PartitionInfo]:
        del call
        return [PartitionInfo(*one) for one in await self._ask("listing", (), ctx)]

    @handles(c.ListHosts)
    async def _hosts(self, call: c.ListHosts, ctx: CallContext) -> list[HostStatus]:
        del call
        rows: dict[str, int] = {}
        with suppress(DataPlaneUnsupported):  # a directory that an earlier release started does not know the request
            rows = await self._ask("rows_by_unit", (), ctx)
        silent = await self._silent(ctx)
        units = (await self._connection.link(ctx.deadline)).endpoints.units
        return [
            HostStatus(
                *(unit.id, 0, unit.id not in silent, unit.ip, tuple(sorted(set(unit.ports.values())))),
                rows=rows.get(unit.id),
            )
            for unit in sorted(units, key=lambda unit: unit.id)
        ]

    @handles(c.DescribePartition)
    async def _describe(self, call: c.DescribePartition, ctx: CallContext) -> PartitionInfo:
        return PartitionInfo(*await self._ask("describe", (call.partition_id,), ctx, call.partition_id))

    # -- checkpoints

    @handles(sn.Snapshot)
    async def _snapshot(self, call: sn.Snapshot, ctx: CallContext) -> sn.PartitionState:
        state, specs = await self._ask("state", (call.partition_id,), ctx, call.partition_id)
        return partition_state(state, {name: spec_from_wire(spec) for name, spec in specs.items()})

    @handles(sn.RestoreClaims)
    async def _restore_claims(self, call: sn.RestoreClaims, ctx: CallContext) -> None:
        claims = [tuple(claim) for claim in call.claims]
        args = (call.partition_id, call.consumer_tasks, claims, ctx.op_id, await self._not_after(ctx))
        await self._mutate("restore_claims", args, ctx, call.partition_id)


CODEC = RowCodec()

CAPABILITIES = DataPlaneCapabilities(
    persistent_recovery=False,
    server_side_filtering=False,
    atomic_batch_put=True,
    verified_clear=True,
    mutation_dedup=True,
    claim_release=True,
    atomic_tags=True,
    slot_addressable=True,
    slot_writes=False,
    claim_dedup=True,
    bound_mutations=True,
    host_listing=True,
    directory_snapshots=True,
)
