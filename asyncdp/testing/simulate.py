"""Simulate on all cores: ``python -m asyncdp.testing.simulate --seconds 60``.

Ends with code 1 if any promise was broken, and says which seed to repeat.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .simulation.seed_runner import BACKENDS, SeedRunner

__all__ = ["main"]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m asyncdp.testing.simulate", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long, by the clock on the wall")
    parser.add_argument("--seed", type=int, help="the first seed; a random one by default")
    parser.add_argument("--once", action="store_true", help="run this one seed only, and print its hash")
    parser.add_argument("--runs", type=int, help="how many seeds; as many as there is time for by default")
    parser.add_argument("--backend", choices=BACKENDS, help="the event loop; both in turn by default")
    parser.add_argument("--steps", type=int, default=60, help="things that each task does")
    parser.add_argument("--jobs", type=int, help="processes; one for each core by default")
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run, print, and return the exit code."""
    args = _arguments(words)
    runner = SeedRunner(
        seconds=args.seconds,
        first=args.seed,
        runs=1 if args.once else args.runs,
        backend=args.backend,
        steps=args.steps,
        jobs=1 if args.once else args.jobs,
    )
    return runner.run(print)


if __name__ == "__main__":
    sys.exit(main())
