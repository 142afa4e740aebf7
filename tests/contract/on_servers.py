"""What the contract on real servers has in common: which themes make test shows, and which are slow."""

from __future__ import annotations

from typing import ClassVar

import pytest

from asyncdp.testing.contract import Claims, Closing, Contract, DataPlaneContract, Puts, Reads, Rows, Snapshots, Stale

__all__ = ["SLICE", "Slow", "others"]

#: Themes that make test shows on real servers.
SLICE = (Rows, Reads, Stale, Puts, Claims, Snapshots, Closing)


def others(*themes: type[Contract]) -> tuple[type[Contract], ...]:
    """Return the themes of the contract but these."""
    return tuple(theme for theme in DataPlaneContract.__bases__ if theme not in themes)


class Slow(Contract):
    """The tests that only make test-all runs."""

    pytestmark: ClassVar = [*Contract.pytestmark, pytest.mark.slow]
