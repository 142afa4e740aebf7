"""The client, whose verbs users call.

For each use of a verb, :class:`Client` checks the arguments, makes one call with a deadline and an op_id, and has a
service execute it. :func:`asyncdp.stack` makes a client over the default layers.
"""

from __future__ import annotations

import random
import sys
import uuid
import warnings
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from tensordict import TensorDict

from asyncdp import calls as c
from asyncdp.calls import Call, CallContext, Env, Only
from asyncdp.calls_in_flight import CallsInFlight
from asyncdp.clock import AnyioClock, NoSink, Unlimited
from asyncdp.compose.composition import SlotMapping
from asyncdp.compose.outcomes import PendingOutcomes
from asyncdp.errors import (
    DataPlaneError,
    DataPlaneUnsupported,
    PartialReadError,
)
from asyncdp.held_claims import HeldClaims
from asyncdp.meta import (
    ClaimInfo,
    DataPlaneCapabilities,
    DataPlaneGroupMeta,
    HostStatus,
    KVBatchMeta,
    PartitionInfo,
    Tags,
)
from asyncdp.process.tracebacks import shorten
from asyncdp.protocol import DataPlaneClient, Stale
from asyncdp.rows.block import field_names
from asyncdp.service import Service, layers_of
from asyncdp.settings import verb_arguments as check

if TYPE_CHECKING:
    from types import TracebackType

    import torch

    from asyncdp.batches import Batches, Idle, Survivors
    from asyncdp.metrics.histogram import Histogram
    from asyncdp.metrics.snapshot import Snapshot

__all__ = ["Client", "DataPlaneClient"]

R = TypeVar("R")

#: Seconds that the single poll of a claim with ``timeout_s=0`` may take; the default of AttemptTimeout.
LOOK_S = 10.0


class Caller:
    """Marks that a layer written in verbs is serving a call: verbs that it calls below end by that call's deadline."""

    __slots__ = ("ctx",)

    def __init__(self, ctx: CallContext) -> None:
        """Set ``ctx``; it becomes None when the call has ended, even if tasks of the layer still run."""
        self.ctx: CallContext | None = ctx


CALLER: ContextVar[Caller | None] = ContextVar("asyncdp caller", default=None)


class Client(DataPlaneClient):
    """A client: the verbs of :class:`DataPlaneClient` over a service.

    A client may be used by one event loop at a time. A verb raises DataPlaneBadRequest if a call of another loop is in
    flight, or in a forked child. A client is pickled as its config and, when unpickled, attaches to the same plane.

    ``Client(transport)`` has no layers: nothing is retried, bounded or counted. :func:`asyncdp.stack` adds layers.

    Args:
        service: A transport, or layers over one.
        env: State shared by the services of a stack; made by ``stack()``. None: the client makes its own, and puts
            :class:`~asyncdp.compose.composition.SlotMapping` above a slot-addressable service that has none.

    Attributes:
        call_timeout_s: Default of the verbs' ``timeout_s``, in seconds.
        full_tracebacks: Whether errors keep every frame and cause; set from the config's ``full_tracebacks``.
        outermost: Whether layers have retried what can be retried, so that errors leave with ``retryable=False``.
        recipe: How to make the client again, as (function, arguments); set by ``stack()`` and the factory.
        given: The service that the client was made with.
        service: The service that executes its calls.
    """

    def __init__(self, service: Service, *, env: Env | None = None) -> None:
        """Begin open, in use by no event loop."""
        self.given = service
        self.service = service
        capabilities = service.get_capabilities()
        if env is None:
            if capabilities.slot_addressable and not any(isinstance(one, SlotMapping) for one in layers_of(service)):
                self.service = SlotMapping(service)
            env = _plain_env(service)
            for one in layers_of(self.service):
                one.env = env
        self.env = env
        self._capabilities = capabilities
        *_, transport = layers_of(service)
        self.call_timeout_s = transport.call_timeout_s
        self.full_tracebacks = False
        self.outermost = False
        self.recipe: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self.__claims = HeldClaims()
        self._in_flight = CallsInFlight()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the recipe: when unpickled, the client attaches to the same plane."""
        return (Client, (self.given,)) if self.recipe is None else self.recipe

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Have the service execute a call in the given context, without the checks that a verb makes."""
        return self.service.execute(call, ctx)

    def get_capabilities(self) -> DataPlaneCapabilities:
        return self._capabilities

    def attach_config(self) -> dict[str, Any]:
        return self.service.attach_config()

    def snapshot(self) -> Snapshot:
        """Return what the client has counted; all zero if it has no layers."""
        return self.service.snapshot()

    def call_times(self) -> dict[tuple[str, str], Histogram]:
        """Return a histogram of durations per (op, status), such as ``("put", "ok")``; {} if it has no layers."""
        return self.service.call_times()

    @property
    def owner(self) -> str:
        """Name under which the plane lists what this client puts and claims."""
        return self.service.owner

    # -- one user call

    async def __run(self, call: Call[R], verb: str, timeout_s: float | None) -> R:
        env = self.env
        timeout_s = self.call_timeout_s if timeout_s is None else check.seconds(timeout_s, verb)
        self._in_flight.begin(call, verb)
        began = env.clock.now()
        serving = CALLER.get()
        caller = None if serving is None else serving.ctx
        if caller is None or caller.env is not env:
            caller = None
            env.budget.deposit(began)
        try:
            ctx = CallContext(env, env.next_op_id(), began + timeout_s, verb, began, call=call)
            if not timeout_s and isinstance(call, (c.ClaimMeta, c.WaitPartition)):
                look_s = LOOK_S if self.service is not self.given else 0.0
                ctx = replace(ctx, looks_once=True, deadline=began + look_s)
            elif caller is not None and not caller.looks_once and caller.deadline < ctx.deadline:
                ctx = replace(ctx, deadline=caller.deadline)
            return await self.service.execute(call, ctx)
        except DataPlaneError as err:
            leaving = self.__leaving(err, call, verb, env.clock.now() - began)
            if self.outermost and not self.full_tracebacks:
                shorten(leaving, sys._getframe())  # noqa: SLF001 - what inspect.currentframe() returns, typed
            raise leaving from leaving.__cause__
        finally:
            self._in_flight.ended()

    def __leaving(self, err: DataPlaneError, call: Call[Any], verb: str, elapsed_s: float) -> DataPlaneError:
        """Complete an error that leaves the client: verb, partition, elapsed time, ``retryable``."""
        if isinstance(err, PartialReadError) and not err.ok.size:
            err = err.alone()
        err.located(op=verb, partition_id=getattr(call, "partition_id", None))
        if err.elapsed_s is None:
            err.elapsed_s = elapsed_s
        if self.outermost:
            err.retryable = False
            if isinstance(err, PartialReadError):
                for row in err.errors.values():
                    row.retryable = False
        return err

    # -- A. task-mediated

    @check.of_verb
    async def register_partition(
        self,
        partition_id: str,
        fields: Sequence[str],
        num_samples: int,
        consumer_tasks: Sequence[str],
        grpo_group_size: int | None = None,
        enums: Mapping[str, Sequence[str]] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> None:
        if enums is not None and not isinstance(enums, Mapping):
            raise check.bad(f"enums must map fields to vocabularies, not {enums!r:.80}", "enums")
        call = c.RegisterPartition(
            check.name(partition_id, "partition_id"),
            check.names(fields, "fields"),
            check.count(num_samples, "num_samples", 0),
            check.names(consumer_tasks, "consumer_tasks"),
            None if grpo_group_size is None else check.count(grpo_group_size, "grpo_group_size"),
            {
                check.name(f, "each field of enums"): check.names(words, f"enums[{f!r}]")
                for f, words in (enums or {}).items()
            },
        )
        for name, words in call.enums.items():
            if len(set(words)) != len(words) or not words:
                raise check.bad(f"the vocabulary of {name!r} is empty or names a word twice", "enums")
        await self.__run(call, "register_partition", timeout_s)

    @check.of_verb
    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,  # noqa: FBT001, FBT002
        timeout_s: float | None = None,
        *,
        min_batch_size: int | None = None,
    ) -> KVBatchMeta:
        call = c.ClaimMeta(
            check.name(partition_id, "partition_id"),
            check.name(task_name, "task_name"),
            check.names(required_fields, "required_fields"),
            check.count(batch_size, "batch_size"),
            None if min_batch_size is None else check.count(min_batch_size, "min_batch_size"),
            None if dp_rank is None else check.count(dp_rank, "dp_rank", 0),
            check.flag(blocking, "blocking"),
        )
        if min_batch_size is not None and min_batch_size > batch_size:
            raise check.bad(f"min_batch_size {min_batch_size} is above batch_size {batch_size}", "min_batch_size")
        meta = await self.__run(call, "claim_meta", timeout_s)
        self.__claims.remember(meta)
        return meta

    @check.of_verb
    async def get_data(
        self,
        meta: KVBatchMeta,
        select_fields: Sequence[str] | None = None,
        *,
        borrow: bool = False,
        timeout_s: float | None = None,
    ) -> TensorDict:
        meta = KVBatchMeta.of(meta)
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise check.bad("neither select_fields nor meta.fields names a field", "select_fields")
        handles = None if meta.handles is None else tuple(meta.handles)
        return await self.__get(meta.sample_ids, meta.partition_id, fields, handles, borrow, "get_data", timeout_s)

    async def __get(
        self,
        sample_ids: Any,
        partition_id: Any,
        fields: Any,
        handles: Any,
        borrow: Any,
        verb: str,
        timeout_s: float | None,
    ) -> TensorDict:
        ids = check.ids(sample_ids)
        names = tuple(dict.fromkeys(check.names(fields, "select_fields")))
        name, borrow = check.name(partition_id, "partition_id"), check.flag(borrow, "borrow")
        call = c.GetSamples(ids, name, names, handles, borrow)
        if not ids:
            return TensorDict({}, batch_size=[0])
        if not names:
            raise check.bad("select_fields is empty", "select_fields")
        return await self.__run(call, verb, timeout_s)

    @check.of_verb
    async def check_consumption_status(
        self, partition_id: str, task_names: Sequence[str], *, timeout_s: float | None = None
    ) -> bool:
        call = c.CheckConsumptionStatus(check.name(partition_id, "partition_id"), check.names(task_names, "task_names"))
        return await self.__run(call, "check_consumption_status", timeout_s)

    # -- B. by key

    @check.of_verb
    async def put_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta,
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Tags] | None = None,
        *,
        only: Only | None = None,
        stale: Stale = "raise",
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        partition_id = check.name(partition_id, "partition_id")
        named = check.rows(sample_ids, partition_id, "sample_ids", ordered=True)
        ids, meta = named.ids, named.meta
        if only is not None:
            only = cast("Only", check.choice(only, "only", ("existing", "new")))
        stale = cast("Stale", check.choice(stale, "stale", ("raise", "skip")))
        if meta is not None:
            if only == "new":
                raise check.bad("only='new' contradicts a put by meta, which means rows that live", "only")
            only = "existing"
        if stale == "skip" and only != "existing":
            raise check.bad("stale='skip' needs a meta or only='existing': no row of another put can be stale", "stale")
        if len(set(ids)) != len(ids):
            raise check.bad(f"sample_ids names {check.first_duplicate(ids)!r} twice", "sample_ids")
        data = check.field_columns(fields, len(ids))
        rows = None if tags is None else check.tag_rows(tags, len(ids))
        if not ids:
            none = KVBatchMeta(partition_id) if meta is None else replace(meta.subset(()), created=[])
            return none.only_fields(None if data is None else field_names(data))
        if rows is None and not field_names(data):
            raise check.bad("neither fields nor tags has anything to put", "fields")
        if only is None:
            return await self.__run(c.PutSamples(ids, partition_id, data, rows), "put_samples", timeout_s)
        self.__need_bound("put_samples", partition_id)
        call = c.PutSamples(ids, partition_id, data, rows, only, named.lives, stale == "skip")
        written = await self.__run(call, "put_samples", timeout_s)
        return written if meta is None else _written_of(meta, written)

    @check.of_verb
    async def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        borrow: bool = False,
        timeout_s: float | None = None,
    ) -> TensorDict:
        return await self.__get(sample_ids, partition_id, select_fields, None, borrow, "get_samples", timeout_s)

    @check.of_verb
    async def clear_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta | None,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        partition_id = check.name(partition_id, "partition_id")
        if sample_ids is None:
            call = c.ClearSamples(None, partition_id, self.owner)
            if not await self.__run(call, "clear_samples", timeout_s):
                text = (
                    f"clear_samples(None, {partition_id!r}) found nothing that {self.owner!r} put and that still lives"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=3)
            self.__claims.forget(partition_id, None)
            return
        await self.__remove(c.ClearSamples, sample_ids, partition_id, "clear_samples", timeout_s)

    # -- C. recovery

    @check.of_verb
    async def ping(self, timeout_s: float = 5.0) -> None:
        await self.__run(c.Ping(), "ping", timeout_s)

    @check.of_verb
    async def list_metadata(self, partition_id: str, *, timeout_s: float | None = None) -> list[DataPlaneGroupMeta]:
        return await self.__run(c.ListMetadata(check.name(partition_id, "partition_id")), "list_metadata", timeout_s)

    @check.of_verb
    async def depth(self, partition_id: str, *, timeout_s: float | None = None) -> int:
        return await self.__run(c.Depth(check.name(partition_id, "partition_id")), "depth", timeout_s)

    @check.of_verb
    async def pop(
        self,
        keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        await self.__remove(c.PopSamples, keys, partition_id, "pop", timeout_s)

    @check.of_verb
    async def evict(
        self,
        keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        *,
        timeout_s: float | None = None,
    ) -> None:
        await self.__remove(c.EvictSamples, keys, partition_id, "evict", timeout_s)

    async def __remove(
        self, kind: type[c.ClearSamples], keys: Any, partition_id: Any, verb: str, timeout_s: float | None
    ) -> None:
        """Remove rows by ids, a meta or a group; of a meta or group only the lives that it names."""
        partition_id = check.name(partition_id, "partition_id")
        named = check.rows(keys, partition_id, "sample_ids" if verb == "clear_samples" else "keys")
        if not named.ids:
            return
        if named.lives is not None or named.is_group:
            self.__need_bound(verb, partition_id)
        ids = named.ids if named.lives is not None else tuple(dict.fromkeys(named.ids))
        claims = self.__claims.of(named, ids, partition_id) if kind is c.PopSamples else None
        await self.__run(kind(ids, partition_id, claims=claims, lives=named.lives), verb, timeout_s)
        self.__claims.forget(partition_id, ids, named.lives)

    def __need_bound(self, verb: str, partition_id: str) -> None:
        """Raise DataPlaneUnsupported if the backend cannot bind a mutation to lives."""
        if not self.get_capabilities().bound_mutations:
            msg = f"this backend lacks bound_mutations, which {verb} needs for a meta, a group or only=; pass plain ids"
            raise DataPlaneUnsupported(msg, capability="bound_mutations", op=verb, partition_id=partition_id)

    @check.of_verb
    async def release_claim(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        meta = KVBatchMeta.of(meta)
        if not meta.size:
            return
        partition_id = check.name(meta.partition_id, "meta.partition_id")
        task = check.name(meta.task_name, "meta.task_name")
        claims = tuple(h.claim_id if h else None for h in meta.handles or [None] * meta.size)
        if None in claims:
            name = meta.sample_ids[claims.index(None)]
            raise check.bad(f"the meta has no claim for sample {name!r}", "meta")
        call = c.ReleaseClaim(partition_id, task, check.names(meta.sample_ids, "meta.sample_ids"), claims)
        await self.__run(call, "release_claim", timeout_s)
        self.__claims.released(partition_id, call.sample_ids, task)

    @check.of_verb
    async def list_claims(
        self, partition_id: str, task_name: str, *, timeout_s: float | None = None
    ) -> list[ClaimInfo]:
        call = c.ListClaims(check.name(partition_id, "partition_id"), check.name(task_name, "task_name"))
        return await self.__run(call, "list_claims", timeout_s)

    @check.of_verb
    async def release_claims(self, partition_id: str, owner: str, *, timeout_s: float | None = None) -> None:
        call = c.ReleaseClaims(check.name(partition_id, "partition_id"), check.name(owner, "owner"))
        await self.__run(call, "release_claims", timeout_s)

    @check.of_verb
    async def list_partitions(self, *, timeout_s: float | None = None) -> list[PartitionInfo]:
        return await self.__run(c.ListPartitions(), "list_partitions", timeout_s)

    @check.of_verb
    async def describe(self, partition_id: str, *, timeout_s: float | None = None) -> PartitionInfo:
        return await self.__run(c.DescribePartition(check.name(partition_id, "partition_id")), "describe", timeout_s)

    @check.of_verb
    async def list_hosts(self, *, timeout_s: float | None = None) -> list[HostStatus]:
        return await self.__run(c.ListHosts(), "list_hosts", timeout_s)

    @check.of_verb
    async def drop_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        partition_id = check.name(partition_id, "partition_id")
        await self.__run(c.DropPartition(partition_id), "drop_partition", timeout_s)
        self.__claims.forget(partition_id, None)

    @check.of_verb
    async def wait_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        await self.__run(c.WaitPartition(check.name(partition_id, "partition_id")), "wait_partition", timeout_s)

    def batches(  # noqa: PLR0913 - the arguments of claim_meta, and how to iterate
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        select_fields: Sequence[str] | None = None,
        min_batch_size: int | None = None,
        prefetch: int = 0,
        device: torch.device | str | int | None = None,
        borrow: bool = False,
        survivors: Survivors = "raise",
        idle: Idle = "raise",
        timeout_s: float | None = None,
    ) -> Batches:
        from asyncdp.batches import Batches

        return Batches(
            self,
            partition_id,
            task_name,
            check.names(required_fields, "required_fields"),
            check.count(batch_size, "batch_size"),
            select_fields=None if select_fields is None else check.names(select_fields, "select_fields"),
            min_batch_size=min_batch_size,
            prefetch=check.count(prefetch, "prefetch", 0),
            timeout_s=timeout_s,
            device=check.device(device),
            borrow=check.flag(borrow, "borrow"),
            survivors=cast("Survivors", check.choice(survivors, "survivors", ("raise", "drop"))),
            idle=cast("Idle", check.choice(idle, "idle", ("raise", "wait", "end"))),
        )

    # -- D. lifecycle

    async def close(self) -> None:
        """Close the client: waiting calls raise DataPlaneClosed.

        Idempotent; in a forked child it leaves the parent's client open.
        """
        if self._in_flight.closed:
            return
        try:
            await self.end_calls()
        finally:
            await self.service.close()

    async def end_calls(self) -> None:
        """Cancel the waits of calls, which then raise DataPlaneClosed, and let the calls end, within a second."""
        await self._in_flight.end(self.env.open_waits)

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()


def _plain_env(service: Service) -> Env:
    """Return the Env of a client without layers."""
    return Env(
        clock=AnyioClock(),
        rng=random.Random(),  # noqa: S311 - jitter
        sink=NoSink(),
        budget=Unlimited(),
        codec=service.object_codec,
        pending_outcomes=PendingOutcomes(),
        session=uuid.uuid4().hex[:16],
    )


def _written_of(meta: KVBatchMeta, written: KVBatchMeta) -> KVBatchMeta:
    """Return the rows of ``meta`` that a put by it wrote, with the task and claims of ``meta``, and where they lie."""
    if written.size == meta.size:
        rows = meta.subset(range(meta.size))
    else:
        there = set(written.sample_ids)
        rows = meta.subset([at for at, sample_id in enumerate(meta.sample_ids) if sample_id in there])
    pairs = zip(rows.handles or [None] * rows.size, written.handles or [None] * rows.size, strict=True)
    tags: list[Tags] | None = written.tags
    if rows.tags is not None:
        tags = [{**old, **new} for old, new in zip(rows.tags, written.tags or [{}] * rows.size, strict=True)]
    return replace(
        rows,
        fields=written.fields,
        sequence_lengths=written.sequence_lengths or rows.sequence_lengths,
        tags=tags,
        handles=[old._replace(hint=new.hint) if old and new and new.hint else old or new for old, new in pairs],
        created=written.created,
    )
