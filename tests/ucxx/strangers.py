"""Who sends what nobody asked for, to a UCX listener. ``python -m tests.ucxx.strangers PORT KIND BYTES COUNT TAG``."""

from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.wire.engine import Engine

__all__ = ["flood", "native_of", "post", "rss_mib", "with_all_features"]

LOCAL = "127.0.0.1"


def flood(port: int, kind: str, nbytes: int, count: int, tag: int = -1) -> subprocess.Popen[bytes]:
    """Start a process that connects, shows no token, and sends ``count`` messages; it connects again when cut off.

    Args:
        port: Of the listener.
        kind: ``tag``, ``am`` (an active message) or ``stream``.
        nbytes: Of each message.
        count: How many.
        tag: Of all messages; -1: each another.
    """
    command = [sys.executable, "-m", "tests.ucxx.strangers", *map(str, (port, kind, nbytes, count, tag))]
    return subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"})


def rss_mib(pid: int) -> int:
    """Memory that a process has to itself: resident, without shared pages, in MiB."""
    with open(f"/proc/{pid}/statm") as statm:  # noqa: PTH123 - as short as it gets
        _, resident, shared, *_ = map(int, statm.read().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") >> 20


def native_of(endpoint: Any) -> Any:
    """What ucxx made; earlier releases, which ``make attack`` can attack too, hand out that itself."""
    return getattr(endpoint, "native", endpoint)


def with_all_features() -> Engine:
    """An engine that sends all that UCX has: what a host turns off is not turned off in strangers."""
    from asyncdp.transports.ucxx.wire import engine as engines

    load = engines._load

    def loaded() -> dict[str, Any]:
        library = load()
        context = library["UCXContext"]
        return {**library, "UCXContext": lambda config, *_: context(config)}

    engines._load = loaded
    try:
        return engines.Engine(devices="lo")
    finally:
        engines._load = load


def post(engine: Engine, endpoint: Any, kind: str, tag: int, buffer: Any) -> Any:
    """Post one message, as :func:`flood` describes it."""
    if kind == "tag":
        return engine.send(endpoint, secrets.randbits(62) if tag < 0 else tag, buffer)
    return engine._post(getattr(native_of(endpoint), f"{kind}_send"), endpoint, buffer)


async def main(port: int, kind: str, nbytes: int, count: int, tag: int) -> None:
    """Send them, some hundreds under way; the exit code is 0 where all were sent."""
    engine, buffer, sent, cut_off = with_all_features(), np.zeros(nbytes, np.uint8), 0, 0
    while sent < count and cut_off < 50:
        endpoint = engine.connect(LOCAL, port)
        await asyncio.sleep(0.01)
        try:
            while sent < count and native_of(endpoint).alive:
                while engine.under_way < 200:
                    post(engine, endpoint, kind, tag, buffer)
                    sent += 1
                engine.poll()
                await asyncio.sleep(0)
        except Exception as err:
            if not type(err).__name__.startswith("UCXX") and not isinstance(err, ConnectionResetError):
                raise
        cut_off += 1
        engine.abandon(endpoint)
    await engine.drained(2.0)
    os._exit(int(sent < count))


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), sys.argv[2], *map(int, sys.argv[3:6])))
