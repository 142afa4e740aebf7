"""OpenTelemetry: metrics, and a span for each user call with a child span for each attempt.

::

    telemetry = OpenTelemetry()             # the global providers, or meter_provider=..., tracer_provider=...
    telemetry.add(client)
    ...
    telemetry.close()

All work of OpenTelemetry is done in a thread of its own, so that an exporter that is slow or down delays no call; what
does not fit into its queue is dropped (``dropped``).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final

try:
    from opentelemetry import context, metrics, trace
    from opentelemetry.trace import SpanKind, Status, StatusCode
except ImportError as err:
    msg = f"OpenTelemetry needs: pip install 'asyncdp[otel]' ({err})"
    raise ImportError(msg) from err

from .histogram import BOUNDS_S
from .observer import AttemptEnded, Background, CallEnded, Observer, observe

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from asyncdp.client import Client

    from .plane import PlaneWatch

__all__ = ["INSTRUMENTS", "OpenTelemetry"]

#: Names of all instruments, their units and what they are.
INSTRUMENTS: Final = {
    "asyncdp.call.duration": ("s", "Duration of user calls."),
    "asyncdp.attempt.duration": ("s", "Duration of attempts of requests."),
    "asyncdp.events": ("{event}", "What the layers did: retry, quarantine, recovered, budget_refused, ..."),
    "asyncdp.outstanding.bytes": ("By", "Payload bytes in the plane that these clients have put."),
    "asyncdp.ports": ("{port}", "Ports that these clients use, by health."),
    "asyncdp.partition.bytes": ("By", "Payload bytes in a partition."),
    "asyncdp.partition.groups": ("{group}", "Groups of a partition that are committed and complete."),
    "asyncdp.slots": ("{slot}", "Slots by state, of hosts that are up."),
}
#: Most calls whose span has begun and not ended; the oldest are given up.
OPEN_SPANS: Final = 10_000
_ERRORS: Final = frozenset({"error", "timeout"})


class OpenTelemetry:
    """Exports what clients do by OpenTelemetry's API; the program configures the SDK and its exporters.

    Args:
        meter_provider: Provider of meters; None: the global one.
        tracer_provider: Provider of tracers; None: the global one.
        queue_size: Most items that wait for the thread.
        traces: Whether to make spans, which cost more than metrics.
    """

    def __init__(
        self,
        *,
        meter_provider: Any = None,
        tracer_provider: Any = None,
        queue_size: int = 10_000,
        traces: bool = True,
    ) -> None:
        """Make the instruments."""
        meter = (meter_provider or metrics.get_meter_provider()).get_meter("asyncdp")
        tracer = (tracer_provider or trace.get_tracer_provider()).get_tracer("asyncdp") if traces else None
        self._background = _InContext(_Exporting(meter, tracer), queue_size)
        self._clients: list[Client] = []
        self._watches: list[PlaneWatch] = []
        for name, values in (
            ("asyncdp.outstanding.bytes", self._outstanding),
            ("asyncdp.ports", self._ports),
            ("asyncdp.partition.bytes", self._partition_bytes),
            ("asyncdp.partition.groups", self._groups),
            ("asyncdp.slots", self._slots),
        ):
            unit, text = INSTRUMENTS[name]
            meter.create_observable_gauge(name, [_callback(values)], unit=unit, description=text)

    @property
    def dropped(self) -> int:
        """Number of items that did not fit into the queue."""
        return self._background.dropped

    @property
    def errors(self) -> int:
        """How often OpenTelemetry raised."""
        return self._background.errors

    def add(self, client: Client) -> None:
        """Export what a client does, from now on."""
        observe(client, self._background)
        self._clients.append(client)

    def watch(self, plane: PlaneWatch) -> None:
        """Export what a plane holds, too; one process that does so is enough for a plane."""
        self._watches.append(plane)

    def close(self, timeout_s: float = 5.0) -> None:
        """Hand over what waits in the queue, for at most so many seconds, and end the thread."""
        self._background.close(timeout_s)

    def _outstanding(self) -> Iterable[tuple[int, dict[str, str]]]:
        return [(sum(client.snapshot()["bytes_outstanding"] for client in self._clients), {})]

    def _ports(self) -> Iterable[tuple[int, dict[str, str]]]:
        found = [port["health"] for client in self._clients for port in client.snapshot()["ports"]]
        return [(found.count(health), {"asyncdp.health": health}) for health in sorted(set(found))]

    def _partition_bytes(self) -> Iterable[tuple[int, dict[str, str]]]:
        parts = [part for watch in self._watches for part in watch.state.partitions]
        return [(part.size_bytes, {"asyncdp.partition": part.partition_id}) for part in parts]

    def _groups(self) -> Iterable[tuple[int, dict[str, str]]]:
        depths = [one for watch in self._watches for one in watch.state.depths.items()]
        return [(depth, {"asyncdp.partition": name}) for name, depth in depths]

    def _slots(self) -> Iterable[tuple[int, dict[str, str]]]:
        total: dict[str, int] = {}
        for host in (host for watch in self._watches for host in watch.state.hosts if host.alive):
            for state, number in host.slots.items():
                total[state] = total.get(state, 0) + number
        return [(number, {"asyncdp.state": state}) for state, number in total.items()]


def _callback(values: Any) -> Any:
    def read(options: Any) -> list[Any]:
        del options
        return [metrics.Observation(value, attributes) for value, attributes in values()]

    return read


class _InContext(Background):
    """Hands over the time of a call's begin, and the span in which the user made it."""

    def call_began(self, op_id: str, verb: str) -> None:
        self.put("call_began_at", op_id, verb, time.time_ns(), context.get_current())

    def call_ended(self, call: CallEnded) -> None:
        self.put("call_ended_at", call, time.time_ns())

    def attempt_ended(self, attempt: AttemptEnded) -> None:
        self.put("attempt_ended_at", attempt, time.time_ns())


class _Exporting(Observer):
    """Records metrics and makes spans; called in the thread."""

    def __init__(self, meter: Any, tracer: Any) -> None:
        told: dict[str, Any] = {"explicit_bucket_boundaries_advisory": list(BOUNDS_S)}
        self._calls, self._attempts = (
            meter.create_histogram(name, unit=INSTRUMENTS[name][0], description=INSTRUMENTS[name][1], **told)
            for name in ("asyncdp.call.duration", "asyncdp.attempt.duration")
        )
        unit, text = INSTRUMENTS["asyncdp.events"]
        self._events = meter.create_counter("asyncdp.events", unit=unit, description=text)
        self._tracer = tracer
        self._open: dict[str, Any] = {}

    def call_began_at(self, op_id: str, verb: str, at_ns: int, around: Any) -> None:
        """Begin the span of a call."""
        if self._tracer is None:
            return
        while len(self._open) >= OPEN_SPANS:
            self._open.pop(next(iter(self._open))).end()
        self._open[op_id] = self._tracer.start_span(
            f"asyncdp {verb}", context=around, kind=SpanKind.CLIENT, start_time=at_ns
        )

    def call_ended_at(self, call: CallEnded, at_ns: int) -> None:
        """Record a call, and end its span."""
        attributes = {"asyncdp.op": call.op, "asyncdp.status": call.status}
        if call.error:
            attributes["error.type"] = call.error
        self._calls.record(call.seconds, attributes)
        span = self._open.pop(call.op_id, None)
        if span is None:
            return
        size = {"asyncdp.keys": call.n_keys, "asyncdp.bytes": call.n_bytes, "asyncdp.partition": call.partition_id}
        span.set_attributes({**attributes, **size, "asyncdp.op_id": call.op_id})
        if call.status in _ERRORS:
            span.set_status(Status(StatusCode.ERROR, call.error))
        span.end(end_time=at_ns)

    def attempt_ended_at(self, attempt: AttemptEnded, at_ns: int) -> None:
        """Record an attempt, and make its span."""
        attributes = {"asyncdp.request": attempt.request, "asyncdp.outcome": attempt.outcome}
        self._attempts.record(attempt.seconds, attributes)
        parent = self._open.get(attempt.op_id)
        if parent is None:
            return
        span = self._tracer.start_span(
            f"asyncdp {attempt.request}",
            context=trace.set_span_in_context(parent, context.Context()),
            kind=SpanKind.CLIENT,
            start_time=at_ns - int(attempt.seconds * 1e9),
        )
        where = {"asyncdp.host": attempt.host, "server.port": attempt.port} if attempt.host else {}
        span.set_attributes({**attributes, **where, "asyncdp.attempt": attempt.attempt})
        if attempt.outcome not in ("ok", "partial", "cancelled"):
            span.set_status(Status(StatusCode.ERROR, attempt.outcome))
        span.end(end_time=at_ns)

    def event(self, name: str, labels: Mapping[str, Any]) -> None:
        """Count an event."""
        reason = labels.get("reason")
        self._events.add(1, {"asyncdp.event": name, **({"asyncdp.reason": str(reason)} if reason else {})})
