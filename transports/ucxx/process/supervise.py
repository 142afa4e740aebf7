"""A whole plane as one process of an operator's: its parts are children, and one that dies is started again."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, NoReturn

import structlog

from asyncdp.errors import DataPlaneUnavailable

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from .embedded import EmbeddedPlane

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
    acknowledged in its file. Each part is watched by itself: one that takes its time does not keep another waiting, and
    the end does not wait for a start. A start that fails counts as a death.

    Args:
        plane: It has been started.
        ready: Called once signals are waited for.
        stopping: Called when it begins to stop.

    Raises:
        DataPlaneUnavailable: A part died ``MOST_DEATHS`` times within ``DEATHS_S`` seconds: it is given up, and the
            plane with it, which was stopped. The message says which, and why as far as is known.
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
        await _watch_all(plane, ended)
    finally:
        ended.set()
        stopping()
        await plane.stop()
        for number in SIGNALS:  # the end is in order by now: one more signal must not spoil its exit code
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def _watch_all(plane: EmbeddedPlane, ended: asyncio.Event) -> None:
    """Start again what dies, until told to end."""
    parts = [_watch("the directory", lambda: plane.server.pid is not None, plane.server.start)]
    for number in plane.pids:
        is_up = partial(lambda number: number in plane.pids, number)
        parts.append(_watch(f"slot host {number}", is_up, partial(plane.restart_host, number)))
    tasks = [asyncio.create_task(ended.wait()), *map(asyncio.create_task, parts)]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


async def _watch(part: str, is_up: Callable[[], bool], start: Callable[[], Awaitable[None]]) -> NoReturn:
    """Start one part again whenever it died."""
    log = structlog.get_logger("asyncdp.ucxx")
    deaths: deque[float] = deque(maxlen=MOST_DEATHS)
    why = "its log says why"
    while True:
        while is_up():  # noqa: ASYNC110 - a child's end is no event
            await asyncio.sleep(LOOK_S)
        deaths.append(time.monotonic())
        if len(deaths) == MOST_DEATHS and deaths[-1] - deaths[0] < DEATHS_S:
            msg = (
                f"{part} died {MOST_DEATHS} times within {DEATHS_S:.0f} s and is given up, and the plane with it: {why}"
            )
            raise DataPlaneUnavailable(msg)
        log.warning("died; it is started again", part=part)
        try:
            await start()
        except DataPlaneUnavailable as err:
            why = str(err)
            log.error("could not be started again", part=part, why=why)  # noqa: TRY400 - the text says it all
        else:
            log.info("serves again", part=part)
