"""The command line: ``asyncdp``, or ``python -m asyncdp``."""

from __future__ import annotations

import importlib.util
import logging
import sys

__all__ = ["main"]

#: What the commands are written with; all of it comes with the extra.
NEEDS = ("typer", "rich")


def main() -> None:
    """Run a command; without the extra ``cli``, say how to get it."""
    missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"asyncdp: {', '.join(missing)} not installed; the command line needs: pip install 'asyncdp[cli]'")
    _log_errors_only()
    from .app import app

    app()


def _log_errors_only() -> None:
    """Keep log lines out of what commands print: errors only, on stderr; ``asyncdp serve`` has a log of its own."""
    import structlog

    level = structlog.make_filtering_bound_logger(logging.ERROR)
    structlog.configure(wrapper_class=level, logger_factory=structlog.PrintLoggerFactory(sys.stderr))


if __name__ == "__main__":
    main()
