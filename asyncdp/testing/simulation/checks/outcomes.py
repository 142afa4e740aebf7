"""Checks of outcomes: each requested sample has exactly one outcome, in time and with an error of asyncdp."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncdp.errors import DataPlaneError

from ..recording.operation import READS
from ..recording.violation import Violation

if TYPE_CHECKING:
    from ..recording.history import History

__all__ = ["late_calls", "raw_errors", "short_batches"]

#: Tolerance in seconds for the end of a call: one tick of the loop.
SLACK_S = 0.02


def short_batches(history: History) -> Iterator[Violation]:
    """Find reads that return a sample twice, or neither a row nor an error for it."""
    for op in history.operations:
        if op.verb not in READS or not (op.outcome == "ok" or op.errors):
            continue
        answered = sorted([*op.came, *op.errors])
        if answered != list(range(len(op.ids))):
            text = f"{len(op.ids)} samples were asked for, the outcomes are for positions {answered}"
            yield Violation("outcome", text, op.partition, op.ids, (op,))
        for name, values in op.values.items():
            if len(values) != len(op.came):
                text = f"{len(values)} values of field {name!r} came for {len(op.came)} samples"
                yield Violation("outcome", text, op.partition, op.ids, (op,))
        if op.came and op.values.keys() != set(op.fields):
            text = f"fields {sorted(op.fields)} were asked for, {sorted(op.values)} came"
            yield Violation("outcome", text, op.partition, op.ids, (op,))


def late_calls(history: History) -> Iterator[Violation]:
    """Find calls that exceeded their timeout, did not end when they were cancelled, or never ended."""
    for op in history.operations:
        if math.isinf(op.end):
            yield Violation("time", f"{op.verb} never ended", op.partition, op.ids, (op,))
            continue
        took = op.ended - op.began
        if took > op.timeout_s + SLACK_S:
            text = f"{op.verb} took {took:.3f} s where {op.timeout_s:.3f} s were allowed"
            yield Violation("time", text, op.partition, op.ids, (op,))
        if op.cancelled_at is not None and op.ended > op.cancelled_at + SLACK_S:
            text = f"{op.verb} went on for {op.ended - op.cancelled_at:.3f} s after it was cancelled"
            yield Violation("time", text, op.partition, op.ids, (op,))


def raw_errors(history: History) -> Iterator[Violation]:
    """Find errors that are not errors of asyncdp."""
    for op in history.operations:
        if op.error is not None and not isinstance(op.error, DataPlaneError):
            text = f"{op.verb} raised {type(op.error).__name__}: {op.error}"
            yield Violation("error", text, op.partition, op.ids, (op,))
