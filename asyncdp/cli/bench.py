"""The command ``asyncdp bench``: the benchmarks of a checkout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import typer

import asyncdp

from .attached import fail

__all__ = ["bench"]


def bench(context: typer.Context) -> None:
    """Run a benchmark of a checkout, by name, with its own options; without a name, the one that needs no backend."""
    root = Path(asyncdp.__file__).resolve().parents[1]
    if not (root / "benchmarks" / "__main__.py").is_file():
        fail("bench", f"the benchmarks are in a checkout of asyncdp only, and not beside {root / 'asyncdp'}")
    done = subprocess.run([sys.executable, "-m", "benchmarks", *context.args], cwd=root, check=False)  # noqa: S603
    raise typer.Exit(done.returncode)
