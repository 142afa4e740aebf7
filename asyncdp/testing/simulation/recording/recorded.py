"""A wrapper of a client that records its calls in a history."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from asyncdp.errors import PartialReadError
from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from tensordict import TensorDict

    from asyncdp.meta import RowHandle, Tags
    from asyncdp.protocol import DataPlaneClient

    from .history import History
    from .operation import Operation

__all__ = ["Recorded"]

R = TypeVar("R")


def _frozen(value: Any) -> Hashable:
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def row_values(leaf: Any) -> list[Hashable]:
    """Return one hashable value per row of a field: a number for single elements, a tuple for longer rows."""
    if isinstance(leaf, torch.Tensor) and leaf.is_nested:
        return [_frozen(row.tolist()) for row in leaf.unbind()]
    rows = leaf.tolist() if hasattr(leaf, "tolist") else list(leaf)
    return [_frozen(row) for row in rows]


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

    async def _run(self, op: Operation, call: Awaitable[R]) -> R:
        self.latest = op
        try:
            result = await call
        except BaseException as err:
            self.history.ended(op, err, **(self._partial(op, err) if isinstance(err, PartialReadError) else {}))
            raise
        return result

    def _begin(self, verb: str, partition: str, ids: Sequence[str], timeout_s: float | None, **known: Any) -> Operation:
        limit = self.timeout_s if timeout_s is None else timeout_s
        return self.history.begin(self.name, verb, partition, ids, timeout_s=limit, **known)

    # -- writing

    async def put_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta,
        partition_id: str,
        fields: TensorDict | Mapping[str, Any] | None = None,
        tags: Sequence[Tags] | None = None,
        *,
        timeout_s: float | None = None,
        **bound: Any,
    ) -> KVBatchMeta:
        """Put and record; ``bound`` are the arguments ``only`` and ``stale``."""
        ids, meant = _named(sample_ids)
        values: dict[str, Sequence[Hashable]] = {} if fields is None else {n: self.values(v) for n, v in fields.items()}
        for tag in self.tags:
            if tags and tag in tags[0]:
                values[f"#{tag}"] = [row[tag] for row in tags]
        only = bound.get("only") or ("" if ids is sample_ids else "existing")
        op = self._begin("put_samples", partition_id, ids, timeout_s, values=values, only=only, meant=meant)
        put = self.client.put_samples(sample_ids, partition_id, fields, tags, timeout_s=timeout_s, **bound)
        meta = await self._run(op, put)
        result_of: dict[str, Any] = {"lives": _lives(meta.handles), "created": meta.created or ()}
        if meta.size < len(ids):
            there = set(meta.sample_ids)
            at = [i for i, sample_id in enumerate(ids) if sample_id in there]
            result_of["skipped"] = {i: op.life_meant(i) for i in ids if i not in there}
            result_of["ids"] = tuple(ids[i] for i in at)
            result_of["values"] = {name: [rows[i] for i in at] for name, rows in values.items()}
            result_of["meant"] = [meant[i] for i in at] if meant else ()
        self.history.ended(op, **result_of)
        return meta

    async def clear_samples(
        self,
        sample_ids: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta,
        partition_id: str,
        timeout_s: float | None = None,
    ) -> None:
        """Clear samples and record."""
        ids, meant = _named(sample_ids)
        op = self._begin("clear_samples", partition_id, ids, timeout_s, meant=meant)
        await self._run(op, self.client.clear_samples(sample_ids, partition_id, timeout_s=timeout_s))
        self.history.ended(op)

    async def evict(
        self, keys: Sequence[str] | KVBatchMeta | DataPlaneGroupMeta, partition_id: str, timeout_s: float | None = None
    ) -> None:
        """Evict samples and record."""
        ids, meant = _named(keys)
        op = self._begin("evict", partition_id, ids, timeout_s, meant=meant)
        await self._run(op, self.client.evict(keys, partition_id, timeout_s=timeout_s))
        self.history.ended(op)

    async def pop(self, meta: KVBatchMeta, timeout_s: float | None = None) -> None:
        """Pop the samples of a claim and record."""
        claims = _claims(meta)
        known = {"claims": claims, "task": meta.task_name or "", "meant": _lives(meta.handles)}
        op = self._begin("pop", meta.partition_id, meta.sample_ids, timeout_s, **known)
        await self._run(op, self.client.pop(meta, meta.partition_id, timeout_s=timeout_s))
        self.history.ended(op)

    # -- reading

    async def get_samples(
        self,
        sample_ids: Sequence[str],
        partition_id: str,
        select_fields: Sequence[str],
        *,
        timeout_s: float | None = None,
    ) -> TensorDict:
        """Read by ids and record."""
        op = self._begin("get_samples", partition_id, sample_ids, timeout_s, fields=tuple(select_fields))
        got = await self._run(op, self.client.get_samples(sample_ids, partition_id, select_fields, timeout_s=timeout_s))
        return self._got(op, got)

    async def get_data(
        self, meta: KVBatchMeta, select_fields: Sequence[str] | None = None, *, timeout_s: float | None = None
    ) -> TensorDict:
        """Read by a meta and record."""
        fields = tuple(meta.fields or () if select_fields is None else select_fields)
        lives = _lives(meta.handles)
        op = self._begin(
            *("get_data", meta.partition_id, meta.sample_ids, timeout_s),
            fields=fields,
            lives=lives,
            claims=_claims(meta),
        )
        got = await self._run(op, self.client.get_data(meta, select_fields, timeout_s=timeout_s))
        return self._got(op, got)

    def _got(self, op: Operation, got: TensorDict) -> TensorDict:
        self.history.ended(op, values=self._rows(got), came=range(got.batch_size[0]))
        return got

    def _rows(self, got: TensorDict) -> dict[str, Sequence[Hashable]]:
        return {str(name): self.values(got.get(name)) for name in got.keys()}  # noqa: SIM118 - no mapping

    def _partial(self, op: Operation, err: PartialReadError) -> dict[str, Any]:
        came = [at for at in range(len(op.ids)) if at not in err.errors]
        return {"values": self._rows(err.rows), "came": came, "errors": dict(err.errors)}

    # -- claims

    async def claim_meta(
        self,
        partition_id: str,
        task_name: str,
        required_fields: Sequence[str],
        batch_size: int,
        *,
        timeout_s: float | None = None,
        **options: Any,
    ) -> KVBatchMeta:
        """Claim and record."""
        op = self._begin("claim_meta", partition_id, (), timeout_s, task=task_name, asked=batch_size)
        op.fields = tuple(required_fields)
        if options.get("blocking", True):
            op.least = batch_size if options.get("min_batch_size") is None else options["min_batch_size"]
        call = self.client.claim_meta(
            partition_id, task_name, required_fields, batch_size, timeout_s=timeout_s, **options
        )
        meta = await self._run(op, call)
        values = {f"#{tag}": [row.get(tag) for row in meta.tags or ()] for tag in self.tags}
        self.history.ended(
            op,
            ids=tuple(meta.sample_ids),
            came=range(meta.size),
            values=values,
            lives=_lives(meta.handles),
            claims=_claims(meta),
            groups=_groups(meta),
        )
        return meta

    async def release_claim(self, meta: KVBatchMeta, *, timeout_s: float | None = None) -> None:
        """Release a claim and record."""
        op = self._begin("release_claim", meta.partition_id, meta.sample_ids, timeout_s, task=meta.task_name or "")
        op.claims = _claims(meta)
        await self._run(op, self.client.release_claim(meta, timeout_s=timeout_s))
        self.history.ended(op)

    async def release_claims(self, partition_id: str, owner: str, *, timeout_s: float | None = None) -> None:
        """Release all claims of an owner and record."""
        op = self._begin("release_claims", partition_id, (), timeout_s, owner=owner)
        await self._run(op, self.client.release_claims(partition_id, owner, timeout_s=timeout_s))
        self.history.ended(op)

    # -- other verbs

    async def list_metadata(self, partition_id: str, *, timeout_s: float | None = None) -> Any:
        """List groups, and record the samples that they contain, with their tags."""
        op = self._begin("list_metadata", partition_id, (), timeout_s)
        groups = await self._run(op, self.client.list_metadata(partition_id, timeout_s=timeout_s))
        ids = tuple(key for group in groups for key in group.keys)
        rows = [row for group in groups for row in group.tags]
        values = {f"#{tag}": [row.get(tag) for row in rows] for tag in self.tags}
        self.history.ended(op, ids=ids, came=range(len(ids)), values=values)
        return groups

    async def call(self, verb: str, *args: Any, timeout_s: float | None = None, **options: Any) -> Any:
        """Call any other verb by name, and record its duration and outcome."""
        op = self._begin(verb, args[0] if args and isinstance(args[0], str) else "", (), timeout_s)
        result = await self._run(op, getattr(self.client, verb)(*args, timeout_s=timeout_s, **options))
        self.history.ended(op)
        return result


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
