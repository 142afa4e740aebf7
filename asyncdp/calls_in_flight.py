"""The calls that a client has in flight: of one event loop at a time, in the process that made the client."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any, Final

import anyio

from asyncdp.errors import DataPlaneBadRequest, DataPlaneClosed

if TYPE_CHECKING:
    from asyncdp.calls import Call, OpenWaits

__all__ = ["CallsInFlight"]

#: Seconds that end() waits for calls whose waits it has cancelled. They end at once unless a backend keeps them.
CALLS_END_S: Final = 1.0


class CallsInFlight:
    """Counts the calls of one client, and refuses those that it may not make.

    Attributes:
        closed: Whether the client was closed, in whichever process.
        number: Number of calls in flight.
    """

    __slots__ = ("_home", "_idle", "_pid", "closed", "number")

    def __init__(self) -> None:
        """Begin without calls, in use by no event loop."""
        self.closed = False
        self.number = 0
        self._pid = os.getpid()
        self._home: int | None = None
        self._idle: anyio.Event | None = None

    def begin(self, call: Call[Any], verb: str) -> None:
        """Count a call, which has to be ended by :meth:`ended`.

        Raises:
            DataPlaneClosed: The client was closed.
            DataPlaneBadRequest: This is a forked child, or another thread's event loop uses the client.
        """
        if self.closed:
            msg = "the client is closed"
            raise DataPlaneClosed(msg, op=verb, partition_id=getattr(call, "partition_id", None))
        here = threading.get_ident()
        if self._pid != os.getpid():
            msg = f"this client was made in process {self._pid}; a forked child attaches a client of its own"
            raise DataPlaneBadRequest(msg, op=verb)
        if self.number == 0:
            self._home = here
        elif self._home != here:
            msg = "this client is in use by the event loop of another thread; use one client per loop"
            raise DataPlaneBadRequest(msg, op=verb)
        self.number += 1

    def ended(self) -> None:
        """Count the end of a call."""
        self.number -= 1
        if self._idle is not None and not self.number:
            self._idle.set()

    async def end(self, waits: OpenWaits) -> None:
        """Cancel the waits of calls, which then raise DataPlaneClosed, and let the calls end, within CALLS_END_S."""
        self.closed = True
        if self._pid != os.getpid():  # in a forked child the calls belong to the parent
            return
        waits.end()
        if self.number and self._home == threading.get_ident():
            self._idle = anyio.Event()  # outcomes that these calls leave open are resolved when the services close
            with anyio.move_on_after(CALLS_END_S):
                await self._idle.wait()
