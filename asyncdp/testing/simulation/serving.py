"""Time that the plane takes to serve a request."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

if TYPE_CHECKING:
    from asyncdp.transports.memory import MemoryTransport

__all__ = ["slow_to_serve"]

#: How likely a request is not served at once.
SLOW = 0.25


def slow_to_serve(kind: type[MemoryTransport], rng: random.Random, most_s: float) -> type[MemoryTransport]:
    """Return a transport that takes its time, up to ``most_s`` seconds, so that reads and writes of a slot overlap."""

    class SlowToServe(kind):  # type: ignore[valid-type,misc]
        """Serves some requests slowly."""

        async def _wire(self, call: Any) -> None:
            del call
            if rng.random() < SLOW:
                await anyio.sleep(rng.uniform(0.0, most_s))
            else:
                await anyio.lowlevel.checkpoint()

    return SlowToServe
