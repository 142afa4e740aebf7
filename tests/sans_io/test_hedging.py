"""The delay of hedged reads: a quantile of the latest reads of the same kind."""

from __future__ import annotations

import math

import pytest

from asyncdp.middleware.policy import hedging
from asyncdp.middleware.policy.hedging import HedgeDelay

KIND = (("x",), 4)
OTHER = (("x",), 5)


def learn(delay: HedgeDelay, seconds: list[float], kind: hedging.Kind = KIND) -> None:
    """Let reads take so long."""
    for one in seconds:
        delay.took(kind, one)


def test_the_longest_delay_holds_until_enough_reads_are_known() -> None:
    """Of each kind; sixteen are enough."""
    delay = HedgeDelay(3.0, 0.95)
    learn(delay, [0.01 * (at % 4) for at in range(15)])
    assert (delay.delay_s(KIND), delay.delay_s(OTHER)) == (3.0, 3.0)
    learn(delay, [0.03])
    assert (delay.delay_s(KIND), delay.delay_s(OTHER)) == (0.04, 3.0)


def test_it_is_a_quantile_of_the_latest_reads() -> None:
    """Computed anew after each eight; what was long ago is forgotten."""
    delay = HedgeDelay(3.0, 0.95)
    learn(delay, [0.01] * 90 + [0.1] * 6)
    assert delay.delay_s(KIND) == 0.1
    learn(delay, [0.01] * 31)  # 7 short of eight: 6 of 120 were the latest to count
    assert delay.delay_s(KIND) == 0.1
    learn(delay, [0.01])  # 6 of 128 are fewer than one in twenty
    assert delay.delay_s(KIND) == 0.02
    learn(delay, [0.5] * 7)
    assert delay.delay_s(KIND) == 0.02
    learn(delay, [0.5])
    assert delay.delay_s(KIND) == 0.5
    learn(delay, [0.01] * 128)
    assert delay.delay_s(KIND) == 0.02
    learn(delay, [0.02] * 128)
    assert delay.delay_s(KIND) == 0.04


def test_it_is_at_least_twice_the_median_and_at_most_what_was_asked_for() -> None:
    """A read that is a little late is answered before a second one would be."""
    delay = HedgeDelay(0.5, 0.9)
    learn(delay, [0.1] * 9 + [0.11] * 7)
    assert delay.delay_s(KIND) == 0.2
    learn(delay, [1.0] * 16)
    assert delay.delay_s(KIND) == 0.5
    learn(delay, [0.2] * 9, OTHER)
    assert delay.delay_s(OTHER) == 0.5


def test_it_doubles_with_each_time_in_a_row() -> None:
    """Up to what was asked for, however often."""
    delay = HedgeDelay(1.0, 0.9)
    learn(delay, [0.1] * 16)
    assert [delay.delay_s(KIND, outruns) for outruns in (0, 1, 2, 3, 10_000)] == [0.2, 0.4, 0.8, 1.0, 1.0]
    tiny = HedgeDelay(1.0, 0.9)
    learn(tiny, [2.0**-60] * 16)
    assert tiny.delay_s(KIND, 59) == 1.0
    assert HedgeDelay(1.0, 0.0).delay_s(KIND, 3) == 1.0


def test_without_a_quantile_nothing_is_learnt() -> None:
    """The delay is the one that was asked for."""
    delay = HedgeDelay(3.0, 0.0)
    learn(delay, [0.01] * 100)
    assert delay.delay_s(KIND) == 3.0
    assert not delay._kinds


def test_a_number_of_kinds_is_remembered() -> None:
    """One more, and all begin anew."""
    delay = HedgeDelay(3.0, 0.5)
    learn(delay, [0.01] * 16)
    for number in range(hedging.KINDS - 1):
        learn(delay, [0.01], ((str(number),), 1))
    assert delay.delay_s(KIND) == 0.02
    learn(delay, [0.01], (("more",), 1))
    assert delay.delay_s(KIND) == 3.0
    assert len(delay._kinds) == 1


def test_quantiles_are_checked() -> None:
    """From 0, below 1."""
    for wrong in (-0.01, 1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="hedge_quantile must be at least 0 and below 1"):
            HedgeDelay(1.0, wrong)
    assert HedgeDelay(1.0, 0.999).delay_s(KIND) == 1.0
