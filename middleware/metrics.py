"""Metrics: counts every call, and everything the other layers emit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import structlog
import torch
from tensordict import TensorDict, TensorDictBase

from asyncdp.block import field_names
from asyncdp.calls import ClearSamples, DropPartition, PutSamples
from asyncdp.errors import DataPlaneError
from asyncdp.meta import KVBatchMeta
from asyncdp.middleware.layer import Layer

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext
    from asyncdp.client import BaseClient

__all__ = ["DataPlaneEvent", "Metrics", "MetricsDataPlaneClient", "fields_nbytes", "log_event"]

R = TypeVar("R")
EventStatus = Literal["ok", "error", "timeout", "cancelled"]


class DataPlaneEvent(TypedDict):
    """One user call: what, where, how much, how long (milliseconds), how it ended."""

    op: str
    partition_id: str
    n_keys: int
    n_bytes: int
    wall_ms: float
    status: EventStatus


#: Names of the ops in events, where they differ from the verb's.
OPS = {
    "register_partition": "register",
    "put_samples": "put",
    "get_samples": "get",
    "clear_samples": "clear",
}
#: Labels that counters are kept by; others are too many to count by.
_LABELS = ("reason", "host", "port", "verb", "what", "state")


def log_event(event: DataPlaneEvent) -> None:
    """Write one structlog line per op."""
    structlog.get_logger("asyncdp").info("data_plane", **event)


def fields_nbytes(fields: Mapping[str, Any] | TensorDictBase | None) -> int:
    """Payload bytes of the leaves; of non-tensor values the length of text and bytes, else 8 per value."""
    if fields is None:
        return 0
    total = 0
    for leaf in fields.values():
        if isinstance(leaf, torch.Tensor):
            total += leaf.values().nbytes if leaf.is_nested and leaf.layout == torch.jagged else leaf.nbytes
        else:
            rows = leaf.tolist() if hasattr(leaf, "tolist") else leaf
            for value in rows if isinstance(rows, (list, tuple)) else [rows]:
                total += len(value) if isinstance(value, (str, bytes)) else 8
    return total


class Metrics(Layer):
    """Emits one flat event per user call and keeps totals, live bytes and the counters of all layers.

    It is the stack's only sink: retries, rotations, quarantines and the like arrive by :meth:`emit`. Totals count what
    ended well; a failed put or clear leaves the account of live bytes as it was.

    Args:
        inner: The next layer.
        on_event: Called with a :class:`DataPlaneEvent` per op. What it raises harms no call.
    """

    def __init__(self, inner: BaseClient, on_event: Callable[[DataPlaneEvent], None] | None = None) -> None:
        """Begin with all counts at zero."""
        super().__init__(inner)
        self.on_event = on_event
        self._callback_errors = 0
        self._ops = self._keys = self._bytes = 0
        self._outstanding = self._peak = self._max_per_key = self._last_per_key = 0
        # partition -> key -> fields of one put -> bytes: a put of the same fields replaces, of other fields adds.
        self._held: dict[str, dict[str, dict[tuple[str, ...], int]]] = {}
        self._by_status: Counter[tuple[str, str]] = Counter()
        self._wall: dict[str, list[int]] = {}
        self._events: Counter[str] = Counter()
        self._labelled: Counter[tuple[str, tuple[tuple[str, Any], ...]]] = Counter()

    async def execute(self, call: Call[R], ctx: CallContext) -> R:
        """Pass the call on, then count it."""
        status: EventStatus = "cancelled"
        n_bytes = 0
        ids = getattr(call, "sample_ids", None)
        n_keys = len(ids) if ids is not None else 0
        try:
            result = await self.inner.execute(call, ctx)
            status = "ok"
            if isinstance(result, TensorDict):
                n_bytes = fields_nbytes(result)
            elif isinstance(call, PutSamples):
                n_bytes = self._record_put(call)
            elif isinstance(call, ClearSamples):
                n_keys = self._record_clear(call, result)
            elif isinstance(call, DropPartition):
                self._record_drop(call.partition_id)
            elif isinstance(result, KVBatchMeta):
                n_keys = result.size
            self._ops += 1
            self._keys += n_keys
            self._bytes += n_bytes
        except Exception as err:
            status = "timeout" if isinstance(err, TimeoutError) else "error"
            if isinstance(err, DataPlaneError):
                self._events["error." + type(err).__name__] += 1
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
        except Exception as err:  # noqa: BLE001 - whoever watches must not harm what is watched
            self._callback_errors += 1
            if self._callback_errors == 1:
                structlog.get_logger("asyncdp").warning(
                    "on_event raised; further errors are only counted", error=repr(err)
                )

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Count an event of a layer."""
        self._events[name] += 1
        self._labelled[name, tuple((k, labels[k]) for k in _LABELS if k in labels)] += 1

    # -- accounts

    def _record_put(self, call: PutSamples) -> int:
        n_bytes = fields_nbytes(call.fields)
        share, rest = divmod(n_bytes, len(call.sample_ids))
        held = self._held.setdefault(call.partition_id, {})
        if call.fields is not None:
            names = tuple(sorted(field_names(call.fields)))
            for key in call.sample_ids:
                size = share + rest
                rest = 0
                puts = held.setdefault(key, {})
                self._outstanding += size - puts.get(names, 0)
                puts[names] = size
                self._max_per_key = max(self._max_per_key, sum(puts.values()))
            self._last_per_key = share
        else:
            for key in call.sample_ids:
                held.setdefault(key, {})
        self._peak = max(self._peak, self._outstanding)
        return n_bytes

    def _record_clear(self, call: ClearSamples, removed: Any) -> int:
        held = self._held.get(call.partition_id, {})
        # None clears what this owner put, which is what this client has on its account.
        ids = list(held) if call.sample_ids is None else call.sample_ids
        for key in ids:
            self._outstanding -= sum(held.pop(key, {}).values())
        return int(removed) if call.sample_ids is None and removed is not None else len(ids)

    def _record_drop(self, partition_id: str) -> None:
        for puts in self._held.pop(partition_id, {}).values():
            self._outstanding -= sum(puts.values())

    def snapshot(self) -> dict[str, Any]:
        """Return totals and live counts.

        Keys: total_bytes, total_keys, total_ops; bytes_outstanding, peak_bytes_outstanding, n_keys_outstanding,
        max_bytes_per_key_seen, last_put_bytes_per_key; ``ops`` {op: {status: count}}; ``wall_ms`` {op: {p50, p90, p99}}
        (upper bounds of power-of-two buckets); ``events`` {name: count} and ``events_by`` {name: {labels: count}} of
        what the layers did; callback_errors.
        """
        ops: dict[str, dict[str, int]] = {}
        for (op, status), count in self._by_status.items():
            ops.setdefault(op, {})[status] = count
        by: dict[str, dict[str, int]] = {}
        for (name, labels), count in self._labelled.items():
            by.setdefault(name, {})[" ".join(f"{k}={v}" for k, v in labels)] = count
        return {
            "total_bytes": self._bytes,
            "total_keys": self._keys,
            "total_ops": self._ops,
            "bytes_outstanding": self._outstanding,
            "peak_bytes_outstanding": self._peak,
            "max_bytes_per_key_seen": self._max_per_key,
            "last_put_bytes_per_key": self._last_per_key,
            "n_keys_outstanding": sum(map(len, self._held.values())),
            "ops": ops,
            "wall_ms": {op: _quantiles(buckets) for op, buckets in self._wall.items()},
            "events": dict(self._events),
            "events_by": by,
            "callback_errors": self._callback_errors,
        }

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """Return live bytes per partition."""
        return {
            partition: sum(sum(puts.values()) for puts in held.values())
            for partition, held in self._held.items()
            if held
        }


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


#: The name that users of NeMo-RL know.
MetricsDataPlaneClient = Metrics
