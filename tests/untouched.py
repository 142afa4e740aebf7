"""Fails a test, by name, that leaves the process changed: environment, signal handlers, logging, the product."""

from __future__ import annotations

import asyncio.events
import os
import signal
import sys
from collections.abc import Generator
from types import ModuleType
from typing import Any

import pytest
import structlog

__all__ = ["Untouched"]

#: Settings of libraries that they read once, when they are loaded: whoever loads one first sets them for good.
OF_LIBRARIES = (b"TQ_", b"MC_", b"UCX_", b"RAY_", b"UCXPY_", b"KMP_", b"TORCH", b"PYTHONBREAKPOINT")
#: pytest's own.
OF_PYTEST = (b"PYTEST_",)
#: Packages whose modules and classes are looked at.
PRODUCT = ("asyncdp",)
NOTHING = object()
BY_DEFAULT = structlog.get_config()
#: Set by the module that it needs, when that is imported.
BY_IMPORT = frozenset({"asyncdp.errors.PartialReadError.columnar"})
SIGNALS = sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP})


def _environment() -> dict[bytes, bytes]:
    return {
        name: value
        for name, value in os.environ._data.items()  # type: ignore[attr-defined] # decoded names cost ten times as much
        if not name.startswith(OF_LIBRARIES + OF_PYTEST)
    }


def _umask() -> str:
    with open("/proc/self/status") as told:  # noqa: PTH123 - to ask the system itself is to change it, and this is fast
        return next((line for line in told if line.startswith("Umask")), "")


def _process() -> dict[str, Any]:
    return {
        "the working directory": os.getcwd(),  # noqa: PTH109 - as above
        "the umask": _umask(),
        "the event loop policy": asyncio.events._event_loop_policy,  # type: ignore[attr-defined] # asked for, it is made
        "where structlog's lines go": structlog.get_config()["logger_factory"],
        **{f"the handler of {number!r}": signal.getsignal(number) for number in SIGNALS},
    }


class Attributes:
    """The attributes of the product's modules and of their classes, by identity.

    A module that is loaded is no change, and neither is the name by which its package then has it.
    """

    def __init__(self) -> None:
        self._modules = 0
        self._seen: dict[str, list[tuple[str, dict[str, Any], dict[str, Any], list[Any]]]] = {}

    def remember(self) -> None:
        """Take in modules that are new."""
        if len(sys.modules) == self._modules:
            return
        self._modules = len(sys.modules)
        for name, module in list(sys.modules.items()):
            if name.split(".", 1)[0] in PRODUCT and name not in self._seen and isinstance(module, ModuleType):
                self._seen[name] = [self._of(name, vars(module))]
                for key, value in list(vars(module).items()):
                    if isinstance(value, type) and value.__module__ == name:
                        self._seen[name].append(self._of(f"{name}.{key}", vars(value)))

    @staticmethod
    def _of(name: str, live: Any) -> tuple[str, Any, dict[str, Any], list[Any]]:
        kept = dict(live)
        return name, live, kept, list(kept.values())

    def changed(self) -> list[str]:
        """Return what is other than it was, and remember that: the next test is not to blame."""
        found: list[str] = []
        for known in self._seen.values():
            for number, (name, live, kept, values) in enumerate(known):
                if _same(list(live.values()), values):
                    continue
                found += sorted({f"{name}.{key}" for key in _differing(kept, live)} - BY_IMPORT)
                known[number] = self._of(name, live)
        return found


def _same(here: list[Any], there: list[Any]) -> bool:
    """Compare by identity, at the speed of a list's own comparison; what is equal and not the same may pass."""
    try:
        return here == there
    except Exception:  # noqa: BLE001 - somebody's own comparison, of what is not the same then
        return False


def _differing(kept: dict[str, Any], live: Any) -> list[str]:
    lazy = "__getattr__" in live
    gone = [key for key in kept if key not in live]
    other = [
        key
        for key, value in live.items()
        if key in kept
        and value is not kept[key]
        and not (isinstance(value, ModuleType) and isinstance(kept[key], ModuleType))  # loaded anew, as pytester does
    ]
    new = [
        key
        for key, value in live.items()
        if key not in kept and not lazy and not isinstance(value, ModuleType) and not key.startswith("__")
    ]
    return gone + other + new


class Untouched:
    """Looks at the process before and after each test.

    What a fixture of a wider scope changes, and puts back at its end, is not its tests' doing.

    Args:
        only: How the ids of the tests begin that may fail by it.
    """

    def __init__(self, only: tuple[str, ...] = ("",)) -> None:
        self._only = only
        self._process: dict[str, Any] = {}
        self._first = _process()
        self._environment: dict[bytes, bytes] = {}
        self._first_environment = _environment()
        self._attributes = Attributes()

    def _remember(self) -> None:
        self._process, self._environment = _process(), _environment()

    def _changed(self) -> list[str]:
        """Return what is neither as it was before the test, nor as it was at first; remember how it is."""
        process, environment = _process(), _environment()
        found = [
            f"{name} ({self._process[name]!r} before, {now!r} now)"
            for name, now in process.items()
            if now not in (self._process[name], self._first[name]) and not _of_a_library(now)
        ]
        if environment != self._environment:
            for name in environment.keys() | self._environment.keys():
                now = environment.get(name)
                if now not in (self._environment.get(name), self._first_environment.get(name)):
                    found.append(f"the environment's {name.decode(errors='replace')}")
        self._process, self._environment = process, environment
        return found

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, None, None]:
        """Remember how it is."""
        self._attributes.remember()
        self._attributes.changed()
        self._remember()
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Generator[None, object, object]:
        """Take what fixtures of wider scopes change for what there was."""
        if fixturedef.scope == "function":
            return (yield)
        before = _process(), _environment()
        try:
            return (yield)
        finally:
            self._attributes.changed()
            after = _process(), _environment()
            for known, was, now in zip((self._process, self._environment), before, after, strict=True):
                known |= {name: value for name, value in now.items() if was.get(name, NOTHING) != value}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        """Compare, when everything that is the test's own has ended."""
        result = yield
        if structlog.is_configured() and structlog.get_config() == BY_DEFAULT:
            structlog.reset_defaults()  # capture_logs() configures what it puts back, and a client then logs more
        changed = [*self._changed(), *self._attributes.changed()]
        if changed and item.nodeid.startswith(self._only):
            pytest.fail(f"{item.name} has left changed: " + "; ".join(changed), pytrace=False)
        return result


def _of_a_library(value: Any) -> bool:
    """Return whether it is what the first use of asyncio or a start of Ray leaves."""
    return type(value) is asyncio.DefaultEventLoopPolicy or getattr(value, "__module__", "").startswith("ray.")
