"""One request on the wire, as a history keeps it."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SlotKey", "WireRequest"]

#: A slot as one reader means it: host, epoch, slot, generation, the fields and the rows of it.
SlotKey = tuple[str, int, int, int, tuple[str, ...], tuple[int, ...]]


@dataclass(slots=True, eq=False)
class WireRequest:
    """One request.

    Attributes:
        at, done_at: When it was sent and when its sender had an answer or gave up, in seconds.
        client: Who sent it.
        op_id: Of the user call that it was sent for.
        verb: The user's verb.
        kind: What it asks for, such as ``"ReadSlots"``.
        host, port: Where it went.
        attempt: As its sender counts; 1 is the first.
        subject: What tells two requests of one call apart; the same twice is the same request sent again.
        slots: Of a read: what it asked for.
        stale: Of a read: what of it was answered to be stale.
        failed: Of a read: slots that failed otherwise.
        ended: How it ended: ``""`` while it runs, ``"ok"``, the name of an error, ``"cancelled"``.
        fault: Whether it ended by a fault, as opposed to an answer.
        probe: Whether its sender meant it to find out whether a port works again.
    """

    at: float
    client: str
    op_id: str
    verb: str
    kind: str
    host: str | None = None
    port: int | None = None
    attempt: int = 1
    subject: object = None
    slots: tuple[SlotKey, ...] = ()
    stale: tuple[SlotKey, ...] = ()
    failed: tuple[SlotKey, ...] = ()
    done_at: float = math.inf
    ended: str = ""
    fault: bool = False
    probe: bool = False
