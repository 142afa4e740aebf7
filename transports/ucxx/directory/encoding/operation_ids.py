"""Identification of mutations, by which the server executes each at most once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OperationId"]


@dataclass(frozen=True, slots=True)
class OperationId:
    """Identifies a mutation, and limits the time in which it may be executed.

    Attributes:
        id: Unique id of the user call; all attempts of the call have the same one.
        left_s: Seconds until the call's deadline; an attempt that arrives later is refused.
    """

    id: str
    left_s: float
