"""Rounds of several works in turns, and what they took beside each other."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable

from benchmarks._turns import line

__all__ = ["Rounds", "line"]


class Rounds:
    """Seconds that works took, a round of all of them at a time: what disturbs the machine disturbs all alike."""

    def __init__(self) -> None:
        """Begin with none."""
        self.seconds: dict[str, list[float]] = {}

    async def run(self, works: dict[str, Callable[[], Awaitable[float | None]]], rounds: int) -> None:
        """Run all works in turns, ``rounds`` times and once before; a work may return the seconds that count."""
        for number in range(rounds + 1):
            for name, work in works.items():
                began = time.perf_counter()
                told = await work()
                seconds = time.perf_counter() - began if told is None else told
                if number:
                    self.seconds.setdefault(name, []).append(seconds)

    def ratio(self, name: str, other: str) -> float:
        """How many times as long ``other`` took: the median over rounds."""
        return statistics.median(b / a for a, b in zip(self.seconds[name], self.seconds[other], strict=False))

    def show(self, name: str, nbytes: int, beside: tuple[str, ...]) -> None:
        """Print the median, the rate, and how fast it is beside others (1: as fast, 0.5: half as fast)."""
        middle = statistics.median(self.seconds[name])
        ratios = [f"{self.ratio(name, other):.2f}" if other in self.seconds else "-" for other in beside]
        line(name, f"{middle * 1e3:.2f} ms", f"{nbytes / middle / 1e9:.2f} GB/s", *ratios)
