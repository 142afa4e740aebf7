"""Fuzz for a while: ``python -m tests.fuzz --seconds 300``; rounds of the fuzz tests, each with a seed of its own."""

# ruff: noqa: T201 - speaks to a person

from __future__ import annotations

import argparse
import os
import re
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: One round tries so many times what a usual test run tries: about two minutes on an idle core.
SCALE = 5


def command(seed: int, only: str) -> list[str]:
    """Return the command of one round."""
    pytest = [sys.executable, "-m", "pytest", "tests/fuzz", "-q", "-x", "-p", "no:cacheprovider", "--timeout", "0"]
    return [*pytest, f"--hypothesis-seed={seed}", *(["-k", only] if only else [])]


def main() -> int:
    """Run rounds until time is up or one fails; the exit status says which."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0, help="no round begins after so long")
    parser.add_argument("--only", default="", help="as pytest's -k")
    parser.add_argument("--seed", type=int, default=None, help="of the first round; the next ones count on")
    args = parser.parse_args()
    first = secrets.randbelow(1 << 31) if args.seed is None else args.seed
    env = {name: value for name, value in os.environ.items() if name != "CI"}  # where examples are the same each time
    env |= {"ASYNCDP_FUZZ_SCALE": str(SCALE), "OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    rounds = 0
    while not rounds or time.monotonic() - began < args.seconds:
        seed = first + rounds
        done = subprocess.run(command(seed, args.only), cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        rounds += 1
        told = re.findall(r"^\d+ (?:passed|failed).*$", done.stdout, re.MULTILINE)
        print(
            f"round {rounds}, seed {seed}, {time.monotonic() - began:.0f} s: {(told or ['no result'])[-1]}", flush=True
        )
        if done.returncode:
            print(done.stdout[-20000:] + done.stderr[-2000:])
            again = shlex.join(command(seed, args.only)[1:])
            print(f"again: ASYNCDP_FUZZ_SCALE={SCALE} python {again}")
            print("hypothesis has kept the smallest failure in .hypothesis: the same test, run alone, begins with it")
            return 1
    print(f"{rounds} round(s) of {SCALE} times the usual examples, no failure")
    return 0


if __name__ == "__main__":
    sys.exit(main())
