"""A broken promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .operation import Operation

__all__ = ["Violation"]


@dataclass(frozen=True, slots=True)
class Violation:
    """A promise that a history breaks.

    Attributes:
        check: Name of the check that found it.
        text: What is wrong, in one line.
        partition: Where.
        ids: The samples that it is about.
        operations: The calls that prove it.
    """

    check: str
    text: str
    partition: str = ""
    ids: Sequence[str] = ()
    operations: Sequence[Operation] = ()

    def __str__(self) -> str:
        """Name the check, then say what is wrong."""
        return f"{self.check}: {self.text}"
