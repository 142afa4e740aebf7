"""Base class of the tasks of a simulated workload."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import torch

from asyncdp.errors import DataPlaneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..recording.recorded import Recorded
    from ..scenario import Scenario

__all__ = ["FLOW", "REGISTERS", "TAGS", "Values", "Worker"]

#: Partition with a few samples that all clients write.
REGISTERS = "registers"
#: Partition through which samples pass from producers to trainers.
FLOW = "flow"
#: Tags that carry unique values.
TAGS = ("v",)


class Values:
    """Source of unique row values."""

    def __init__(self) -> None:
        """Start at 1."""
        self._next = 1

    def take(self, n: int) -> tuple[list[int], torch.Tensor]:
        """Return n new values, as numbers and as a tensor of a field."""
        first = self._next
        self._next += n
        return list(range(first, first + n)), torch.arange(first, first + n)


class Worker:
    """A task of one client that executes random steps, some of which it cancels.

    Args:
        verbs: Recorded verbs of the client.
        scenario: The scenario of the run.
        values: Source of unique values.
        name: Unique name, used in sample ids and as part of the seed.
    """

    role: ClassVar[str]

    def __init__(self, verbs: Recorded, scenario: Scenario, values: Values, name: str) -> None:
        """Store the arguments and seed the random source."""
        self.verbs = verbs
        self.scenario = scenario
        self.values = values
        self.name = name
        self.rng = random.Random(f"{scenario.seed}:{name}")  # noqa: S311
        self.choices: list[Callable[[], Awaitable[Any]]] = []

    async def run(self) -> None:
        """Execute the steps."""
        for _ in range(self.scenario.steps):
            if self.rng.random() < 0.7:  # noqa: PLR2004 - sometimes one thing follows the other at once
                await anyio.sleep(self.rng.uniform(0.0, 0.04))
            await self.try_(self.rng.choice(self.choices)())

    async def try_(self, doing: Awaitable[Any]) -> None:
        """Execute one step, cancelling some at random; errors are ignored, because they are recorded already."""
        try:
            if self.rng.random() >= self.scenario.cancels:
                await doing
                return
            with anyio.move_on_after(self.rng.uniform(0.0, 0.05)) as scope:
                await doing
            if scope.cancelled_caught and self.verbs.latest is not None:
                self.verbs.latest.cancelled_at = max(scope.deadline, self.verbs.latest.began)
        except DataPlaneError:
            pass

    async def finish(self) -> None:
        """Finish open work after the faults have ended."""

    def patience(self) -> float:
        """Draw the timeout of a call in seconds."""
        return self.rng.uniform(*self.scenario.patience_s)
