"""A project of a user's, in a folder of its own, and pytest run on it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

__all__ = ["Project", "Run"]

#: Seconds until a run that hangs is ended.
PATIENCE_S = 240
OPTIONS = ("-p", "no:cacheprovider", "--strict-markers")


@dataclass(frozen=True)
class Run:
    """How a run of pytest ended."""

    code: int
    text: str

    @property
    def counts(self) -> dict[str, int]:
        """How many tests passed, failed, ...; from its last line."""
        lines = [line for line in self.text.splitlines() if re.search(r"\d+ \w+.* in [\d.]+s", line)]
        assert lines, self.text
        found = re.findall(r"(\d+) (passed|failed|skipped|error|xfailed|warning)", lines[-1])
        return {word: int(n) for n, word in found}


class Project:
    """A folder with tests; what is installed here is installed there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, **files: str) -> Project:
        """Write files; ``test_a="..."`` is test_a.py, ``pytest_ini="..."`` the settings."""
        for name, text in files.items():
            target = "pytest.ini" if name == "pytest_ini" else f"{name}.py"
            (self.folder / target).write_text(textwrap.dedent(text))
        return self

    def here(self, pytester: pytest.Pytester, *arguments: str, without: Sequence[str] = ()) -> Run:
        """Run pytest in this process, ``without`` the plugins named: torch is loaded already."""
        off = [part for name in without for part in ("-p", f"no:{name}")]
        if "asyncio" not in without:
            off += ["-o", "asyncio_default_fixture_loop_scope=function"]  # it warns where this is left open
        done = pytester.runpytest_inprocess(*OPTIONS, *off, "--rootdir", str(self.folder), *arguments)
        return Run(int(done.ret), "\n".join([*done.outlines, *done.errlines]))

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start pytest in a process of its own."""
        env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "ASYNCDP_"))}
        return subprocess.Popen(
            [sys.executable, "-m", "pytest", *OPTIONS, *arguments],
            cwd=self.folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def apart(self, *arguments: str) -> Run:
        """Run pytest in a process of its own."""
        with self.start(*arguments) as process:
            try:
                text, _ = process.communicate(timeout=PATIENCE_S)
            except BaseException:
                process.kill()
                raise
        return Run(process.returncode, text)
