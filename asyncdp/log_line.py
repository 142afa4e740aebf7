"""Log lines of the library: through the program's structlog, and never at the cost of a call."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import structlog

__all__ = ["log_line"]


def log_line(level: str, event: str, /, **about: Any) -> None:
    """Write one line of a level (``warning``) to structlog's logger ``asyncdp``.

    Where the program has not configured structlog, it goes to standard error; structlog's own default would print to
    standard output, which may be the program's result. A standard error that is closed takes no line. What writing
    raises (a full disk, a processor of the program's own) is ignored.
    """
    with contextlib.suppress(Exception):
        if structlog.is_configured():
            log = structlog.get_logger("asyncdp")
        elif sys.stderr is not None:
            log = structlog.wrap_logger(structlog.PrintLogger(sys.stderr))
        else:
            return
        getattr(log, level)(event, **about)
