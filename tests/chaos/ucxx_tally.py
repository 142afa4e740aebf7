"""What one fault did: how each call ended, how long it took, how the event loop went on."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from asyncdp.errors import DataPlaneError
from tests.chaos.transfer_queue_idle import Ticks

__all__ = ["Tally"]


@dataclass
class Tally:
    """Counts of one fault.

    Attributes:
        fault: Its name.
        calls: How often each verb ended how: ``ok``, or the class of its error.
        longest: Of all calls: verb and seconds.
        gap_s: Largest gap of the event loop, as `Ticks` measures it.
        notice_s: From the fault to the first error of a request that is not retried; None: it had none.
        wrong: Answers that were wrong, errors that were no DataPlaneError.
        afterwards: What was seen when it was over.
    """

    fault: str
    calls: dict[str, Counter[str]] = field(default_factory=dict)
    longest: tuple[str, float] = ("-", 0.0)
    gap_s: float = 0.0
    notice_s: float | None = None
    wrong: list[str] = field(default_factory=list)
    afterwards: str = ""

    async def call(self, verb: str, work: Awaitable[Any]) -> Any:
        """Await a call; returns its result, or its error, which has to be typed."""
        began = time.monotonic()
        answer: Any
        try:
            answer = await work
            how = "ok"
        except DataPlaneError as err:
            answer, how = err, type(err).__name__
        except Exception as err:  # noqa: BLE001 - what this is looking for
            answer, how = DataPlaneError(str(err), op=verb), type(err).__name__
            self.wrong.append(f"{verb}: an error without a type of ours: {err!r}")
        self.calls.setdefault(verb, Counter())[how] += 1
        self.longest = max(self.longest, (verb, time.monotonic() - began), key=lambda one: one[1])
        return answer

    @contextmanager
    def ticking(self) -> Iterator[None]:
        """Measure the event loop."""
        ticks = Ticks(asyncio.get_running_loop())
        try:
            yield
        finally:
            self.gap_s = max(self.gap_s, ticks.stop())

    @property
    def verbs(self) -> int:
        """How many verbs were called."""
        return len(self.calls)

    @property
    def errors(self) -> Counter[str]:
        """Errors by class, over all verbs."""
        total: Counter[str] = Counter()
        for counts in self.calls.values():
            total += counts
        del total["ok"]
        return total

    @property
    def right(self) -> int:
        """Calls that were answered."""
        return sum(counts["ok"] for counts in self.calls.values())
