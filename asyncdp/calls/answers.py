"""Makes the answers of calls: of what a backend has done, and of the plain values of the directory in Python.

The directory (:mod:`asyncdp.transports.directory`) imports nothing of asyncdp, so it answers in tuples and names errors
by their class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncdp import errors
from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta, RowHandle, lengths_of

from .slots import ClaimTry, Published, TryClaim, living_rows, stale_rows

if TYPE_CHECKING:
    from asyncdp.errors import DataPlaneError

    from .samples import PutSamples

__all__ = ["claim_try", "group_meta", "published", "refusal", "written"]


def written(call: PutSamples, names: Sequence[str], done: Published) -> KVBatchMeta:
    """Return the meta of a put of the fields ``names``: the rows that were written, their handles, which are new."""
    meta = KVBatchMeta(
        call.partition_id,
        sample_ids=list(call.sample_ids),
        fields=list(names),
        sequence_lengths=lengths_of(call.tags),
        tags=None if call.tags is None else [dict(row) for row in call.tags],
        handles=list(done.handles),
        created=None if done.created is None else list(done.created),
    )
    if None not in done.handles:
        return meta
    return meta.subset([at for at, handle in enumerate(done.handles) if handle is not None])


def refusal(kind: str, message: str, **info: Any) -> DataPlaneError:
    """Return the error whose class the directory named."""
    if "bound" in info:  # a put bound to lives was refused: the message is the same on every transport
        told = stale_rows if kind == "StaleSlotError" else living_rows
        return told(info["partition_id"], info["sample_ids"], info["bound"])
    made: type[DataPlaneError] = getattr(errors, kind)
    marks = {key: info.pop(key) for key in ("no_plane", "unknown_partition") if key in info}
    err = made(message, **info)
    for key, value in marks.items():
        setattr(err, key, value)
    return err


def published(answer: tuple[Sequence[int | None], Sequence[bool]]) -> Published:
    """Convert the answer to a put."""
    lives, created = answer
    return Published(tuple(None if life is None else RowHandle(life) for life in lives), tuple(created))


def claim_try(call: TryClaim, claim_id: str, answer: tuple[Any, ...]) -> ClaimTry:
    """Convert the answer to a claim."""
    what, *facts = answer
    fields = list(call.required_fields)
    if what == "unready":
        ready, oldest_s, waiting, lacking = facts
        empty = KVBatchMeta(call.partition_id, call.task_name, [], fields, tags=[], handles=[])
        return ClaimTry(empty, ready, oldest_s, tuple(waiting), lacking)
    ids, tags, lives = facts
    handles: list[RowHandle | None] = [RowHandle(life, claim_id) for life in lives]
    lengths = lengths_of(tags)
    meta = KVBatchMeta(call.partition_id, call.task_name, ids, fields, lengths, tags=tags, handles=handles)
    return ClaimTry(meta, ready=len(ids))


def group_meta(partition_id: str, group: Sequence[Any], gone: frozenset[Any]) -> DataPlaneGroupMeta:
    """Convert one group of a listing; a row is lost if a part of it is stored at one of the places in ``gone``."""
    *facts, homes, lives = group
    lost = tuple(key for key, at in zip(facts[1], homes, strict=True) if not gone.isdisjoint(at))
    return replace(DataPlaneGroupMeta(partition_id, *facts), lost_keys=lost, handles=tuple(map(RowHandle, lives)))
