"""One mutant, tried in a process of its own: forked, so that torch is not loaded anew for each of them."""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec

__all__ = ["Trial"]


class _Served(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from a text instead of its file."""

    def __init__(self, name: str, path: Path, source: str) -> None:
        self.name, self.path, self.source = name, path, source

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def exec_module(self, module: ModuleType) -> None:
        module.__file__ = str(self.path)
        exec(compile(self.source, str(self.path), "exec"), module.__dict__)


@dataclass
class Trial:
    """Tests that run against a module made of ``source``.

    Attributes:
        pid: The process.
        ends_at: When it is taken for hung, on the monotonic clock.
    """

    pid: int
    ends_at: float

    @classmethod
    def begin(cls, module: str, path: Path, source: str, tests: Sequence[str], limit_s: float) -> Trial:
        """Fork; the child runs the tests and tells by its exit status."""
        pid = os.fork()
        if not pid:
            status = 70
            try:
                os.setpgid(0, 0)
                status = _run(module, path, source, tests)
            finally:
                os._exit(status)
        return cls(pid, time.monotonic() + limit_s)

    def poll(self) -> str | None:
        """Return "survived", "killed" or "hung" once it has ended."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            return "survived" if os.waitstatus_to_exitcode(status) == 0 else "killed"
        if time.monotonic() > self.ends_at:
            os.killpg(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            return "hung"
        return None


def _run(module: str, path: Path, source: str, tests: Sequence[str]) -> int:
    import pytest

    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    sys.meta_path.insert(0, _Served(module, path, source))
    plain = [
        "-p",
        "no:cacheprovider",
        "-p",
        "no:unraisableexception",
        "-p",
        "no:threadexception",
        "--assert=plain",
        "-m",
        "not slow",
    ]
    return int(pytest.main(["-x", "-q", "-o", "faulthandler_timeout=0", "-o", "timeout=0", *plain, *tests]))
