"""The command line: ``asyncdp demo``, or ``python -m asyncdp.cli.main demo``."""

from __future__ import annotations

import importlib.util
import sys

__all__ = ["main"]

#: What the commands are written with; all of it comes with the extra.
NEEDS = ("typer", "rich", "matplotlib")


def main() -> None:
    """Run a command; without the extra ``cli``, say how to get it."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"asyncdp: {', '.join(missing)} not installed; the command line needs: pip install 'asyncdp[cli]'")
    from .app import app

    app()


if __name__ == "__main__":
    main()
