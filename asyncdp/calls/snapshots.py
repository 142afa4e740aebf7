"""The calls by which a checkpoint reads the directory's state of a partition, and gives claims back to it.

A backend that serves them has the capability ``directory_snapshots``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from asyncdp.meta import PartitionInfo, Tags  # noqa: TC001 - in annotations of dataclasses

from .context import Call, Resend

if TYPE_CHECKING:
    from asyncdp.rows.block import FieldSpec

__all__ = ["CellState", "ClaimState", "PartitionState", "RestoreClaims", "RowState", "Snapshot"]


class CellState(NamedTuple):
    """What one put wrote of a row, as far as it has not been replaced.

    Attributes:
        name: Identifies the cell in the row's life. What is stored under a name never changes; only fields may go.
        fields: Fields of the row that the cell holds.
        nbytes: Payload bytes of these fields.
    """

    name: str
    fields: tuple[str, ...]
    nbytes: int


class RowState(NamedTuple):
    """One row: its id, the number of its life, its group, its tags as ``list_metadata`` shows them, and its cells."""

    sample_id: str
    life: int
    group_id: str
    tags: Tags
    cells: tuple[CellState, ...]


class ClaimState(NamedTuple):
    """One claim.

    Attributes:
        owner: Client that holds it.
        task_name: Task that it was made for.
        fields: Fields that were required.
        rows: Id and life of each claimed row that exists.
        claimed_at: Unix time of the claim, in seconds.
        left_s: Seconds until its lease ends; None: it has no lease.
    """

    owner: str
    task_name: str
    fields: tuple[str, ...]
    rows: tuple[tuple[str, int], ...]
    claimed_at: float
    left_s: float | None


@dataclass(frozen=True, slots=True)
class PartitionState:
    """Result of :class:`Snapshot`: the state of a partition at one moment.

    Attributes:
        info: Its declaration, and how much it holds.
        specs: Specs of its fields.
        rows: Its rows, oldest first.
        claims: Its claims, oldest first; those whose lease has ended have been taken back.
    """

    info: PartitionInfo
    specs: Mapping[str, FieldSpec]
    rows: tuple[RowState, ...]
    claims: tuple[ClaimState, ...]


@dataclass(frozen=True, slots=True)
class Snapshot(Call[PartitionState]):
    """Read what the directory knows of a partition, in one atomic step."""

    partition_id: str


@dataclass(frozen=True, slots=True)
class RestoreClaims(Call[None]):
    """Declare tasks of a partition and make claims for them, in one atomic step: all, or an error and nothing.

    Nobody can claim for a task before it is declared, so rows that are claimed again here were claimable to nobody in
    between. The claims get new ids; a lease ends ``left_s`` after this step.

    Raises, from ``execute``:
        StaleSlotError: A row is gone or has another life.
        DataPlaneBadRequest: A row is claimed for that task already, or named twice for it, or the partition is unknown.
    """

    partition_id: str
    consumer_tasks: tuple[str, ...]
    claims: tuple[ClaimState, ...]
    resend: ClassVar[Resend] = Resend.DEDUP
    mutates: ClassVar[bool] = True
