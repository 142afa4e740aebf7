"""Checks of claims: each task gets each life of a sample once, and only the holder of a claim can pop its samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..recording.violation import Violation
from .rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Sequence

    from ..recording.history import History
    from ..recording.operation import Operation
    from .rows import Rows

__all__ = ["doubled_claims", "foreign_pops", "misshapen_batches", "untagged_claims"]

NAME = "claim"
#: Verbs that end a claim, with the text for messages.
ENDS = {"pop": "popped", "release_claim": "given back"}


class Held(NamedTuple):
    """One claimed row."""

    op: Operation
    sample_id: str
    claim_id: str | None


def _holdings(history: History) -> dict[tuple[str, str, str, Hashable], list[Held]]:
    """Return the claimed rows by (partition, task, sample, life)."""
    held: dict[tuple[str, str, str, Hashable], list[Held]] = {}
    for op in history.operations:
        if op.verb == "claim_meta" and op.outcome == "ok":
            lives = op.lives or [None] * len(op.ids)
            claims = op.claims or [None] * len(op.ids)
            for sample_id, life, claim_id in zip(op.ids, lives, claims, strict=True):
                held.setdefault((op.partition, op.task, sample_id, life), []).append(Held(op, sample_id, claim_id))
    return held


def doubled_claims(history: History) -> Iterator[Violation]:
    """Find samples that a task got twice in one life without a release or an expired lease in between."""
    releases = [op for op in history.operations if op.verb in ("release_claim", "release_claims") and op.happened]
    rows = rows_of(history)
    for (partition, task, sample_id, life), held in _holdings(history).items():
        held.sort(key=lambda each: each.op.end)
        for one, two in pairwise(held):
            if one.claim_id is not None and one.claim_id == two.claim_id:
                continue  # the repeated answer of one claim
            lease = history.lease_s
            # Of two concurrent claims, the one that returned later may have been made first.
            apart = max(two.op.ended - one.op.began, one.op.ended - two.op.began)
            if lease is not None and apart >= lease - 1e-6:
                continue
            freed = any(
                op.partition == partition
                and op.start < two.op.end
                and (op.outcome != "ok" or op.end > one.op.start)
                and (op.verb == "release_claims" or _gives_back(op, one, task))
                for op in releases
            )
            if life is None and (row := rows.get((partition, sample_id))) is not None:  # the lives may differ
                freed = freed or any(r.start < two.op.end and r.end > one.op.start for r in row.may_remove())
            if not freed:
                text = f"task {task!r} was given sample {sample_id!r} twice"
                yield Violation(NAME, text, partition, (sample_id,), (one.op, two.op))


def _gives_back(op: Operation, held: Held, task: str) -> bool:
    """Whether a call releases this row of this claim, as far as the call names it."""
    if held.sample_id not in op.ids or (op.task and op.task != task):
        return False
    named = op.claims[op.ids.index(held.sample_id)] if op.claims else None
    return named is None or held.claim_id in (None, named)


def foreign_pops(history: History) -> Iterator[Violation]:
    """Find pops and releases that succeeded although another claim had taken over the samples."""
    later: dict[tuple[str, str, str | None], tuple[str, Operation]] = {}
    for (partition, _, sample_id, _), held in _holdings(history).items():
        held.sort(key=lambda each: each.op.end)
        for one, two in pairwise(held):
            if (
                one.claim_id != two.claim_id and one.op.end < two.op.start
            ):  # of two concurrent claims, either may be the later one
                later[partition, sample_id, one.claim_id] = (sample_id, two.op)
    for op in history.operations:
        if op.verb not in ENDS or op.outcome != "ok" or not op.claims:
            continue
        for sample_id, claim_id in zip(op.ids, op.claims, strict=True):
            found = later.get((op.partition, sample_id, claim_id))
            if claim_id is not None and found is not None and found[1].end < op.start:
                text = f"sample {sample_id!r} was {ENDS[op.verb]} by a claim that another holder had taken over"
                yield Violation(NAME, text, op.partition, (sample_id,), (found[1], op))


def untagged_claims(history: History) -> Iterator[Violation]:
    """Find samples that were claimed without the tags of the put that made them claimable."""
    rows = rows_of(history)
    for op in history.operations:
        if op.verb != "claim_meta" or op.outcome != "ok":
            continue
        for name, values in op.values.items():
            for sample_id, value in zip(op.ids, values, strict=False):
                if value is not None:
                    continue
                put = _always_tagged(rows[op.partition, sample_id], op.fields, name)
                if put is not None:
                    text = f"sample {sample_id!r} was claimed without the tag {name[1:]!r} that it was put with"
                    yield Violation(NAME, text, op.partition, (sample_id,), (put, op))


def _always_tagged(row: Rows, fields: Sequence[str], tag: str) -> Operation | None:
    """Return a put that wrote a field together with a tag, provided that every put of the field did."""
    for name in fields:
        puts = [span.op for span in row.registers[name].puts.values()] if name in row.registers else []
        if puts and all(tag in put.values for put in puts):
            return puts[0]
    return None


def misshapen_batches(history: History) -> Iterator[Violation]:
    """Find batches that are too large or too small, or contain a sample twice or only a part of a group."""
    members = _members(history)
    for op in history.operations:
        if op.verb != "claim_meta" or op.outcome != "ok":
            continue
        if len(op.ids) > op.asked:
            yield Violation(NAME, f"{len(op.ids)} samples for a batch of {op.asked}", op.partition, op.ids, (op,))
        if len(set(op.ids)) < len(op.ids):
            yield Violation(NAME, f"a batch holds a sample twice: {list(op.ids)}", op.partition, op.ids, (op,))
        size = history.group_sizes.get(op.partition)
        least = op.least if size is None else op.least // size * size
        if len(op.ids) < least and not _removed_meanwhile(history, op, None):
            text = f"{len(op.ids)} samples for a batch of at least {least}"
            yield Violation(NAME, text, op.partition, op.ids, (op,))
        for group, count in Counter(op.groups).items():
            if size is not None and count < size and not _removed_meanwhile(history, op, members[op.partition, group]):
                text = f"{count} samples of group {group!r}, which has {size}"
                yield Violation(NAME, text, op.partition, op.ids, (op,))


def _members(history: History) -> dict[tuple[str, str], set[str]]:
    """Return the samples of each group, as far as claims reported them."""
    members: dict[tuple[str, str], set[str]] = {}
    for op in history.operations:
        for sample_id, group in zip(op.ids, op.groups, strict=False):
            members.setdefault((op.partition, group), set()).add(sample_id)
    return members


def _removed_meanwhile(history: History, op: Operation, ids: Collection[str] | None) -> bool:
    """Whether samples may have been removed during a claim; a repeated answer contains only rows that still live."""
    return any(
        removal.start < op.end and removal.end > op.start
        for (partition, sample_id), row in rows_of(history).items()
        if partition == op.partition and (ids is None or sample_id in ids)
        for removal in row.may_remove()
    )
