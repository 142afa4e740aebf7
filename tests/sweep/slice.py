"""How much of the sweep is run: a slice with the other tests, all of it by ``make sweep``."""

from __future__ import annotations

import os
from typing import Any

import pytest

from asyncdp.testing.sweep import VERBS

__all__ = ["EVERYTHING", "all_verbs", "real"]

#: Set by ``make sweep``.
EVERYTHING = bool(os.environ.get("ASYNCDP_SWEEP_ALL"))
#: On real servers each cancel costs a fresh client and a dozen requests; every fifth checkpoint is tried as a rule.
EVERY = 5


def all_verbs() -> pytest.MarkDecorator:
    """Make a test of each verb."""
    return pytest.mark.parametrize("verb", VERBS)


def real() -> dict[str, Any]:
    """Arguments of a sweep on real servers."""
    return {"polls": True, "every": 1 if EVERYTHING else EVERY}
