"""A wrapper of a client that records its calls in a history."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import torch

from asyncdp.errors import PartialReadError
from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta
from asyncdp.protocol import DataPlaneClient

if TYPE_CHECKING:
    from tensordict import TensorDict

    from asyncdp.meta import RowHandle, Tags

    from .history import History
    from .operation import Operation

__all__ = ["Recorded"]

P = ParamSpec("P")
R = TypeVar("R")
#: The arguments of a call by name, with the defaults of those that were not given.
Arguments = dict[str, Any]


def _frozen(value: Any) -> Hashable:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def row_values(leaf: Any) -> list[Hashable]:
    """Return one hashable value per row of a field: a number for single elements, a tuple for longer rows."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return [_frozen(row.tolist()) for row in leaf.unbind()]
    rows = leaf.tolist() if hasattr(leaf, "tolist") else list(leaf)
    return [_frozen(row) for row in rows]


def _groups(meta: KVBatchMeta) -> list[str]:
    tags = meta.tags or []
    result_of = [row.get("group_id") for row in tags if "expected_num_keys" not in row]
    return [str(group) for group in result_of] if None not in result_of and len(result_of) == len(tags) else []


def _lives(handles: Sequence[RowHandle | None] | None) -> list[int | None]:
    return [None if h is None else h.incarnation for h in handles or ()]


def _named(given: Any) -> tuple[Sequence[str], list[int | None]]:
    """Return the ids of an argument (ids, a meta or a group) and the lives that it is bound to."""
    if isinstance(given, KVBatchMeta):
        return given.sample_ids, _lives(given.handles)
    if isinstance(given, DataPlaneGroupMeta):
        return given.keys, _lives(given.handles)
    return given, []


def _claims(meta: KVBatchMeta) -> list[str | None]:
    return [None if h is None else h.claim_id for h in meta.handles or ()]


def _recorded(
    verb: Callable[Concatenate[Any, P], Awaitable[R]],
    asked: Callable[[Recorded, Arguments], dict[str, Any]],
    known: Callable[[Recorded, Operation, R], dict[str, Any]] | None = None,
) -> Callable[Concatenate[Recorded, P], Coroutine[Any, Any, R]]:
    """Make a recorded verb of the protocol's, with its name, arguments, defaults and docstring.

    Args:
        verb: The protocol's verb.
        asked: Returns the attributes of the :class:`Operation` that follow from the arguments, which it gets by name.
        known: Returns those that follow from the result; None: there are none.
    """
    name = verb.__name__
    arguments = inspect.signature(verb)

    async def recorded(self: Recorded, /, *args: P.args, **kwargs: P.kwargs) -> R:
        bound = arguments.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        op = self.begin(name, given["timeout_s"], **asked(self, given))
        result: R = await self.run(op, getattr(self.client, name)(*args, **kwargs))
        self.history.ended(op, **({} if known is None else known(self, op, result)))
        return result

    functools.update_wrapper(recorded, verb)
    return recorded


# --- what is recorded of each verb: of its arguments, and of its result -------------------------------------------


def _asked_of_partition(_: Recorded, given: Arguments) -> dict[str, Any]:
    return {"partition": given["partition_id"]}


def _asked_to_put(recorded: Recorded, given: Arguments) -> dict[str, Any]:
    ids, meant = _named(given["sample_ids"])
    fields, tags = given["fields"], given["tags"]
    values = {} if fields is None else {name: recorded.values(column) for name, column in fields.items()}
    for tag in recorded.tags:
        if tags and tag in tags[0]:
            values[f"#{tag}"] = [row[tag] for row in tags]
    only = given["only"] or ("" if ids is given["sample_ids"] else "existing")
    return {"partition": given["partition_id"], "ids": ids, "values": values, "only": only, "meant": meant}


def _has_put(_: Recorded, op: Operation, meta: KVBatchMeta) -> dict[str, Any]:
    known: dict[str, Any] = {"lives": _lives(meta.handles), "created": meta.created or ()}
    if meta.size < len(op.ids):
        there = set(meta.sample_ids)
        at = [i for i, sample_id in enumerate(op.ids) if sample_id in there]
        known["skipped"] = {name: op.life_meant(name) for name in op.ids if name not in there}
        known["ids"] = tuple(op.ids[i] for i in at)
        known["values"] = {name: [rows[i] for i in at] for name, rows in op.values.items()}
        known["meant"] = [op.meant[i] for i in at] if op.meant else ()
    return known


def _asked_to_remove(_: Recorded, given: Arguments) -> dict[str, Any]:
    keys = given["sample_ids"] if "sample_ids" in given else given["keys"]
    ids, meant = _named(keys)
    return {"partition": given["partition_id"], "ids": ids, "meant": meant}


def _asked_to_pop(recorded: Recorded, given: Arguments) -> dict[str, Any]:
    known = _asked_to_remove(recorded, given)
    if isinstance(given["keys"], KVBatchMeta):
        known |= {"claims": _claims(given["keys"]), "task": given["keys"].task_name or ""}
    return known


def _asked_by_ids(_: Recorded, given: Arguments) -> dict[str, Any]:
    fields = tuple(given["select_fields"])
    return {"partition": given["partition_id"], "ids": given["sample_ids"], "fields": fields}


def _asked_by_meta(_: Recorded, given: Arguments) -> dict[str, Any]:
    meta: KVBatchMeta = given["meta"]
    fields = tuple(meta.fields or () if given["select_fields"] is None else given["select_fields"])
    known = {"fields": fields, "lives": _lives(meta.handles), "claims": _claims(meta)}
    return {"partition": meta.partition_id, "ids": meta.sample_ids, **known}


def _has_read(recorded: Recorded, _: Operation, got: TensorDict) -> dict[str, Any]:
    return {"values": recorded.rows(got), "came": range(got.batch_size[0])}


def _asked_to_claim(_: Recorded, given: Arguments) -> dict[str, Any]:
    size, least = given["batch_size"], given["min_batch_size"]
    known = {"task": given["task_name"], "asked": size, "fields": tuple(given["required_fields"])}
    if given["blocking"]:
        known["least"] = size if least is None else least
    return {"partition": given["partition_id"], **known}


def _has_claimed(recorded: Recorded, _: Operation, meta: KVBatchMeta) -> dict[str, Any]:
    return {
        "ids": tuple(meta.sample_ids),
        "came": range(meta.size),
        "values": recorded.tag_values(meta.tags or ()),
        "lives": _lives(meta.handles),
        "claims": _claims(meta),
        "groups": _groups(meta),
    }


def _asked_to_release(_: Recorded, given: Arguments) -> dict[str, Any]:
    meta: KVBatchMeta = given["meta"]
    known = {"task": meta.task_name or "", "claims": _claims(meta)}
    return {"partition": meta.partition_id, "ids": meta.sample_ids, **known}


def _asked_of_owner(_: Recorded, given: Arguments) -> dict[str, Any]:
    return {"partition": given["partition_id"], "owner": given["owner"]}


def _has_listed(recorded: Recorded, _: Operation, groups: Sequence[DataPlaneGroupMeta]) -> dict[str, Any]:
    ids = tuple(key for group in groups for key in group.keys)
    values = recorded.tag_values([row for group in groups for row in group.tags])
    return {"ids": ids, "came": range(len(ids)), "values": values}


class Recorded:
    """The verbs of a client; each call is recorded in a history.

    The checks recognise by its values which put a read returned. So **every row of every put must have a value that no
    other row of any put has**, in each field.

    Args:
        client: Any data plane client.
        history: History to record in.
        name: Name of this client.
        tags: Tags that have unique values as well; other tags are not recorded.
        timeout_s: Default timeout of the calls in seconds, which the checks compare with their duration.
        values: Returns the values of a field, one per row.
    """

    def __init__(
        self,
        client: DataPlaneClient,
        history: History,
        name: str,
        *,
        tags: Collection[str] = (),
        timeout_s: float = 60.0,
        values: Callable[[Any], Sequence[Hashable]] = row_values,
    ) -> None:
        """Store the arguments."""
        self.client = client
        self.history = history
        self.name = name
        self.tags = tuple(tags)
        self.timeout_s = timeout_s
        self.values = values
        #: The last recorded call.
        self.latest: Operation | None = None

    async def run(self, op: Operation, call: Awaitable[R]) -> R:
        """Await a call of the client, and record the error that it raises."""
        self.latest = op
        try:
            result = await call
        except BaseException as err:
            self.history.ended(op, err, **(self._partial(err, op) if isinstance(err, PartialReadError) else {}))
            raise
        return result

    def begin(self, verb: str, timeout_s: float | None, **known: Any) -> Operation:
        """Record the start of a call; ``known`` are attributes of :class:`Operation`."""
        limit = self.timeout_s if timeout_s is None else timeout_s
        return self.history.begin(self.name, verb, timeout_s=limit, **known)

    def rows(self, got: TensorDict) -> dict[str, Sequence[Hashable]]:
        """Return the values of what a read returned, by field."""
        return {str(name): self.values(got.get(name)) for name in got.keys()}  # noqa: SIM118 - no mapping

    def tag_values(self, rows: Sequence[Tags]) -> dict[str, Sequence[Hashable]]:
        """Return the values of the recorded tags, one per row."""
        return {f"#{tag}": [row.get(tag) for row in rows] for tag in self.tags}

    def _partial(self, err: PartialReadError, op: Operation) -> dict[str, Any]:
        came = [at for at in range(len(op.ids)) if at not in err.errors]
        return {"values": self.rows(err.rows), "came": came, "errors": dict(err.errors)}

    # -- the verbs, with the arguments of the protocol

    put_samples = _recorded(DataPlaneClient.put_samples, _asked_to_put, _has_put)
    clear_samples = _recorded(DataPlaneClient.clear_samples, _asked_to_remove)
    evict = _recorded(DataPlaneClient.evict, _asked_to_remove)
    pop = _recorded(DataPlaneClient.pop, _asked_to_pop)
    get_samples = _recorded(DataPlaneClient.get_samples, _asked_by_ids, _has_read)
    get_data = _recorded(DataPlaneClient.get_data, _asked_by_meta, _has_read)
    claim_meta = _recorded(DataPlaneClient.claim_meta, _asked_to_claim, _has_claimed)
    release_claim = _recorded(DataPlaneClient.release_claim, _asked_to_release)
    release_claims = _recorded(DataPlaneClient.release_claims, _asked_of_owner)
    list_metadata = _recorded(DataPlaneClient.list_metadata, _asked_of_partition, _has_listed)

    async def call(self, verb: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Call any other verb by name, and record its duration and outcome."""
        about = {"partition": args[0]} if args and isinstance(args[0], str) else {}
        op = self.begin(verb, timeout_s, **about)
        result = await self.run(op, getattr(self.client, verb)(*args, timeout_s=timeout_s, **options))
        self.history.ended(op)
        return result
