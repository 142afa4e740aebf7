"""Checks of lives: a put bound to lives writes only those, creates no row, and leaves out only rows that are gone."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import TYPE_CHECKING

from asyncdp.errors import StaleSlotError

from ..recording.violation import Violation
from .presence import is_there
from .rows import Rows, rows_of
from .stale_errors import first_named

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.operation import Operation

__all__ = ["groundless_refusals", "unbound_puts"]

NAME = "life"

#: The first call that reported a life, by (partition, sample, life).
FirstNamed = dict[tuple[str, str, Hashable], "Operation"]


def unbound_puts(history: History) -> Iterator[Violation]:
    """Find puts that wrote to another life than theirs or to an ended one, or that created a row that already lived."""
    named = first_named(history)
    ends = _ended(history, named)
    for op in history.operations:
        if op.verb != "put_samples" or op.outcome != "ok" or not op.only:
            continue
        for at, sample_id in enumerate(op.ids):
            created = op.created[at] if at < len(op.created) else None
            if created is not None and created is not (op.only == "new"):
                text = f"sample {sample_id!r} was {'created' if created else 'replaced'} by a put of {op.only} rows"
                yield Violation(NAME, text, op.partition, (sample_id,), (op,))
            if op.only == "new":
                before = is_there(rows_of(history)[op.partition, sample_id], sample_id, op)
                if before is not None:
                    text = f"sample {sample_id!r} was created although it was there"
                    yield Violation(NAME, text, op.partition, (sample_id,), (before, op))
                continue
            meant, life = op.life_meant(sample_id), op.life(sample_id)
            if meant is not None and life != meant:
                text = f"sample {sample_id!r} was written in life {life} by a put that meant life {meant}"
                yield Violation(NAME, text, op.partition, (sample_id,), (op,))
            over = ends.get((op.partition, sample_id, life if meant is None else meant))
            if over is not None and over.end < op.start:
                text = f"sample {sample_id!r} was written in a life that had ended"
                yield Violation(NAME, text, op.partition, (sample_id,), (over, op))


def _ended(history: History, named: FirstNamed) -> dict[tuple[str, str, Hashable], Operation]:
    """Return, for each life, the acknowledged call by which it had ended: a removal, or a report of a later life."""
    ends: dict[tuple[str, str, Hashable], Operation] = {}
    rows = rows_of(history)
    by_row: dict[tuple[str, str], list[tuple[Hashable, Operation]]] = {}
    for (partition, sample_id, life), op in named.items():
        if life is not None:
            by_row.setdefault((partition, sample_id), []).append((life, op))
    for (partition, sample_id), lives in by_row.items():
        row = rows.get((partition, sample_id), Rows())
        for life, first in lives:
            over = [span.op for span in row.removals if span.op.outcome == "ok" and span.start > first.end]
            over += [span.op for span, meant in row.bound if span.op.outcome == "ok" and meant == life]
            over += [op for other, op in lives if isinstance(other, int) and isinstance(life, int) and other > life]
            if over:
                ends[partition, sample_id, life] = min(over, key=lambda op: op.end)
    return ends


def groundless_refusals(history: History) -> Iterator[Violation]:
    """Find puts that refused or left out a row as stale although nothing can have ended its life."""
    rows = rows_of(history)
    named = first_named(history)
    for op in history.operations:
        if op.verb != "put_samples" or op.only != "existing":
            continue
        stale = {i: op.life_meant(i) for i in op.error.sample_ids} if isinstance(op.error, StaleSlotError) else {}
        for sample_id, meant in (*stale.items(), *op.skipped.items()):
            row = rows.get((op.partition, sample_id))
            if row is None:
                continue
            first = named.get((op.partition, sample_id, meant))
            if meant is None or first is None:  # not bound to a known life
                before = is_there(row, sample_id, op)
                if before is None:
                    continue
                first = before
            elif any(r.start < op.end and r.end > first.start for r in row.may_remove(meant)):
                continue
            text = f"sample {sample_id!r} was said to be stale, and nothing ended its life"
            yield Violation(NAME, text, op.partition, (sample_id,), (first, op))
