import math

from asyncdp.transports.ucxx.host.remedies import Remedies, Remedy


def test_a_new_worker_is_tried_twice_then_a_new_process() -> None:
    """What comes back soon was not cured."""
    remedies = Remedies(5.0, process_from=0.0)
    assert [remedies.next(at) for at in (100.0, 110.0, 120.0)] == [
        Remedy.NEW_WORKER,
        Remedy.NEW_WORKER,
        Remedy.NEW_PROCESS,
    ]


def test_trouble_of_another_day_is_new_trouble() -> None:
    """A new worker cured it: it is tried again."""
    remedies = Remedies(5.0, process_from=0.0)
    assert {remedies.next(at) for at in (100.0, 140.0, 180.0, 220.0)} == {Remedy.NEW_WORKER}


def test_a_process_that_just_began_anew_does_not_do_so_again() -> None:
    """Who sends garbage without end gets one start in a while, and not all connections ended again and again."""
    remedies = Remedies(1.0, process_from=600.0)
    assert [remedies.next(float(at)) for at in (2, 4, 6, 8)] == [*[Remedy.NEW_WORKER] * 2, *[Remedy.NOTHING] * 2]
    assert {remedies.next(float(at)) for at in range(10, 600, 2)} == {Remedy.NOTHING}
    assert remedies.next(600.0) is Remedy.NEW_PROCESS


def test_in_a_process_of_others_none_is_asked_for() -> None:
    """Where nobody would give a new process."""
    remedies = Remedies(1.0)
    assert {remedies.next(float(at)) for at in range(4, 10_000, 2)} == {Remedy.NOTHING} | {Remedy.NEW_WORKER}
    assert remedies.next(math.inf) is Remedy.NEW_WORKER  # by then it is new trouble
