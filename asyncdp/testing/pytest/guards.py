"""The hooks of the leak guard and of the watchdog.

pytest imports this module even in runs that use no fixture of asyncdp, so it does not import the core.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest

from .leaks import KINDS, LeakGuard
from .watchdog import Watchdog

__all__ = ["Guards", "add_options"]

#: Loop iterations, and seconds, that tasks have to end after the test that cancelled them.
ROUNDS, TASKS_S = 20, 1.0
#: Key under which a worker of pytest-xdist reports suspected segments to the controlling process.
_SUSPECTS = "asyncdp_suspects"
_ALLOWED = pytest.StashKey[tuple[str, ...] | None]()


def add_options(parser: pytest.Parser) -> None:
    """Register the ini options for pytest.ini or pyproject.toml."""
    parser.addini(
        "asyncdp_leaks", "fail tests that leave tasks, threads, processes, files, segments", "bool", default=False
    )
    parser.addini(
        "asyncdp_watchdog_s", "print all stacks when an event loop stands still for so long (0: off)", None, "0"
    )


class Guards:
    """Runs leak guard and watchdog on the tests selected by the option ``asyncdp_leaks`` or the marker ``leaks``."""

    def __init__(self, config: pytest.Config) -> None:
        self._every = bool(config.getini("asyncdp_leaks"))
        self._guard = LeakGuard()
        self._stack = ExitStack()
        self._stack.enter_context(self._guard.at_work())
        self._watchdog: Watchdog | None = None
        after_s = float(config.getini("asyncdp_watchdog_s"))
        if after_s > 0:
            # The real standard error: pytest's capture is shown only after the test, which may never end.
            to = os.dup(sys.__stderr__.fileno() if sys.__stderr__ is not None else 2)
            self._stack.callback(os.close, to)
            self._watchdog = Watchdog(after_s, lambda text: os.write(to, text.encode(errors="replace")))
            self._stack.callback(self._watchdog.close)

    def _allowed(self, item: pytest.Item) -> tuple[str, ...] | None:
        """Return what a test may leave behind; None: the test is not checked."""
        marker = item.get_closest_marker("leaks")
        if marker is None:
            return () if self._every else None
        allow = marker.kwargs.get("allow", ())
        allow = (allow,) if isinstance(allow, str) else tuple(allow)
        if marker.args or marker.kwargs.keys() - {"allow", "reason"} or set(allow) - set(KINDS):
            raise pytest.UsageError(f"{item.nodeid}: leaks takes allow= (of {', '.join(KINDS)}) and reason=")
        if allow and not marker.kwargs.get("reason"):
            raise pytest.UsageError(f"{item.nodeid}: leaks(allow=...) needs a reason=")
        return allow

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Take a snapshot before the test, and have its asyncio tasks checked when the test function ends."""
        try:
            allow = item.stash[_ALLOWED] = self._allowed(item)
        except pytest.UsageError:
            yield  # the other hooks still have to run, or their teardown would fail too
            raise
        if allow is not None:
            self._guard.begin()
        test = getattr(item, "obj", None)
        if inspect.iscoroutinefunction(test) and (self._watchdog is not None or allow is not None):
            tasks = allow is not None and "tasks" not in allow
            item.obj = _guarded(test, item.nodeid, self._watchdog, tasks=tasks)  # type: ignore[attr-defined]
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(
        self, fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
    ) -> Generator[None, object, object]:
        """Add what fixtures of wider scopes create to the snapshot."""
        del request
        with nullcontext() if fixturedef.scope == "function" else self._guard.lasting():
            return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Compare with the snapshot after the teardown of the test."""
        result = yield
        allow = item.stash.get(_ALLOWED, None)
        if allow is not None:
            getattr(item, "funcargs", {}).clear()  # pytest releases the values of fixtures only later
        if allow is not None and (left := self._guard.left(item.nodeid, allow)):
            pytest.fail(f"{item.name} has left behind: " + "; ".join(left), pytrace=False)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Report segments that still exist, with the test in which each appeared.

        Workers of pytest-xdist pass them to the controlling process, which checks after all workers have ended.
        """
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[_SUSPECTS] = dict(self._guard.suspects())
            return (yield)
        result = yield
        if (suspects := self._guard.suspects()) and session.exitstatus in (0, 1):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            self._told = [f"shared-memory segment {name}, since {test}" for name, test in suspects.items()]
        return result

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any) -> None:
        """Collect the suspected segments of a pytest-xdist worker that has ended."""
        self._guard.suspect(getattr(node, "workeroutput", {}).get(_SUSPECTS, {}))

    _told: list[str] = []  # noqa: RUF012 - replaced, never changed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the segments that were left at the end."""
        for line in self._told:
            terminalreporter.line(f"LEFT BEHIND: {line}", red=True)

    def pytest_unconfigure(self) -> None:
        """Stop the watchdog."""
        self._stack.close()


def _guarded(
    test: Callable[..., Awaitable[Any]], name: str, watchdog: Watchdog | None, *, tasks: bool
) -> Callable[..., Awaitable[Any]]:
    """Wrap a test function so that the watchdog monitors its loop and leftover tasks are found."""

    @functools.wraps(test)
    async def guarded(*args: Any, **kwargs: Any) -> Any:
        with nullcontext() if watchdog is None else watchdog.watching(name):
            before = _tasks() if tasks else {}
            result = await test(*args, **kwargs)
            if tasks and (left := await _left(before)):
                pytest.fail(f"{name} has left behind: " + "; ".join(f"task {one}" for one in left), pytrace=False)
            return result

    return guarded


def _tasks() -> dict[int, str]:
    """Return the tasks of this loop, except those named as belonging to a client, which end with the client."""
    import anyio

    return {
        task.id: f"{task.name!r} ({getattr(task.coro, '__qualname__', task.coro)})"
        for task in anyio.get_running_tasks()
        if not (task.name or "").startswith("asyncdp ")
    }


async def _left(before: dict[int, str]) -> list[str]:
    """Return the new tasks that do not end in time."""
    import anyio

    new: list[str] = []
    for turn in range(ROUNDS):
        new = [name for task, name in _tasks().items() if task not in before]
        if not new:
            return []
        await anyio.sleep(0 if turn < ROUNDS // 2 else TASKS_S / ROUNDS * 2)
    return new
