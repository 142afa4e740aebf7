"""Little memory: whoever believes a length from the wire before checking it runs out."""

from __future__ import annotations

import errno
import resource
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["little_memory", "ran_out"]

_PAGE = resource.getpagesize()


@contextmanager
def little_memory(more_bytes: int = 1 << 30) -> Iterator[None]:
    """Let this process's address space grow by so much and no more; beyond it allocations are MemoryError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, (used + more_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def ran_out(err: BaseException | None) -> bool:
    """Whether memory ran out, somewhere behind an error."""
    while err is not None:
        if isinstance(err, MemoryError) or (isinstance(err, OSError) and err.errno == errno.ENOMEM):
            return True
        err = err.__cause__ or err.__context__
    return False
