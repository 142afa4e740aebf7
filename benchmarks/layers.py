"""What each layer costs on the way of a one-row get, in units of one bare ``anyio.CancelScope``.

Run with ``python -m benchmarks.layers``. The unit is what an attempt cannot do without:
``with CancelScope(deadline=...): pass``, entered and left in a tight loop (bare: without the wrapper of ``fail_after``;
the same without a deadline is printed beside it). Unit, transport alone and stack are measured close together, in short
turns, and the median of their ratios is printed, so that a busy or slowed machine hits all three alike. Beside much
other work ``--processor-time`` leaves out the time in which others had the processor; what the loop then waits for
Python's lock, which the thread of an exporter may hold, is left out too.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
import torch
from tensordict import TensorDict

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

    Clock = Callable[[], float]

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


async def one_get(client: Client, count: int, clock: Clock) -> float:
    """Seconds per one-row get."""
    began = clock()
    for _ in range(count):
        await client.get_samples(["s"], "p", ["x"])
    return (clock() - began) / count


def scope(count: int, deadline: float | None, clock: Clock) -> float:
    """Seconds per scope entered and left."""
    began = clock()
    for _ in range(count):
        with anyio.CancelScope() if deadline is None else anyio.CancelScope(deadline=deadline):
            pass
    return (clock() - began) / count


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


async def measure(rounds: int, count: int, clock: Clock) -> None:
    """Measure and print the table."""
    torch.set_num_threads(1)
    transport = MemoryTransport()
    bare = Client(transport)
    await bare.register_partition("p", ["x"], 1, ["t"])
    await bare.put_samples(["s"], "p", TensorDict({"x": torch.zeros(1, 8)}, [1]))
    watched = exporters(transport)
    clients = {**stacks(transport), **watched}
    unit_s: list[float] = []
    plain: list[float] = []
    direct: list[float] = []
    over: dict[str, list[float]] = {name: [] for name in clients}
    gc.collect()
    gc.disable()
    for _ in range(rounds):
        for name, client in clients.items():
            unit = scope(count, anyio.current_time() + 60, clock)
            alone = await one_get(bare, count, clock)
            stacked = await one_get(client, count, clock)
            again = scope(count, anyio.current_time() + 60, clock)
            unit = (unit + again) / 2
            unit_s.append(unit)
            plain.append(scope(count, None, clock) / unit)
            direct.append(alone / unit)
            over[name].append((stacked - alone) / unit)
        gc.collect()
    gc.enable()
    median = {name: statistics.median(values) for name, values in over.items()}
    print(f"{'one unit: CancelScope(deadline=...)':42} {statistics.median(unit_s) * 1e6:7.2f} us")
    print(f"{'CancelScope() without a deadline':42} {statistics.median(plain):7.2f} units")
    print(f"{'one-row get, transport used directly':42} {statistics.median(direct):7.2f} units")
    print(f"\n{'on top of the transport':42}   units")
    whole = f"+ {ORDER[-1]}"
    print(f"  {'+'.join(FIRST):48} {median['first four']:5.2f}   (limit 5)")
    print(f"  {'default stack':48} {median[whole]:5.2f}   (limit 7, aim 5)")
    print(f"\n{'layer by layer, from below':42}   units     this layer")
    before = 0.0
    for name, total in median.items():
        if name != "first four" and name not in watched:
            print(f"  {name:40} {total:7.2f}        {total - before:7.2f}")
            before = total
    print(f"\n{'exporters, on top of the default stack':42}   units")
    for name in watched:
        print(f"  {name:48} {median[name] - median[whole]:5.2f}")
    await transport.close()


def main() -> None:
    """Parse the arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=61, help="turns of each stack")
    parser.add_argument("--count", type=int, default=50, help="gets per turn")
    said = "by the processor time of the event loop's thread: beside other work"
    parser.add_argument("--processor-time", action="store_true", help=said)
    options = parser.parse_args()
    clock = time.thread_time if options.processor_time else time.perf_counter
    anyio.run(partial(measure, options.rounds, options.count, clock))


if __name__ == "__main__":
    main()
