"""Hooks that tell how long each part of the tests took: each folder of tests/."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath
from typing import TYPE_CHECKING

from tests.order import said

if TYPE_CHECKING:
    import pytest

__all__ = ["pytest_runtest_logreport", "pytest_terminal_summary"]

_SECONDS: Counter[str] = Counter()
_TESTS: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add what a test took, its fixtures included."""
    parts = PurePath(report.nodeid.split("::", 1)[0]).parts
    part = parts[1] if len(parts) > 2 else parts[0]
    _SECONDS[part] += report.duration
    _TESTS[part] += report.when == "call" or (report.when == "setup" and report.skipped)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the parts, those that took longest first, and what repeats the order."""
    terminalreporter.line(said(terminalreporter.config))
    if len(_SECONDS) < 2:
        return
    terminalreporter.section("seconds and tests of each part")
    for part, seconds in _SECONDS.most_common():
        terminalreporter.line(f"{seconds:8.1f} s {_TESTS[part]:6d}  {part}")
    terminalreporter.line(f"{_SECONDS.total():8.1f} s {_TESTS.total():6d}  together")
