"""Metrics: counts and times all user calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import structlog
from tensordict import TensorDict, TensorDictBase

from asyncdp.calls import PutSamples
from asyncdp.errors import DataPlaneError, PartialReadError
from asyncdp.meta import KVBatchMeta
from asyncdp.service import Layer

from .counters import Counters
from .policy.live_bytes import leaf_nbytes

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
        self._by_status: Counter[tuple[str, str]] = Counter()
        self._wall: dict[str, list[int]] = {}

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Pass the call on and count it when it ends."""
        status: EventStatus = "cancelled"
        n_bytes = 0
        ids = getattr(call, "sample_ids", None)
        n_keys = len(ids) if ids is not None else 0
        try:
            result = await self.inner.execute(call, ctx)
            status = "ok"
            if isinstance(result, TensorDict):
                n_bytes = fields_nbytes(result)
            elif isinstance(result, KVBatchMeta) and not isinstance(call, PutSamples):
                n_keys = result.size
            elif call.mutates:
                n_keys, n_bytes = self.counters.enter(call, result, n_keys)
            self._ops += 1
            self._keys += n_keys
            self._bytes += n_bytes
        except DataPlaneError as err:
            told = err.alone() if isinstance(err, PartialReadError) and not err.ok.size else err
            status = "timeout" if isinstance(told, TimeoutError) else "error"
            self.counters.count("error." + type(told).__name__)
            if err.ambiguous:
                self.counters.unknown(call, ctx.op_id)
            raise
        except Exception as err:
            status = "timeout" if isinstance(err, TimeoutError) else "error"
            raise
        except BaseException:
            self.counters.unknown(call, ctx.op_id)
            raise
        else:
            return result
        finally:
            self._record(call, ctx, n_keys, n_bytes, status)

    def _record(self, call: Call[Any], ctx: CallContext, n_keys: int, n_bytes: int, status: EventStatus) -> None:
        op = OPS.get(ctx.verb, ctx.verb)
        wall_s = ctx.env.clock.now() - ctx.began
        self._by_status[op, status] += 1
        buckets = self._wall.get(op)
        if buckets is None:
            buckets = self._wall[op] = [0] * 40
        buckets[min(int(wall_s * 1e6).bit_length(), 39)] += 1
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
                structlog.get_logger("asyncdp").warning(
                    "on_event raised; further errors are only counted", error=repr(err)
                )

    def snapshot(self) -> dict[str, Any]:
        """Return totals, live bytes and keys, and event counts.

        Keys: total_bytes, total_keys, total_ops; bytes_outstanding, peak_bytes_outstanding, n_keys_outstanding,
        max_bytes_per_key_seen, last_put_bytes_per_key; ``ops`` {op: {status: count}}; ``wall_ms`` {op: {p50, p90, p99}}
        (upper bounds of power-of-two buckets); ``events`` {name: count} and ``events_by`` {name: {labels: count}} of
        the layers' events; callback_errors.
        """
        ops: dict[str, dict[str, int]] = {}
        for (op, status), count in self._by_status.items():
            ops.setdefault(op, {})[status] = count
        return {
            "total_bytes": self._bytes,
            "total_keys": self._keys,
            "total_ops": self._ops,
            "ops": ops,
            "wall_ms": {op: _quantiles(buckets) for op, buckets in self._wall.items()},
            "callback_errors": self._callback_errors,
            **self.counters.snapshot(),
        }

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """Return live bytes per partition."""
        return self.counters.live_bytes.by_partition()


def _quantiles(buckets: list[int]) -> dict[str, float]:
    total = sum(buckets)
    out = {}
    for name, part in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        seen = 0
        for at, count in enumerate(buckets):
            seen += count
            if seen >= part * total:
                out[name] = (1 << at) / 1e3
                break
    return out


#: The name of this class in NeMo-RL.
MetricsDataPlaneClient = Metrics
