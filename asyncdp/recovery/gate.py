"""A gate: pumps wait in front of it while the plane is away."""

from __future__ import annotations

import anyio

__all__ = ["Gate"]


class Gate:
    """Lets callers pass while it is open, and makes them wait while it is closed. It begins open."""

    def __init__(self) -> None:
        """Begin open."""
        self._opened = anyio.Event()
        self._opened.set()
        self._error: Exception | None = None

    @property
    def is_open(self) -> bool:
        """Whether a caller passes without waiting."""
        return self._opened.is_set() and self._error is None

    async def wait(self) -> None:
        """Return once the gate is open.

        Raises:
            Exception: The error with which the gate was broken: it will not open any more.
        """
        await self._opened.wait()
        if self._error is not None:
            raise self._error

    def open(self) -> None:
        """Open it, and let all who wait pass."""
        self._opened.set()

    def close(self) -> None:
        """Close it; does nothing once it is broken."""
        if self._opened.is_set() and self._error is None:
            self._opened = anyio.Event()

    def break_with(self, error: Exception) -> None:
        """Raise ``error`` to all who wait, now and later."""
        self._error = error
        self._opened.set()
