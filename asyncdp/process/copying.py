"""Copies of bytes by two threads, since one core does not use all of the bandwidth of the memory."""

from __future__ import annotations

import _thread
import os
from collections import deque
from contextlib import suppress
from typing import Any, Final

__all__ = ["copy_by_two"]

#: Into how many steps a copy is divided between the two threads.
_STEPS: Final = 8
_CORES: Final = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def copy_by_two(out: Any, data: Any) -> None:
    """Copy an array of bytes into another of the same length, and return when all of it is there.

    A second thread takes steps of the copy as long as there are any; where no core is idle it takes none, and this one
    does them all. Below some megabytes that are in a core's cache, one thread is as fast.
    """
    step = -(-len(data) // _STEPS)
    begins, busy, failed = iter(range(0, len(data), step or 1)), _thread.allocate_lock(), []

    def help_() -> None:
        while True:
            with busy:
                begin = next(begins, None)
                if begin is None:
                    return
                try:
                    out[begin : begin + step] = data[begin : begin + step]
                except BaseException:  # noqa: BLE001 - this step is done again below, where an error can be raised
                    failed.append(begin)

    if _CORES > 1:
        with suppress(RuntimeError):  # the process has no more threads, or ends
            _thread.start_new_thread(help_, ())
    try:
        for begin in begins:
            out[begin : begin + step] = data[begin : begin + step]
    finally:  # after an error, too, nothing is written any more
        deque(begins, maxlen=0)
        with busy:
            pass
    for begin in failed:
        out[begin : begin + step] = data[begin : begin + step]
