"""What travels about samples instead of the samples: metadata only, never tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, replace
from typing import Any, NamedTuple, cast

from asyncdp.errors import DataPlaneBadRequest

__all__ = [
    "ClaimInfo",
    "DataPlaneCapabilities",
    "DataPlaneGroupMeta",
    "KVBatchMeta",
    "PartitionInfo",
    "RowHandle",
    "is_meta",
    "lengths_of",
]

Tags = dict[str, Any]


class RowHandle(NamedTuple):
    """What a meta remembers of one row, opaque to users.

    Attributes:
        incarnation: Which life of the id was meant; another one is StaleSlotError.
        claim_id: The claim that gave the row to its holder, or None.
        hint: A transport's own short cut to the row (it must survive pickling); never trusted without a check.
    """

    incarnation: int
    claim_id: str | None = None
    hint: Any = None


def _restore(self: Any, state: Any) -> None:
    """Take the state of a pickle; attributes that the release which made it did not know get their defaults."""
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
    """Names a batch of samples and carries what routing needs, without any tensor.

    Every list has one entry per row: ``sample_ids``, ``sequence_lengths``, ``tags``, ``handles``, ``created``.

    Attributes:
        partition_id: The partition of all rows.
        task_name: The task that claimed them, or None.
        sample_ids: Ids, in batch order.
        fields: The fields that ``get_data`` reads by default, or None.
        sequence_lengths: Tokens per row (from the tag ``input_lengths``), or None.
        extra_info: Free, for the caller; shared by copies.
        tags: Small primitives per row, or None.
        handles: Opaque :class:`RowHandle` per row, or None: lets ``get_data``, puts and removals by the meta notice
            another incarnation.
        created: Whether the put that returned the meta created each row, or None where no put did.

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
        """Return what a pickle holds; what says nothing is left out, so that releases without it read the rest."""
        state = {one.name: getattr(self, one.name) for one in fields(self)}
        if self.created is None:
            del state["created"]
        return None, state

    __setstate__ = _restore

    def __post_init__(self) -> None:
        """Check that the per-row lists agree."""
        size = len(self.sample_ids)
        for name in ("sequence_lengths", "tags", "handles", "created"):
            rows = getattr(self, name)
            if rows is not None and len(rows) != size:
                msg = f"{name} has {len(rows)} entries for {size} sample_ids"
                raise DataPlaneBadRequest(msg, partition_id=self.partition_id, field=name)

    @classmethod
    def of(cls, given: Any) -> KVBatchMeta:
        """Return ``given``, or a meta made of an object of another project that has the same attributes.

        Raises:
            DataPlaneBadRequest: It has no ``partition_id`` or no ``sample_ids``, or handles that are none of ours.
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
            scalars: ``{tag name: one value per row}``; lists, tensors of shape ``(size,)`` and arrays alike.

        Raises:
            DataPlaneBadRequest: A column does not have ``size`` entries; nothing is written then.
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
        """Return a meta of the rows at ``indices``, in that order; IndexError where one is out of range."""
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
        """Return a meta of the rows in ``[start, stop)``, as Python slices do it."""
        return self.subset(range(*slice(start, stop).indices(self.size)))

    def concat(self, *others: KVBatchMeta | Iterable[KVBatchMeta]) -> KVBatchMeta:
        """Append the rows of ``others`` (metas, or lists of metas) to these.

        Fields become those that all parts have; sequence_lengths and created survive only where every part has them; a
        missing handle list becomes None per row; missing tags become empty ones.

        Raises:
            DataPlaneBadRequest: A part belongs to another partition.
        """
        parts: list[KVBatchMeta] = [self]
        for other in others:
            parts.extend(KVBatchMeta.of(part) for part in ([other] if is_meta(other) else cast("Any", other)))
        for part in parts:
            if part.partition_id != self.partition_id:
                msg = f"cannot join metas of partitions {self.partition_id!r} and {part.partition_id!r}"
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
        """Return a meta without the given rows (ids or positions), or None when nothing is left."""
        gone = set(rows)
        keep = [i for i, sample_id in enumerate(self.sample_ids) if i not in gone and sample_id not in gone]
        return self.subset(keep) if keep else None

    def with_fields(self, fields: Sequence[str]) -> KVBatchMeta:
        """Return a meta of the same rows that names these fields as well, after those that it names already."""
        return self.only_fields([*(self.fields or ()), *_field_names(fields)])

    def only_fields(self, fields: Sequence[str] | None) -> KVBatchMeta:
        """Return a meta of the same rows that names these fields and no others; None: no fields at all."""
        meta = self.subset(range(self.size))
        meta.fields = None if fields is None else list(dict.fromkeys(_field_names(fields)))
        return meta


@dataclass(frozen=True, slots=True)
class DataPlaneGroupMeta:
    """What the plane holds of one group (the rollouts of one prompt), without any tensor.

    Attributes:
        partition_id, group_id: Which group.
        keys: Ids of its rows that are there, oldest first; may be passed to ``get_samples``, ``pop``, ``evict``.
        weight_version: Lowest version stamped on a row, None where none is.
        created_at: Unix seconds of the oldest row.
        committed: Whether no row (of those that are not failed) is tagged ``committed=False``.
        expected_num_keys: How many rows make it whole (the highest ever seen).
        size_bytes: Payload bytes of the rows that are there.
        tags: One mapping per key.
        lost_keys: Those of ``keys`` whose payload is gone for good, or whose host does not answer.
        handles: Opaque :class:`RowHandle` per key, or () where the backend has none: a removal by the group means these
            lives and no others.
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
        """Return a meta of all keys, or of some (such as ``lost_keys``), with their tags and handles.

        Raises:
            DataPlaneBadRequest: One of ``keys`` is no key of the group.
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
        """Whether all expected rows are there and none is lost; rows tagged ``status="failed"`` do not count."""
        failed = {key for key, tags in zip(self.keys, self.tags, strict=False) if tags.get("status") == "failed"}
        return len(self.keys) - len(failed) >= self.expected_num_keys and failed.issuperset(self.lost_keys)


@dataclass(frozen=True, slots=True)
class ClaimInfo:
    """One claim that lives: who took which samples when. Times are unix seconds; ``expires_at`` None: no lease."""

    claim_id: str
    owner: str
    task_name: str
    sample_ids: tuple[str, ...]
    claimed_at: float
    expires_at: float | None = None


@dataclass(frozen=True, slots=True)
class PartitionInfo:
    """What a partition declares and how full it is.

    ``fields`` maps each declared or written field to a text of its type: ``"float32[4]"``, ``"int64[*]"`` (ragged),
    ``"object"``, ``"enum(a, b)"``, or ``""`` while nothing was written to it.
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
class DataPlaneCapabilities:
    """What a backend guarantees beyond the common promises.

    Where one is absent:

    Attributes:
        persistent_recovery: no -> samples do not survive a restart of the plane.
        server_side_filtering: no -> recovery verbs transfer all metadata of a partition.
        atomic_batch_put: no -> a failed put may be ambiguous for each of its rows on its own.
        verified_clear: no -> a clear that returned may still be going on.
        mutation_dedup: no -> a put or clear whose reply was lost is not resolved later; it stays ambiguous.
        claim_release: no -> release_claim, release_claims are DataPlaneUnsupported.
        atomic_tags: no -> tag merges of several clients may be lost.
        slot_addressable: no -> reads are not retried by slot, but as a whole.
        slot_writes: no -> puts are not placed, rotated and retried by slot, but as a whole.
        claim_dedup: no -> a claim whose reply was lost is not asked again; it shows in list_claims.
        bound_mutations: no -> a put by a meta or with ``only``, and a removal by a meta or group with handles, is
            DataPlaneUnsupported: it could hit another life.
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

    __setstate__ = _restore


def is_meta(given: Any) -> bool:
    """Whether an object is a meta, or one of another project with the same attributes."""
    return isinstance(given, KVBatchMeta) or (hasattr(given, "sample_ids") and hasattr(given, "partition_id"))


def _field_names(fields: Sequence[str]) -> list[str]:
    if isinstance(fields, str):
        msg = f"fields must be a sequence of names, not {fields!r}"
        raise DataPlaneBadRequest(msg, field="fields")
    return list(fields)


def lengths_of(tags: Sequence[Tags] | None) -> list[int] | None:
    """Lift sequence lengths from the tag ``input_lengths``, where every row has it."""
    if not tags or any(row.get("input_lengths") is None for row in tags):
        return None
    return [int(row["input_lengths"]) for row in tags]
