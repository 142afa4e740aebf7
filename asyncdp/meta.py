"""Metadata of samples, partitions, claims and backends; none of it holds tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple, cast

from asyncdp.errors import DataPlaneBadRequest

__all__ = [
    "ClaimInfo",
    "DataPlaneCapabilities",
    "DataPlaneGroupMeta",
    "HostStatus",
    "KVBatchMeta",
    "PartitionInfo",
    "RowHandle",
    "is_meta",
    "lengths_of",
]

Tags = dict[str, Any]


class RowHandle(NamedTuple):
    """Identifies one life of a row within a meta; opaque to users.

    Attributes:
        incarnation: Number of the row's life. A request for a row that has another one by now is StaleSlotError.
        claim_id: Claim under which the holder of the meta has the row, or None.
        hint: Where the transport may find the row, in a form of its own that can be pickled; checked before use. It
            does not count where handles are compared.
    """

    incarnation: int
    claim_id: str | None = None
    hint: Any = None

    def __eq__(self, other: object) -> bool:
        """Compare the life and the claim."""
        return isinstance(other, RowHandle) and self[:2] == other[:2]

    def __ne__(self, other: object) -> bool:
        """Compare the life and the claim."""
        return not self == other

    def __hash__(self) -> int:
        """Return the hash of the life and the claim."""
        return hash(self[:2])

    def __repr__(self) -> str:
        """Leave out the hint, which is long and says nothing to people."""
        return f"RowHandle(incarnation={self.incarnation}, claim_id={self.claim_id!r})"


def _restore(self: Any, state: Any) -> None:
    """Restore the state of a pickle; attributes unknown to the release that made it get their defaults."""
    known = fields(self)
    if isinstance(state, tuple):
        state = state[1]
    values = state if isinstance(state, dict) else dict(zip((f.name for f in known), state, strict=False))
    for one in known:
        value = values.get(one.name, one.default)
        if value is MISSING:
            msg = f"this {type(self).__name__} was pickled by another release of asyncdp: it has no {one.name}"
            raise DataPlaneBadRequest(msg, field=one.name)
        object.__setattr__(self, one.name, value)


@dataclass(slots=True)
class KVBatchMeta:
    """Identifies a batch of samples, with their tags and what is needed to route requests for them; holds no tensors.

    ``sample_ids``, ``sequence_lengths``, ``tags``, ``handles`` and ``created`` have one entry per row.

    Attributes:
        partition_id: Partition of all rows.
        task_name: Task that claimed the rows, or None.
        sample_ids: Ids of the rows, in batch order.
        fields: Fields that ``get_data`` reads by default, or None.
        sequence_lengths: Tokens per row (from the tag ``input_lengths``), or None.
        extra_info: For the caller's own use; copied, one level deep, with the meta.
        tags: One mapping of small primitives per row, or None.
        handles: One opaque :class:`RowHandle` per row, or None. With handles, ``get_data`` and puts and removals by the
            meta detect rows that were removed, or removed and put anew, since the meta was made.
        created: Whether the put that returned this meta created the row; None if the meta is from no put.

    Raises:
        DataPlaneBadRequest: A list is not as long as ``sample_ids``.
    """

    partition_id: str
    task_name: str | None = None
    sample_ids: list[str] = field(default_factory=list)
    fields: list[str] | None = None
    sequence_lengths: list[int] | None = None
    extra_info: dict[str, Any] = field(default_factory=dict)
    tags: list[Tags] | None = None
    handles: list[RowHandle | None] | None = None
    created: list[bool] | None = None

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        """Return the state to pickle, without ``created`` if it is None, so that older releases can read the rest."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.created is None:
            del state["created"]
        return None, state

    __setstate__ = _restore

    def __post_init__(self) -> None:
        """Check that the per-row lists have equal lengths."""
        size = len(self.sample_ids)
        for name in ("sequence_lengths", "tags", "handles", "created"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != size:
                msg = f"{name} has {len(rows)} entries for {size} sample_ids; they align 1:1"
                raise DataPlaneBadRequest(msg, partition_id=self.partition_id, field=name)

    @classmethod
    def of(cls, given: Any) -> KVBatchMeta:
        """Return ``given`` if it is a KVBatchMeta, else a meta with the attributes of an object of another project.

        Raises:
            DataPlaneBadRequest: ``given`` lacks ``partition_id`` or ``sample_ids``, or its handles are no RowHandles.
        """
        if isinstance(given, KVBatchMeta):
            return given
        if not is_meta(given):
            msg = f"a meta has partition_id and sample_ids, which a {type(given).__name__} has not"
            raise DataPlaneBadRequest(msg, field="meta")

        def rows(name: str) -> Any:
            found = getattr(given, name, None)
            return None if found is None else list(found)

        handles = rows("handles")
        strange = [h for h in handles or () if h is not None and not isinstance(h, RowHandle)]
        if strange:
            msg = f"handles of a {type(given).__name__} hold a {type(strange[0]).__name__}, which is no RowHandle"
            raise DataPlaneBadRequest(msg, partition_id=given.partition_id, field="handles")
        return cls(
            given.partition_id,
            getattr(given, "task_name", None),
            list(given.sample_ids),
            rows("fields"),
            rows("sequence_lengths"),
            dict(getattr(given, "extra_info", None) or {}),
            rows("tags"),
            handles,
            rows("created"),
        )

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self.sample_ids)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.sample_ids)

    def stamp_tags(self, scalars: Mapping[str, Sequence[Any]]) -> None:
        """Write columns of per-row scalars into ``tags``, in place.

        Args:
            scalars: ``{tag name: one value per row}``; a column is a list, or a tensor or array of shape ``(size,)``.

        Raises:
            DataPlaneBadRequest: A column does not have ``size`` entries; nothing was written.
        """
        columns = {
            name: list(column.tolist() if hasattr(column, "tolist") else column) for name, column in scalars.items()
        }
        for name, column in columns.items():
            if len(column) != self.size:
                msg = f"tag {name!r} has {len(column)} values for {self.size} rows"
                raise DataPlaneBadRequest(msg, partition_id=self.partition_id, field=name)
        if self.tags is None:
            self.tags = [{} for _ in self.sample_ids]
        for name, column in columns.items():
            for row, value in zip(self.tags, column, strict=True):
                row[name] = value

    def subset(self, indices: Sequence[int]) -> KVBatchMeta:
        """Return a meta of the rows at ``indices``, in that order; raise IndexError if one is out of range."""
        at = [int(i) for i in indices]

        def pick(rows: list[Any] | None) -> Any:
            return None if rows is None else [rows[i] for i in at]

        return replace(
            self,
            sample_ids=pick(self.sample_ids),
            sequence_lengths=pick(self.sequence_lengths),
            tags=None if self.tags is None else [dict(self.tags[i]) for i in at],
            handles=pick(self.handles),
            created=pick(self.created),
            extra_info=dict(self.extra_info),
            fields=None if self.fields is None else list(self.fields),
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Return a meta of the rows in ``[start, stop)``, with the bounds of a Python slice."""
        return self.subset(range(*slice(start, stop).indices(self.size)))

    def concat(self, *others: KVBatchMeta | Iterable[KVBatchMeta]) -> KVBatchMeta:
        """Return a meta of these rows followed by those of ``others`` (metas, or lists of metas).

        Its fields are those that all metas have. ``sequence_lengths`` and ``created`` are None unless every meta has
        them. Rows of a meta without handles get the handle None, rows of a meta without tags empty ones; if no meta has
        any, the result has none.

        Raises:
            DataPlaneBadRequest: The metas are of different partitions.
        """
        parts: list[KVBatchMeta] = [self]
        for other in others:
            parts.extend(KVBatchMeta.of(part) for part in ([other] if is_meta(other) else cast("Any", other)))
        for part in parts:
            if part.partition_id != self.partition_id:
                msg = f"partition_ids must match: these metas are of {self.partition_id!r} and {part.partition_id!r}"
                raise DataPlaneBadRequest(msg, partition_id=self.partition_id)
        fields: list[str] | None = None
        if all(part.fields is not None for part in parts):
            shared = set.intersection(*(set(part.fields or ()) for part in parts))
            fields = [name for name in self.fields or () if name in shared]
        lengths = [part.sequence_lengths for part in parts]
        extra: dict[str, Any] = {}
        for part in reversed(parts):
            extra.update(part.extra_info)
        return KVBatchMeta(
            partition_id=self.partition_id,
            task_name=self.task_name if all(p.task_name == self.task_name for p in parts) else None,
            sample_ids=[i for part in parts for i in part.sample_ids],
            fields=fields,
            sequence_lengths=None if any(x is None for x in lengths) else [n for x in lengths for n in x or ()],
            extra_info=extra,
            tags=None
            if all(part.tags is None for part in parts)
            else [dict(t) for part in parts for t in (part.tags or [{}] * part.size)],
            handles=None
            if all(part.handles is None for part in parts)
            else [h for part in parts for h in (part.handles or [None] * part.size)],
            created=None
            if any(part.created is None for part in parts)
            else [new for part in parts for new in part.created or ()],
        )

    def drop(self, rows: Iterable[str | int]) -> KVBatchMeta | None:
        """Return a meta without the given rows (ids or positions), or None if no row is left."""
        gone = set(rows)
        keep = [i for i, sample_id in enumerate(self.sample_ids) if i not in gone and sample_id not in gone]
        return self.subset(keep) if keep else None

    def with_fields(self, fields: Sequence[str]) -> KVBatchMeta:
        """Return a meta of the same rows with ``fields`` appended to its own."""
        return self.only_fields([*(self.fields or ()), *_field_names(fields)])

    def only_fields(self, fields: Sequence[str] | None) -> KVBatchMeta:
        """Return a meta of the same rows with exactly these fields; None sets ``fields`` to None."""
        meta = self.subset(range(self.size))
        meta.fields = None if fields is None else list(dict.fromkeys(_field_names(fields)))
        return meta


@dataclass(frozen=True, slots=True)
class DataPlaneGroupMeta:
    """Metadata of one group, that is the rollouts of one prompt; holds no tensors.

    Attributes:
        partition_id: Partition of the group.
        group_id: Id of the group.
        keys: Ids of the rows that exist, oldest first; may be passed to ``get_samples``, ``pop``, ``evict``.
        weight_version: Lowest weight version tagged on a row; None if no row has one.
        created_at: Unix time of the oldest row, in seconds.
        committed: Whether no row is tagged ``committed=False``, failed rows aside.
        expected_num_keys: Number of rows of the complete group (the highest ever seen).
        size_bytes: Payload bytes of the rows that exist.
        tags: One mapping per key.
        lost_keys: Those of ``keys`` whose payload is lost for good, or whose host does not answer.
        handles: One opaque :class:`RowHandle` per key, or () if the backend has none. With handles, a removal by the
            group removes exactly these lives.
    """

    partition_id: str
    group_id: str
    keys: tuple[str, ...]
    weight_version: int | None
    created_at: float
    committed: bool
    expected_num_keys: int
    size_bytes: int
    tags: tuple[Tags, ...]
    lost_keys: tuple[str, ...] = ()
    handles: tuple[RowHandle | None, ...] = ()

    __setstate__ = _restore

    def meta(self, keys: Iterable[str] | None = None) -> KVBatchMeta:
        """Return a meta of some keys (such as ``lost_keys``), with their tags and handles; None: of all keys.

        Raises:
            DataPlaneBadRequest: One of ``keys`` is not in the group.
        """
        chosen = set(self.keys if keys is None else keys)
        if chosen.difference(self.keys):
            msg = f"group {self.group_id!r} has no key {min(chosen.difference(self.keys))!r}"
            raise DataPlaneBadRequest(msg, partition_id=self.partition_id, field="keys")
        at = [i for i, key in enumerate(self.keys) if key in chosen]
        tags = [dict(self.tags[i]) for i in at] if self.tags else None
        return KVBatchMeta(
            self.partition_id,
            sample_ids=[self.keys[i] for i in at],
            sequence_lengths=lengths_of(tags),
            tags=tags,
            handles=[self.handles[i] for i in at] if self.handles else None,
        )

    @property
    def is_complete(self) -> bool:
        """Whether all expected rows exist and none is lost; rows tagged ``status="failed"`` are ignored."""
        failed = {key for key, tags in zip(self.keys, self.tags, strict=False) if tags.get("status") == "failed"}
        return len(self.keys) - len(failed) >= self.expected_num_keys and failed.issuperset(self.lost_keys)


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """Describes one live claim.

    Attributes:
        claim_id: Id of the claim.
        owner: Name of the client that made it.
        task_name: Task that it was made for.
        sample_ids: Ids of the claimed samples.
        claimed_at: Unix time of the claim, in seconds.
        expires_at: Unix time at which its lease ends, in seconds; None: it has no lease.
    """

    claim_id: str
    owner: str
    task_name: str
    sample_ids: tuple[str, ...]
    claimed_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """Describes a partition: its declaration and how much it holds.

    Attributes:
        partition_id: Name of the partition.
        fields: Type of each declared or written field, as text: ``"float32[4]"``, ``"int64[*]"`` (ragged),
            ``"object"``, ``"enum(a, b)"``, or ``""`` while nothing has been written to the field.
        consumer_tasks: Names of the tasks that claim samples.
        num_samples: Expected number of samples, as declared; not a limit.
        grpo_group_size: Rows per group, or None if claims need not take whole groups.
        enums: Vocabulary of each enum field.
        size: Number of samples that exist.
        size_bytes: Payload bytes of these samples.
    """

    partition_id: str
    fields: dict[str, str]
    consumer_tasks: tuple[str, ...]
    num_samples: int
    grpo_group_size: int | None
    enums: dict[str, tuple[str, ...]]
    size: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class HostStatus:
    """Describes a slot host or storage unit: whether it answers, and how full it is.

    Attributes:
        host_id: Id of the host, as in errors and events.
        epoch: Epoch of its slots, which increases whenever the host loses them; 0 if the backend has no epochs.
        alive: Whether the host answers, as far as the backend knows.
        address: Address that clients connect to; empty if there is none.
        ports: Its ports.
        heartbeat_age_s: Seconds since its last heartbeat, by the backend's clock; None if the backend keeps no times.
        capacity_bytes: Bytes that it can hold; None if that is not limited, or not known.
        free_bytes: Bytes of these that are free; None if ``capacity_bytes`` is None.
        rows: Number of rows that it holds; None if the backend does not count them.
        slots: Number of slots by state: ``free``, ``writing``, ``ready``, ``given_up``, among these ``reading`` and
            ``doomed`` (without rows, kept by borrowed reads); a state may be missing. Empty if the backend has no
            slots, or does not count them.
        draining: Whether it only serves what it has and accepts no new rows.
        supervised: Whether a supervisor starts it again when it dies, as ``asyncdp serve`` does.
    """

    host_id: str
    epoch: int
    alive: bool
    address: str = ""
    ports: tuple[int, ...] = ()
    heartbeat_age_s: float | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    rows: int | None = None
    slots: dict[str, int] = field(default_factory=dict)
    draining: bool = False
    supervised: bool = False


@dataclass(frozen=True, slots=True)
class DataPlaneCapabilities:
    """Guarantees of a backend beyond the promises common to all backends.

    Attributes:
        persistent_recovery: Samples survive a restart of the plane.
        server_side_filtering: Recovery verbs are filtered by the plane. If False, they transfer all metadata of a
            partition.
        atomic_batch_put: A put is atomic over its rows. If False, a failed put may be ambiguous for single rows.
        verified_clear: A clear is complete when it returns. If False, it may still be going on.
        mutation_dedup: A put or clear sent twice under one op_id happens once, and its outcome can be found out later.
            If False, one whose reply was lost stays ambiguous.
        claim_release: Claims can be released. If False, release_claim and release_claims are DataPlaneUnsupported.
        atomic_tags: Tag merges are atomic. If False, concurrent merges of several clients may be lost.
        slot_addressable: Reads can be retried by slot. If False, they are retried as a whole.
        slot_writes: Puts can be placed, rotated over ports and retried by slot. If False, they are sent as a whole.
        claim_dedup: A claim whose reply was lost can be asked for again. If False, it is not; list_claims shows it.
        bound_mutations: Puts and removals can be bound to lives. If False, a put by a meta or with ``only``, or a
            removal by a meta or group with handles, is DataPlaneUnsupported, since it could affect another life.
        host_listing: The slot hosts can be listed. If False, list_hosts is DataPlaneUnsupported.
        directory_snapshots: The state of a partition can be read, and claims restored, in one atomic step each. If
            False, the plane cannot be saved: ``asyncdp.checkpoint.save`` is DataPlaneUnsupported.
    """

    persistent_recovery: bool = False
    server_side_filtering: bool = False
    atomic_batch_put: bool = False
    verified_clear: bool = False
    mutation_dedup: bool = False
    claim_release: bool = False
    atomic_tags: bool = False
    slot_addressable: bool = False
    slot_writes: bool = False
    claim_dedup: bool = False
    bound_mutations: bool = False
    host_listing: bool = False
    directory_snapshots: bool = False

    __setstate__ = _restore


def is_meta(given: Any) -> bool:
    """Return whether an object is a meta, or one of another project with the same attributes."""
    return isinstance(given, KVBatchMeta) or (hasattr(given, "sample_ids") and hasattr(given, "partition_id"))


def _field_names(fields: Sequence[str]) -> list[str]:
    if isinstance(fields, str):
        msg = f"fields must be a sequence of names, not {fields!r}"
        raise DataPlaneBadRequest(msg, field="fields")
    return list(fields)


def lengths_of(tags: Sequence[Tags] | None) -> list[int] | None:
    """Return the sequence lengths in the tag ``input_lengths``, or None unless every row has it."""
    if not tags or any(row.get("input_lengths") is None for row in tags):
        return None
    return [int(row["input_lengths"]) for row in tags]
