"""How many examples a fuzz test tries: few in every test run, many where ``make fuzz`` asks for them."""

from __future__ import annotations

import os

__all__ = ["examples", "steps"]


def _scale() -> float:
    return float(os.environ.get("ASYNCDP_FUZZ_SCALE", "1"))


def examples(few: int) -> int:
    """Return how many examples to try, where a usual test run tries ``few``."""
    return max(1, int(few * _scale()))


def steps(few: int) -> int:
    """Return how long a sequence may be; longer where there is time."""
    return few if _scale() <= 1 else 2 * few
