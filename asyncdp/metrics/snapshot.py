"""Snapshot: what a client has counted so far."""

from __future__ import annotations

from collections import Counter
from typing import TypedDict

__all__ = ["CountsBy", "PortSnapshot", "Quantiles", "Snapshot", "empty_snapshot"]


class CountsBy(dict[str, "Counter[str]"]):
    """Counts by two names: ``counts[name][label]``; 0 for what never happened."""

    def __missing__(self, name: str) -> Counter[str]:
        """Return no counts, without keeping them."""
        del name
        return Counter()


class Quantiles(TypedDict):
    """Durations in milliseconds that a half, 90 % and 99 % of the calls did not exceed."""

    p50: float
    p90: float
    p99: float


class PortSnapshot(TypedDict):
    """A port that the client has used.

    ``health`` is ``healthy``, ``resting``, ``quarantined`` or ``half_open``; ``left_s`` the seconds that its quarantine
    lasts on.
    """

    host: str
    port: int
    health: str
    failures: int
    left_s: float


class Snapshot(TypedDict):
    """What a client has counted since it was made; plain values, for JSON too.

    Attributes:
        total_ops, total_keys, total_bytes: Calls that succeeded, and samples and payload bytes that they moved.
        ops: ``{op: {status: number of calls}}``; the status is ``ok``, ``error``, ``timeout`` or ``cancelled``.
        wall_ms: Durations of calls by op.
        bytes_outstanding, n_keys_outstanding: Payload bytes and samples in the plane that this client has put.
        peak_bytes_outstanding, max_bytes_per_key_seen, last_put_bytes_per_key: Of these, so far.
        events: ``{event: number}``: what the layers did, and ``error.<class>`` for errors that left the client; 0 for
            an event that never happened.
        events_by: The same by labels: ``{event: {"reason=... host=... port=...": number}}``.
        ports: The ports that were used, with their health.
        callback_errors: How often ``on_event`` raised.
        observer_errors: How often an observer, such as an exporter, raised.
    """

    total_bytes: int
    total_keys: int
    total_ops: int
    ops: CountsBy
    wall_ms: dict[str, Quantiles]
    callback_errors: int
    observer_errors: int
    ports: list[PortSnapshot]
    bytes_outstanding: int
    peak_bytes_outstanding: int
    max_bytes_per_key_seen: int
    last_put_bytes_per_key: int
    n_keys_outstanding: int
    events: Counter[str]
    events_by: CountsBy


def empty_snapshot() -> Snapshot:
    """Return the snapshot of a client that counts nothing."""
    return Snapshot(
        total_bytes=0,
        total_keys=0,
        total_ops=0,
        ops=CountsBy(),
        wall_ms={},
        callback_errors=0,
        observer_errors=0,
        ports=[],
        bytes_outstanding=0,
        peak_bytes_outstanding=0,
        max_bytes_per_key_seen=0,
        last_put_bytes_per_key=0,
        n_keys_outstanding=0,
        events=Counter(),
        events_by=CountsBy(),
    )
