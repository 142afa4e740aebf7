"""How much of the sweep is run: a slice with the other tests, all of it by ``make sweep``."""

from __future__ import annotations

import os
from typing import Any

import pytest

from asyncdp.testing.sweep import VERBS

__all__ = ["EVERYTHING", "all_verbs", "real", "real_verbs"]

#: Set by ``make sweep``.
EVERYTHING = bool(os.environ.get("ASYNCDP_SWEEP_ALL"))
#: On real servers each cancel costs a fresh client and a dozen requests; every fifth checkpoint is tried as a rule.
EVERY = 5


def all_verbs() -> pytest.MarkDecorator:
    """Make a test of each verb."""
    return pytest.mark.parametrize("verb", VERBS)


#: Verbs that leave most to clean up, or are the only ones of their kind. On real servers the others are for
#: make test-all; in memory all of them are part of make test.
FIRST = {
    "batches, ahead",
    "claim_meta",
    "claim_meta, waiting",
    "clear_samples",
    "close",
    "get_samples",
    "pop",
    "put_samples",
    "put_samples, again",
    "register_partition",
    "release_claim",
    "wait_partition, waiting",
}


def real_verbs() -> pytest.MarkDecorator:
    """Make a test of each verb, most of them slow ones."""
    marks = {verb: () if verb in FIRST or EVERYTHING else pytest.mark.slow for verb in VERBS}
    return pytest.mark.parametrize("verb", [pytest.param(verb, marks=marks[verb]) for verb in VERBS])


def real() -> dict[str, Any]:
    """Arguments of a sweep on real servers."""
    return {"polls": True, "every": 1 if EVERYTHING else EVERY}
