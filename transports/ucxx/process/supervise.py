"""Supervision of a plane in one process: its directory and hosts are children, and one that dies is restarted."""

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

__all__ = ["supervise"]

LOOK_S: Final = 0.2
"""Seconds between two checks that a part runs; short in comparison with a restart, which takes seconds."""
MOST_DEATHS: Final = 3
"""Deaths of one part within ``DEATHS_S`` seconds after which the plane is stopped instead of restarting the part."""
DEATHS_S: Final = 60.0
SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)


async def supervise(
    plane: EmbeddedPlane, ready: Callable[[], None] = lambda: None, stopping: Callable[[], None] = lambda: None
) -> None:
    """Keep a plane running until SIGTERM or SIGINT, then stop it; a second signal cuts off running requests.

    A slot host that was killed is restarted and adopts its arena. The directory is restarted too; its append-only file
    holds everything that it acknowledged. Each part is watched independently, so a slow restart delays neither other
    parts nor the stop. A failed start counts as a death.

    Args:
        plane: Plane that has been started.
        ready: Called once the signal handlers are installed.
        stopping: Called when the plane begins to stop.

    Raises:
        DataPlaneUnavailable: A part died ``MOST_DEATHS`` times within ``DEATHS_S`` seconds, and the plane was stopped.
            The message names the part, and the reason as far as it is known.
    """
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def request_end() -> None:
        if ended.is_set():
            plane.cut_off_requests()
        ended.set()

    for number in SIGNALS:
        loop.add_signal_handler(number, request_end)
    try:
        ready()
        await _watch_all(plane, ended)
    finally:
        ended.set()
        stopping()
        await plane.stop()
        for number in SIGNALS:  # the plane has stopped in order; a further signal must not change the exit code
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


async def _watch_all(plane: EmbeddedPlane, ended: asyncio.Event) -> None:
    """Restart parts that die, until ``ended`` is set or a part is given up."""
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
    """Restart one part whenever it has died; raise DataPlaneUnavailable where it dies too often."""
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
            log.error("could not be started again", part=part, why=why)  # noqa: TRY400 - the message suffices without a traceback
        else:
            log.info("serves again", part=part)
