"""Counters: what the layers of a stack did, and how many payload bytes its client has in the plane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from asyncdp.calls import ClearSamples, DropPartition, PutSamples

from .policy.live_bytes import LiveBytes, sizes_of

if TYPE_CHECKING:
    from asyncdp.calls import Call
    from asyncdp.meta import KVBatchMeta

__all__ = ["Counters"]

#: Mutations of unknown outcome that are remembered.
UNSURE_KEPT = 1024
#: Labels that events are counted by; others are too many to count by.
_LABELS = ("reason", "host", "port", "verb", "what", "state")


class Counters:
    """The events of a stack and its account of live bytes. ``stack()`` makes one; it is the sink of all layers.

    A mutation that failed leaves the account as it was. One of unknown outcome is entered when the Reconcile layer
    tells that it happened.

    Attributes:
        account: Live bytes by partition, key and field.
    """

    def __init__(self) -> None:
        """Begin with all counts at zero."""
        self.account = LiveBytes()
        self._events: Counter[str] = Counter()
        self._labelled: Counter[tuple[str, tuple[tuple[str, Any], ...]]] = Counter()
        # What mutations whose outcome nobody knows yet would enter, by op_id.
        self._unsure: dict[str, Callable[[], object]] = {}

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Count an event of a layer."""
        if name == "settled":
            enter = self._unsure.pop(str(labels.get("op_id")), None)
            if enter is not None and labels.get("state") == "done":
                enter()
        self.count(name)
        self._labelled[name, tuple((k, labels[k]) for k in _LABELS if k in labels)] += 1

    def count(self, name: str) -> None:
        """Count what has no labels."""
        self._events[name] += 1

    def enter(self, call: Call[Any], result: Any, n_keys: int) -> tuple[int, int]:
        """Enter a mutation that happened into the account; returns its keys and its bytes."""
        if isinstance(call, PutSamples):
            written = _written(result)
            return len(written), self.account.put(call.partition_id, call.sample_ids, call.fields, written)
        if isinstance(call, ClearSamples):
            return self.account.clear(call.partition_id, call.sample_ids, call.lives), 0
        if isinstance(call, DropPartition):
            self.account.clear(call.partition_id, None)
        return n_keys, 0

    def unknown(self, call: Call[Any], op_id: str) -> None:
        """Keep what a mutation whose outcome nobody knows would enter; the oldest are forgotten first.

        Not the call itself: its tensors would live on with it. A put that may have left rows out is not entered: nobody
        learns which.
        """
        if isinstance(call, PutSamples):
            if call.skip_stale:
                return
            sizes = sizes_of(call.fields)
            self._unsure[op_id] = partial(self.account.put_sizes, call.partition_id, call.sample_ids, sizes)
        elif isinstance(call, ClearSamples):
            self._unsure[op_id] = partial(self.account.clear, call.partition_id, call.sample_ids, call.lives)
        elif isinstance(call, DropPartition):
            self._unsure[op_id] = partial(self.account.clear, call.partition_id, None)
        while len(self._unsure) > UNSURE_KEPT:
            del self._unsure[next(iter(self._unsure))]

    def snapshot(self) -> dict[str, Any]:
        """Return the live counts and the events, as in :meth:`asyncdp.Metrics.snapshot`."""
        by: dict[str, dict[str, int]] = {}
        for (name, labels), count in self._labelled.items():
            by.setdefault(name, {})[" ".join(f"{k}={v}" for k, v in labels)] = count
        return {
            "bytes_outstanding": self.account.outstanding,
            "peak_bytes_outstanding": self.account.peak,
            "max_bytes_per_key_seen": self.account.max_bytes_per_key_seen,
            "last_put_bytes_per_key": self.account.last_put_bytes_per_key,
            "n_keys_outstanding": self.account.keys(),
            "events": dict(self._events),
            "events_by": by,
        }


def _written(meta: KVBatchMeta) -> dict[str, int | None]:
    """Return the incarnation of each row that a put wrote, as far as it is told."""
    handles = meta.handles or [None] * meta.size
    return {i: None if h is None else h.incarnation for i, h in zip(meta.sample_ids, handles, strict=True)}
