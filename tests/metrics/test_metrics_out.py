"""What exporters tell: histograms, snapshots, Prometheus, OpenTelemetry; and that none of them harms a call."""

import json
import re
import shutil
import subprocess
import threading
from pathlib import Path
from typing import Any

import anyio
import pytest
import torch

from asyncdp import MemoryTransport, Metrics, default_layers, layers_of, stack
from asyncdp.metrics.histogram import BOUNDS_S, Histogram
from asyncdp.metrics.observer import AttemptEnded, Background, CallEnded, Observer, observe
from asyncdp.metrics.plane import PlaneWatch
from asyncdp.testing import FaultPlan
from tests.layers.rig import Rig, virtual

ROOT = Path(__file__).parents[2]
GRAFANA = ROOT / "docs" / "grafana"


class Seen(Observer):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.calls: list[CallEnded] = []
        self.attempts: list[AttemptEnded] = []
        self.events: list[tuple[str, dict[str, Any]]] = []

    def call_ended(self, call: CallEnded) -> None:
        """Keep it."""
        self.calls.append(call)

    def attempt_ended(self, attempt: AttemptEnded) -> None:
        """Keep it."""
        self.attempts.append(attempt)

    def event(self, name: str, labels: Any) -> None:
        """Keep it."""
        self.events.append((name, dict(labels)))


# -- histograms and snapshots


def test_a_histogram_covers_what_calls_take() -> None:
    """From 50 us to 60 s, counts by bound; quantiles within a third; two can be added."""
    assert (BOUNDS_S[0], BOUNDS_S[-1]) == (50e-6, 60.0)
    one, two = Histogram(), Histogram()
    for n in range(1, 1001):
        (one if n % 2 else two).add(n / 1000)
    one.merge(two)
    assert (one.count, one.total_s) == (1000, pytest.approx(500.5))
    assert dict(one.cumulative())[0.1] == 100
    assert dict(one.cumulative())[float("inf")] == 1000
    for part in (0.05, 0.5, 0.9, 0.99):
        assert one.quantile(part) == pytest.approx(part, rel=0.1)
    assert (Histogram().quantile(0.5), one.quantile(0.0) >= 0) == (0.0, True)
    late = Histogram()
    late.add(3600.0)
    assert (late.quantile(0.5), late.cumulative()[-2:]) == (60.0, [(60.0, 0), (float("inf"), 1)])


@virtual
async def test_a_snapshot_has_0_for_what_never_happened() -> None:
    """Events, events by label, calls by op and status; it is JSON; a client without layers has zeros."""
    async with stack(MemoryTransport()) as client:
        await client.ping()
        got = client.snapshot()
        assert got["events"]["quarantine"] == 0
        assert got["events_by"]["retry"]["reason=DataPlaneTimeout"] == 0
        assert (got["ops"]["ping"]["ok"], got["ops"]["ping"]["error"], got["ops"]["put"]["ok"]) == (1, 0, 0)
        assert json.loads(json.dumps(got))["total_ops"] == 1


@virtual
async def test_observers_see_calls_attempts_and_ports() -> None:
    """A get through a port that refuses: two attempts, the first blamed, the second elsewhere; one call."""
    plan = FaultPlan().on("get_samples", call="ReadSlots").refuse(times=1)
    async with Rig(plan) as rig:
        ids = await rig.fill(2)
        seen = Seen()
        observe(rig.client, seen)
        await rig.get(ids)
        reads = [one for one in seen.attempts if one.request == "ReadSlots"]
        assert [one.outcome for one in reads] == ["DataPlaneUnavailable", "ok"]
        assert reads[0].port != reads[1].port
        assert {one.op_id for one in seen.attempts} == {seen.calls[0].op_id}
        (call,) = seen.calls
        assert (call.op, call.status, call.error, call.n_bytes > 0) == ("get", "ok", "", True)
        assert "quarantine" in [name for name, _ in seen.events]
        (out,) = [port for port in rig.client.snapshot()["ports"] if port["health"] == "quarantined"]
        assert (out["port"], 0 < out["left_s"] <= 30) == (reads[0].port, True)


@virtual
async def test_an_observer_that_raises_harms_no_call() -> None:
    """In each of its methods; it is counted."""

    class Bad(Observer):
        def call_began(self, op_id: str, verb: str) -> None:
            raise RuntimeError

        def call_ended(self, call: CallEnded) -> None:
            raise RuntimeError

        def attempt_ended(self, attempt: AttemptEnded) -> None:
            raise OSError

        def event(self, name: str, labels: Any) -> None:
            raise OSError

    plan = FaultPlan().on("ping").refuse(times=1)
    async with Rig(plan) as rig:
        observe(rig.client, Bad())
        seen = Seen()
        observe(rig.client, seen)
        await rig.client.ping()
        assert [call.status for call in seen.calls] == ["ok"]
        assert rig.client.snapshot()["observer_errors"] >= 4


def test_a_slow_observer_delays_nothing_and_what_does_not_fit_is_dropped() -> None:
    """Behind a queue; closing hands over what waits."""
    stuck, told = threading.Event(), []

    class Slow(Observer):
        def event(self, name: str, labels: Any) -> None:
            stuck.wait(60)
            told.append(name)
            if name == "2":
                raise OSError

    background = Background(Slow(), size=10)

    async def main() -> None:
        async with stack(MemoryTransport()) as client:
            observe(client, background)
            for n in range(100):
                background.event(str(n), {})
            await client.ping()

    anyio.run(main)
    assert background.dropped >= 89
    stuck.set()
    background.close(60)
    assert told[:3] == ["0", "1", "2"]
    assert background.errors == 1


# -- Prometheus


def scrape(*, faults: bool = True) -> tuple[dict[str, Any], set[str]]:
    """Return the metrics of a client that used a plane, by name, and the names of all time series."""
    pytest.importorskip("prometheus_client", reason="needs the extra: pip install 'asyncdp[prometheus]'")
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.parser import text_string_to_metric_families

    from asyncdp.metrics.prometheus import PrometheusCollector

    plan = FaultPlan().on("get_samples", call="ReadSlots").refuse(times=1)
    registry, collector = CollectorRegistry(), PrometheusCollector()
    registry.register(collector)

    async def main() -> bytes:
        transport = MemoryTransport()
        async with stack(transport, [*default_layers(), plan.layer] if faults else None) as client:
            collector.add(client)
            watch = PlaneWatch(client)
            collector.watch(watch)
            await client.register_partition("p", ["x"], 8, ["t"])
            await client.put_samples(["a", "b"], "p", {"x": torch.zeros(2, 8)})
            await client.get_samples(["a", "b"], "p", ["x"])
            await watch.ask()
            return await anyio.to_thread.run_sync(generate_latest, registry)  # as a scrape: outside of the loop

    text = anyio.run(main).decode()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return families, {sample.name for family in families.values() for sample in family.samples}


def test_prometheus_parses_the_scrape() -> None:
    """Each metric has its type and labels; histograms are cumulative; names end as the conventions want."""
    families, _ = scrape()
    calls = families["asyncdp_call_duration_seconds"]
    assert calls.type == "histogram"
    put = [s for s in calls.samples if s.labels.get("op") == "put" and s.name.endswith("_bucket")]
    assert [s.value for s in put] == sorted(s.value for s in put)
    assert (put[-1].labels["le"], put[-1].value) == ("+Inf", 1.0)
    outcomes = {s.labels["outcome"] for s in families["asyncdp_attempt_duration_seconds"].samples}
    assert outcomes == {"ok", "DataPlaneUnavailable"}
    events = {(s.labels["event"], s.labels["reason"]): s.value for s in families["asyncdp_events"].samples}
    assert events["quarantine", "DataPlaneUnavailable"] == 1
    for name, wanted in (
        ("asyncdp_partition_samples", 2),
        ("asyncdp_partition_groups", 2),
        ("asyncdp_partition_bytes", 64),
        ("asyncdp_outstanding_bytes", 64),
    ):
        assert [s.value for s in families[name].samples] == [wanted], name
    assert {s.labels["state"]: s.value for s in families["asyncdp_hosts"].samples}["up"] == 2
    assert sum(s.value for s in families["asyncdp_ports"].samples) >= 2


def test_the_dashboard_and_the_alerts_name_existing_metrics() -> None:
    """Of docs/grafana; each metric of the exporter is in the dashboard; labels exist too."""
    _, series = scrape()
    from asyncdp.metrics.prometheus import METRICS

    dashboard = json.loads((GRAFANA / "asyncdp.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    alerts = (GRAFANA / "alerts.yml").read_text()
    rules = re.findall(r"expr: (.+)", alerts)
    assert len(queries) >= 8
    assert len(rules) >= 5
    for query in (*queries, *rules):
        names = re.findall(r"\basyncdp_\w+", query)
        assert names, query
        for name in names:
            assert name in series, query
        labels = {label for name in names for label in METRICS[re.sub(r"_(total|bucket|sum|count)$", "", name)][0]}
        used = {
            *re.findall(r"(\w+)=~?\"", query),
            *(one.strip() for group in re.findall(r"by ?\(([^)]*)\)", query) for one in group.split(",")),
        }
        assert used <= labels | {"le", "instance", "job"}, query
    shown = " ".join(queries)
    for name in METRICS:
        assert name in shown, f"{name} is on no panel"


# -- OpenTelemetry


def test_a_span_per_call_and_one_per_attempt() -> None:
    """Of a get through a port that refuses: which attempt, which port, how it ended; below the user's own span."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra: pip install 'asyncdp[otel]'")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from asyncdp.metrics.opentelemetry import INSTRUMENTS, OpenTelemetry

    spans, reader, tracers = InMemorySpanExporter(), InMemoryMetricReader(), TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(spans))
    meters = MeterProvider(metric_readers=[reader])
    telemetry = OpenTelemetry(meter_provider=meters, tracer_provider=tracers)
    plan = FaultPlan().on("get_samples", call="ReadSlots").refuse(times=1)

    async def main() -> None:
        async with stack(MemoryTransport(), [*default_layers(), plan.layer]) as client:
            await client.register_partition("p", ["x"], 8, ["t"])
            await client.put_samples(["a"], "p", {"x": torch.zeros(1, 8)})
            telemetry.add(client)
            watch = PlaneWatch(client)
            await watch.ask()
            telemetry.watch(watch)
            with tracers.get_tracer("user").start_as_current_span("step"):
                await client.get_samples(["a"], "p", ["x"])
            telemetry.close()
            data = reader.get_metrics_data()
            assert data is not None
            names = {m.name for r in data.resource_metrics for s in r.scope_metrics for m in s.metrics}
            assert names == set(INSTRUMENTS)

    anyio.run(main)
    meters.shutdown()
    found = spans.get_finished_spans()
    by_name = {span.name: span for span in found}
    call = by_name["asyncdp get_samples"]
    assert call.parent is not None
    assert call.parent.span_id == by_name["step"].context.span_id
    reads = [span for span in found if span.name == "asyncdp ReadSlots"]
    assert [span.attributes["asyncdp.outcome"] for span in reads] == ["DataPlaneUnavailable", "ok"]
    assert reads[0].attributes["server.port"] != reads[1].attributes["server.port"]
    assert {span.parent.span_id for span in reads} == {call.context.span_id}
    assert call.attributes["asyncdp.bytes"] == 32
    assert (telemetry.errors, telemetry.dropped) == (0, 0)


@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_an_exporter_that_is_down_harms_no_call(how: str) -> None:
    """Of spans and of metrics: calls go on, spans that do not fit are dropped, and closing ends in time."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra: pip install 'asyncdp[otel]'")
    from opentelemetry.sdk.metrics import MeterProvider
    from opentelemetry.sdk.metrics.export import InMemoryMetricReader
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

    from asyncdp.metrics.opentelemetry import OpenTelemetry

    back = threading.Event()

    class Down(SpanExporter):
        def export(self, spans: Any) -> Any:
            if how == "hangs":
                back.wait(300)
            raise ConnectionRefusedError

    tracers = TracerProvider()
    tracers.add_span_processor(SimpleSpanProcessor(Down()))
    meters = MeterProvider(metric_readers=[InMemoryMetricReader()])
    telemetry = OpenTelemetry(meter_provider=meters, tracer_provider=tracers, queue_size=10)

    async def main() -> None:
        async with stack(MemoryTransport()) as client:
            telemetry.add(client)
            for _ in range(100):
                await client.ping()
            assert client.snapshot()["ops"]["ping"] == {"ok": 100}
            assert client.snapshot()["observer_errors"] == 0

    anyio.run(main)
    if how == "hangs":
        assert telemetry.dropped >= 100
        telemetry.close(0.01)
        back.set()
    else:
        telemetry.close(60)
    meters.shutdown()


def test_every_layer_finds_the_counters() -> None:
    """snapshot() of a client is that of its Metrics layer."""
    client = stack(MemoryTransport())
    (metrics,) = [layer for layer in layers_of(client) if isinstance(layer, Metrics)]
    assert client.snapshot() == metrics.snapshot()


# -- alert rules


@pytest.mark.skipif(shutil.which("promtool") is None, reason="needs promtool: apt-get install prometheus")
def test_each_alert_fires_in_trouble_and_none_in_a_plane_that_is_well(tmp_path: Path) -> None:
    """By promtool: the rules are valid, and what alerts_test.yml has counted fires each, with its words."""
    rules = Path(shutil.copy(GRAFANA / "alerts.yml", tmp_path))
    cases = Path(shutil.copy(Path(__file__).with_name("alerts_test.yml"), tmp_path))
    for words in (("check", "rules", rules), ("test", "rules", cases)):
        done = subprocess.run(["promtool", *words], capture_output=True, text=True, cwd=tmp_path, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    named = re.findall(r"alert: (\w+)", rules.read_text())
    assert [cases.read_text().count(f"alertname: {name}") for name in named] == [2] * len(named)
