"""Checks of StaleSlotError: it is raised only if the data changed meanwhile, and never omitted for a later life."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncdp.errors import StaleSlotError

from ..recording.operation import READS
from ..recording.violation import Violation
from .rows import rows_of

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.operation import Operation

__all__ = ["first_named", "groundless_stale_errors", "other_lives"]

NAME = "stale"


def groundless_stale_errors(history: History) -> Iterator[Violation]:
    """Find reads that got StaleSlotError although no call can have changed the samples.

    For a read by ids, changes since its start count; for a read by a meta, changes since the meta was made, because the
    meta is bound to a life of the sample.
    """
    rows = rows_of(history)
    mutations: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for key, row in rows.items():
        spans = [(r.start, r.end) for r in row.may_remove()] + [(at, math.inf) for at in row.lost]
        for register in row.registers.values():
            spans += [(put.start, put.end) for put in register.puts.values()]
        mutations[key] = spans
    made = first_named(history)
    for op in history.operations:
        if op.verb not in READS:
            continue
        stale = [op.ids[at] for at, err in op.errors.items() if isinstance(err, StaleSlotError)]
        if isinstance(op.error, StaleSlotError):
            stale += op.error.sample_ids or op.ids
        if not stale:
            continue
        since = op.start
        if op.verb == "get_data":
            first = [made.get((op.partition, i, life), op).start for i, life in zip(op.ids, op.lives, strict=False)]
            since = min(first, default=op.start)
        # The slot may be shared by any samples of the request.
        touched = any(
            start < op.end and end > since for i in op.ids for start, end in mutations.get((op.partition, i), ())
        )
        if not touched:
            text = f"{stale} were said to be stale, and nobody touched what was read"
            yield Violation(NAME, text, op.partition, stale, (op,))


def other_lives(history: History) -> Iterator[Violation]:
    """Find reads by a meta that returned a value of a later life than the meta's."""
    rows = rows_of(history)
    made = first_named(history)
    for op in history.operations:
        if op.verb != "get_data" or not op.came:
            continue
        lives = {at: made.get((op.partition, op.ids[at], life)) for at, life in enumerate(op.lives)}
        for name, values in op.values.items():
            for at, value in zip(op.came, values, strict=False):
                row = rows[op.partition, op.ids[at]]
                put, first = row.registers[name].puts.get(value), lives.get(at)
                if put is None or first is None:
                    continue
                between = [
                    r for r in row.removals if r.op.outcome == "ok" and r.start > first.end and r.end < put.start
                ]
                if between:
                    text = f"sample {op.ids[at]!r} was read by a meta of a former life, as {value!r}"
                    yield Violation(NAME, text, op.partition, (op.ids[at],), (first, between[0].op, put.op, op))


def first_named(history: History) -> dict[tuple[str, str, object], Operation]:
    """Return, for each life of each sample, the call that first reported it."""
    made: dict[tuple[str, str, object], Operation] = {}
    for op in history.operations:
        if op.verb in ("claim_meta", "put_samples") and op.outcome == "ok":
            for sample_id, life in zip(op.ids, op.lives, strict=False):
                made.setdefault((op.partition, sample_id, life), op)
    return made
