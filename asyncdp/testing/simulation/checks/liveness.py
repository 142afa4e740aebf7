"""Check of liveness: after the faults have ended, every call succeeds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asyncdp.errors import (
    ClaimLost,
    ClaimNotReady,
    DataPlaneNotReady,
    DataPlaneUnavailable,
    PartialReadError,
    SampleNotFound,
    StaleSlotError,
)

from ..recording.operation import READS
from ..recording.violation import Violation
from .rows import rows_of

if TYPE_CHECKING:
    from ..recording.history import History

__all__ = ["still_failing"]

#: Errors that are valid answers and not failures; other checks decide whether they are correct.
ANSWERS = (ClaimLost, ClaimNotReady, SampleNotFound, StaleSlotError)
#: Valid errors for a sample that a fault removed.
OF_LOST = (*ANSWERS, DataPlaneUnavailable)


def still_failing(history: History) -> Iterator[Violation]:
    """Find calls that failed after the faults had ended."""
    calm = history.calm_since
    if calm is None:
        return
    lost = {key for key, row in rows_of(history).items() if row.lost}
    for op in history.operations:
        if op.began < calm or op.outcome == "ok":
            continue
        if isinstance(op.error, PartialReadError) and op.verb in READS:
            problems = [(op.ids[at], err) for at, err in op.errors.items()]
        elif op.error is not None:
            problems = [(i, op.error) for i in op.ids or ("",)]
        else:
            problems = []
        bad = [
            (i, err)
            for i, err in problems
            if not isinstance(err, OF_LOST if (op.partition, i) in lost else ANSWERS) and not _plane_is_full(err)
        ]
        if bad or not problems:
            said = f": {type(bad[0][1]).__name__} ({bad[0][1]})" if bad else f" ({op.outcome})"
            text = f"{op.verb} failed after the last fault was over{said}"
            yield Violation("liveness", text, op.partition, [i for i, _ in bad] or op.ids, (op,))


def _plane_is_full(err: Exception) -> bool:
    """Return whether hosts have no room, which they may have for good: producers fill it, and scores need room, too."""
    return isinstance(err, DataPlaneNotReady) and "no room" in str(err)
