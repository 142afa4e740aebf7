"""The priority of the actors of a Ray that is started here."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Generator

__all__ = ["workers_not_niced"]

#: Setting of a Ray that starts: how nice its workers are.
_NICENESS = "RAY_worker_niceness"


@contextmanager
def workers_not_niced() -> Generator[None]:
    """Let a Ray that is started meanwhile run its actors at the priority of this process.

    By default Ray's workers have a niceness of 15. The controller and the storage units then get 1/28 of the processor
    time of each other process that is busy, and beside four of those they take minutes to start.
    """
    if _NICENESS in os.environ:
        yield
        return
    os.environ[_NICENESS] = "0"
    try:
        yield
    finally:
        del os.environ[_NICENESS]
