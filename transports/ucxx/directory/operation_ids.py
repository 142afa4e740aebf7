"""What a mutation carries so that it happens once."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Op"]


@dataclass(frozen=True, slots=True)
class Op:
    """Names a mutation, and says for how long it may still happen.

    Attributes:
        id: The same for every attempt of one user call, and for no other call of any client.
        left_s: Seconds until the call's deadline; an attempt that arrives later is refused.
    """

    id: str
    left_s: float
