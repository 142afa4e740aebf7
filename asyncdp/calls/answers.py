"""Makes answers of what a backend has done, or of plain values of the directory in Python; verifies those of reads.

The directory (:mod:`asyncdp.transports.directory`) imports nothing of asyncdp, so it answers in tuples and names errors
by their class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from asyncdp import errors
from asyncdp.errors import CorruptPayload, DataPlaneBadRequest, DataPlaneError, StaleSlotError
from asyncdp.meta import DataPlaneGroupMeta, KVBatchMeta, PartitionInfo, RowHandle, lengths_of

from .slots import ClaimTry, Part, Published, ReadResult, ReadSlots, TryClaim
from .snapshots import CellState, ClaimState, PartitionState, RowState

if TYPE_CHECKING:
    from asyncdp.rows.block import FieldSpec

    from .samples import PutSamples

__all__ = [
    "claim_try",
    "group_meta",
    "living_rows",
    "partition_state",
    "published",
    "refusal",
    "stale_rows",
    "verify",
    "written",
]

#: Largest number of ids that a message names; the error's ``sample_ids`` has all of them.
NAMED = 8


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
    if all(done.handles):
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


def partition_state(answer: tuple[Any, ...], specs: Mapping[str, FieldSpec]) -> PartitionState:
    """Convert the answer to a snapshot."""
    info, rows, claims = answer
    told = [
        RowState(sample_id, life, group_id, tags, tuple(CellState(*cell) for cell in cells))
        for sample_id, life, group_id, tags, cells in rows
    ]
    held = [
        ClaimState(owner, task, tuple(fields), tuple((i, life) for i, life in lives), at, left_s)
        for owner, task, fields, lives, at, left_s in claims
    ]
    return PartitionState(PartitionInfo(*info), specs, tuple(told), tuple(held))


# --- refusals of puts that are bound to lives -----------------------------------------------------------------------


def _named(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - NAMED} more" if len(ids) > NAMED else ""
    return ", ".join(map(repr, ids[:NAMED])) + more


def stale_rows(partition_id: str, ids: Sequence[str], of: int) -> StaleSlotError:
    """Return the error of a put of ``of`` rows of which ``ids`` are stale: removed, or removed and put anew."""
    msg = f"{len(ids)} of {of} rows were removed, or removed and put again; nothing was written: {_named(ids)}"
    return StaleSlotError(msg, partition_id=partition_id, sample_ids=tuple(ids))


def living_rows(partition_id: str, ids: Sequence[str], of: int) -> DataPlaneBadRequest:
    """Return the error of a put of ``of`` new rows of which ``ids`` exist already."""
    msg = f"{len(ids)} of {of} rows already exist, which only='new' does not allow; nothing was written: {_named(ids)}"
    return DataPlaneBadRequest(msg, partition_id=partition_id, sample_ids=tuple(ids), field="only")


# --- verification ---------------------------------------------------------------------------------------------------


def _corrupt(why: str, call: ReadSlots) -> CorruptPayload:
    return CorruptPayload(why, host=call.host.id, port=call.port)


def _check_part(part: Part, call: ReadSlots) -> dict[int, DataPlaneError]:
    """Compare a part with what the host announced about it; return an error for each ref that does not match."""
    block, columns = part.block, part.block.columns
    counts: list[int] = []
    whole = len(part.nbytes) == len(part.refs)
    for number in part.refs:
        counts.append(len(call.refs[number].rows))
        whole = whole and all(map(columns.__contains__, call.refs[number].fields))
    for column in columns.values():
        whole = whole and len(column) == block.n
    if not whole or block.n != sum(counts):
        fields = sorted(call.refs[part.refs[0]].fields)
        why = f"{block.n} rows of fields {sorted(columns)} came for {sum(counts)} rows of {fields}"
        return dict.fromkeys(part.refs, _corrupt(why, call))
    if block.schema_hash() != part.schema:
        return dict.fromkeys(part.refs, _corrupt("the payload's schema is not the one announced", call))
    if len(counts) == 1:
        sizes = [block.nbytes]
    else:
        per_row = block.row_nbytes()
        ends = [0, *accumulate(counts)]
        sizes = [int(per_row[a:b].sum()) for a, b in pairwise(ends)]
    bad: dict[int, DataPlaneError] = {}
    first = 0
    for at, (ref, size, count) in enumerate(zip(part.refs, sizes, counts, strict=True)):
        if size != part.nbytes[at]:
            bad[ref] = _corrupt(f"{size} bytes came where {part.nbytes[at]} were announced", call)
        elif part.checksums is not None and block.checksum(range(first, first + count)) != part.checksums[at]:
            bad[ref] = _corrupt("the payload's checksum does not match", call)
        first += count
    return bad


def verify(result: ReadResult, call: ReadSlots) -> ReadResult:
    """Check lengths, schema and checksums; refs that do not match, or have no answer, become CorruptPayload errors.

    Returns a verified result unchanged.
    """
    if result.verified:
        return result
    errors = dict(result.errors)
    parts = []
    seen = len(errors)
    for part in result.parts:
        bad = _check_part(part, call)
        seen += len(part.refs)
        errors.update(bad)
        if not bad:
            parts.append(part)
            continue
        parts.extend(_split(part, call, [ref for ref in part.refs if ref not in bad]))
    if seen < len(call.refs):
        there = set(result.errors).union(*(part.refs for part in result.parts))
        for ref in range(len(call.refs)):
            if ref not in there:
                errors[ref] = _corrupt("the host's answer leaves this slot out", call)
    return ReadResult(tuple(parts), errors, verified=True, through_port=result.through_port)


def _split(part: Part, call: ReadSlots, keep: Sequence[int]) -> Iterable[Part]:
    """Yield one part for each of the refs in ``keep``."""
    first = 0
    for at, ref in enumerate(part.refs):
        count = len(call.refs[ref].rows)
        if ref in keep:
            block = part.block.take(range(first, first + count))
            yield Part((ref,), block, (part.nbytes[at],), part.schema)
        first += count
