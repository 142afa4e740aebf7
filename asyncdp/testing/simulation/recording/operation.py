"""Record of one user call."""

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
    """Type of :data:`ABSENT`."""

    def __repr__(self) -> str:
        return "ABSENT"


#: Value of an absent field.
ABSENT: Hashable = _Absent()


@dataclass(slots=True, eq=False)
class Operation:
    """A user call: its client, arguments, times and outcome.

    Attributes:
        number: Number of the call in the history.
        client: Name of the client; one client may have several calls in flight.
        verb: Name of the method.
        partition: Partition id.
        ids: Sample ids of the call, in order; for a claim, those of the claimed samples.
        start, end: Positions in the order of all events; ``end`` is infinite while the call runs.
        began, ended: Times of start and end in seconds.
        timeout_s: Timeout of the call in seconds.
        cancelled_at: Time in seconds at which the caller cancelled it; None: not cancelled.
        outcome: ``ok``; ``fail``: an error that says that nothing happened; ``unknown``: a timeout, an ambiguous
            error or a cancel, it may have happened, or may still happen; ``running``.
        error: The exception that it raised.
        denied: Whether its error says that nothing was changed (``ambiguous`` is False).
        values: For puts and reads, ``{field: one value per row}``. A field that begins with ``#`` is a tag. For a read,
            the rows are those at ``came``.
        came: For a read, the positions in ``ids`` of the rows that it returned.
        errors: For a read, ``{position: error}`` of the rows that it did not return.
        fields: For a read, the requested fields.
        task: For a claim, the task.
        lives, claims: For a claim, the life and the claim id of each row. For a pop or a release, ``claims`` are the
            claim ids of its meta.
        only: For a put bound by ``only``, ``existing`` or ``new``.
        meant: For a put or a removal by a meta, the life that each row is bound to; None means any.
        created: For a put, whether it created each row.
        skipped: For a put that left out stale rows, ``{sample: life}`` of those; they are not in ``ids``.
        owner: For ``release_claims``, the owner whose claims are released.
        asked, least: For a claim, the maximum and minimum number of requested rows.
        groups: For a claim, the group of each row, from its tag; empty if groups may have different sizes.
        notes: Further text for a trace.
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
        """Return the life of a sample that the call reported; None if it reported none."""
        return self._at(self.lives, sample_id)

    def life_meant(self, sample_id: str) -> Hashable:
        """Return the life of a sample that the call was bound to; None if it was not bound."""
        return self._at(self.meant, sample_id)

    def _at(self, rows: Sequence[Hashable], sample_id: str) -> Hashable:
        at = self.ids.index(sample_id) if rows and sample_id in self.ids else None
        return None if at is None or at >= len(rows) else rows[at]

    @property
    def happened(self) -> bool:
        """Whether the call may have changed something."""
        return self.outcome != "fail"

    def __str__(self) -> str:
        """Describe the call in one line for a trace."""
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
