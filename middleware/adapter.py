"""Adapter: a service over a client of another project that has only the verbs, so that layers can be put above it."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import anyio
import anyio.to_thread
from tensordict import TensorDictBase

from asyncdp import calls as c
from asyncdp.calls import CallContext, handles
from asyncdp.client import CALLER, Caller
from asyncdp.errors import DataPlaneBadRequest, DataPlaneError, DataPlaneReadError, DataPlaneUnsupported
from asyncdp.log_line import log_line
from asyncdp.meta import DataPlaneCapabilities, KVBatchMeta, RowHandle
from asyncdp.rows.block import field_names
from asyncdp.service import Service
from asyncdp.settings.stack_arguments import setting

from .client_verb import ClientVerb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tensordict import TensorDict

    from asyncdp.meta import ClaimInfo, DataPlaneGroupMeta, HostStatus, PartitionInfo

__all__ = ["Adapter"]


class Adapter(Service):
    """Serves calls with the verbs of ``client``.

    Async verbs are awaited; sync ones run in worker threads (a cancelled call returns at once, its thread runs on).
    ``timeout_s``, the time left, is passed to verbs whose signature has it, and so are ``blocking``, ``dp_rank`` and
    ``min_batch_size`` to a claim; if the signature lacks one of these, it is left out if it has its default value, and
    is DataPlaneUnsupported otherwise. A verb that is missing, or whose signature does not accept the arguments, is
    DataPlaneUnsupported. So is a put or removal that is bound to lives, unless the client has the capability
    ``bound_mutations``: then it is passed a meta, and ``only`` and ``stale``. The rows and columns that a get returns
    are checked against the request.

    Args:
        client: Any object with verbs of :class:`~asyncdp.client.DataPlaneClient`.
        inner: The service below, if the client is a layer written in verbs; closed after the client.
        close_timeout_s: Seconds that the client's own close() may take. 5 by default: enough to end the connections to
            a backend that answers. What it raises is only logged.
    """

    def __init__(self, client: Any, *, inner: Service | None = None, close_timeout_s: float = 5.0) -> None:
        """Wrap ``client``."""
        super().__init__()
        self.client = client
        self.inner = inner
        self.close_timeout_s: float = setting(close_timeout_s, "float", "close_timeout_s")
        self.error_table = tuple(getattr(client, "error_table", ()))
        self._verbs: dict[str, ClientVerb] = {}

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Return the client's capabilities, without those of slots and deduplication, which need calls and op_ids."""
        ask = getattr(self.client, "get_capabilities", None)
        if ask is None:
            return DataPlaneCapabilities()
        told = ask()
        known = {name: bool(getattr(told, name, False)) for name in DataPlaneCapabilities.__dataclass_fields__}
        known.update(slot_addressable=False, slot_writes=False, mutation_dedup=False, claim_dedup=False)
        return DataPlaneCapabilities(**known)

    def attach_config(self) -> dict[str, Any]:
        """Return the client's attach config; raise DataPlaneUnsupported if the client has none."""
        ask = getattr(self.client, "attach_config", None)
        return super().attach_config() if ask is None else dict(ask())

    @property
    def owner(self) -> str:
        """Name under which the plane lists what the client puts and claims; empty if the client has none."""
        return str(getattr(self.client, "owner", ""))

    def _verb(self, name: str, ctx: CallContext) -> ClientVerb:
        """Return a verb of the client; raise DataPlaneUnsupported if it has none of that name."""
        found = self._verbs.get(name)
        if found is None:
            method = getattr(self.client, name, None)
            if method is None:
                msg = f"{type(self.client).__name__} has no {name}"
                raise DataPlaneUnsupported(msg, capability=name, op=ctx.verb)
            found = self._verbs[name] = ClientVerb.of(method)
        return found

    async def _call(self, name: str, ctx: CallContext, *args: Any, **kwargs: Any) -> Any:
        verb = self._verb(name, ctx)
        if verb.takes("timeout_s"):
            kwargs["timeout_s"] = 0.0 if ctx.looks_once else max(0.0, ctx.remaining())
        try:
            verb.check(*args, **kwargs)
        except TypeError as err:  # checked before the call: after a TypeError of the verb something may have been sent
            msg = f"{type(self.client).__name__}.{name}{verb.signature} cannot be called as asyncdp does: {err}"
            raise DataPlaneUnsupported(msg, capability=name, op=ctx.verb, cause=err) from err
        caller = Caller(ctx)
        before = CALLER.set(caller)
        try:
            if verb.is_async:
                return await verb.method(*args, **kwargs)
            result = await anyio.to_thread.run_sync(partial(verb.method, *args, **kwargs), abandon_on_cancel=True)
            return await result if inspect.isawaitable(result) else result
        finally:
            caller.ctx = None
            CALLER.reset(before)

    # -- A. task-mediated

    @handles(c.RegisterPartition)
    async def _register(self, call: c.RegisterPartition, ctx: CallContext) -> None:
        enums = {name: list(words) for name, words in call.enums.items()} or None
        fields, tasks = list(call.fields), list(call.consumer_tasks)
        group = call.grpo_group_size
        await self._call("register_partition", ctx, call.partition_id, fields, call.num_samples, tasks, group, enums)

    @handles(c.ClaimMeta)
    async def _claim(self, call: c.ClaimMeta, ctx: CallContext) -> KVBatchMeta:
        verb = self._verb("claim_meta", ctx)
        extra: dict[str, Any] = {}
        for name, value, usual in (
            ("blocking", call.blocking, True),
            ("dp_rank", call.dp_rank, None),
            ("min_batch_size", call.min_batch_size, None),
        ):
            if verb.takes(name) is not False:
                if value is not None:
                    extra[name] = value
            elif value != usual:
                msg = f"{type(self.client).__name__}.claim_meta takes no {name}, and the call has {name}={value!r}"
                raise DataPlaneUnsupported(msg, capability=name, op=ctx.verb)
        args = (call.partition_id, call.task_name, list(call.required_fields), call.batch_size)
        return _meta(await self._call("claim_meta", ctx, *args, **extra))

    @handles(c.GetSamples)
    async def _get(self, call: c.GetSamples, ctx: CallContext) -> TensorDict:
        ids, fields = list(call.sample_ids), list(call.fields)
        if ctx.verb == "get_data" and hasattr(self.client, "get_data"):
            handles_ = None if call.handles is None else list(call.handles)
            meta = KVBatchMeta(call.partition_id, sample_ids=ids, fields=fields, handles=handles_)
            got = await self._call("get_data", ctx, meta, fields)
        else:
            got = await self._call("get_samples", ctx, ids, call.partition_id, fields)
        _check_rows(got, call, type(self.client).__name__)
        return cast("TensorDict", got)

    @handles(c.CheckConsumptionStatus)
    async def _check(self, call: c.CheckConsumptionStatus, ctx: CallContext) -> bool:
        return bool(await self._call("check_consumption_status", ctx, call.partition_id, list(call.task_names)))

    # -- B. by key

    @handles(c.PutSamples)
    async def _put(self, call: c.PutSamples, ctx: CallContext) -> KVBatchMeta:
        tags = None if call.tags is None else [dict(row) for row in call.tags]
        ids, how = list(call.sample_ids), {}
        if call.only is not None:
            self._need_bound(ctx)
            how = {"only": call.only, "stale": "skip" if call.skip_stale else "raise"}
        named = ids if call.lives is None else _of_lives(call.partition_id, ids, call.lives)
        got = await self._call("put_samples", ctx, named, call.partition_id, call.fields, tags, **how)
        if got is not None:
            return _meta(got)
        names = list(field_names(call.fields))
        return KVBatchMeta(call.partition_id, sample_ids=list(call.sample_ids), fields=names, tags=tags)

    @handles(c.ClearSamples)
    async def _clear(self, call: c.ClearSamples, ctx: CallContext) -> int:
        if call.sample_ids is None:
            await self._call("clear_samples", ctx, None, call.partition_id)
            return 1
        await self._call("clear_samples", ctx, self._named(call, ctx), call.partition_id)
        return len(call.sample_ids)

    @handles(c.PopSamples, c.EvictSamples)
    async def _remove(self, call: c.ClearSamples, ctx: CallContext) -> int:
        name = "pop" if isinstance(call, c.PopSamples) else "evict"
        if not hasattr(self.client, name):
            name = "clear_samples"  # removes the same rows
        await self._call(name, ctx, self._named(call, ctx), call.partition_id)
        return len(call.sample_ids or ())

    def _named(self, call: c.ClearSamples, ctx: CallContext) -> list[str] | KVBatchMeta:
        """Return the rows of a removal as ids, or as a meta if the removal is bound to lives."""
        ids = list(call.sample_ids or ())
        if call.lives is None:
            return ids
        self._need_bound(ctx)
        held = call.claims or (None,) * len(ids)
        return _of_lives(call.partition_id, ids, call.lives, [claims[0] if claims else None for claims in held])

    def _need_bound(self, ctx: CallContext) -> None:
        """Raise DataPlaneUnsupported if the client cannot bind mutations to lives."""
        if not self.get_capabilities().bound_mutations:
            msg = f"{type(self.client).__name__} does not say that it binds {ctx.verb} to lives (bound_mutations)"
            raise DataPlaneUnsupported(msg, capability="bound_mutations", op=ctx.verb)

    # -- C. recovery

    @handles(c.Ping)
    async def _ping(self, call: c.Ping, ctx: CallContext) -> None:
        del call
        await self._call("ping", ctx)

    @handles(c.ListMetadata)
    async def _list(self, call: c.ListMetadata, ctx: CallContext) -> list[DataPlaneGroupMeta]:
        return list(await self._call("list_metadata", ctx, call.partition_id))

    @handles(c.Depth)
    async def _depth(self, call: c.Depth, ctx: CallContext) -> int:
        return int(await self._call("depth", ctx, call.partition_id))

    @handles(c.ReleaseClaim)
    async def _release(self, call: c.ReleaseClaim, ctx: CallContext) -> None:
        claims = [None if claim is None else RowHandle(0, claim) for claim in call.claim_ids]
        meta = KVBatchMeta(call.partition_id, call.task_name, list(call.sample_ids), handles=claims)
        await self._call("release_claim", ctx, meta)

    @handles(c.ListClaims)
    async def _claims_of(self, call: c.ListClaims, ctx: CallContext) -> list[ClaimInfo]:
        return list(await self._call("list_claims", ctx, call.partition_id, call.task_name))

    @handles(c.ReleaseClaims)
    async def _release_all(self, call: c.ReleaseClaims, ctx: CallContext) -> None:
        await self._call("release_claims", ctx, call.partition_id, call.owner)

    @handles(c.ListPartitions)
    async def _partitions(self, call: c.ListPartitions, ctx: CallContext) -> list[PartitionInfo]:
        del call
        return list(await self._call("list_partitions", ctx))

    @handles(c.ListHosts)
    async def _hosts(self, call: c.ListHosts, ctx: CallContext) -> list[HostStatus]:
        del call
        return list(await self._call("list_hosts", ctx))

    @handles(c.DescribePartition)
    async def _describe(self, call: c.DescribePartition, ctx: CallContext) -> PartitionInfo:
        return cast("PartitionInfo", await self._call("describe", ctx, call.partition_id))

    @handles(c.DropPartition)
    async def _drop(self, call: c.DropPartition, ctx: CallContext) -> None:
        await self._call("drop_partition", ctx, call.partition_id)

    @handles(c.WaitPartition)
    async def _wait(self, call: c.WaitPartition, ctx: CallContext) -> None:
        await self._call("wait_partition", ctx, call.partition_id)

    # -- D. lifecycle

    async def on_close(self) -> None:
        """Close the client, if it has a close(), within close_timeout_s; errors are logged."""
        close = getattr(self.client, "close", None)
        if close is not None:
            await self._close_client(close)
        if self.inner is not None:
            await self.inner.close()

    async def _close_client(self, close: Any) -> None:
        name = type(self.client).__name__
        try:
            with anyio.move_on_after(self.close_timeout_s) as scope:
                if inspect.iscoroutinefunction(close):
                    await close()
                else:
                    result = await anyio.to_thread.run_sync(close, abandon_on_cancel=True)
                    if inspect.isawaitable(result):
                        await result
        except Exception as err:  # noqa: BLE001 - code of another project may raise anything
            log_line("warning", "client_close_failed", client=name, error=f"{type(err).__name__}: {err}")
        else:
            if scope.cancelled_caught:
                log_line("warning", "client_close_timed_out", client=name, close_timeout_s=self.close_timeout_s)


def _meta(got: Any) -> KVBatchMeta:
    """Return a KVBatchMeta with the attributes of another project's meta."""
    try:
        return KVBatchMeta.of(got)
    except DataPlaneBadRequest as err:
        msg = f"the client answered with a {type(got).__name__}, which is no batch meta"
        raise DataPlaneError(msg, cause=err) from err


def _of_lives(
    partition_id: str, ids: list[str], lives: Sequence[int | None], claims: Sequence[str | None] | None = None
) -> KVBatchMeta:
    """Return a meta whose handles have these lives and claims."""
    told = zip(lives, claims or [None] * len(ids), strict=True)
    handles_ = [None if life is None else RowHandle(life, claim) for life, claim in told]
    return KVBatchMeta(partition_id, sample_ids=ids, handles=handles_)


def _check_rows(got: Any, call: c.GetSamples, who: str) -> None:
    """Raise if an answer has fewer rows or columns than were requested."""
    if not isinstance(got, TensorDictBase):
        msg = f"{who} answered with a {type(got).__name__} instead of a TensorDict"
        raise DataPlaneReadError(msg)
    rows = got.batch_size[0] if got.batch_size else None
    there = set(field_names(got))
    absent = [name for name in call.fields if name not in there]
    if rows != len(call.sample_ids) or absent:
        what = f"fields {absent} are missing" if absent else f"{rows} rows came"
        msg = f"{who}: {what} where {len(call.sample_ids)} rows of {list(call.fields)} were asked for"
        raise DataPlaneReadError(msg)
