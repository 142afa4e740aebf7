"""The command ``asyncdp bench``: the benchmarks of a checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import typer

import asyncdp

from ..attached import fail

__all__ = ["bench"]


def bench(context: typer.Context) -> None:
    """Run benchmarks of a checkout, by name, with their own options; without a name, list them."""
    root = Path(asyncdp.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        fail("bench", f"the benchmarks are in a checkout of asyncdp only, and not beside {root / 'asyncdp'}")
    path = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "benchmarks", *context.args]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, check=False)  # noqa: S603
    raise typer.Exit(done.returncode)
