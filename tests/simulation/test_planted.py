"""Planted bugs: the simulator finds each, by the check that is there for it, and nothing where there is none."""

from functools import cache

import pytest

from asyncdp.testing.simulation import Report, draw, simulate
from tests.planted.table import PLANTED, Planted, Variant

#: Tried in turn until one shows the bug.
SEEDS = range(8)


@cache
def clean(variant: Variant, seed: int) -> Report:
    """Run a seed with nothing broken."""
    return simulate(seed, scenario=variant(draw(seed)))


#: The first bug that each check finds is for make test, the others are for make test-all.
FIRST = {planted.check: planted for planted in reversed(PLANTED)}


@pytest.mark.parametrize(
    "planted",
    [
        pytest.param(
            planted, id=planted.bug.__name__, marks=() if FIRST[planted.check] is planted else pytest.mark.slow
        )
        for planted in PLANTED
    ],
)
def test_a_planted_bug_is_found(planted: Planted) -> None:
    """One of a few seeds shows the bug; without it, the same seeds are well."""
    for seed in SEEDS:
        well = clean(planted.variant, seed)
        assert not well.violations, "\n".join(well.describe())
        report = simulate(seed, scenario=planted.variant(draw(seed)), replace={planted.guard: planted.bug})
        if planted.check in {violation.check for violation in report.violations}:
            return
    pytest.fail(f"{planted.bug.__name__} shows in none of seeds {SEEDS}: {planted.bug.__doc__}")


def test_each_planted_bug_says_what_is_broken() -> None:
    """Each is a class with one line."""
    assert all((planted.bug.__doc__ or "").strip().count("\n") == 0 for planted in PLANTED)
    assert len({planted.bug for planted in PLANTED}) == len(PLANTED)
