"""Record of one request on the wire."""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["SlotKey", "WireRequest"]

#: A slot as named by a read: host, epoch, slot, generation, and the requested fields and rows.
SlotKey = tuple[str, int, int, int, tuple[str, ...], tuple[int, ...]]


@dataclass(slots=True, eq=False)
class WireRequest:
    """A request on the wire and how it ended.

    Attributes:
        at, done_at: Times in seconds when it was sent, and when its sender got an answer or gave up.
        client: Name of the sender.
        op_id: op_id of the user call that it was sent for.
        verb: User's verb that it was sent for.
        kind: Type name of the request, such as ``"ReadSlots"``.
        host, port: Host id and port number that it was sent to.
        attempt: Number of the attempt, counted by the sender from 1.
        subject: Distinguishes requests of one call; an equal subject means that the request was sent again.
        slots: For a read, the requested slots.
        stale: For a read, the slots that were answered as stale.
        failed: For a read, the slots that failed with another retryable error.
        ended: ``""`` while it runs, ``"ok"``, the name of an error, or ``"cancelled"``.
        fault: Whether it ended by a fault instead of an answer.
        probe: Whether the sender meant it as a probe of a quarantined port.
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
