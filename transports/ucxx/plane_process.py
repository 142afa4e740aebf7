"""A whole plane as one process of an operator's: its parts are children, and one that dies is started again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import structlog

from asyncdp.errors import DataPlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable

    from asyncdp.transports.ucxx.bootstrap import EmbeddedPlane

__all__ = ["keep"]

LOOK_S: Final = 0.2
"""Pause between two looks whether all parts run: a restart takes seconds, so nobody waits for this."""
MOST_DEATHS: Final = 3
"""So many deaths of one part within ``DEATHS_S`` seconds are no accident: then the plane ends."""
DEATHS_S: Final = 60.0
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def keep(
    plane: EmbeddedPlane, ready: Callable[[], None] = lambda: None, stopping: Callable[[], None] = lambda: None
) -> None:
    """Keep a plane running until SIGTERM or SIGINT, then stop it; a second signal cuts off what runs.

    A slot host that was killed is started again and adopts its arena; so is the directory, which has all that was
    acknowledged in its file.

    Args:
        plane: It has been started.
        ready: Called once signals are waited for.
        stopping: Called when it begins to stop.

    Raises:
        DataPlaneUnavailable: A part dies again and again, or cannot be started again; the plane was stopped.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def told_to_end() -> None:
        if ended.is_set():
            plane.hurry()
        ended.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, told_to_end)
    try:
        ready()
        await _revive(plane, ended)
    finally:
        ended.set()
        stopping()
        await plane.stop()
        for number in SIGNALS:  # the end is in order by now: one more signal must not spoil its exit code
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def _revive(plane: EmbeddedPlane, ended: asyncio.Event) -> None:
    """Start what has died again, until told to end."""
    log = structlog.get_logger("asyncdp.ucxx")
    deaths: dict[str, deque[float]] = {}
    numbers = set(plane.pids)
    while not ended.is_set():
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await ended.wait()
        if ended.is_set():
            return
        if plane.server.pid is None:
            _count(deaths, "the directory")
            log.warning("the directory died; it is started again")
            await plane.server.start()
        for number in numbers - set(plane.pids):
            _count(deaths, f"slot host {number}")
            log.warning("a slot host died; it is started again", host=f"host-{number}")
            await asyncio.to_thread(plane.start_host, number)
            log.info("it serves again", host=f"host-{number}", ports=plane.reports[number]["ports"])


def _count(deaths: dict[str, deque[float]], part: str) -> None:
    recent = deaths.setdefault(part, deque(maxlen=MOST_DEATHS))
    recent.append(time.monotonic())
    if len(recent) == MOST_DEATHS and recent[-1] - recent[0] < DEATHS_S:
        raise DataPlaneUnavailable(f"{part} died {MOST_DEATHS} times within {DEATHS_S:.0f} s: the log says why")
