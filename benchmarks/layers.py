"""What each layer costs on the way of a one-row get, in units of one anyio.CancelScope.

The unit is what an attempt cannot do without: ``with CancelScope(deadline=...): pass``, entered and left in a tight
loop (bare: without the wrapper of ``fail_after``; the same without a deadline is measured beside it). Beside much other
work ``--processor-time`` leaves out the time in which others had the processor; what the loop then waits for Python's
lock, which the thread of an exporter may hold, is left out too.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch

from asyncdp import (
    AttemptTimeout,
    BatchRetry,
    Client,
    Layer,
    MemoryTransport,
    Metrics,
    PortRotation,
    Reconcile,
    SlotMapping,
    SlotRetry,
    TypedErrors,
    stack,
)
from asyncdp.metrics.observer import Observer, observe

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks._scenario import Bench

FIRST = ("SlotMapping", "TypedErrors", "AttemptTimeout", "Metrics")
#: Metrics and SlotMapping are in every stack; the others are added in this order.
ALWAYS = ("Metrics", "SlotMapping")
ORDER = ("TypedErrors", "AttemptTimeout", "PortRotation", "SlotRetry", "Reconcile", "BatchRetry")
LAYERS: dict[str, Any] = {
    "Metrics": Metrics,
    "BatchRetry": BatchRetry,
    "SlotMapping": SlotMapping,
    "Reconcile": Reconcile,
    "SlotRetry": SlotRetry,
    "PortRotation": PortRotation,
    "AttemptTimeout": AttemptTimeout,
    "TypedErrors": TypedErrors,
}


UNIT = "CancelScope(deadline=...)"
ALONE = "transport alone"


def stacks(transport: MemoryTransport) -> dict[str, Client]:
    """The stacks that are compared, each with one layer more than the one before."""
    out: dict[str, Client] = {"first four": stack(transport, [Metrics, SlotMapping, AttemptTimeout, TypedErrors])}
    for count in range(2, len(LAYERS) + 1):
        # From below: SlotMapping and Metrics are always there, the others join them one by one.
        chosen = [*ALWAYS, *ORDER[: count - len(ALWAYS)]]
        label = "+".join(ALWAYS) if count == len(ALWAYS) else "+ " + chosen[-1]
        out[label] = stack(transport, [kind for name, kind in LAYERS.items() if name in chosen])
    out["+ a layer that passes everything on"] = stack(transport, [Layer, *LAYERS.values()])
    return out


def exporters(transport: MemoryTransport) -> dict[str, Client]:
    """The default stack, watched by each exporter whose extra is installed."""
    made: dict[str, Callable[[Client], None]] = {"an observer that does nothing": lambda c: observe(c, Observer())}
    with suppress(ImportError):
        from asyncdp.metrics.prometheus import PrometheusCollector

        made["Prometheus"] = lambda c: PrometheusCollector().add(c)
    with suppress(ImportError):
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.trace import TracerProvider

        from asyncdp.metrics.opentelemetry import OpenTelemetry

        for name, traces in {"OpenTelemetry, metrics": False, "OpenTelemetry, metrics and spans": True}.items():
            given = {"meter_provider": MeterProvider(), "tracer_provider": TracerProvider(), "traces": traces}
            made[name] = partial(lambda given, c: OpenTelemetry(**given).add(c), given)
    out = {}
    for name, watch in made.items():
        out[name] = stack(transport, [*LAYERS.values()])
        watch(out[name])
    return out


async def measure(bench: Bench, *, count: int = 50) -> None:
    """Measure ``count`` gets of each stack in each round."""
    transport = MemoryTransport()
    bare = await bench.stack.enter_async_context(Client(transport))
    await bare.register_partition("p", ["x"], 1, ["t"])
    await bare.put_samples(["s"], "p", {"x": torch.zeros(1, 8)})
    built, watched = stacks(transport), exporters(transport)

    def get(client: Client) -> Callable[[], Any]:
        return lambda: client.get_samples(["s"], "p", ["x"])

    def scopes(deadline_s: float | None) -> Callable[[], Any]:
        async def run() -> float:
            deadline = None if deadline_s is None else anyio.current_time() + deadline_s
            began = bench.clock()
            for _ in range(count):
                with anyio.CancelScope() if deadline is None else anyio.CancelScope(deadline=deadline):
                    pass
            return (bench.clock() - began) / count

        return run

    works = {name: get(client) for name, client in {ALONE: bare, **built, **watched}.items()}
    units = {UNIT: scopes(60), "CancelScope()": scopes(None)}
    read = await bench.measure(
        "one-row get", {**works, **units}, beside=[UNIT], rounds=61, count=count, collector=False
    )

    def added(name: str, to: str) -> Callable[[Any], float]:
        return lambda s: (s[name] - s[to]) / s[UNIT]

    whole = f"+ {ORDER[-1]}"
    read.figure("+".join(FIRST), added("first four", ALONE), at_most=5, unit="units")
    read.figure("default stack", added(whole, ALONE), at_most=4, unit="units", must="5")
    before = ALONE
    for name in built:
        if name != "first four":
            read.figure(f"layer {name.removeprefix('+ ')}", added(name, before), unit="units", width=1)
            before = name
    for name in watched:
        read.figure(f"exporter {name}", added(name, whole), unit="units", width=1)
