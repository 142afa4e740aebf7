"""Metrics: counts and times all user calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import structlog
from tensordict import TensorDict, TensorDictBase

from asyncdp.errors import DataPlaneError, PartialReadError
from asyncdp.log_line import log_line
from asyncdp.metrics.histogram import Histogram
from asyncdp.metrics.observer import CallEnded
from asyncdp.metrics.snapshot import CountsBy, PortSnapshot, Quantiles, Snapshot
from asyncdp.service import Layer, layers_of

from .counters import Counters
from .policy.live_bytes import leaf_nbytes
from .port_rotation import PortRotation

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext
    from asyncdp.service import Service

__all__ = ["DataPlaneEvent", "Metrics", "MetricsDataPlaneClient", "log_event"]

R = TypeVar("R")
EventStatus = Literal["ok", "error", "timeout", "cancelled"]


class DataPlaneEvent(TypedDict):
    """Event of one user call: op, partition, size, duration in milliseconds, and status."""

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: EventStatus


#: Names of ops in events that differ from the verb's.
OPS = {
    "register_partition": "register",
    "put_samples": "put",
    "get_samples": "get",
    "clear_samples": "clear",
}


def log_event(event: DataPlaneEvent) -> None:
    """Write one structlog line per op."""
    structlog.get_logger("asyncdp").info("data_plane", **event)


def fields_nbytes(fields: Mapping[str, Any] | TensorDictBase | None) -> int:
    """Return the payload bytes of all leaves, see :func:`~asyncdp.middleware.policy.live_bytes.leaf_nbytes`."""
    return 0 if fields is None else sum(map(leaf_nbytes, fields.values()))


class Metrics(Layer):
    """Emits one flat event per user call, keeps totals, and reports the outcome of mutations to the stack's counters.

    Totals include successful calls only. Events of the other layers, and live bytes, are counted by
    :class:`~asyncdp.middleware.counters.Counters`.

    Args:
        inner: The next layer.
        on_event: Called with a :class:`DataPlaneEvent` per op. What it raises is counted and does not affect the call.

    Attributes:
        counters: The counters of the stack.
    """

    def __init__(self, inner: Service, on_event: Callable[[DataPlaneEvent], None] | None = None) -> None:
        """Start with all counts at zero."""
        super().__init__(inner)
        self.on_event = on_event
        self._callback_errors = 0
        self._ops = self._keys = self._bytes = 0
        self.counters = Counters()
        self._times: dict[tuple[str, str], Histogram] = {}
        self._latest = 0.0

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Pass the call on and count it when it ends."""
        status: EventStatus = "cancelled"
        failed = ""
        n_bytes = 0
        observers = ctx.env.observers
        if observers is not None:
            observers.call_began(ctx.op_id, ctx.verb)
        ids = getattr(call, "sample_ids", None)
        n_keys = len(ids) if ids is not None else 0
        try:
            result = await self.inner.execute(call, ctx)
            status = "ok"
            if call.mutates:
                n_keys, n_bytes = self.counters.enter(call, result, n_keys)
            elif isinstance(result, TensorDict):
                n_bytes = fields_nbytes(result)
            self._ops += 1
            self._keys += n_keys
            self._bytes += n_bytes
        except DataPlaneError as err:
            told = err.alone() if isinstance(err, PartialReadError) and not err.ok.size else err
            status = "timeout" if isinstance(told, TimeoutError) else "error"
            failed = type(told).__name__
            self.counters.count("error." + type(told).__name__)
            if err.ambiguous:
                self.counters.unknown(call, ctx.op_id)
            raise
        except Exception as err:
            status = "timeout" if isinstance(err, TimeoutError) else "error"
            failed = type(err).__name__
            raise
        except BaseException:
            self.counters.unknown(call, ctx.op_id)
            raise
        else:
            return result
        finally:
            self._record(call, ctx, n_keys, n_bytes, status, failed)

    def _record(
        self, call: Call[Any], ctx: CallContext, n_keys: int, n_bytes: int, status: EventStatus, failed: str
    ) -> None:
        op = OPS.get(ctx.verb, ctx.verb)
        self._latest = ctx.env.clock.now()
        wall_s = self._latest - ctx.began
        times = self._times.get((op, status))
        if times is None:
            times = self._times[op, status] = Histogram()
        times.add(wall_s)
        observers = ctx.env.observers
        if observers is not None:
            partition = getattr(call, "partition_id", "")
            observers.call_ended(CallEnded(ctx.op_id, op, status, wall_s, failed, partition, n_keys, n_bytes))
        if self.on_event is None:
            return
        event: DataPlaneEvent = {
            "op": op,
            "partition_id": getattr(call, "partition_id", ""),
            "n_keys": n_keys,
            "n_bytes": n_bytes,
            "wall_ms": wall_s * 1e3,
            "status": status,
        }
        try:
            self.on_event(event)
        except Exception as err:  # noqa: BLE001 - an error of the callback must not fail the call
            self._callback_errors += 1
            if self._callback_errors == 1:
                log_line("warning", "on_event raised; further errors are only counted", error=repr(err))

    def snapshot(self) -> Snapshot:
        """Return what the stack has counted so far: totals, calls by op and status, durations, events, ports."""
        ops = CountsBy()
        by_op: dict[str, Histogram] = {}
        for (op, status), times in list(self._times.items()):
            ops.setdefault(op, Counter())[status] = times.count
            by_op.setdefault(op, Histogram()).merge(times)
        counted = self.counters.snapshot()
        return {
            "total_bytes": self._bytes,
            "total_keys": self._keys,
            "total_ops": self._ops,
            "ops": ops,
            "wall_ms": {op: _quantiles(times) for op, times in by_op.items()},
            "callback_errors": self._callback_errors,
            "ports": self._ports(),
            **counted,
        }

    def call_times(self) -> dict[tuple[str, str], Histogram]:
        """Return a histogram of durations per (op, status), such as ``("put", "ok")``."""
        return dict(self._times)

    def _ports(self) -> list[PortSnapshot]:
        """Return the ports that the layers below have used, with their health."""
        found: list[PortSnapshot] = []
        try:
            now = self.env.clock.now()
        except RuntimeError:  # outside of the event loop, in the thread of a scrape: as of the last call
            now = self._latest
        for layer in layers_of(self):
            if isinstance(layer, PortRotation):
                for (host, port), seen in sorted(layer.ports(now).items()):
                    left_s = 0.0 if seen.until is None else max(0.0, seen.until - now)
                    health = seen.health.name.lower()
                    failures = seen.failures
                    found.append(PortSnapshot(host=host, port=port, health=health, failures=failures, left_s=left_s))
        return found

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """Return live bytes per partition."""
        return self.counters.live_bytes.by_partition()


def _quantiles(times: Histogram) -> Quantiles:
    p50, p90, p99 = (times.quantile(part) * 1e3 for part in (0.5, 0.9, 0.99))
    return {"p50": p50, "p90": p90, "p99": p99}


#: The name of this class in NeMo-RL.
MetricsDataPlaneClient = Metrics
