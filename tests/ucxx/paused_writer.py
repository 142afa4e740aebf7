"""A writer that stops itself (SIGSTOP) at one point of a put; a job of ``forking.py``."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from asyncdp import stack
from asyncdp.calls.slots import Publish
from asyncdp.errors import DataPlaneError
from asyncdp.transports.ucxx import UCXXTransport
from asyncdp.transports.ucxx.client import lane
from tests.chaos.ucxx_rows import fields_of

__all__ = ["put"]


class Bed:
    """Where the process sleeps, once."""

    slept = False

    def stop(self) -> None:
        """Be paused, here and now."""
        if not self.slept:
            self.slept = True
            os.kill(os.getpid(), signal.SIGSTOP)


BED = Bed()


class Writer(UCXXTransport):
    """Stops when its rows are written, before the directory is asked to publish them."""

    def execute(self, call: Any, ctx: Any) -> Any:
        """Serve a call."""
        if isinstance(call, Publish):
            BED.stop()
        return super().execute(call, ctx)


def in_mid_write() -> None:
    """Stop when one of two fields is copied."""
    whole = lane.pack

    def half(*args: Any) -> Iterator[int]:
        for copied in whole(*args):
            yield copied
            BED.stop()

    lane.pack = half  # type: ignore[assignment]


def before_sending(transport: UCXXTransport) -> None:
    """Stop when the directory's command is made, with its time limit in it, and not sent."""
    link = transport._directory._link
    send = link.pipeline

    async def later(commands: Any) -> Any:
        if any("publish" in str(command[1:2]) for command in commands):
            BED.stop()
        return await send(commands)

    link.pipeline = later  # type: ignore[method-assign]


async def put(told: dict[str, Any], say: Callable[[Any], None]) -> None:
    """Put rows; say how it ended."""
    transport = (Writer if told["where"] == "publish" else UCXXTransport)(told["config"], bootstrap=False)
    if told["where"] == "write":
        in_mid_write()
    elif told["where"] == "send":
        before_sending(transport)
    async with stack(transport) as client:
        try:
            await client.put_samples(told["ids"], "p", fields_of(told["ids"], 1), timeout_s=told["timeout_s"])
            say({"ok": True, "error": ""})
        except DataPlaneError as err:
            say({"ok": False, "error": type(err).__name__, "ambiguous": err.ambiguous})
