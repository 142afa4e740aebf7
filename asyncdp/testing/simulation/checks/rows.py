"""Index of a history by sample: the puts, reads and removals of each."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from asyncdp.errors import SampleNotFound

from ..recording.operation import READS, REMOVALS

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.operation import Operation

__all__ = ["Register", "Rows", "Span", "rows_of"]


class Span(NamedTuple):
    """A call and the interval in which it took effect, if it did; ``reconciler`` is the call that reconciled it."""

    start: float
    end: float
    op: Operation
    reconciler: Operation | None = None


#: The call that reconciled an operation, by (number of the operation, sample).
Reconcilers = dict[tuple[int, str], "Operation"]


@dataclass(slots=True)
class Register:
    """The puts and reads of one field of one sample."""

    puts: dict[Hashable, Span] = field(default_factory=dict)
    reads: list[tuple[Hashable, Operation]] = field(default_factory=list)
    empty: list[Operation] = field(default_factory=list)


@dataclass(slots=True)
class Rows:
    """One sample: its registers, puts and removals. ``lost`` is the position from which a fault may have removed it.

    ``removals`` apply to any life; ``bound`` removals only to one life of a sample that may have several.
    """

    registers: dict[str, Register] = field(default_factory=dict)
    puts: list[Span] = field(default_factory=list)
    removals: list[Span] = field(default_factory=list)
    bound: list[tuple[Span, Hashable]] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)

    def may_remove(self, life: Hashable = None) -> list[Span]:
        """Return the removals that may apply to a life of the sample; None: an unknown life."""
        return self.removals + [span for span, meant in self.bound if life is None or meant == life]


def rows_of(history: History) -> dict[tuple[str, str], Rows]:
    """Index a history by sample; the result is cached, since several checks need it.

    Raises:
        ValueError: Two rows of puts have the same value, so that it is unknown which of them a read saw.
    """
    rows: dict[tuple[str, str], Rows] | None = history.derived.get("rows")
    if rows is None:
        rows = history.derived["rows"] = _sorted(history)
    return rows


def _sorted(history: History) -> dict[tuple[str, str], Rows]:
    rows: dict[tuple[str, str], Rows] = {}
    ends, reconcilers = _ends(history)
    seen: dict[tuple[str, Hashable], tuple[Operation, str]] = {}
    for op in history.operations:
        if op.verb == "put_samples":
            _check_unique(op, seen)
            _enter_put(op, ends[op.number], rows, reconcilers)
        elif op.verb not in REMOVALS:
            _enter_read(op, rows)
    for op in history.operations:
        if op.verb in REMOVALS and op.happened:
            whole = op.verb == "drop_partition"
            keys = [key for key in rows if key[0] == op.partition] if whole else [(op.partition, i) for i in op.ids]
            for key in keys:
                span = Span(op.start, ends[op.number], op, reconcilers.get((op.number, key[1])))
                row = rows.setdefault(key, Rows())
                meant = op.life_meant(key[1])
                if meant is None or sum(put.op.only != "existing" for put in row.puts) <= 1:  # a single life
                    row.removals.append(span)
                else:
                    row.bound.append((span, meant))
    for lost in history.lost:
        for sample_id in lost.ids:
            rows.setdefault((lost.partition, sample_id), Rows()).lost.append(lost.at)
    return rows


def _check_unique(op: Operation, seen: dict[tuple[str, Hashable], tuple[Operation, str]]) -> None:
    for name, values in op.values.items():
        for sample_id, value in zip(op.ids, values, strict=True):
            other, where = seen.setdefault((name, value), (op, sample_id))
            if value is not None and (other is not op or where != sample_id):
                raise ValueError(
                    f"field {name!r} of {sample_id!r} was put as {value!r} by call #{op.number}, and so was that of "
                    f"{where!r} by #{other.number}: every row of every put needs a value of its own, also of a put "
                    "that is sent again, or it cannot be told which of them a read saw"
                )


def _enter_put(op: Operation, end: float, rows: dict[tuple[str, str], Rows], reconcilers: Reconcilers) -> None:
    for sample_id in op.ids:
        rows.setdefault((op.partition, sample_id), Rows()).puts.append(
            Span(op.start, end, op, reconcilers.get((op.number, sample_id)))
        )
    for name, values in op.values.items():
        for sample_id, value in zip(op.ids, values, strict=True):
            row = rows.setdefault((op.partition, sample_id), Rows())
            row.registers.setdefault(name, Register()).puts[value] = Span(
                op.start, end, op, reconcilers.get((op.number, sample_id))
            )


def _enter_read(op: Operation, rows: dict[tuple[str, str], Rows]) -> None:
    for name, values in op.values.items() if op.came else ():
        for at, value in zip(op.came, values, strict=False):  # another check reports too few values
            row = rows.setdefault((op.partition, op.ids[at]), Rows())
            known = row.registers.setdefault(name, Register())
            if value is None:
                known.empty.append(op)
            else:
                known.reads.append((value, op))
    for sample_id, name in _missing(op):
        row = rows.setdefault((op.partition, sample_id), Rows())
        row.registers.setdefault(name, Register()).empty.append(op)


def _missing(op: Operation) -> Iterator[tuple[str, str]]:
    """Yield the (sample, field) pairs that a read found absent."""
    if op.verb not in READS:
        return
    for at, err in op.errors.items():
        if isinstance(err, SampleNotFound):
            for name in op.fields if err.field is None else (err.field,):
                yield op.ids[at], name
    if isinstance(op.error, SampleNotFound) and not op.errors:
        # Several rows may lack different fields, and the error names the field of only one of them.
        if len(op.ids) == 1:
            for name in op.fields if op.error.field is None else (op.error.field,):
                yield op.ids[0], name
        elif len(op.fields) == 1:
            for sample_id in op.error.sample_ids:
                yield sample_id, op.fields[0]


def _ends(history: History) -> tuple[dict[int, float], Reconcilers]:
    """Return until when each mutation may still take effect, and which call reconciled it.

    A client with the Reconcile layer resolves a pending mutation before its next one on the same samples, and all
    pending ones in close().
    """
    ends: dict[int, float] = {}
    reconcilers: Reconcilers = {}
    unsure: dict[tuple[str, str, str], list[Operation]] = {}
    for op in sorted(history.operations, key=lambda op: op.end):
        if op.verb == "close" and op.outcome == "ok":
            for key in [key for key in unsure if key[0] == op.client]:
                _reconciled(unsure, key, op, (ends, reconcilers))
        elif op.verb == "put_samples" or op.verb in REMOVALS:
            keys = [(op.client, op.partition, i) for i in op.ids]
            ends[op.number] = op.end if op.outcome == "ok" else math.inf
            for key in keys if op.outcome == "ok" else ():
                _reconciled(unsure, key, op, (ends, reconcilers))
            if op.outcome == "unknown" and op.client in history.settles:
                for key in keys:
                    unsure.setdefault(key, []).append(op)
    return ends, reconcilers


def _reconciled(
    unsure: dict[tuple[str, str, str], list[Operation]],
    key: tuple[str, str, str],
    op: Operation,
    found: tuple[dict[int, float], Reconcilers],
) -> None:
    """Record which mutations a successful call reconciled: those that had returned before it began."""
    ends, reconcilers = found
    for before in unsure.pop(key, ()):
        if before.end < op.start:
            ends[before.number] = min(ends[before.number], op.end)
            reconcilers[before.number, key[2]] = op
        else:
            unsure.setdefault(key, []).append(before)
