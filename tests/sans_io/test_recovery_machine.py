import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncdp.middleware.policy.backoff import Backoff
from asyncdp.recovery.machine import TRANSITIONS, Event, RecoveryMachine, RecoveryStep, State

JOBS = ["pinging", "rebuilding", "evicting", "releasing"]


def machine(now: float = 100.0, **settings: Any) -> RecoveryMachine:
    """Make one with long waits, so that they are told apart."""
    return RecoveryMachine(Backoff(1.0, 64.0), random.Random(3), now, **settings)


def opened(now: float = 100.0, **settings: Any) -> RecoveryMachine:
    """Make one whose gate is open."""
    one = machine(now, **settings)
    for _ in JOBS:
        one.handle(Event.DONE, now)
    return one


def test_a_start_is_a_recovery() -> None:
    """It pings at once, rebuilds, evicts, releases, and opens the gate: in that order."""
    one = machine()
    seen = []
    for _ in JOBS:
        assert not one.gate_is_open
        assert one.expires == 700.0
        seen.append(str(one.state))
        one.handle(Event.DONE, 101.0)
    assert seen == JOBS
    assert (one.state, one.gate_is_open, one.outage, one.recoveries) == (State.OPEN, True, 0, 1)


def test_a_fault_closes_the_gate_until_all_is_done_again() -> None:
    """It waits first: a plane that answers a ping may still refuse what has just failed."""
    one = opened()
    step = one.handle(Event.FAULT, 200.0, {"error": "gone"})
    assert (one.state, one.gate_is_open, one.outage) == (State.WAITING, False, 1)
    assert 200.0 < one.wait_until <= 201.0
    assert one.expires == 800.0
    assert step == RecoveryStep(1, 0.0, State.OPEN, Event.FAULT, State.WAITING, {"error": "gone"})
    one.handle(Event.WAITED, 200.5)
    assert one.state is State.PINGING
    for _ in JOBS:
        one.handle(Event.DONE, 201.0)
    assert (one.gate_is_open, one.recoveries, one.outage) == (True, 2, 1)


@pytest.mark.parametrize("fails", JOBS)
def test_whatever_fails_begins_again_with_a_wait_and_a_ping(fails: str) -> None:
    """A plane that is away again while the recovery goes on."""
    one = machine()
    while str(one.state) != fails:
        one.handle(Event.DONE, 100.0)
    one.handle(Event.FAILED, 103.0)
    assert (one.state, one.outage) == (State.WAITING, 0)
    assert 103.0 < one.wait_until <= 104.0
    one.handle(Event.WAITED, 104.0)
    assert one.state is State.PINGING


def test_waits_grow_over_all_failures_of_an_outage() -> None:
    """Pings that are answered in between do not make them short again."""
    ceilings = []
    for seed in range(300):
        one = RecoveryMachine(Backoff(1.0, 64.0), random.Random(seed), 0.0)
        waits = []
        for _ in range(8):
            one.handle(Event.DONE, 0.0)  # the ping
            one.handle(Event.FAILED, 0.0)  # the rebuild
            waits.append(one.wait_until)
            one.handle(Event.WAITED, 0.0)
        ceilings.append(waits)
    most = [max(column) for column in zip(*ceilings, strict=True)]
    for number, longest in enumerate(most):
        assert 0.9 * min(64.0, 2.0**number) < longest <= min(64.0, 2.0**number)


def longest_wait(fault_at: float, took_s: float = 0.0) -> float:
    """Return the longest first wait after a fault, of machines that failed three times and opened at 50 s."""
    found = 0.0
    for seed in range(300):
        one = RecoveryMachine(Backoff(1.0, 64.0), random.Random(seed), 0.0)
        for _ in range(3):
            one.handle(Event.FAILED, 0.0)
            one.handle(Event.WAITED, 0.0)
        for _ in JOBS:
            one.handle(Event.DONE, 50.0)
        one.handle(Event.FAULT, fault_at, took_s=took_s)
        found = max(found, one.wait_until - fault_at)
    return found


@pytest.mark.parametrize(("open_for_s", "longest"), [(29.9, 8.0), (30.0, 1.0)])
def test_waits_are_short_again_after_a_calm_time(open_for_s: float, longest: float) -> None:
    """A plane that fails again at once is not asked more and more often."""
    found = longest_wait(50.0 + open_for_s)
    assert 0.9 * longest < found <= longest


def test_a_backend_that_says_when_is_asked_no_sooner() -> None:
    """Loading, busy, out of memory: retry_after_s counts, plus the usual wait."""
    one = opened()
    one.handle(Event.FAULT, 200.0, retry_after_s=7.0)
    assert 207.0 <= one.wait_until <= 208.0


def recover(one: RecoveryMachine, at: float, until: float, took_s: float = 0.0) -> None:
    """Have it meet a fault and open its gate again."""
    one.handle(Event.FAULT, at, took_s=took_s)
    one.handle(Event.WAITED, at)
    for _ in JOBS:
        one.handle(Event.DONE, until)


def test_outages_without_progress_share_one_bound() -> None:
    """From the call that failed to the open gate each, also the start; progress ends the count."""
    one = machine()
    for _ in JOBS:
        one.handle(Event.DONE, 110.0)
    recover(one, 120.0, 140.0, took_s=5.0)
    one.handle(Event.FAULT, 150.0, took_s=3.0)
    assert one.expires == 150.0 + 600.0 - 10.0 - 25.0 - 3.0
    assert ({step.outage for step in one.story}, one.first_outage) == ({0, 1, 2}, 0)
    one.progressed()  # seen while the gate is closed: only what is over is forgotten
    assert one.expires == 750.0
    assert ([step.outage for step in one.story], one.first_outage) == ([2], 2)
    one.handle(Event.WAITED, 150.0)
    for _ in JOBS:
        one.handle(Event.DONE, 160.0)
    recover(one, 170.0, 172.0)
    assert one.first_outage == 2
    one.progressed()
    one.handle(Event.FAULT, 180.0)
    assert (one.expires, [step.outage for step in one.story], one.first_outage) == (780.0, [4], 4)


def test_a_call_that_failed_counts_no_longer_than_the_gate_was_open() -> None:
    """What it waited before that is counted already, or was another controller's; less than nothing is nothing."""
    one = opened(give_up_after_s=50.0)
    one.handle(Event.FAULT, 110.0, took_s=40.0)
    assert one.expires == 110.0 + 50.0 - 10.0
    one = opened()
    one.handle(Event.FAULT, 110.0, took_s=-40.0)
    assert one.expires == 710.0


@pytest.mark.parametrize(("took_s", "anew"), [(0.0, True), (0.1, False)])
def test_a_gate_that_was_open_for_as_long_as_the_bound_is_progress(took_s: float, *, anew: bool) -> None:
    """Until the call began that failed: one that hung all the while is none."""
    one = opened()
    recover(one, 110.0, 130.0)
    one.handle(Event.FAULT, 730.0, took_s=took_s)
    assert one.expires == pytest.approx(1330.0 if anew else 1330.0 - 20.0 - took_s)
    assert one.first_outage == (2 if anew else 0)


def test_the_wait_for_a_call_that_failed_is_no_calm_time() -> None:
    """A plane on which calls hang for a minute is asked as seldom as one that refuses at once."""
    found = longest_wait(110.0, took_s=60.0)
    assert 7.0 < found <= 8.0


@pytest.mark.parametrize("event", [Event.EXPIRED, Event.BROKEN])
@pytest.mark.parametrize("state", ["waiting", *JOBS])
def test_it_gives_up_for_good(state: str, event: Event) -> None:
    """After the bound, or for what waiting does not mend, the gate stays closed."""
    one = machine()
    if state == "waiting":
        one.handle(Event.FAILED, 100.0)
    while str(one.state) != state:
        one.handle(Event.DONE, 100.0)
    one.handle(event, 900.0)
    assert (one.state, one.gate_is_open) == (State.GIVEN_UP, False)
    one.handle(Event.FAULT, 901.0)  # noted, no more
    assert one.state is State.GIVEN_UP
    for other in set(Event) - {Event.FAULT}:
        with pytest.raises(ValueError, match=f"{other} cannot happen while given_up"):
            one.handle(other, 902.0)


def test_a_fault_during_a_recovery_is_only_noted() -> None:
    """Calls that were under way fail one after the other; the recovery goes on."""
    one = machine()
    one.handle(Event.DONE, 100.0)
    step = one.handle(Event.FAULT, 101.5, {"error": "late"})
    assert (one.state, one.outage) == (State.REBUILDING, 0)
    assert step == RecoveryStep(0, 1.5, State.REBUILDING, Event.FAULT, State.REBUILDING, {"error": "late"})
    assert one.story[-1] is step


def test_an_event_that_cannot_happen_is_refused() -> None:
    """Nothing is done in OPEN that could be done or fail, and a ping is not waited for."""
    one = opened()
    with pytest.raises(ValueError, match="done cannot happen while open"):
        one.handle(Event.DONE, 100.0)
    with pytest.raises(ValueError, match="waited cannot happen while pinging"):
        machine().handle(Event.WAITED, 100.0)
    assert one.story[-1].state is State.RELEASING  # what was refused is not told


@pytest.mark.parametrize("limit", [0.0, -1.0, float("nan")])
def test_a_recovery_may_take_some_time(limit: float) -> None:
    """A bound of nothing would give up before the first ping."""
    with pytest.raises(ValueError, match="give_up_after_s must be positive"):
        machine(give_up_after_s=limit)


def test_the_story_keeps_the_beginning_and_the_end() -> None:
    """Of a long outage the first and the last steps are told, and how many are not."""
    one = machine(story_steps=4)
    steps = [one.handle(Event.FAULT, 100.0 + n) for n in range(7)]
    assert one.story == (steps[0], steps[1], steps[5], steps[6])
    assert one.left_out == 3
    for _ in JOBS:
        one.handle(Event.DONE, 200.0)
    one.progressed()
    first = one.handle(Event.FAULT, 300.0)
    assert one.story == (first,)
    assert one.left_out == 0


def test_where_a_machine_begins_and_what_it_counts() -> None:
    """Nothing is waited for at first; outages are numbered; bounds of less than a second are taken."""
    one = machine(give_up_after_s=0.5)
    assert (one.wait_until, one.expires, one.outage) == (100.0, 100.5, 0)
    for number in (1, 2, 3):
        for _ in JOBS:
            one.handle(Event.DONE, 100.0)
        assert one.handle(Event.FAULT, 100.0).outage == one.outage == number
        one.handle(Event.WAITED, 100.0)
    assert RecoveryStep(0, 0.0, State.OPEN, Event.FAULT, State.WAITING).detail == {}


@pytest.mark.parametrize(("story_steps", "kept"), [(4, 4), (5, 4), (None, 200)])
def test_a_story_has_two_halves_of_one_length(story_steps: int | None, kept: int) -> None:
    """Of 200 steps unless it is told otherwise."""
    one = machine() if story_steps is None else machine(story_steps=story_steps)
    for _ in range(300):
        one.handle(Event.FAULT, 101.0)
    assert (len(one.story), one.left_out) == (kept, 300 - kept)


def test_a_short_story_is_whole() -> None:
    """Where nothing is left out, nothing is said to be."""
    one = machine()
    steps = [one.handle(Event.FAULT, 100.0 + n) for n in range(200)]
    assert (one.story, one.left_out) == (tuple(steps), 0)
    one.handle(Event.FAULT, 400.0)
    assert one.left_out == 1
    assert len(one.story) == 200


def test_a_step_reads_as_a_line() -> None:
    """When, from where to where, why, and what else is known."""
    step = RecoveryStep(2, 1.25, State.PINGING, Event.FAILED, State.WAITING, {"error": "refused", "at": 3})
    assert str(step) == "outage 2, 1.25 s: pinging -> waiting: failed, error: refused, at: 3"


def test_the_table_leaves_no_way_out_but_open() -> None:
    """From every state but GIVEN_UP each way leads on; OPEN is entered from RELEASING alone."""
    assert {state for state, _ in TRANSITIONS} == set(State) - {State.GIVEN_UP}
    assert [key for key, after in TRANSITIONS.items() if after is State.OPEN] == [(State.RELEASING, Event.DONE)]
    for state in ("waiting", *JOBS):
        ways = {event for one, event in TRANSITIONS if one == state}
        assert ways == {Event.EXPIRED, Event.BROKEN} | (
            {Event.WAITED} if state == "waiting" else {Event.DONE, Event.FAILED}
        )
    assert {event for one, event in TRANSITIONS if one == "open"} == {Event.FAULT}


EVENTS = st.lists(
    st.tuples(st.sampled_from([*sorted(Event), "progress"]), st.floats(0.0, 50.0), st.floats(0.0, 60.0)), max_size=60
)


def play(events: list[tuple[Event | str, float, float]]) -> None:  # noqa: C901, PLR0912 - one branch for each rule
    """Play events; the rules are written here a second time, as a user would say them."""
    one, now, done, outages = machine(), 100.0, 0, 0
    where = "pinging"  # else "waiting", "open", "given_up"; how many jobs are done says which one is next
    began, opened_at, lost = now, now, 0.0  # what earlier outages since the last progress took, and failed calls
    for event, passed, took_s in events:
        now += passed
        if not isinstance(event, Event):
            one.progressed()
            lost = 0.0
            continue
        if where in {"given_up", "open"}:
            allowed = event is Event.FAULT
        elif where == "waiting":
            allowed = event in (Event.FAULT, Event.WAITED, Event.EXPIRED, Event.BROKEN)
        else:
            allowed = event is not Event.WAITED
        if not allowed:
            with pytest.raises(ValueError, match="cannot happen"):
                one.handle(event, now)
            continue
        one.handle(event, now, took_s=took_s)
        if event in (Event.EXPIRED, Event.BROKEN):
            where = "given_up"
        elif event is Event.WAITED:
            where, done = "pinging", 0
        elif event is Event.FAILED:
            where = "waiting"
        elif event is Event.FAULT and where == "open":
            where, outages, began = "waiting", outages + 1, now
            counted = min(took_s, now - opened_at)
            lost = (0.0 if now - counted - opened_at >= 600.0 else lost) + counted
        elif event is Event.DONE:
            done += 1
            where = "open" if done == 4 else "pinging"
            if where == "open":
                opened_at, lost = now, lost + now - began
        assert one.gate_is_open == (where == "open")
        assert str(one.state) == (JOBS[done] if where == "pinging" else where)
        assert one.outage == outages
        assert all(one.first_outage <= step.outage <= outages for step in one.story)
        if where != "open":
            assert one.expires == pytest.approx(began + 600.0 - lost)
        if where == "waiting" and event is not Event.FAULT:
            assert one.wait_until > now


@settings(max_examples=50)
@given(events=EVENTS)
def test_the_machine_is_what_the_model_says(events: list[tuple[Event | str, float, float]]) -> None:
    """Fifty random histories of events, possible ones and others."""
    play(events)


@pytest.mark.slow
@settings(max_examples=1000)
@given(events=EVENTS)
def test_the_machine_is_what_the_model_says_for_long(events: list[tuple[Event | str, float, float]]) -> None:
    """A thousand of them."""
    play(events)


def test_states_and_events_are_told_by_these_words() -> None:
    """Stories and events have them."""
    assert list(State) == ["waiting", *JOBS, "open", "given_up"]
    assert list(Event) == ["fault", "waited", "done", "failed", "expired", "broken"]
