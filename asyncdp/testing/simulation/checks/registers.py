"""Checks of reads: each field of each sample must behave as a linearizable register.

Every put has unique values, so it is known which put a read saw, and linearizability can be decided by *zones* (P.
Gibbons, E. Korach, "Testing Shared Memories", SIAM J. Comput. 26, 1997). All calls on one value form a cluster. If the
earliest end of its calls precedes their latest start, the value was certainly present between the two (a forward zone);
otherwise it was present at some moment between the two (a backward zone). Two forward zones must not overlap, and no
backward zone may lie within a forward one. A clear, and a read that found nothing, is a backward zone in which no value
was present.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Iterator
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from ..recording.operation import ABSENT, REMOVALS
from ..recording.violation import Violation
from .rows import rows_of

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.operation import Operation
    from .rows import Register, Rows, Span

__all__ = ["wrong_reads"]

NAME = "register"


def wrong_reads(history: History) -> Iterator[Violation]:
    """Check every register."""
    rows = rows_of(history)
    homes: dict[Hashable, tuple[str, str, str]] = {}
    for (partition, sample_id), row in rows.items():
        for name, known in row.registers.items():
            for value in known.puts:
                homes[name, value] = (partition, sample_id, name)
    for (partition, sample_id), row in rows.items():
        for name, known in row.registers.items():
            where = f"field {name!r} of sample {sample_id!r}"
            found = (*_strange(name, known, homes), *_out_of_order(known, row), *_vanished(known, row, sample_id))
            for text, ops in found:
                yield Violation(NAME, f"{where} {text}", partition, (sample_id,), ops)


Finding = tuple[str, tuple["Operation", ...]]


def _strange(name: str, known: Register, homes: dict[Hashable, tuple[str, str, str]]) -> Iterator[Finding]:
    """Find values that no put wrote, or that were read before their put began or although it failed."""
    for value, op in known.reads:
        put = known.puts.get(value)
        if put is None:
            home = next((home for key, home in homes.items() if isinstance(key, tuple) and key[1] == value), None)
            whose = "that nobody put" if home is None else f"that belongs to field {home[2]!r} of {home[1]!r}"
            yield f"was read as {value!r}, {whose}", (op,)
        elif op.end < put.start:
            yield f"was read as {value!r} before that was put", (op, put.op)
        elif put.op.denied:
            yield f"was read as {value!r}, whose put failed and said that it did nothing", (put.op, op)
        elif put.reconciler is not None and put.reconciler.end < op.start and _changes(put.reconciler, name):
            yield (
                f"was read as {value!r}, which its client had reconciled and changed since",
                (put.op, put.reconciler, op),
            )


def _changes(op: Operation, name: str) -> bool:
    """Whether a mutation replaces or removes the former value of a field."""
    return (op.verb in REMOVALS and not any(op.meant)) or name in op.values


class Zone(NamedTuple):
    """Interval in which a value was present: throughout (forward zone) or at some moment (backward zone)."""

    first: float
    last: float
    value: Hashable
    ops: tuple[Operation, ...]


def _zones(known: Register, row: Rows) -> tuple[list[Zone], list[Zone]]:
    """Return the forward and the backward zones of a register."""
    earliest: dict[Hashable, tuple[float, Operation]] = {}
    latest: dict[Hashable, tuple[float, Operation]] = {}
    for value, put in known.puts.items():
        if put.op.outcome == "ok":
            earliest[value] = (put.end, put.op)
            latest[value] = (put.start, put.op)
    for value, op in known.reads:
        if value not in known.puts:
            continue
        if value not in earliest:  # its put never returned, but it took effect
            put = known.puts[value]
            earliest[value] = (put.end, put.op)
            latest[value] = (put.start, put.op)
        if op.end < earliest[value][0]:
            earliest[value] = (op.end, op)
        if op.start > latest[value][0]:
            latest[value] = (op.start, op)
    forward, backward = [], []
    for value, (end, first) in earliest.items():
        start, last = latest[value]
        if end < start:
            forward.append(Zone(end, start, value, (known.puts[value].op, first, last)))
        else:
            backward.append(Zone(start, end, value, (known.puts[value].op,)))
    backward += [Zone(r.start, r.end, ABSENT, (r.op,)) for r in row.removals if r.op.outcome == "ok"]
    backward += [Zone(op.start, op.end, ABSENT, (op,)) for op in known.empty]
    forward.sort(key=lambda zone: zone.first)
    return forward, backward


def _out_of_order(known: Register, row: Rows) -> Iterator[Finding]:
    """Find values that reappeared after another value, or no value, was present."""
    forward, backward = _zones(known, row)
    for before, after in pairwise(forward):
        if after.first < before.last:
            text = f"was {after.value!r} while it was {before.value!r}: an older value came back"
            yield text, tuple(dict.fromkeys((*before.ops, *after.ops)))
    starts = [zone.first for zone in forward]
    for inner in backward:
        at = bisect_right(starts, inner.first) - 1
        if at >= 0 and forward[at].first < inner.first and inner.last < forward[at].last:
            outer = forward[at]
            what = "nothing" if inner.value is ABSENT else f"{inner.value!r}"
            text = f"was {outer.value!r} before and after it was {what}: what was gone came back"
            yield text, tuple(dict.fromkeys((*outer.ops, *inner.ops)))


def _vanished(known: Register, row: Rows, sample_id: str) -> Iterator[Finding]:
    """Find reads that found nothing although a put was acknowledged and nothing can have removed it.

    If one removal is the only explanation of two such reads with a put in between, it would have happened twice.
    """
    done = [put for put in known.puts.values() if put.op.outcome == "ok"]
    alone: dict[int, list[tuple[Span, Operation]]] = {}
    for op in known.empty:
        before = [put for put in done if put.end < op.start]
        if not before:
            continue
        put = max(before, key=lambda put: put.start)
        if any(put.start < at < op.end for at in row.lost):
            continue
        # Mutations that the put itself reconciled had ended before it.
        may = row.may_remove(put.op.life(sample_id))
        removals = [r.op for r in may if r.start < op.end and r.end > put.start and r.reconciler is not put.op]
        if not removals:
            yield "was put, acknowledged, never removed, and is not there", (put.op, op)
        elif len(removals) == 1:
            for earlier_put, earlier in alone.setdefault(removals[0].number, []):
                if earlier.end < put.start or op.end < earlier_put.start:
                    yield "was removed once, put again, and is gone again", (removals[0], earlier, put.op, op)
                    break
            alone[removals[0].number].append((put, op))
