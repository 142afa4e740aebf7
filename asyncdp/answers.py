"""Converts the plain values with which the directory in Python answers into metadata, results and errors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from asyncdp import errors
from asyncdp.calls.slots import ClaimTry, Published, TryClaim, living_rows, stale_rows
from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta, RowHandle, lengths_of

if TYPE_CHECKING:
    from asyncdp.errors import DataPlaneError

__all__ = ["claim_try", "group_meta", "published", "refusal"]


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
