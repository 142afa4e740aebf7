"""What all tasks of a simulation have in common."""

from __future__ import annotations

import random
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, ClassVar

import anyio
import torch

from asyncdp.errors import DataPlaneError

if TYPE_CHECKING:
    from collections.abc import Callable

    from .recorded import Recorded
    from .scenario import Scenario

__all__ = ["FLOW", "REGISTERS", "TAGS", "Values", "Worker"]

#: The partition whose few samples everybody writes.
REGISTERS = "registers"
#: The partition through which samples flow.
FLOW = "flow"
#: Tags that carry unique values.
TAGS = ("v",)


class Values:
    """Values that no other row has."""

    def __init__(self) -> None:
        """Begin at 1."""
        self._next = 1

    def take(self, n: int) -> tuple[list[int], torch.Tensor]:
        """Return n of them, as numbers and as a field."""
        first = self._next
        self._next += n
        return list(range(first, first + n)), torch.arange(first, first + n)


class Worker:
    """One task of one client: does one thing after the other, gives up on some of them.

    Args:
        verbs: The client's verbs, recorded.
        scenario: What is going on.
        values: Where values come from.
        name: Makes its ids and its chance different from others'.
    """

    role: ClassVar[str]

    def __init__(self, verbs: Recorded, scenario: Scenario, values: Values, name: str) -> None:
        """Take a place."""
        self.verbs = verbs
        self.scenario = scenario
        self.values = values
        self.name = name
        self.rng = random.Random(f"{scenario.seed}:{name}")  # noqa: S311
        self.choices: list[Callable[[], Awaitable[Any]]] = []

    async def run(self) -> None:
        """Do what there is to do."""
        for _ in range(self.scenario.steps):
            if self.rng.random() < 0.7:  # noqa: PLR2004 - sometimes one thing follows the other at once
                await anyio.sleep(self.rng.uniform(0.0, 0.04))
            await self.try_(self.rng.choice(self.choices)())

    async def try_(self, doing: Awaitable[Any]) -> None:
        """Do one thing; errors are recorded already, and some things are cancelled on their way."""
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
        """End what is still to be ended, once the faults are over."""

    def patience(self) -> float:
        """What a call is allowed, in seconds."""
        return self.rng.uniform(*self.scenario.patience_s)
