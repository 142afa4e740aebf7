"""Metrics: counts every call, and everything the other layers emit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, TypedDict, TypeVar

import structlog
from tensordict import TensorDict, TensorDictBase

from asyncdp.calls import ClearSamples, DropPartition, PutSamples
from asyncdp.errors import DataPlaneError, PartialReadError
from asyncdp.meta import KVBatchMeta
from asyncdp.middleware.account import Account, leaf_nbytes, sizes_of
from asyncdp.service import Layer

if TYPE_CHECKING:
    from asyncdp.calls import Call, CallContext
    from asyncdp.service import Service

__all__ = ["DataPlaneEvent", "Metrics", "MetricsDataPlaneClient", "fields_nbytes", "log_event"]

R = TypeVar("R")
#: Mutations of unknown outcome that are remembered.
UNSURE_KEPT = 1024
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
    """Payload bytes of all leaves, see :func:`~asyncdp.middleware.account.leaf_nbytes`."""
    return 0 if fields is None else sum(map(leaf_nbytes, fields.values()))


class Metrics(Layer):
    """Emits one flat event per user call and keeps totals, live bytes and the counters of all layers.

    It is the stack's only sink: retries, rotations, quarantines and the like arrive by :meth:`emit`. Totals count what
    ended well; a failed put or clear leaves the account of live bytes as it was, one of unknown outcome is entered when
    it turned out to have happened.

    Args:
        inner: The next layer.
        on_event: Called with a :class:`DataPlaneEvent` per op. What it raises harms no call.
    """

    def __init__(self, inner: Service, on_event: Callable[[DataPlaneEvent], None] | None = None) -> None:
        """Begin with all counts at zero."""
        super().__init__(inner)
        self.on_event = on_event
        self._callback_errors = 0
        self._ops = self._keys = self._bytes = 0
        self.account = Account()
        # Mutations whose outcome nobody knows yet, by op_id: entered when the Settle layer has found out.
        self._unsure: dict[str, Callable[[], object]] = {}
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
            elif isinstance(result, KVBatchMeta) and not isinstance(call, PutSamples):
                n_keys = result.size
            elif call.mutates:
                n_keys, n_bytes = self._enter(call, result, n_keys)
            self._ops += 1
            self._keys += n_keys
            self._bytes += n_bytes
        except DataPlaneError as err:
            told = err.alone() if isinstance(err, PartialReadError) and not err.ok.size else err
            status = "timeout" if isinstance(told, TimeoutError) else "error"
            self._events["error." + type(told).__name__] += 1
            if err.ambiguous:
                self._unknown(call, ctx)
            raise
        except Exception as err:
            status = "timeout" if isinstance(err, TimeoutError) else "error"
            raise
        except BaseException:
            self._unknown(call, ctx)
            raise
        else:
            return result
        finally:
            self._record(call, ctx, n_keys, n_bytes, status)

    def _enter(self, call: Call[Any], result: Any, n_keys: int) -> tuple[int, int]:
        """Enter a mutation that happened into the account; returns its keys and bytes."""
        if isinstance(call, PutSamples):
            written = _written(result)
            return len(written), self.account.put(call.partition_id, call.sample_ids, call.fields, written)
        if isinstance(call, ClearSamples):
            return self.account.clear(call.partition_id, call.sample_ids, call.lives), 0
        if isinstance(call, DropPartition):
            self.account.clear(call.partition_id, None)
        return n_keys, 0

    def _unknown(self, call: Call[Any], ctx: CallContext) -> None:
        """Keep what a mutation whose outcome nobody knows would enter; the oldest are forgotten first.

        Not the call itself: its tensors would live on with it. A put that may have left rows out is not entered: nobody
        learns which.
        """
        if isinstance(call, PutSamples):
            if call.skip_stale:
                return
            sizes = sizes_of(call.fields)
            self._unsure[ctx.op_id] = partial(self.account.put_sizes, call.partition_id, call.sample_ids, sizes)
        elif isinstance(call, ClearSamples):
            self._unsure[ctx.op_id] = partial(self.account.clear, call.partition_id, call.sample_ids, call.lives)
        elif isinstance(call, DropPartition):
            self._unsure[ctx.op_id] = partial(self.account.clear, call.partition_id, None)
        while len(self._unsure) > UNSURE_KEPT:
            del self._unsure[next(iter(self._unsure))]

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
        if name == "settled":
            enter = self._unsure.pop(str(labels.get("op_id")), None)
            if enter is not None and labels.get("state") == "done":
                enter()
        self._events[name] += 1
        self._labelled[name, tuple((k, labels[k]) for k in _LABELS if k in labels)] += 1

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
            "bytes_outstanding": self.account.outstanding,
            "peak_bytes_outstanding": self.account.peak,
            "max_bytes_per_key_seen": self.account.max_bytes_per_key_seen,
            "last_put_bytes_per_key": self.account.last_put_bytes_per_key,
            "n_keys_outstanding": self.account.keys(),
            "ops": ops,
            "wall_ms": {op: _quantiles(buckets) for op, buckets in self._wall.items()},
            "events": dict(self._events),
            "events_by": by,
            "callback_errors": self._callback_errors,
        }

    def bytes_outstanding_by_partition(self) -> dict[str, int]:
        """Return live bytes per partition."""
        return self.account.by_partition()


def _written(meta: KVBatchMeta) -> dict[str, int | None]:
    """Return the incarnation of each row that a put wrote, as far as it is told."""
    handles = meta.handles or [None] * meta.size
    return {i: None if h is None else h.incarnation for i, h in zip(meta.sample_ids, handles, strict=True)}


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
