"""Simulated service time of the plane."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from asyncdp.transports.memory import MemoryTransport

__all__ = ["slow_to_serve"]

#: Probability that a request is served with a delay.
SLOW = 0.25


def slow_to_serve(kind: type[MemoryTransport], rng: random.Random, most_s: float) -> type[MemoryTransport]:
    """Return a transport class that delays some requests by up to ``most_s`` seconds, so that requests overlap."""

    class SlowToServe(kind):  # type: ignore[valid-type,misc]
        """A memory transport that serves some requests with a delay."""

        async def _wire(self, call: Any) -> None:
            del call
            if rng.random() < SLOW:
                await anyio.sleep(rng.uniform(0.0, most_s))
            else:
                await anyio.lowlevel.checkpoint()

    return SlowToServe
