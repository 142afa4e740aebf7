"""Runs benchmarks by name: ``python -m benchmarks layers``; without a name it lists them."""

from __future__ import annotations

import runpy
import sys

from benchmarks import _runner

if sys.argv[1:2] and sys.argv[1] in _runner.scripts():
    sys.argv = sys.argv[1:]
    runpy.run_module(f"benchmarks.{sys.argv[0]}", run_name="__main__")
else:
    sys.exit(_runner.main(sys.argv[1:]))
