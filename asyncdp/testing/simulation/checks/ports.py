"""Check of ports: a client probes a quarantined port with one request at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..recording.violation import Violation

if TYPE_CHECKING:
    from ..recording.history import History
    from ..recording.wire_request import WireRequest

__all__ = ["doubled_probes"]


def doubled_probes(history: History) -> Iterator[Violation]:
    """Find probes that were sent to a port while another probe of the same client was in flight."""
    probes: dict[tuple[str, str | None, int | None], list[WireRequest]] = defaultdict(list)
    for request in history.requests:
        if request.probe:
            probes[request.client, request.host, request.port].append(request)
    for (client, host, port), sent in probes.items():
        sent.sort(key=lambda request: request.at)
        until = float("-inf")
        for request in sent:
            if request.at < until:
                text = f"client {client} probed port {port} of {host} twice at once, at {request.at:.4f} s"
                yield Violation("probe", text)
            until = max(until, request.done_at)
