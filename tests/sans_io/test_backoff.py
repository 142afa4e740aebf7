import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncdp.middleware.policy.backoff import Backoff

SECONDS = st.floats(1e-6, 1e6)


@given(attempt=st.integers(1, 10_000), times=st.tuples(SECONDS, SECONDS), seed=st.integers(0, 2**32))
def test_a_delay_lies_between_nothing_and_the_ceiling(attempt: int, times: tuple[float, float], seed: int) -> None:
    """Whatever the attempt, the delay is at least 0 and at most min(cap_s, base_s * 2 ** (attempt - 1))."""
    base_s, cap_s = sorted(times)
    delay = Backoff(base_s, cap_s).delay_s(attempt, random.Random(seed))
    assert 0.0 <= delay <= cap_s
    if attempt < 50:
        assert delay <= base_s * 2 ** (attempt - 1)


def test_the_ceiling_doubles_up_to_the_cap() -> None:
    """The defaults wait for up to 50 ms, 100 ms, ... and no more than two seconds."""
    ceilings = [Backoff().ceiling_s(attempt) for attempt in range(1, 9)]
    assert ceilings == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0])
    assert all(earlier <= later for earlier, later in pairwise(ceilings))


@pytest.mark.parametrize("attempt", [1_000, 1_100, 10_000, 10**12])
def test_any_attempt_has_a_delay(attempt: int) -> None:
    """An attempt far beyond what a float can double waits like one at the cap."""
    assert Backoff().ceiling_s(attempt) == 2.0


def test_the_jitter_is_full() -> None:
    """Delays fill the whole range evenly: clients that failed together come back spread out."""
    rng, backoff = random.Random(5), Backoff()
    delays = [backoff.delay_s(3, rng) / 0.2 for _ in range(10_000)]
    shares = [sum(low <= delay < low + 0.25 for delay in delays) / len(delays) for low in (0.0, 0.25, 0.5, 0.75)]
    assert shares == pytest.approx([0.25] * 4, abs=0.02)


def test_the_same_random_source_gives_the_same_delays() -> None:
    """Nothing but the given random source decides."""
    backoff = Backoff()
    one, other = ([backoff.delay_s(n, rng) for n in range(1, 20)] for rng in (random.Random(9), random.Random(9)))
    assert one == other


@given(retry_after_s=st.floats(0.0, 1e6), attempt=st.integers(1, 10_000), seed=st.integers(0, 2**32))
def test_not_ready_is_obeyed(retry_after_s: float, attempt: int, seed: int) -> None:
    """The backend is never asked before retry_after_s have passed, and not much later: the usual delay on top."""
    backoff = Backoff()
    delay = backoff.not_ready_s(retry_after_s, attempt, random.Random(seed))
    assert retry_after_s <= delay <= retry_after_s + backoff.ceiling_s(attempt) + 1e-9 * retry_after_s


def test_those_who_were_refused_together_come_back_apart() -> None:
    """The same retry_after_s does not bring all clients back in the same moment."""
    backoff, rng = Backoff(), random.Random(2)
    assert len({backoff.not_ready_s(1.0, 1, rng) for _ in range(100)}) == 100


@pytest.mark.parametrize("retry_after_s", [None, -3.0, float("nan")])
def test_a_backend_that_does_not_say_gets_the_usual_delay(retry_after_s: float | None) -> None:
    """No number, or one that is no time, leaves the plain delay."""
    backoff = Backoff()
    delay = backoff.not_ready_s(retry_after_s, 4, random.Random(1))
    assert delay == backoff.delay_s(4, random.Random(1))


@pytest.mark.parametrize("attempt", [0, -1])
def test_attempts_count_from_one(attempt: int) -> None:
    """There is no delay before the first attempt to ask for."""
    with pytest.raises(ValueError, match="attempt"):
        Backoff().delay_s(attempt, random.Random(0))


@pytest.mark.parametrize("name", ["base_s", "cap_s"])
@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_wrong_times_are_refused(name: str, seconds: float) -> None:
    """A time that is none is refused by name."""
    with pytest.raises(ValueError, match=f"^{name} must"):
        Backoff(**{name: seconds})


def test_a_cap_below_the_base_is_refused() -> None:
    """The cap may not be below the first ceiling."""
    with pytest.raises(ValueError, match="cap_s"):
        Backoff(base_s=1.0, cap_s=0.5)


@pytest.mark.parametrize("asked_s", [0.001, 0.5, 1.0])
def test_a_short_request_for_patience_counts_too(asked_s: float) -> None:
    """Whatever is above zero comes on top of the usual delay."""
    backoff = Backoff()
    delay = backoff.not_ready_s(asked_s, 1, random.Random(1))
    assert delay == pytest.approx(asked_s + backoff.delay_s(1, random.Random(1)))
