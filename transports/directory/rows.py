"""What a directory knows of one sample, of one group, of one claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cell", "Claim", "Group", "Row", "Tags"]

Tags = dict[str, Any]


@dataclass(slots=True, eq=False)
class Cell:
    """Where the fields that one put gave to one row lie.

    Attributes:
        place: The storage's own object. Cells that one request can read have the same one; its ``home`` says who holds
            it, as a hashable value.
        index: Which row of the place it is.
    """

    place: Any
    index: int


@dataclass(slots=True, eq=False)
class Row:
    """One sample.

    Attributes:
        id, incarnation: Its name, and which life of it this is. Incarnations grow, so they are its age, too.
        owner: Who put it first.
        group: Name of its group.
        created_at: Unix seconds.
        tags: Merged over all puts.
        cells: Where each field lies.
        produced: Sequence number at which each field was there first.
        eligible: Sequence number since when it is committed and not failed; None while it is not.
        claimed: {task: claim id}.
        nbytes: Payload bytes per field.
    """

    id: str
    incarnation: int
    owner: str
    group: str
    created_at: float
    tags: Tags = field(default_factory=dict)
    cells: dict[str, Cell] = field(default_factory=dict)
    produced: dict[str, int] = field(default_factory=dict)
    eligible: int | None = None
    claimed: dict[str, str] = field(default_factory=dict)
    nbytes: dict[str, int] = field(default_factory=dict)

    @property
    def order(self) -> int:
        """Age among samples."""
        return self.incarnation

    @property
    def failed(self) -> bool:
        """Whether no claim gives it: a group has to be whole without it."""
        return self.tags.get("status") == "failed"

    def each_cell(self) -> list[Cell]:
        """Return its cells, each once, however many fields lie in it."""
        return list({id(cell): cell for cell in self.cells.values()}.values())

    def homes(self) -> frozenset[Any]:
        """Return who holds a part of it."""
        return frozenset(cell.place.home for cell in self.cells.values())


@dataclass(slots=True, eq=False)
class Group:
    """The samples that share a group id; ``expected`` is the highest expected_num_keys ever seen."""

    id: str
    rows: dict[str, Row] = field(default_factory=dict)
    expected: int | None = None

    @property
    def order(self) -> int:
        """Age among groups: that of the oldest row, or 0 where there is none."""
        return min((row.incarnation for row in self.rows.values()), default=0)

    @property
    def fit(self) -> list[Row]:
        """The rows that count: all but the failed ones."""
        return [row for row in self.rows.values() if not row.failed]


@dataclass(slots=True, eq=False)
class Claim:
    """One claim that lives. Times are unix seconds."""

    id: str
    owner: str
    task: str
    fields: tuple[str, ...]
    rows: dict[str, Row]
    claimed_at: float
    expires_at: float | None
