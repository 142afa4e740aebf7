"""Claims: each task gets each life of a sample once, and only its holder may pop it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from asyncdp.testing.simulation.checks.rows import rows_of
from asyncdp.testing.simulation.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from asyncdp.testing.simulation.checks.rows import Rows
    from asyncdp.testing.simulation.history import History
    from asyncdp.testing.simulation.operation import Operation

__all__ = ["doubled_claims", "foreign_pops", "misshapen_batches", "untagged_claims"]

NAME = "claim"


class Held(NamedTuple):
    """One row of one claim."""

    op: Operation
    sample_id: str
    claim_id: str | None


def _holdings(history: History) -> dict[tuple[str, str, str, Hashable], list[Held]]:
    """Rows that were claimed, by partition, task, sample and life."""
    held: dict[tuple[str, str, str, Hashable], list[Held]] = {}
    for op in history.operations:
        if op.verb == "claim_meta" and op.outcome == "ok":
            lives = op.lives or [None] * len(op.ids)
            claims = op.claims or [None] * len(op.ids)
            for sample_id, life, claim_id in zip(op.ids, lives, claims, strict=True):
                held.setdefault((op.partition, op.task, sample_id, life), []).append(Held(op, sample_id, claim_id))
    return held


def doubled_claims(history: History) -> Iterator[Violation]:
    """Find samples that a task was given twice in one life, without a release or the end of a lease in between."""
    releases = [op for op in history.operations if op.verb in ("release_claim", "release_claims") and op.happened]
    for (partition, task, sample_id, _), held in _holdings(history).items():
        held.sort(key=lambda each: each.op.end)
        for one, two in pairwise(held):
            if one.claim_id is not None and one.claim_id == two.claim_id:
                continue  # the same claim, answered again
            lease = history.lease_s
            if lease is not None and two.op.ended - one.op.began >= lease - 1e-6:
                continue
            freed = any(
                op.start < two.op.end
                and (op.outcome != "ok" or op.end > one.op.start)
                and (sample_id in op.ids if op.verb == "release_claim" else op.partition == partition)
                for op in releases
            )
            if not freed:
                text = f"task {task!r} was given sample {sample_id!r} twice"
                yield Violation(NAME, text, partition, (sample_id,), (one.op, two.op))


def foreign_pops(history: History) -> Iterator[Violation]:
    """Find pops that went well although the claim they were made with had passed to another."""
    later: dict[tuple[str, str, str | None], tuple[str, Operation]] = {}
    for (partition, _, sample_id, _), held in _holdings(history).items():
        held.sort(key=lambda each: each.op.end)
        for one, two in pairwise(held):
            if one.claim_id != two.claim_id:
                later[partition, sample_id, one.claim_id] = (sample_id, two.op)
    for op in history.operations:
        if op.verb != "pop" or op.outcome != "ok" or not op.claims:
            continue
        for sample_id, claim_id in zip(op.ids, op.claims, strict=True):
            found = later.get((op.partition, sample_id, claim_id))
            if claim_id is not None and found is not None and found[1].end < op.start:
                text = f"sample {sample_id!r} was popped by a claim that another holder had taken over"
                yield Violation(NAME, text, op.partition, (sample_id,), (found[1], op))


def untagged_claims(history: History) -> Iterator[Violation]:
    """Find samples that were claimed before the tags of the put that made them claimable were there."""
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
    """Return a put that wrote a field together with a tag, if every put of that field did."""
    for name in fields:
        puts = [span.op for span in row.registers[name].puts.values()] if name in row.registers else []
        if puts and all(tag in put.values for put in puts):
            return puts[0]
    return None


def misshapen_batches(history: History) -> Iterator[Violation]:
    """Find batches that are too large, or hold a sample twice."""
    for op in history.operations:
        if op.verb != "claim_meta" or op.outcome != "ok":
            continue
        if len(op.ids) > op.asked:
            yield Violation(NAME, f"{len(op.ids)} samples for a batch of {op.asked}", op.partition, op.ids, (op,))
        if len(set(op.ids)) < len(op.ids):
            yield Violation(NAME, f"a batch holds a sample twice: {list(op.ids)}", op.partition, op.ids, (op,))
