"""Runs real faults on a real plane: ``python -m tests.chaos [name] [its arguments]``; without a name all there are.

A backend's program is a module of this folder with ``main(argv) -> int``.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

NAMES = sorted(
    path.stem
    for path in Path(__file__).parent.glob("*.py")
    if not path.stem.startswith(("_", "test_"))
    and "def main(argv: list[str]) -> int:" in path.read_text(encoding="utf-8")
)


def main(argv: list[str]) -> int:
    """Run the named program, or all of them one after the other; return the first exit status that is not zero."""
    names, rest = (argv[:1], argv[1:]) if argv and argv[0] in NAMES else (NAMES, argv)
    if rest and names is NAMES and not rest[0].startswith("-"):
        print(f"no chaos program {rest[0]!r}; there are {', '.join(NAMES)}")  # noqa: T201 - a command line
        return 2
    status = 0
    for name in names:
        print(f"== {name}", flush=True)  # noqa: T201
        status = importlib.import_module(f"tests.chaos.{name}").main(list(rest)) or status
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
