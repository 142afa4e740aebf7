import random

import pytest

from asyncdp.middleware.policy.outage import PAUSE_S, Answer, Outage, Patience


class FakeEvent:
    """Stands for an event."""


def test_one_of_those_who_wait_asks() -> None:
    """While one leads nobody else does; when it gives up without an answer another may, and all are woken."""
    outage = Outage(FakeEvent)
    waiters = [outage.join() for _ in range(3)]
    assert outage.waiting == 3
    assert [outage.lead() for _ in waiters] == [True, False, False]
    turn = outage.turn
    assert outage.probed(None) is turn
    assert outage.turn is not turn
    assert [outage.verdict(waiter) for waiter in waiters] == [None] * 3
    assert outage.lead()
    outage.probed(Answer.NOT_YET)
    assert [outage.verdict(waiter) for waiter in waiters] == [Answer.NOT_YET] * 3
    outage.probed(Answer.BACK)
    assert [outage.verdict(waiter) for waiter in waiters] == [Answer.BACK] * 3
    for _ in waiters:
        outage.leave()
    assert outage.waiting == 0


def test_what_stops_being_expected_is_waited_for_by_those_who_wait() -> None:
    """A first answer decides whether a caller waits; who waits already does not mind that a heartbeat grew old."""
    outage = Outage(FakeEvent)
    early = outage.join()
    outage.probed(Answer.NOT_YET)
    assert outage.verdict(early) is Answer.NOT_YET
    late = outage.join()
    assert outage.verdict(late) is None  # what was learnt before it came does not count
    outage.probed(Answer.UNEXPECTED)
    assert outage.verdict(early) is Answer.NOT_YET
    assert outage.verdict(late) is Answer.UNEXPECTED


def test_what_answers_at_once_was_not_away() -> None:
    """A host that answers the first question was not away: what it answered was wrong, and attempts bound that."""
    outage = Outage(FakeEvent)
    first = outage.join()
    outage.probed(Answer.BACK)
    assert outage.verdict(first) is Answer.UNEXPECTED
    outage.probed(Answer.NOT_YET)
    late = outage.join()
    outage.probed(Answer.BACK)
    assert outage.verdict(late) is Answer.BACK


def test_pauses_grow_and_have_a_floor() -> None:
    """The first question comes at once, the second after 0.05 to 0.1 s, later ones after half to all of PAUSE_S."""
    outage, rng = Outage(FakeEvent), random.Random(1)
    assert outage.pause_s(rng) == 0.0
    outage.asked = 1
    assert all(0.05 <= outage.pause_s(rng) <= 0.1 for _ in range(100))
    for outage.asked in (4, 1000, 10**9):
        drawn = [outage.pause_s(rng) for _ in range(100)]
        assert PAUSE_S / 2 <= min(drawn) < max(drawn) <= PAUSE_S


def test_patience_is_counted_over_a_whole_call() -> None:
    """Waits of one call add up, those that overlap count once; other calls have their own."""
    patience = Patience(10.0)
    assert patience.left_s("a", 0.0) == 10.0
    patience.begin("a", 60.0, 0.0)
    patience.begin("a", 60.0, 1.0)
    assert patience.left_s("a", 3.0) == 7.0
    patience.end("a", 3.0)
    assert patience.left_s("a", 4.0) == 6.0
    patience.end("a", 4.0)
    assert patience.left_s("a", 50.0) == 6.0
    patience.begin("a", 60.0, 50.0)
    assert patience.left_s("a", 57.0) == -1.0
    patience.end("a", 57.0)
    assert patience.left_s("b", 57.0) == 10.0


def test_calls_that_are_over_are_forgotten() -> None:
    """However many calls have waited, few are remembered; one that still waits is."""
    patience = Patience(10.0)
    patience.begin("long", 1.0, 0.0)
    for i in range(10 * Patience.REMEMBERED):
        patience.begin(f"{i}", i + 1.0, float(i))
        patience.end(f"{i}", i + 0.5)
    assert len(patience._calls) <= Patience.REMEMBERED + 1
    assert patience.left_s("long", 5.0) == 5.0


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_patience_is_finite(seconds: float) -> None:
    """A limit that is none is refused."""
    with pytest.raises(ValueError, match="seconds"):
        Patience(seconds)
