"""Logging of a slot host: lines that remote peers can cause are rate limited, and logging never raises.

An error of logging must not reach the code that logs. Otherwise a host without free descriptors would lose its
heartbeat by logging that fact.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO

import structlog

from ..wire.failures import printable

__all__ = ["Seldom", "log_to"]

#: Most lines of one kind (one event, whatever its values) per ``_SPAN_S`` seconds; further ones are only counted.
_LINES: Final = 20
_SPAN_S: Final = 10.0
#: Most kinds that are counted at a time; events are constants of the code, so there are few.
_KINDS: Final = 1024

#: Loggers of libraries that write a line where a peer misbehaves; ucxx writes to the one of its predecessor.
_LIBRARIES: Final = ("asyncio", "ucx", "ucxx")

Event = MutableMapping[str, Any]


class Seldom:
    """Passes 20 log lines of one kind in 10 s; the first line after that says how many were left out.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Start with no lines counted."""
        self._now = now
        self._told: dict[str, tuple[float, int]] = {}

    def left_out(self, kind: str) -> int | None:
        """Count one line; return None to suppress it, else how many lines of its kind were suppressed before it."""
        now = self._now()
        since, count = self._told.get(kind, (now, 0))
        skipped = max(0, count - _LINES)
        if now - since > _SPAN_S:
            since, count = now, 0
        else:
            skipped = 0
        if len(self._told) >= _KINDS:
            self._told.clear()
        self._told[kind] = (since, count + 1)
        return skipped if count < _LINES else None

    def __call__(self, logger: Any, method: str, event: Event) -> Event:
        """Process an event as a structlog processor: drop it, or add ``left_out`` to it."""
        del logger, method
        skipped = self.left_out(str(event.get("event")))
        if skipped is None:
            raise structlog.DropEvent
        if skipped:
            event["left_out"] = skipped
        return event


class _Safe:
    """Writes lines to a file and ignores errors of writing."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def msg(self, message: str) -> None:
        try:
            self._file.write(message + "\n")
            self._file.flush()
        except (OSError, ValueError):  # the reader is gone, or the file is closed
            return

    debug = info = warning = warn = error = critical = exception = failure = fatal = log = msg


class _Seldom(logging.Filter):
    """Applies the rate limit of :class:`Seldom` to the ``logging`` module, which asyncio and ucxx write to."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        # Not by text: a peer's address or an object's may be formatted into it.
        skipped = self._seldom.left_out(f"{record.name}:{record.levelname}")
        if skipped:
            record.msg, record.args = f"{record.getMessage()} ({skipped} lines before it were left out)", ()
        return skipped is not None


def _cleaned(logger: Any, method: str, event: Event) -> Event:
    """Remove control characters of texts, a processor: a peer may have sent them."""
    del logger, method
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value)
    return event


def _rendered(render: Any) -> Any:
    def safely(logger: Any, method: str, event: Event) -> str:
        kind = event.get("event")
        try:
            return str(render(logger, method, event))
        except Exception as err:  # noqa: BLE001 - a traceback reads source files, which fails without free descriptors
            return f"{kind} ({type(err).__name__} while this was told)"

    return safely


def log_to(file: TextIO | None) -> None:
    """Configure logging to a file, by default standard error, for operators: no debug lines, and rate limited."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            Seldom(),
            _cleaned,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            _rendered(renderer),
        ],
        logger_factory=lambda *_: _Safe(file or sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    logging.raiseExceptions = False
    for name in _LIBRARIES:
        logging.getLogger(name).addFilter(_Seldom())
