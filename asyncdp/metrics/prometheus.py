"""PrometheusCollector: the counters of clients as metrics of Prometheus.

::

    collector = PrometheusCollector()
    collector.add(client)
    REGISTRY.register(collector)            # of prometheus_client
    start_http_server(9400, addr="127.0.0.1")

Nothing is pushed: a scrape reads what the clients have counted. The counts of all clients of the process are added.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, Final

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
    from prometheus_client.registry import Collector
except ImportError as err:
    msg = f"Prometheus metrics need: pip install 'asyncdp[prometheus]' ({err})"
    raise ImportError(msg) from err

from .attempts import AttemptTimes
from .histogram import Histogram
from .observer import observe

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from asyncdp.client import Client

    from .plane import PlaneWatch
    from .snapshot import Snapshot

__all__ = ["METRICS", "PrometheusCollector"]

#: Names of all metrics, their labels and what they are.
METRICS: Final[Mapping[str, tuple[tuple[str, ...], str]]] = {
    "asyncdp_call_duration_seconds": (("op", "status"), "Duration of user calls."),
    "asyncdp_attempt_duration_seconds": (("request", "outcome"), "Duration of attempts of requests."),
    "asyncdp_events": (("event", "reason"), "What the layers did: retry, quarantine, recovered, budget_refused, ..."),
    "asyncdp_payload_bytes": ((), "Payload bytes that successful calls moved."),
    "asyncdp_samples": ((), "Samples that successful calls moved."),
    "asyncdp_exporter_errors": ((), "Errors of callbacks and observers, which harmed no call."),
    "asyncdp_outstanding_bytes": ((), "Payload bytes in the plane that these clients have put."),
    "asyncdp_outstanding_samples": ((), "Samples in the plane that these clients have put."),
    "asyncdp_ports": (("health",), "Ports that these clients use, by health."),
    "asyncdp_plane_up": ((), "Whether the plane answered when it was last asked."),
    "asyncdp_partition_samples": (("partition",), "Samples in a partition."),
    "asyncdp_partition_bytes": (("partition",), "Payload bytes in a partition."),
    "asyncdp_partition_groups": (("partition",), "Groups of a partition that are committed and complete."),
    "asyncdp_hosts": (("state",), "Slot hosts by state: up, draining, silent."),
    "asyncdp_slots": (("state",), "Slots by state, of hosts that are up."),
    "asyncdp_arena_bytes": (("state",), "Shared memory of hosts that are up: used, free."),
}
HEALTHS: Final = ("healthy", "resting", "half_open", "quarantined")


class PrometheusCollector(Collector):  # type: ignore[misc,unused-ignore]
    """Collects the metrics of the clients that were added; register it with a registry of prometheus_client."""

    def __init__(self) -> None:
        """Start without clients."""
        self._clients: list[tuple[Client, AttemptTimes]] = []
        self._watches: list[PlaneWatch] = []

    def add(self, client: Client) -> None:
        """Collect the counters of a client, too."""
        attempts = AttemptTimes()
        observe(client, attempts)
        self._clients.append((client, attempts))

    def remove(self, client: Client) -> None:
        """Forget a client that was closed; its counts go, as those of a process that ends do."""
        self._clients = [one for one in self._clients if one[0] is not client]

    def watch(self, plane: PlaneWatch) -> None:
        """Collect what a plane holds, too; one process that does so is enough for a plane."""
        self._watches.append(plane)

    def describe(self) -> Iterator[Any]:
        """Return the metrics without samples, so that registering asks no client."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        """Return the metrics as they are now; called in the thread of a scrape."""
        snapshots = [client.snapshot() for client, _ in self._clients]
        calls: dict[tuple[str, str], Histogram] = defaultdict(Histogram)
        for client, _ in self._clients:
            for key, histogram in client.call_times().items():
                calls[key].merge(histogram)
        yield _histograms("asyncdp_call_duration_seconds", calls)
        attempts: dict[tuple[str, str], Histogram] = defaultdict(Histogram)
        for _, times in self._clients:
            for request, histogram in list(times.by.items()):
                attempts[request].merge(histogram)
        yield _histograms("asyncdp_attempt_duration_seconds", attempts)
        events: Counter[tuple[str, str]] = Counter()
        for one in snapshots:
            events.update(_events(one))
        yield _family(CounterMetricFamily, "asyncdp_events", events)
        totals = {
            "asyncdp_payload_bytes": sum(one["total_bytes"] for one in snapshots),
            "asyncdp_samples": sum(one["total_keys"] for one in snapshots),
            "asyncdp_exporter_errors": sum(one["callback_errors"] + one["observer_errors"] for one in snapshots),
        }
        for name, total in totals.items():
            yield _family(CounterMetricFamily, name, {(): total})
        held = {
            "asyncdp_outstanding_bytes": sum(one["bytes_outstanding"] for one in snapshots),
            "asyncdp_outstanding_samples": sum(one["n_keys_outstanding"] for one in snapshots),
        }
        for name, total in held.items():
            yield _family(GaugeMetricFamily, name, {(): total})
        health = Counter(port["health"] for one in snapshots for port in one["ports"])
        yield _family(GaugeMetricFamily, "asyncdp_ports", {(name,): health[name] for name in HEALTHS})
        if self._watches:
            yield from self._of_planes()

    def _of_planes(self) -> Iterator[Any]:
        states = [watch.state for watch in self._watches]
        yield _family(GaugeMetricFamily, "asyncdp_plane_up", {(): int(not any(state.error for state in states))})
        parts = [part for state in states for part in state.partitions]
        samples = {(part.partition_id,): part.size for part in parts}
        yield _family(GaugeMetricFamily, "asyncdp_partition_samples", samples)
        sizes = {(part.partition_id,): part.size_bytes for part in parts}
        yield _family(GaugeMetricFamily, "asyncdp_partition_bytes", sizes)
        depths = {(name,): depth for state in states for name, depth in state.depths.items()}
        yield _family(GaugeMetricFamily, "asyncdp_partition_groups", depths)
        hosts: Counter[tuple[str, ...]] = Counter({("up",): 0, ("draining",): 0, ("silent",): 0})
        slots: Counter[tuple[str, ...]] = Counter({("writing",): 0, ("ready",): 0, ("reading",): 0})
        arena: Counter[tuple[str, ...]] = Counter({("used",): 0, ("free",): 0})
        for host in (host for state in states for host in state.hosts):
            hosts["silent" if not host.alive else "draining" if host.draining else "up",] += 1
            if host.alive:
                slots.update({(name,): number for name, number in host.slots.items()})
                if host.capacity_bytes is not None and host.free_bytes is not None:
                    arena["free",] += host.free_bytes
                    arena["used",] += host.capacity_bytes - host.free_bytes
        yield _family(GaugeMetricFamily, "asyncdp_hosts", hosts)
        yield _family(GaugeMetricFamily, "asyncdp_slots", slots)
        yield _family(GaugeMetricFamily, "asyncdp_arena_bytes", arena)


def _family(kind: Any, name: str, values: Mapping[Any, float]) -> Any:
    labels, text = METRICS[name]
    family = kind(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histograms(name: str, by: Mapping[Any, Histogram]) -> Any:
    labels, text = METRICS[name]
    family = HistogramMetricFamily(name, text, labels=labels)
    for key, histogram in by.items():
        buckets = [("+Inf" if bound == float("inf") else repr(bound), seen) for bound, seen in histogram.cumulative()]
        family.add_metric(key, buckets, histogram.total_s)
    return family


def _events(snapshot: Snapshot) -> Counter[tuple[str, str]]:
    """Return counts by event and reason; hosts and ports, of which there may be many, are left out."""
    out: Counter[tuple[str, str]] = Counter()
    labelled = snapshot["events_by"]
    for name, number in snapshot["events"].items():
        if name not in labelled:
            kind, _, error = name.partition(".")
            out[kind, error] += number
    for name, by in labelled.items():
        for labels, number in by.items():
            named = dict(label.split("=", 1) for label in labels.split(" ") if "=" in label)
            out[name, named.get("reason", "")] += number
    return out
