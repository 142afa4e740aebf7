"""Copies by two threads: every byte is there when they return, whoever copied it."""

import _thread
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from asyncdp.process import copying
from asyncdp.process.copying import copy_by_two


class Slow:
    """An array of which each step takes a moment in the threads that a test names, or fails there."""

    def __init__(self, data: Any, in_step: Callable[[], object]) -> None:
        self.data, self.in_step = data, in_step

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, at: slice) -> Any:
        self.in_step()
        return self.data[at]


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a second core, whatever the machine has."""
    monkeypatch.setattr(copying, "_CORES", 2)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 4097, 3_000_001])
def test_all_bytes_are_copied(size: int) -> None:
    """Also where there are fewer bytes than steps, and where they do not divide evenly."""
    data = np.random.default_rng(size).integers(0, 256, size, np.uint8)
    out = np.zeros(size, np.uint8)
    for _ in range(20):
        out[:] = 0
        copy_by_two(out, data)
        assert np.array_equal(out, data)


def test_a_step_of_the_helper_is_waited_for() -> None:
    """The caller is done with its own steps long before; no step is left out or comes later."""
    caller, helped = threading.get_ident(), []

    def in_step() -> None:
        if threading.get_ident() == caller:
            time.sleep(0.02)
        else:
            helped.append(1)
            time.sleep(0.3)

    data, out = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copy_by_two(out, Slow(data, in_step))
    assert np.array_equal(out, data)
    assert helped


def test_a_step_that_fails_in_the_helper_is_done_again() -> None:
    """Where its error can be raised."""
    caller, failures = threading.get_ident(), []

    def fails_elsewhere() -> None:
        if threading.get_ident() != caller:
            failures.append(1)
            raise MemoryError
        time.sleep(0.02)

    data, out = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copy_by_two(out, Slow(data, fails_elsewhere))
    assert np.array_equal(out, data)
    assert failures


def test_nothing_is_written_after_an_error() -> None:
    """An error of the caller's own step is raised when the helper is done, and no step begins after it."""
    caller, began, ended = threading.get_ident(), [], []

    def in_step() -> None:
        if threading.get_ident() == caller:
            time.sleep(0.05)
            raise MemoryError
        began.append(1)
        time.sleep(0.3)
        ended.append(1)

    with pytest.raises(MemoryError):
        copy_by_two(np.zeros(64, np.uint8), Slow(np.arange(64, dtype=np.uint8), in_step))
    assert began == ended == [1]


def test_a_process_without_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller copies alone."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", refuse)
    data, out = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
    copy_by_two(out, data)
    assert np.array_equal(out, data)
