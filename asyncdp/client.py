"""The client: what users call.

:class:`DataPlaneClient` is the protocol that every client fulfils. :class:`BaseClient` writes its verbs once, over
``execute``; layers and transports derive from it, so each of them is a client too.
"""

from __future__ import annotations

import os
import random
import threading
import uuid
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeVar, cast, runtime_checkable

import anyio
from tensordict import TensorDict, TensorDictBase

from asyncdp import calls as c
from asyncdp.block import PICKLE, ObjectCodec, field_names
from asyncdp.calls import Call, CallContext, Env
from asyncdp.clock import AnyioClock, NoSink, Unlimited
from asyncdp.errors import (
    DataPlaneBadRequest,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneUnsupported,
    PartialReadError,
)
from asyncdp.ledger import Ledger
from asyncdp.meta import ClaimInfo, DataPlaneCapabilities, DataPlaneGroupMeta, KVBatchMeta, PartitionInfo, Tags

if TYPE_CHECKING:
    from types import TracebackType

    from asyncdp.batches import Batches

__all__ = ["BaseClient", "DataPlaneClient"]

R = TypeVar("R")

#: How many claim ids a client remembers for plain ids given to pop; the oldest are forgotten first.
CLAIMS_REMEMBERED = 1 << 20
#: How long close() waits, in seconds, for calls whose waits it has ended: a tick, unless a backend does not let go.
CALLS_END_S = 1.0
#: How many ids a message names.
SHOWN = 8


@runtime_checkable
class DataPlaneClient(Protocol):
    """An async client of a data plane. Each verb ends within ``timeout_s`` (default 60 s) with the real error.

    Sample ids, fields, tasks and partitions are named by non-empty strings.
    """

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
        """Declare fields and consumer tasks of a partition; again: fields, tasks and enums are united, rows stay.

        ``num_samples`` is a hint, not a limit.
        """

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        dp_rank: int | None = None,
        blocking: bool = True,  # noqa: FBT001, FBT002 - the order is the field's
        timeout_s: float | None = None,
        *,
        min_batch_size: int | None = None,
    ) -> KVBatchMeta:
        """Claim samples that have all ``required_fields``, first ready first; no task gets a sample twice.

        Returns as soon as ``batch_size`` samples (or ``min_batch_size``) are ready, at most ``batch_size``; whole
        groups where the partition has a group size. ``blocking=False`` returns what is ready, maybe nothing.

        Raises:
            ClaimNotReady: Too few were ready in time; nothing was claimed.
            DataPlaneBadRequest: Unknown partition, task or field; batch_size below one group.
        """

    async def get_data(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TensorDict:
        """Read ``select_fields``, else ``meta.fields``, of the rows of a meta; batch size ``(meta.size,)``.

        Raises:
            StaleSlotError: A row was cleared, or lives again, since the meta was made.
            PartialReadError: Some rows came; they are in the error.
            DataPlaneBadRequest: Neither names a field.
        """

    async def check_consumption_status(
        self, partition_id: str, task_names: Sequence[str], *, timeout_s: float | None = None
    ) -> bool:
        """Tell whether every sample present is claimed by every named task; True where there is none."""

    async def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Tags] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """Write fields, batch size ``(len(sample_ids),)``, and tags; whole or absent. Tags merge by key.

        Raises:
            DataPlaneNotReady: The plane is full; nothing was written.
            DataPlaneBadRequest: Something cannot be kept unchanged; the message names it, nothing was written.
        """

    async def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | None = None,
    ) -> TensorDict:
        """Read fields of samples, in the order asked; never fewer rows or columns.

        Raises:
            SampleNotFound: No row came: no such id, or the field is not produced.
            PartialReadError: Some rows came; they are in the error.
        """

    async def clear_samples(
        self, sample_ids: Sequence[str] | None, partition_id: str, *, timeout_s: float | None = None
    ) -> None:
        """Remove samples; what is not there is no error. None: all that this client's owner put and still lives."""

    async def ping(self, timeout_s: float = 5.0) -> None:
        """Go through the plane's request path and come back."""

    async def list_metadata(self, partition_id: str, *, timeout_s: float | None = None) -> list[DataPlaneGroupMeta]:
        """List the groups of a partition, oldest first, without tensors; consumes nothing."""

    async def depth(self, partition_id: str, *, timeout_s: float | None = None) -> int:
        """Count the groups that are committed and complete, claimed or not."""

    async def pop(
        self, keys: Sequence[str] | KVBatchMeta, partition_id: str, *, timeout_s: float | None = None
    ) -> None:
        """Remove trained samples.

        Raises:
            ClaimLost: They were claimed by this client, and the claim is not its own any more.
        """

    async def evict(
        self, keys: Sequence[str] | KVBatchMeta, partition_id: str, *, timeout_s: float | None = None
    ) -> None:
        """Remove stale samples, whoever claimed them."""

    async def release_claim(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """Make the claimed samples of a meta claimable again."""

    async def list_claims(
        self, partition_id: str, task_name: str, *, timeout_s: float | None = None
    ) -> list[ClaimInfo]:
        """List the claims of a task that live."""

    async def release_claims(self, partition_id: str, owner: str, *, timeout_s: float | None = None) -> None:
        """Make everything that ``owner`` claimed claimable again."""

    async def list_partitions(self, *, timeout_s: float | None = None) -> list[PartitionInfo]:
        """List all partitions."""

    async def describe(self, partition_id: str, *, timeout_s: float | None = None) -> PartitionInfo:
        """Describe one partition."""

    async def drop_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """Remove a partition with its samples; what is not there is no error."""

    async def wait_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """Wait until somebody registered the partition."""

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the backend guarantees beyond the common promises."""

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""

    def batches(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        select_fields: Sequence[str] | None = None,
        min_batch_size: int | None = None,
        prefetch: int = 0,
        timeout_s: float | None = None,
    ) -> AsyncIterator[tuple[KVBatchMeta, TensorDict]]:
        """Iterate over claimed batches with their data, until the caller stops."""

    async def close(self) -> None:
        """End the client; idempotent."""


# --- checking arguments ---------------------------------------------------------------------------------------------


def _bad(what: str, field: str) -> DataPlaneBadRequest:
    return DataPlaneBadRequest(what, field=field)


def _name(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise _bad(f"{what} must be a non-empty string, not {value!r}", what)
    return value


def _names(values: Any, what: str) -> tuple[str, ...]:
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise _bad(f"{what} must be a sequence of strings, not {values!r:.80}", what)
    names = tuple(values)
    for value in names:
        if type(value) is not str or not value:
            _name(value, f"each of {what}")
    return names


def _count(value: Any, what: str, least: int = 1) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _bad(f"{what} must be an int of at least {least}, not {value!r}", what)
    return value


def _seconds(value: Any, verb: str) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        msg = f"timeout_s must be a number of seconds, at least 0, not {value!r}"
        raise DataPlaneBadRequest(msg, op=verb, field="timeout_s")


#: Tags that the plane itself reads, and what they may be.
_TYPED_TAGS: Mapping[str, tuple[type, ...]] = {
    "group_id": (str, int),
    "weight_version": (int,),
    "expected_num_keys": (int,),
    "committed": (bool,),
    "status": (str,),
    "created_at": (float, int),
    "size_bytes": (int,),
    "input_lengths": (int,),
}
_PRIMITIVES = (str, int, float, bool, type(None))


def _tags(tags: Any, n: int) -> tuple[Tags, ...]:
    if isinstance(tags, (str, bytes, Mapping)) or not isinstance(tags, Iterable):
        raise _bad(f"tags must be a sequence of one dict per sample, not {type(tags).__name__}", "tags")
    rows = list(tags)
    if len(rows) != n:
        raise _bad(f"tags has {len(rows)} entries for {n} samples", "tags")
    return tuple(_tag_row(row, at) for at, row in enumerate(rows))


def _tag_row(row: Any, at: int) -> Tags:
    if not isinstance(row, Mapping):
        raise _bad(f"tags[{at}] must be a dict, not {type(row).__name__}", "tags")
    plain: Tags = {}
    for key, value in row.items():
        if not isinstance(key, str):
            raise _bad(f"tags[{at}] has the key {key!r}; keys are strings", "tags")
        if type(value) in _PRIMITIVES or isinstance(value, _PRIMITIVES):
            plain[key] = value
        elif getattr(value, "shape", None) == () and hasattr(value, "item"):
            plain[key] = value.item()  # a numpy or torch scalar: the same number
        else:
            kind = type(value).__name__
            raise _bad(f"tag {key!r} of tags[{at}] is a {kind}; tags are str, int, float, bool or None", "tags")
    for key in _TYPED_TAGS.keys() & plain.keys():
        if plain[key] is not None and type(plain[key]) not in _TYPED_TAGS[key]:
            kinds = " or ".join(kind.__name__ for kind in _TYPED_TAGS[key])
            raise _bad(f"tag {key!r} of tags[{at}] must be {kinds}, not {plain[key]!r}", key)
    return plain


def _fields(fields: Any, n: int) -> TensorDict | None:
    if fields is None:
        return None
    if isinstance(fields, TensorDictBase):
        if not fields.batch_size or fields.batch_size[0] != n:
            raise _bad(f"fields has batch size {tuple(fields.batch_size)} for {n} samples", "fields")
        for key in fields.keys():  # noqa: SIM118 - a TensorDict iterates over rows
            if not isinstance(key, str) or not key:
                raise _bad(f"fields has the key {key!r}; field names are non-empty strings", "fields")
        return cast("TensorDict", fields)
    if isinstance(fields, Mapping):
        _names(fields, "fields")
        return cast("TensorDict", fields)  # a plain dict of columns serves as well; each is checked when it is packed
    raise _bad(f"fields must be a TensorDict, not {type(fields).__name__}", "fields")


def _single(err: PartialReadError) -> DataPlaneError:
    """Where no row came: the error itself, of the kind that a controller can do something about."""
    errors = list(err.errors.values())
    chosen = next((e for e in errors if e.retryable), errors[0])
    if len(errors) > 1:
        same = [at for at, e in err.errors.items() if type(e) is type(chosen)]
        first, chosen = chosen, copy(chosen)
        chosen.__cause__ = first.__cause__
        ids = dict(zip(err.errors, err.sample_ids, strict=True))
        chosen.sample_ids = tuple(ids[at] for at in same)
        if len(same) > 1 or len(errors) > len(same):
            shown = ", ".join(repr(ids[at]) for at in same[:SHOWN]) + (", ..." if len(same) > SHOWN else "")
            others = f", and {len(errors) - len(same)} others failed otherwise" if len(errors) > len(same) else ""
            chosen.message = f"none of {len(errors)} rows came: {first.message} ({shown}{others})"
    return chosen


def _descendants(kind: type[Call[Any]]) -> Iterable[type[Call[Any]]]:
    for child in kind.__subclasses__():
        yield child
        yield from _descendants(child)


# --- the verbs, once ------------------------------------------------------------------------------------------------


class BaseClient:
    """The verbs over :meth:`execute`. A subclass serves calls by methods marked with ``@handles``, or overrides it.

    A client belongs to one event loop at a time: used from a second one while a call is under way, or in a forked
    child, it says so with DataPlaneBadRequest. Pickled, it travels as its config and attaches again.
    """

    #: Seconds that a verb may take unless told otherwise.
    call_timeout_s: float = 60.0
    _methods: ClassVar[dict[type[Call[Any]], str]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Collect the methods marked with ``@handles``, also inherited ones."""
        super().__init_subclass__(**kwargs)
        marked: dict[type[Call[Any]], str] = {}
        for base in reversed(cls.__mro__):
            for name, member in vars(base).items():
                for kind in getattr(member, "__handles__", ()):
                    marked[kind] = name
        # A call's subclass (PopSamples is a ClearSamples) goes to the same method unless it has one of its own.
        cls._methods = dict(marked)
        for kind, name in marked.items():
            for child in _descendants(kind):
                nearest = next(k for k in child.__mro__ if k in marked)
                if nearest is kind:
                    cls._methods[child] = name

    def __init__(self) -> None:
        """Begin open, at home in no event loop."""
        self._env: Env | None = None
        self.__claims: dict[tuple[str, str], dict[str, str]] = {}
        self.__pid = os.getpid()
        self.__home: int | None = None
        self.__in_flight = 0
        self.__idle: anyio.Event | None = None
        self._closed = False
        #: Set by stack() on what it returns: errors that leave it are not to be retried by anybody in it any more.
        self.outermost = False
        #: How to make the client again, set by stack() and the factory: (function, arguments).
        self.recipe: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        self._served: dict[type[Call[Any]], Callable[..., Awaitable[Any]]] = {
            kind: getattr(self, name) for kind, name in self._methods.items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by recipe: unpickled, the client attaches to the same plane."""
        if self.recipe is None:
            msg = f"a {type(self).__name__} is pickled as part of the client that stack() returned"
            raise TypeError(msg)
        return self.recipe

    # -- to be served by subclasses

    def execute(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve a call with the method marked for it; what none is marked for is DataPlaneUnsupported."""
        method = self._served.get(type(call))
        if method is None:
            return self.unserved(call, ctx)
        return cast("Coroutine[Any, Any, R]", method(call, ctx))

    def unserved(self, call: Call[R], ctx: CallContext) -> Coroutine[Any, Any, R]:
        """Serve a call that no method is marked for."""
        kind = type(call).__name__
        msg = f"{type(self).__name__} does not serve {kind}"
        raise DataPlaneUnsupported(msg, capability=kind, op=ctx.verb)

    def get_capabilities(self) -> DataPlaneCapabilities:
        """Tell what the backend guarantees; none of it unless a subclass says so."""
        return DataPlaneCapabilities()

    def attach_config(self) -> dict[str, Any]:
        """Return the config with which another process attaches to the same plane."""
        msg = f"{type(self).__name__} cannot be attached to"
        raise DataPlaneUnsupported(msg, capability="attach_config", op="attach_config")

    @property
    def object_codec(self) -> ObjectCodec:
        """How non-tensor values are encoded."""
        return PICKLE

    @property
    def owner(self) -> str:
        """Who this client is to the plane: what it puts and claims is listed under this name."""
        return ""

    @property
    def env(self) -> Env:
        """What the layers share; a client without a stack makes one of its own."""
        if self._env is None:
            self._env = Env(
                clock=AnyioClock(),
                rng=random.Random(),  # noqa: S311 - jitter
                sink=NoSink(),
                budget=Unlimited(),
                codec=self.object_codec,
                ledger=Ledger(),
                session=uuid.uuid4().hex[:16],
            )
        return self._env

    @env.setter
    def env(self, env: Env) -> None:
        self._env = env

    # -- one user call

    async def __run(self, call: Call[R], verb: str, timeout_s: float | None) -> R:
        env = self.env if self._env is None else self._env
        if self._closed:
            msg = "the client is closed"
            raise DataPlaneClosed(msg, op=verb, partition_id=getattr(call, "partition_id", None))
        if timeout_s is None:
            timeout_s = self.call_timeout_s
        else:
            _seconds(timeout_s, verb)
        self.__enter(verb)
        began = env.clock.now()
        env.budget.deposit(began)
        try:
            return await self.execute(call, CallContext(env, env.next_op_id(), began + timeout_s, verb, began))
        except DataPlaneError as err:
            leaving = self.__leaving(err, call, verb, env.clock.now() - began)
            raise leaving from leaving.__cause__
        finally:
            self.__in_flight -= 1
            if self.__idle is not None and not self.__in_flight:
                self.__idle.set()

    def __enter(self, verb: str) -> None:
        """Notice a second event loop, a second thread, a forked child."""
        here = threading.get_ident()
        if self.__pid != os.getpid():
            msg = f"this client was made in process {self.__pid}; a forked child attaches a client of its own"
            raise DataPlaneBadRequest(msg, op=verb)
        if self.__in_flight == 0:
            self.__home = here
        elif self.__home != here:
            msg = "this client is in use by the event loop of another thread; use one client per loop"
            raise DataPlaneBadRequest(msg, op=verb)
        self.__in_flight += 1

    def __leaving(self, err: DataPlaneError, call: Call[Any], verb: str, elapsed_s: float) -> DataPlaneError:
        """Complete an error at the boundary."""
        if isinstance(err, PartialReadError) and not err.ok.size:
            err = _single(err)
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
        """See :class:`DataPlaneClient`."""
        if enums is not None and not isinstance(enums, Mapping):
            raise _bad(f"enums must map fields to vocabularies, not {enums!r:.80}", "enums")
        call = c.RegisterPartition(
            _name(partition_id, "partition_id"),
            _names(fields, "fields"),
            _count(num_samples, "num_samples", 0),
            _names(consumer_tasks, "consumer_tasks"),
            None if grpo_group_size is None else _count(grpo_group_size, "grpo_group_size"),
            {_name(f, "each field of enums"): _names(words, f"enums[{f!r}]") for f, words in (enums or {}).items()},
        )
        for name, words in call.enums.items():
            if len(set(words)) != len(words) or not words:
                raise _bad(f"the vocabulary of {name!r} is empty or names a word twice", "enums")
        await self.__run(call, "register_partition", timeout_s)

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
        """See :class:`DataPlaneClient`."""
        call = c.ClaimMeta(
            _name(partition_id, "partition_id"),
            _name(task_name, "task_name"),
            _names(required_fields, "required_fields"),
            _count(batch_size, "batch_size"),
            None if min_batch_size is None else _count(min_batch_size, "min_batch_size"),
            None if dp_rank is None else _count(dp_rank, "dp_rank", 0),
            bool(blocking),
        )
        if min_batch_size is not None and min_batch_size > batch_size:
            raise _bad(f"min_batch_size {min_batch_size} is above batch_size {batch_size}", "min_batch_size")
        meta = await self.__run(call, "claim_meta", timeout_s)
        self.__remember(meta)
        return meta

    async def get_data(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TensorDict:
        """See :class:`DataPlaneClient`."""
        if not isinstance(meta, KVBatchMeta):
            raise _bad(f"meta must be a KVBatchMeta, not {type(meta).__name__}", "meta")
        fields = meta.fields if select_fields is None else select_fields
        if fields is None:
            raise _bad("neither select_fields nor meta.fields names a field", "select_fields")
        handles = None if meta.handles is None else tuple(meta.handles)
        return await self.__get(meta.sample_ids, meta.partition_id, fields, handles, "get_data", timeout_s)

    async def __get(
        self, sample_ids: Any, partition_id: Any, fields: Any, handles: Any, verb: str, timeout_s: float | None
    ) -> TensorDict:
        ids = _names(sample_ids, "sample_ids")
        names = tuple(dict.fromkeys(_names(fields, "select_fields")))
        call = c.GetSamples(ids, _name(partition_id, "partition_id"), names, handles)
        if not ids:
            return TensorDict({}, batch_size=[0])
        if not names:
            raise _bad("select_fields is empty", "select_fields")
        return await self.__run(call, verb, timeout_s)

    async def check_consumption_status(
        self, partition_id: str, task_names: Sequence[str], *, timeout_s: float | None = None
    ) -> bool:
        """See :class:`DataPlaneClient`."""
        call = c.CheckConsumptionStatus(_name(partition_id, "partition_id"), _names(task_names, "task_names"))
        return await self.__run(call, "check_consumption_status", timeout_s)

    # -- B. by key

    async def put_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Tags] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> KVBatchMeta:
        """See :class:`DataPlaneClient`."""
        ids = _names(sample_ids, "sample_ids")
        _name(partition_id, "partition_id")
        if len(set(ids)) != len(ids):
            twice = next(i for i in ids if ids.count(i) > 1)
            raise _bad(f"sample_ids names {twice!r} twice", "sample_ids")
        data = _fields(fields, len(ids))
        rows = None if tags is None else _tags(tags, len(ids))
        if not ids:
            return KVBatchMeta(partition_id, fields=None if data is None else list(field_names(data)))
        if rows is None and not field_names(data):
            raise _bad("neither fields nor tags has anything to put", "fields")
        return await self.__run(c.PutSamples(ids, partition_id, data, rows), "put_samples", timeout_s)

    async def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | None = None,
    ) -> TensorDict:
        """See :class:`DataPlaneClient`."""
        return await self.__get(sample_ids, partition_id, select_fields, None, "get_samples", timeout_s)

    async def clear_samples(
        self, sample_ids: Sequence[str] | None, partition_id: str, *, timeout_s: float | None = None
    ) -> None:
        """See :class:`DataPlaneClient`."""
        _name(partition_id, "partition_id")
        if sample_ids is None:
            call = c.ClearSamples(None, partition_id, self.owner)
            if not await self.__run(call, "clear_samples", timeout_s):
                text = (
                    f"clear_samples(None, {partition_id!r}) found nothing that {self.owner!r} put and that still lives"
                )
                warnings.warn(text, RuntimeWarning, stacklevel=2)
            self.__forget(partition_id, None)
            return
        ids = _names(sample_ids, "sample_ids")
        if ids:
            await self.__run(c.ClearSamples(ids, partition_id), "clear_samples", timeout_s)
            self.__forget(partition_id, ids)

    # -- C. recovery

    async def ping(self, timeout_s: float = 5.0) -> None:
        """See :class:`DataPlaneClient`."""
        await self.__run(c.Ping(), "ping", timeout_s)

    async def list_metadata(self, partition_id: str, *, timeout_s: float | None = None) -> list[DataPlaneGroupMeta]:
        """See :class:`DataPlaneClient`."""
        return await self.__run(c.ListMetadata(_name(partition_id, "partition_id")), "list_metadata", timeout_s)

    async def depth(self, partition_id: str, *, timeout_s: float | None = None) -> int:
        """See :class:`DataPlaneClient`."""
        return await self.__run(c.Depth(_name(partition_id, "partition_id")), "depth", timeout_s)

    async def pop(
        self, keys: Sequence[str] | KVBatchMeta, partition_id: str, *, timeout_s: float | None = None
    ) -> None:
        """See :class:`DataPlaneClient`."""
        ids, handles = self.__keys(keys, partition_id)
        if not ids:
            return
        if handles is not None:
            claims: list[tuple[str, ...] | None] = [(h.claim_id,) if h and h.claim_id else None for h in handles]
        else:
            held = (self.__claims.get((partition_id, i)) for i in ids)
            claims = [tuple(by_task.values()) if by_task else None for by_task in held]
        call = c.PopSamples(ids, partition_id, claims=tuple(claims) if any(claims) else None)
        await self.__run(call, "pop", timeout_s)
        self.__forget(partition_id, ids)

    async def evict(
        self, keys: Sequence[str] | KVBatchMeta, partition_id: str, *, timeout_s: float | None = None
    ) -> None:
        """See :class:`DataPlaneClient`."""
        ids, _ = self.__keys(keys, partition_id)
        if ids:
            await self.__run(c.EvictSamples(ids, partition_id), "evict", timeout_s)
            self.__forget(partition_id, ids)

    async def release_claim(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """See :class:`DataPlaneClient`."""
        if not isinstance(meta, KVBatchMeta):
            raise _bad(f"meta must be a KVBatchMeta, not {type(meta).__name__}", "meta")
        if not meta.size:
            return
        task = _name(meta.task_name, "meta.task_name")
        claims = tuple(h.claim_id if h else None for h in meta.handles or [None] * meta.size)
        if None in claims:
            name = meta.sample_ids[claims.index(None)]
            raise _bad(f"the meta has no claim for sample {name!r}", "meta")
        call = c.ReleaseClaim(meta.partition_id, task, _names(meta.sample_ids, "meta.sample_ids"), claims)
        await self.__run(call, "release_claim", timeout_s)
        for i in call.sample_ids:
            self.__claims.get((meta.partition_id, i), {}).pop(task, None)

    async def list_claims(
        self, partition_id: str, task_name: str, *, timeout_s: float | None = None
    ) -> list[ClaimInfo]:
        """See :class:`DataPlaneClient`."""
        call = c.ListClaims(_name(partition_id, "partition_id"), _name(task_name, "task_name"))
        return await self.__run(call, "list_claims", timeout_s)

    async def release_claims(self, partition_id: str, owner: str, *, timeout_s: float | None = None) -> None:
        """See :class:`DataPlaneClient`."""
        call = c.ReleaseClaims(_name(partition_id, "partition_id"), _name(owner, "owner"))
        await self.__run(call, "release_claims", timeout_s)

    async def list_partitions(self, *, timeout_s: float | None = None) -> list[PartitionInfo]:
        """See :class:`DataPlaneClient`."""
        return await self.__run(c.ListPartitions(), "list_partitions", timeout_s)

    async def describe(self, partition_id: str, *, timeout_s: float | None = None) -> PartitionInfo:
        """See :class:`DataPlaneClient`."""
        return await self.__run(c.DescribePartition(_name(partition_id, "partition_id")), "describe", timeout_s)

    async def drop_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """See :class:`DataPlaneClient`."""
        await self.__run(c.DropPartition(_name(partition_id, "partition_id")), "drop_partition", timeout_s)
        self.__forget(partition_id, None)

    async def wait_partition(self, partition_id: str, *, timeout_s: float | None = None) -> None:
        """See :class:`DataPlaneClient`."""
        await self.__run(c.WaitPartition(_name(partition_id, "partition_id")), "wait_partition", timeout_s)

    def batches(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        select_fields: Sequence[str] | None = None,
        min_batch_size: int | None = None,
        prefetch: int = 0,
        timeout_s: float | None = None,
    ) -> Batches:
        """See :class:`DataPlaneClient` and :class:`asyncdp.batches.Batches`."""
        from asyncdp.batches import Batches

        return Batches(
            self,
            partition_id,
            task_name,
            _names(required_fields, "required_fields"),
            _count(batch_size, "batch_size"),
            select_fields=None if select_fields is None else _names(select_fields, "select_fields"),
            min_batch_size=min_batch_size,
            prefetch=_count(prefetch, "prefetch", 0),
            timeout_s=timeout_s,
        )

    # -- D. lifecycle

    async def close(self) -> None:
        """End the client: waiting calls raise DataPlaneClosed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        if self._env is not None:
            self._env.life.end()
        try:
            if self.__in_flight and self.__home == threading.get_ident():
                self.__idle = anyio.Event()  # what they leave to be settled is settled in on_close
                with anyio.move_on_after(CALLS_END_S):
                    await self.__idle.wait()
        finally:
            await self.on_close()

    async def on_close(self) -> None:
        """Free what a subclass holds; called once."""

    async def __aenter__(self) -> Self:
        """Return the client itself."""
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, err: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the client."""
        await self.close()

    # -- claims that this client holds

    def __keys(self, keys: Any, partition_id: Any) -> tuple[tuple[str, ...], list[Any] | None]:
        _name(partition_id, "partition_id")
        if not isinstance(keys, KVBatchMeta):
            return tuple(dict.fromkeys(_names(keys, "keys"))), None
        if keys.partition_id != partition_id:
            raise _bad(f"the meta is of partition {keys.partition_id!r}, not {partition_id!r}", "keys")
        return _names(keys.sample_ids, "keys"), keys.handles

    def __remember(self, meta: KVBatchMeta) -> None:
        if meta.handles is None or meta.task_name is None:
            return
        claims = self.__claims
        for sample_id, handle in zip(meta.sample_ids, meta.handles, strict=True):
            if handle is not None and handle.claim_id is not None:
                claims.setdefault((meta.partition_id, sample_id), {})[meta.task_name] = handle.claim_id
        while len(claims) > CLAIMS_REMEMBERED:
            del claims[next(iter(claims))]

    def __forget(self, partition_id: str, ids: Iterable[str] | None) -> None:
        if ids is None:
            for key in [key for key in self.__claims if key[0] == partition_id]:
                del self.__claims[key]
            return
        for sample_id in ids:
            self.__claims.pop((partition_id, sample_id), None)
