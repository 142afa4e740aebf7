import math
from collections.abc import Callable

import pytest

from asyncdp.transports.ucxx.host.ucx_watchdog import Action, Escalation, SpinDetector

Looks = Callable[..., list[bool]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What a watch says, a second apart each, of a thread that ran and waited for so many seconds."""

    def told(steps: list[tuple[float, float]], *, idle: bool) -> list[bool]:
        spent = {"7": (0.0, 0.0)}
        monkeypatch.setattr(SpinDetector, "_measure", lambda _: dict(spent))
        watch, said = SpinDetector(), []
        for ran, waited in steps:
            spent["7"] = (spent["7"][0] + ran, spent["7"][1] + waited)
            said.append(watch.look(1.0, idle=idle))
        return said

    return told


def test_a_thread_that_is_busy_in_two_looks_in_a_row_spins(looks: Looks) -> None:
    """While UCX has work it has to be busier."""
    assert looks([(0.3, 0.0), (0.1, 0.0), (0.3, 0.0), (0.3, 0.0)], idle=True) == [False, False, False, True]
    assert looks([(0.3, 0.0)] * 3, idle=False) == [False] * 3
    assert looks([(0.5, 0.0)] * 2, idle=False) == [False, True]


def test_a_busy_machine_hides_no_spinning_thread(looks: Looks) -> None:
    """It gets little of the time that it wants, and wants all of it; one that wakes now and then wants little."""
    assert looks([(0.1, 0.9)] * 2, idle=False) == [False, True]
    assert looks([(0.02, 0.6)] * 3, idle=True) == [False] * 3


def test_a_thread_s_own_counters_can_be_read() -> None:
    """Of this process: no thread of UCX spins in it."""
    watch = SpinDetector()
    assert [watch.look(60.0, idle=True) for _ in range(3)] == [False] * 3


def test_a_new_worker_is_tried_twice_then_a_new_process() -> None:
    """What comes back soon was not cured."""
    escalation = Escalation(5.0, process_from=0.0)
    assert [escalation.next(at) for at in (100.0, 110.0, 120.0)] == [
        Action.NEW_WORKER,
        Action.NEW_WORKER,
        Action.NEW_PROCESS,
    ]


def test_trouble_of_another_day_is_new_trouble() -> None:
    """A new worker cured it: it is tried again."""
    escalation = Escalation(5.0, process_from=0.0)
    assert {escalation.next(at) for at in (100.0, 140.0, 180.0, 220.0)} == {Action.NEW_WORKER}


def test_a_process_that_just_began_anew_does_not_do_so_again() -> None:
    """Who sends garbage without end gets one start in a while, and not all connections ended again and again."""
    escalation = Escalation(1.0, process_from=600.0)
    assert [escalation.next(float(at)) for at in (2, 4, 6, 8)] == [*[Action.NEW_WORKER] * 2, *[Action.NOTHING] * 2]
    assert {escalation.next(float(at)) for at in range(10, 600, 2)} == {Action.NOTHING}
    assert escalation.next(600.0) is Action.NEW_PROCESS


def test_in_a_process_of_others_none_is_asked_for() -> None:
    """Where nobody would give a new process."""
    escalation = Escalation(1.0)
    assert {escalation.next(float(at)) for at in range(4, 10_000, 2)} == {Action.NOTHING} | {Action.NEW_WORKER}
    assert escalation.next(math.inf) is Action.NEW_WORKER  # by then it is new trouble
