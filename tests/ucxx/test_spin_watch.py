from collections.abc import Callable

import pytest

from asyncdp.transports.ucxx.host.spin_watch import SpinWatch

Looks = Callable[..., list[bool]]


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    """What a watch says, a second apart each, of a thread that ran and waited for so many seconds."""

    def told(steps: list[tuple[float, float]], *, idle: bool) -> list[bool]:
        spent = {"7": (0.0, 0.0)}
        monkeypatch.setattr(SpinWatch, "_measure", lambda _: dict(spent))
        watch, said = SpinWatch(), []
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
    watch = SpinWatch()
    assert [watch.look(60.0, idle=True) for _ in range(3)] == [False] * 3
