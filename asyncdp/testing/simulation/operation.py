"""One call of a user, as a history keeps it."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["ABSENT", "READS", "REMOVALS", "Operation", "Outcome"]

Outcome = Literal["running", "ok", "fail", "unknown"]

#: Verbs that remove samples.
REMOVALS = frozenset({"clear_samples", "pop", "evict", "drop_partition"})
#: Verbs that read payload.
READS = frozenset({"get_samples", "get_data"})


class _Absent:
    """Stands for "there is none" among values."""

    def __repr__(self) -> str:
        return "ABSENT"


#: The value of a field that is not there.
ABSENT: Hashable = _Absent()


@dataclass(slots=True, eq=False)
class Operation:
    """One call: who asked for what, when, and what came of it.

    Attributes:
        number: Its place in the history.
        client: Who called; one client may have several calls under way.
        verb: The name of the method.
        partition: Where.
        ids: The samples that it names, in order; of a claim, those that it was given.
        start, end: Places in the one order of all events; ``end`` is infinite while nothing came back.
        began, ended: The same in seconds.
        timeout_s: What the caller allowed it, in seconds.
        cancelled_at: When it was cancelled from outside, if it was, in seconds.
        outcome: ``ok``; ``fail``: an error that says that nothing happened; ``unknown``: a timeout, an ambiguous
            error or a cancel, it may have happened, or may still happen; ``running``.
        error: What it raised.
        denied: It changed nothing, says its error (``ambiguous`` is False).
        values: Of a put and a read: ``{field: one value per row}``. A field that begins with ``#`` is a tag. Of a read,
            rows are those at ``came``.
        came: Positions, in ``ids``, of the rows that a read brought.
        errors: ``{position: error}`` of the rows that it did not.
        fields: What a read asked for.
        task: Of a claim.
        lives, claims: Of a claim, per row: which life of the sample it is, and the claim's id. Of a pop or a release,
            ``claims`` are those it was made with.
        only: Of a put: ``existing`` or ``new``, where it was bound so.
        meant: Of a put or a removal by a meta: the life that each row was meant in, None where any was.
        created: Of a put: which rows it created.
        skipped: Of a put that left rows out as stale: ``{sample: life meant}``. They are not among ``ids`` any more.
        owner: Of ``release_claims``: whose.
        asked, least: Rows that were asked for, of a claim: at most, at least.
        groups: Of a claim, the group of each row, by its tag; where a group may be smaller than others: none.
        notes: What else is worth a line in a trace.
    """

    number: int
    client: str
    verb: str
    partition: str = ""
    ids: tuple[str, ...] = ()
    start: float = 0
    end: float = math.inf
    began: float = 0.0
    ended: float = math.inf
    timeout_s: float = math.inf
    cancelled_at: float | None = None
    outcome: Outcome = "running"
    error: Exception | None = None
    denied: bool = False
    values: Mapping[str, Sequence[Hashable]] = field(default_factory=dict)
    came: Sequence[int] = ()
    errors: Mapping[int, Exception] = field(default_factory=dict)
    fields: tuple[str, ...] = ()
    task: str = ""
    lives: Sequence[Hashable] = ()
    claims: Sequence[str | None] = ()
    only: str = ""
    meant: Sequence[Hashable] = ()
    created: Sequence[bool] = ()
    skipped: Mapping[str, Hashable] = field(default_factory=dict)
    owner: str = ""
    asked: int = 0
    least: int = 0
    groups: Sequence[str] = ()
    notes: str = ""

    def life(self, sample_id: str) -> Hashable:
        """Return which life of a sample the call told of, None where it told of none."""
        return self._at(self.lives, sample_id)

    def life_meant(self, sample_id: str) -> Hashable:
        """Return which life of a sample the call was bound to, None where it was bound to none."""
        return self._at(self.meant, sample_id)

    def _at(self, rows: Sequence[Hashable], sample_id: str) -> Hashable:
        at = self.ids.index(sample_id) if rows and sample_id in self.ids else None
        return None if at is None or at >= len(rows) else rows[at]

    @property
    def happened(self) -> bool:
        """Whether it may have changed something."""
        return self.outcome != "fail"

    def __str__(self) -> str:
        """One line for a trace."""
        until = "..." if math.isinf(self.ended) else f"{self.ended:.4f}"
        said = f" {type(self.error).__name__}" if self.error is not None else ""
        rows = ", ".join(self.ids[:8]) + (", ..." if len(self.ids) > 8 else "")  # noqa: PLR2004 - one line
        shown: dict[str, Any] = {name: list(values)[:8] for name, values in self.values.items()}
        what = f" {shown}" if shown else ""
        by = f" claims={list(dict.fromkeys(self.claims))[:4]}" if self.claims else ""
        bound = f" meant={list(self.meant)[:8]}" if any(m is not None for m in self.meant) else ""
        bound += f" only={self.only}" if self.only else ""
        bound += f" skipped={list(self.skipped)[:8]}" if self.skipped else ""
        cut = " cancelled" if self.cancelled_at is not None else ""
        return (
            f"#{self.number} [{self.began:.4f}, {until}] {self.client} {self.verb}({self.partition}: {rows})"
            f"{self.task and f' task={self.task}'} -> {self.outcome}{said}{cut}{what}{by}{bound}"
            f"{self.notes and f' ({self.notes})'}"
        )
