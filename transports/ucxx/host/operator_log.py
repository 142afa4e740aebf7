"""The log of a process that serves: what strangers can cause is told at a bounded rate, and telling never fails.

Nothing that goes wrong here may reach who logs: a host that has no descriptor left would lose its heartbeat by the
attempt to say so.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, MutableMapping
from typing import Any, Final, TextIO

import structlog

__all__ = ["Seldom", "log_to"]

#: Lines of one kind (one event, whatever its values) in one span; then only how many there were.
_LINES: Final = 20
_SPAN_S: Final = 10.0
#: Kinds that are counted; events are constants of the code, so there are few.
_KINDS: Final = 1024

Event = MutableMapping[str, Any]


class Seldom:
    """Lets 20 lines of one kind through in 10 s; the first one after that says how many were left out.

    Args:
        now: Seconds, by any steady clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        """Begin with nothing told."""
        self._now = now
        self._told: dict[str, tuple[float, int]] = {}

    def left_out(self, kind: str) -> int | None:
        """Note one line; None where it is not to be told, else how many of its kind were not told before it."""
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
        """Serve as a processor of structlog."""
        del logger, method
        skipped = self.left_out(str(event.get("event")))
        if skipped is None:
            raise structlog.DropEvent
        if skipped:
            event["left_out"] = skipped
        return event


class _Safe:
    """Writes lines, or does not: whoever logs goes on."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def msg(self, message: str) -> None:
        try:
            self._file.write(message + "\n")
            self._file.flush()
        except (OSError, ValueError):  # nobody reads it any more
            return

    debug = info = warning = warn = error = critical = exception = failure = fatal = log = msg


class _Seldom(logging.Filter):
    """The same for what libraries log, asyncio's own trouble with a listener for one: traceback and all."""

    def __init__(self) -> None:
        super().__init__()
        self._seldom = Seldom()

    def filter(self, record: logging.LogRecord) -> bool:
        return self._seldom.left_out(f"{record.name}:{record.msg}"[:200]) is not None


def _rendered(render: Any) -> Any:
    def safely(logger: Any, method: str, event: Event) -> str:
        kind = event.get("event")
        try:
            return str(render(logger, method, event))
        except Exception as err:  # noqa: BLE001 - a traceback reads source files, which may have no descriptor
            return f"{kind} ({type(err).__name__} while this was told)"

    return safely


def log_to(file: TextIO | None) -> None:
    """Log to a file, by default standard error, as an operator wants to read it: no debug lines, none without bound."""
    renderer = structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback)
    structlog.configure(
        processors=[
            Seldom(),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            _rendered(renderer),
        ],
        logger_factory=lambda *_: _Safe(file or sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    logging.raiseExceptions = False
    logging.getLogger("asyncio").addFilter(_Seldom())
