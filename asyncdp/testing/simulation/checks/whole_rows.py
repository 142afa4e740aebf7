"""Checks of rows: the fields of a sample in one read are of the same life and of whole puts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import combinations
from typing import TYPE_CHECKING

from ..recording.operation import READS, REMOVALS
from ..recording.violation import Violation
from .rows import rows_of

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.operation import Operation
    from .rows import Rows

__all__ = ["half_puts", "torn_rows"]

NAME = "whole"


def torn_rows(history: History) -> Iterator[Violation]:
    """Find rows whose fields cannot have been present at the same time."""
    rows = rows_of(history)
    for op in history.operations:
        if op.verb not in READS or len(op.values) < 2:  # noqa: PLR2004 - one field is always whole
            continue
        for place, at in enumerate(op.came):
            row = rows[op.partition, op.ids[at]]
            shown = [(name, values[place]) for name, values in op.values.items()]
            for (a, one), (b, other) in combinations(shown, 2):
                why = _torn(row, a, one, b, other)
                if why is not None:
                    text = f"sample {op.ids[at]!r} was read with {a}={one!r} and {b}={other!r}: {why[0]}"
                    yield Violation(NAME, text, op.partition, (op.ids[at],), (*why[1], op))


def _torn(row: Rows, a: str, one: Hashable, b: str, other: Hashable) -> tuple[str, tuple[Operation, ...]] | None:
    first = row.registers[a].puts.get(one)
    second = row.registers[b].puts.get(other)
    if first is None or second is None or first.op is second.op:
        return None
    if first.op.values.keys() >= {a, b} and second.op.values.keys() >= {a, b}:
        return "both puts wrote both fields", (first.op, second.op)
    for removal in row.removals:
        if removal.op.outcome != "ok":
            continue
        for before, after in ((first, second), (second, first)):
            if before.end < removal.start and removal.end < after.start:
                return "the sample was removed in between", (before.op, removal.op, after.op)
    return None


def half_puts(history: History) -> Iterator[Violation]:
    """Find listings that contain only a part of the samples that one put created."""
    once = _put_once(history)
    removed: dict[tuple[str, str], float] = {}
    for op in history.operations:
        if op.verb in REMOVALS:
            for i in op.ids:
                removed[op.partition, i] = min(op.start, removed.get((op.partition, i), op.start))
    for op in history.operations:
        if op.verb != "list_metadata" or op.outcome != "ok":
            continue
        there = set(op.ids)
        for put in dict.fromkeys(once[op.partition, i] for i in op.ids if (op.partition, i) in once):
            keys = [(op.partition, i) for i in put.ids]
            fresh = [key[1] for key in keys if key in once and removed.get(key, op.end) >= op.end]
            shown = [i for i in fresh if i in there]
            if shown and len(shown) < len(fresh):
                text = f"a listing shows {shown} of a put of {list(put.ids)}, but not the others"
                yield Violation(NAME, text, op.partition, put.ids, (put, op))


def _put_once(history: History) -> dict[tuple[str, str], Operation]:
    """Return the puts of samples that were put only once."""
    puts: dict[tuple[str, str], list[Operation]] = {}
    for op in history.operations:
        if op.verb == "put_samples":
            for i in op.ids:
                puts.setdefault((op.partition, i), []).append(op)
    return {key: ops[0] for key, ops in puts.items() if len(ops) == 1}
