"""Runs a benchmark by name: ``python -m benchmarks layers``; without a name the one that needs no backend."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent
NAMES = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))


def main() -> None:
    """Run ``benchmarks/<name>.py`` with the arguments that follow its name."""
    name = sys.argv[1] if len(sys.argv) > 1 else "layers"
    if name not in NAMES:
        print(f"no benchmark {name!r}; there are {', '.join(NAMES)}")
        raise SystemExit(2)
    sys.argv = [str(HERE / f"{name}.py"), *sys.argv[2:]]
    runpy.run_path(sys.argv[0], run_name="__main__")


main()
