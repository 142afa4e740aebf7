"""Runs simulations of many seeds on many cores."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count, islice
from typing import Any

import structlog
import torch

from .world import simulate

__all__ = ["BACKENDS", "SeedRunner", "Tally"]

BACKENDS = ("asyncio", "trio")
#: Seconds between two progress lines.
PROGRESS_EVERY_S = 10.0
#: Every n-th seed runs on trio, whose loop is slower.
TRIO_EVERY = 10

Job = tuple[int, str, int]


@dataclass(slots=True)
class Tally:
    """Results of one or more seeds, small enough to be sent between processes."""

    seeds: int = 0
    operations: int = 0
    simulated_s: float = 0.0
    cpu_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    violations: Counter[str] = field(default_factory=Counter)
    messages: list[str] = field(default_factory=list)
    digest: str = ""

    def add(self, other: Tally) -> None:
        """Add the results of another tally."""
        self.seeds += other.seeds
        self.operations += other.operations
        self.simulated_s += other.simulated_s
        self.cpu_s += other.cpu_s
        self.faults += other.faults
        self.violations += other.violations
        self.messages += other.messages

    def line(self) -> str:
        """Return a progress line."""
        return (
            f"{self.seeds} seeds, {self.operations} operations, {self.simulated_s:.0f} simulated s, "
            f"{self.faults.total()} faults, {self.violations.total()} violations"
        )


def _be_small() -> None:
    """Limit torch to one thread, since tensors are tiny here, and silence warnings."""
    torch.set_num_threads(1)
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    gc.freeze()  # torch's objects are permanent and should not be scanned by each collection
    gc.set_threshold(20_000, 20, 50)


def _one(job: Job) -> Tally:
    """Run one seed; an exception of the simulation itself counts as a violation."""
    seed, backend, steps = job
    began = time.process_time()
    try:
        report = simulate(seed, backend, steps=steps)
    except Exception:  # noqa: BLE001 - with its seed it can be repeated
        command = f"python -m asyncdp.testing.simulate --once --seed {seed} --backend {backend} --steps {steps}"
        messages = [f"CRASH at seed {seed}", f"  repeat: {command}", traceback.format_exc()]
        return Tally(1, violations=Counter(crash=1), messages=messages)
    return Tally(
        1,
        report.operations,
        report.simulated_s,
        time.process_time() - began,
        report.faults,
        Counter(violation.check for violation in report.violations),
        report.describe(),
        report.history.digest(),
    )


@dataclass(slots=True)
class SeedRunner:
    """Runs simulations on all cores.

    Attributes:
        seconds: Wall-clock time in seconds after which no further seed is started.
        first: First seed; None: a random one.
        runs: Number of seeds; None: as many as the time allows.
        backend: Name of the event loop; None: asyncio, and trio for some seeds.
        steps: Number of steps of each task.
        jobs: Number of processes; None: one per core.
    """

    seconds: float = 60.0
    first: int | None = None
    runs: int | None = None
    backend: str | None = None
    steps: int = 60
    jobs: int | None = None

    def run(self, say: Callable[[str], Any]) -> int:
        """Run, and report progress and violations to ``say``; return 1 if a promise was violated, else 0."""
        first = random.SystemRandom().randrange(1_000_000) if self.first is None else self.first
        jobs = len(os.sched_getaffinity(0)) if self.jobs is None else self.jobs
        say(f"seeds from {first} on, {jobs} processes")
        whole = Tally()
        began = progress_at = time.monotonic()
        for tally in self._tallies(first, jobs, began + self.seconds):
            whole.add(tally)
            for line in tally.messages:
                say(line)
            if self.runs == 1:
                say(f"hash of the history: {tally.digest}")
            if time.monotonic() - progress_at > PROGRESS_EVERY_S:
                progress_at = time.monotonic()
                say(f"{progress_at - began:4.0f} s: {whole.line()}")
        took = time.monotonic() - began
        say("faults: " + ", ".join(f"{name} {n}" for name, n in sorted(whole.faults.items())))
        if whole.violations:
            say("violations: " + ", ".join(f"{name} {n}" for name, n in sorted(whole.violations.items())))
        rate = whole.operations / whole.cpu_s if whole.cpu_s else 0.0
        say(f"{whole.line()} in {took:.0f} s ({rate:.0f} operations per second of one core)")
        return 1 if whole.violations else 0

    def _jobs(self, first: int, until: float) -> Iterator[Job]:
        """Yield jobs until the time is over."""
        for seed in islice(count(first), self.runs):
            if self.runs is None and time.monotonic() >= until:
                return
            backend = self.backend or BACKENDS[seed % TRIO_EVERY == 0]
            yield seed, backend, self.steps

    def _tallies(self, first: int, jobs: int, until: float) -> Iterator[Tally]:
        if jobs == 1:
            _be_small()
            yield from map(_one, self._jobs(first, until))
            return
        context = multiprocessing.get_context("fork")  # a forked process has torch imported already
        with context.Pool(jobs, _be_small) as pool:
            waiting: list[Any] = []
            for job in self._jobs(first, until):
                waiting.append(pool.apply_async(_one, (job,)))
                while len(waiting) >= 2 * jobs:
                    yield waiting.pop(0).get()
            for one in waiting:
                yield one.get()
