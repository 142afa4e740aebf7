"""Mutation testing of sans-IO files and of recovery: ``python -m tests.mutation [middleware/policy/permit.py ...]``.

Each small fault of the sources has to fail a test that is named below; the score is how many of a hundred do. The
operators are mutmut's. Its own runner finds no test for any of these mutants: it names modules after their files
(``middleware.permit``), and they are imported as ``asyncdp.middleware.policy.permit``. So the mutants are tried here,
each in a forked process. A line that is marked ``pragma: no mutate`` is left out, as mutmut does; none is so far.
"""

# ruff: noqa: T201 - speaks to a person

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path

from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.trial import Trial

ROOT = Path(__file__).parents[2]
#: {file: tests that have to notice}
FILES = {
    "middleware/policy/backoff.py": ("tests/sans_io/test_backoff.py",),
    "middleware/policy/budget.py": ("tests/sans_io/test_budget.py",),
    "middleware/policy/hedging.py": ("tests/sans_io/test_hedging.py",),
    "middleware/policy/rounds.py": ("tests/sans_io/test_rounds.py",),
    "middleware/policy/permit.py": ("tests/sans_io/test_quarantine.py",),
    "middleware/policy/quarantine.py": ("tests/sans_io/test_quarantine.py",),
    "middleware/policy/live_bytes.py": ("tests/sans_io/test_live_bytes.py",),
    "middleware/policy/overlapping_mutations.py": ("tests/sans_io/test_overlapping_mutations.py",),
    "asyncdp/recovery/places.py": ("tests/sans_io/test_places.py",),
    "asyncdp/recovery/selection.py": ("tests/sans_io/test_selection.py",),
    "asyncdp/recovery/reservations.py": ("tests/sans_io/test_selection.py", "tests/recovery/test_ledger.py"),
    "asyncdp/recovery/machine.py": ("tests/sans_io/test_recovery_machine.py",),
    "asyncdp/recovery/gate.py": ("tests/recovery/test_ledger.py", "tests/recovery/test_loop.py"),
    "asyncdp/recovery/group_writer.py": ("tests/recovery/test_group_writer.py",),
    "asyncdp/recovery/ledger.py": ("tests/recovery/test_ledger.py",),
    "asyncdp/recovery/loop.py": ("tests/recovery/test_loop.py",),
}
#: Of a hundred mutants, how many have to be noticed; of those of asyncdp/recovery, which users build on, more.
LEAST = 90.0
LEAST_OF_RECOVERY = 95.0
LIMIT_S = 60.0


def load() -> None:
    """Import what the tests need and no mutant changes."""
    import hypothesis  # noqa: F401
    import pytest  # noqa: F401
    import tensordict  # noqa: F401
    import torch

    torch.set_num_threads(1)
    gc.freeze()  # what is loaded is shared by all that is forked
    assert not [name for name in sys.modules if name.startswith("asyncdp")]


def module_of(file: str) -> str:
    """Return the import name."""
    return "asyncdp." + file.removeprefix("asyncdp/").removesuffix(".py").replace("/", ".")


def exemptions() -> dict[tuple[str, str, str], str]:
    """Return the reasons by file and what differs."""
    listed = tomllib.loads((Path(__file__).parent / "exempt.toml").read_text()).get("mutant", [])
    return {(one["file"], one["before"], one["after"]): one["reason"] for one in listed}


def try_all(file: str, mutants: list[Mutant], at_once: int) -> list[tuple[Mutant, str]]:
    """Try mutants of one file, a few at the same time."""
    tests = [str(ROOT / test) for test in FILES[file]]
    waiting, running, done = list(mutants), {}, []
    while waiting or running:
        while waiting and len(running) < at_once:
            mutant = waiting.pop(0)
            running[mutant] = Trial.begin(module_of(file), ROOT / file, mutant.source, tests, LIMIT_S)
        for mutant, trial in list(running.items()):
            outcome = trial.poll()
            if outcome is not None:
                del running[mutant]
                done.append((mutant, outcome))
                if outcome == "survived" and mutant.line:
                    print(f"  survived: {mutant}", flush=True)
        time.sleep(0.02)
    return done


def main() -> int:
    """Print score and survivors; the exit status says whether the score is reached and no exemption is stale."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    parser.add_argument("files", nargs="*", default=list(FILES), help="of them: " + " ".join(FILES))
    parser.add_argument("--at-once", type=int, default=os.cpu_count() or 1, help="processes at the same time")
    args = parser.parse_args()
    os.environ["CI"] = "1"  # the same examples for each mutant
    load()
    reasons = exemptions()
    tally: Counter[str] = Counter()
    fine = True
    for file in args.files:
        began = time.monotonic()
        source = (ROOT / file).read_text()
        sound = try_all(file, [Mutant(file, 0, "", "", source)], 1)[0][1]
        if sound != "survived":
            print(f"{file}: its tests fail without any fault")
            return 1
        mutants = mutants_of(ROOT, file)
        known = {(m.file, m.before, m.after) for m in mutants}
        for stale in [key for key in reasons if key[0] == file and key not in known]:
            print(f"exempt.toml: {stale} is no mutant any more")
            fine = False
        exempt = [m for m in mutants if (m.file, m.before, m.after) in reasons]
        tried = try_all(file, [m for m in mutants if m not in exempt], args.at_once)
        outcomes = Counter(outcome for _, outcome in tried)
        caught = outcomes["killed"] + outcomes["hung"]
        score = 100.0 * caught / max(1, len(tried))
        fine = fine and score >= (LEAST_OF_RECOVERY if "/recovery/" in file else LEAST)
        tally.update(outcomes)
        took = time.monotonic() - began
        print(f"{file}: {score:.1f} % of {len(tried)} mutants noticed, {len(exempt)} exempt, {took:.0f} s", flush=True)
    caught = tally["killed"] + tally["hung"]
    print(f"in all: {100.0 * caught / max(1, tally.total()):.1f} % of {tally.total()} ({tally['hung']} by hanging)")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
