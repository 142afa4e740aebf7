"""Record of a violated promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operation import Operation

__all__ = ["Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that a history violates.

    Attributes:
        check: Name of the check that found it.
        text: Description in one line.
        partition: Partition of the samples; empty if there is none.
        ids: Ids of the samples.
        operations: The calls that show the violation.
    """

    check: str
    text: str
    partition: str = ""
    ids: Sequence[str] = ()
    operations: Sequence[Operation] = ()

    def __str__(self) -> str:
        """Return the name of the check and the description."""
        return f"{self.check}: {self.text}"
