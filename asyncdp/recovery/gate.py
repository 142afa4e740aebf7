"""A gate: pumps wait in front of it while the plane is away."""

from __future__ import annotations

import warnings
from typing import Final

import anyio

__all__ = ["Gate"]

#: Seconds that a caller waits at a gate that nobody will open, before a RuntimeWarning says so.
UNATTENDED_S: Final = 5.0


class Gate:
    """Lets callers pass while it is open, and makes them wait while it is closed. It begins open.

    Attributes:
        unattended: Why nobody will open it, as text for a RuntimeWarning to those who wait for long; "": somebody will.
    """

    def __init__(self) -> None:
        """Begin open."""
        self._opened = anyio.Event()
        self._opened.set()
        self._error: Exception | None = None
        self.unattended = ""

    @property
    def is_open(self) -> bool:
        """Whether a caller passes without waiting."""
        return self._opened.is_set() and self._error is None

    async def wait(self) -> None:
        """Return once the gate is open.

        Raises:
            Exception: The error with which the gate was broken: it will not open any more.
        """
        alone, opened = self.unattended, self._opened
        while not opened.is_set():
            with anyio.move_on_after(UNATTENDED_S):
                await opened.wait()
            if alone and self.unattended and not opened.is_set():
                warnings.warn(self.unattended, RuntimeWarning, stacklevel=2)
                await opened.wait()
            alone = self.unattended
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
