"""Checks of presence: claims and listings name exactly the samples that exist."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ..recording.violation import Violation
from .rows import rows_of

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.operation import Operation
    from .rows import Rows, Span

__all__ = ["is_there", "phantom_claims", "wrong_listings"]


def phantom_claims(history: History) -> Iterator[Violation]:
    """Find samples that were claimed although they, or the fields that the claim requires, cannot have existed.

    Samples without a recorded put are skipped, so that a history of trainers alone can be checked.
    """
    rows = rows_of(history)
    for op in history.operations:
        if op.verb != "claim_meta" or op.outcome != "ok":
            continue
        for sample_id in op.ids:
            row = rows.get((op.partition, sample_id))
            if row is None or not row.puts:
                continue
            for name in op.fields:
                register = row.registers.get(name)
                if not _may_be_there(() if register is None else register.puts.values(), row, op):
                    text = f"sample {sample_id!r} was claimed by its field {name!r}, which was not there"
                    yield Violation("claim", text, op.partition, (sample_id,), (op,))
                    break


def wrong_listings(history: History) -> Iterator[Violation]:
    """Find listings that lack a present sample, or contain a removed one."""
    rows = rows_of(history)
    for op in history.operations:
        if op.verb != "list_metadata" or op.outcome != "ok":
            continue
        shown = set(op.ids)
        for (partition, sample_id), row in rows.items():
            if partition != op.partition or not row.puts:
                continue
            if sample_id not in shown:
                put = is_there(row, sample_id, op)
                if put is not None:
                    text = f"sample {sample_id!r} was put, acknowledged, never removed, and is not listed"
                    yield Violation("register", text, op.partition, (sample_id,), (put, op))
            elif not _may_be_there(row.puts, row, op):
                text = f"sample {sample_id!r} is listed, and was not there"
                yield Violation("register", text, op.partition, (sample_id,), (op,))


def _may_be_there(puts: Iterable[Span], row: Rows, op: Operation) -> bool:
    """Whether the content of one of these puts can have been present at some moment of a call."""
    removals = [r for r in row.removals if r.op.outcome == "ok" and r.end < op.start]
    return any(
        put.start < op.end and not put.op.denied and not any(put.end < removal.start for removal in removals)
        for put in puts
    )


def is_there(row: Rows, sample_id: str, op: Operation) -> Operation | None:
    """Return a put that was acknowledged before a call and that nothing can have removed before the call's end."""
    put = max((p for p in row.puts if p.op.outcome == "ok" and p.end < op.start), key=lambda p: p.start, default=None)
    if put is None or any(put.start < at < op.end for at in row.lost):
        return None
    removals = row.may_remove(put.op.life(sample_id))
    undone = any(r.start < op.end and r.end > put.start and r.reconciler is not put.op for r in removals)
    return None if undone else put.op
