"""The directory's records of a sample, of a group, and of a claim."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

__all__ = ["Cell", "Claim", "Group", "Row", "Tags"]

Tags = dict[str, Any]


@dataclass(slots=True, eq=False)
class Cell:
    """Location of the fields of one row that one put wrote.

    Attributes:
        place: An object of the storage. Cells that one request can read have the same place; its hashable attribute
            ``home`` identifies the host that holds it.
        index: Index of the row in the place.
    """

    place: Any
    index: int


@dataclass(slots=True, eq=False)
class Row:
    """Record of one sample.

    Attributes:
        id, incarnation: Sample id, and the number of its life. Incarnations increase, so they also order rows by age.
        owner: Owner of the client that put it first.
        group: Id of its group.
        created_at: Time of the first put, in unix seconds.
        tags: Tags, merged over all puts.
        cells: Location of each field.
        produced: Sequence number at which each field was first written.
        eligible: Sequence number since which the row is committed and not failed; None while it is not.
        claimed: {task: claim id} of its claims.
        nbytes: Payload bytes of each field.
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
        """Key that sorts samples by age, oldest first."""
        return self.incarnation

    @property
    def failed(self) -> bool:
        """Whether its tag ``status`` is ``failed``: no claim returns it, and it does not count in its group."""
        return self.tags.get("status") == "failed"

    def each_cell(self) -> list[Cell]:
        """Return its distinct cells; several fields may share one."""
        return list({id(cell): cell for cell in self.cells.values()}.values())

    def homes(self) -> frozenset[Any]:
        """Return the homes that hold fields of it."""
        return frozenset(cell.place.home for cell in self.cells.values())


@dataclass(slots=True, eq=False)
class Group:
    """Samples that share a group id; ``expected`` is the highest ``expected_num_keys`` so far, None without any."""

    id: str
    rows: dict[str, Row] = field(default_factory=dict)
    expected: int | None = None

    @property
    def order(self) -> int:
        """Key that sorts groups by age: the incarnation of the oldest row, or 0 if there is no row."""
        return min((row.incarnation for row in self.rows.values()), default=0)

    @property
    def fit(self) -> list[Row]:
        """The rows that count for the group: all except the failed ones."""
        return [row for row in self.rows.values() if not row.failed]


@dataclass(slots=True, eq=False)
class Claim:
    """An active claim. Times are unix seconds; ``expires_at`` is None for a claim without a lease."""

    id: str
    owner: str
    task: str
    fields: tuple[str, ...]
    rows: dict[str, Row]
    claimed_at: float
    expires_at: float | None
