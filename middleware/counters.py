"""Counters: counts the events of the layers of a stack, and the payload bytes that its client has in the plane."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypedDict

from asyncdp.calls import ClearSamples, DropPartition, PutSamples
from asyncdp.meta import KVBatchMeta
from asyncdp.metrics.snapshot import CountsBy

from .policy.live_bytes import LiveBytes, sizes_of

if TYPE_CHECKING:
    from asyncdp.calls import Call
    from asyncdp.metrics.observer import Observers

__all__ = ["Counters"]

#: Number of mutations with unknown outcome that are remembered.
UNSURE_KEPT = 1024
#: Labels by which events are counted; other labels have too many values.
_LABELS = ("reason", "host", "port", "verb", "what", "state")


class Counted(TypedDict):
    """The part of a snapshot that the counters have."""

    bytes_outstanding: int
    peak_bytes_outstanding: int
    max_bytes_per_key_seen: int
    last_put_bytes_per_key: int
    n_keys_outstanding: int
    events: Counter[str]
    events_by: CountsBy
    observer_errors: int


class Counters:
    """Counts the events and the live bytes of a stack; made by ``stack()`` as the sink of all its layers.

    A failed mutation does not change the live bytes. One with an unknown outcome is counted when the Reconcile layer
    reports that it happened.

    Attributes:
        live_bytes: Live bytes by partition, key and field.
        observers: Observers that are told the events too; None: there are none.
    """

    def __init__(self) -> None:
        """Start with all counts at zero."""
        self.live_bytes = LiveBytes()
        self._events: Counter[str] = Counter()
        self._labelled: Counter[tuple[str, tuple[tuple[str, Any], ...]]] = Counter()
        # By op_id: updates the live bytes for a mutation with unknown outcome, once it is known to have happened.
        self._unsure: dict[str, Callable[[], object]] = {}
        self.observers: Observers | None = None

    def emit(self, name: str, labels: Mapping[str, Any]) -> None:
        """Count an event of a layer."""
        if name == "settled":
            enter = self._unsure.pop(str(labels.get("op_id")), None)
            if enter is not None and labels.get("state") == "done":
                enter()
        self.count(name)
        self._labelled[name, tuple((k, labels[k]) for k in _LABELS if k in labels)] += 1
        if self.observers is not None:
            self.observers.event(name, labels)

    def count(self, name: str) -> None:
        """Count an event without labels."""
        self._events[name] += 1

    def enter(self, call: Call[Any], result: Any, n_keys: int) -> tuple[int, int]:
        """Update the live bytes for a mutation that happened; return its numbers of keys and of bytes.

        ``n_keys`` is the number of keys that the call names. A claim names none; its answer does.
        """
        if isinstance(call, PutSamples):
            written = _written(result)
            return len(written), self.live_bytes.put(call.partition_id, call.sample_ids, call.fields, written)
        if isinstance(call, ClearSamples):
            return self.live_bytes.clear(call.partition_id, call.sample_ids, call.lives), 0
        if isinstance(call, DropPartition):
            self.live_bytes.clear(call.partition_id, None)
        return (result.size if isinstance(result, KVBatchMeta) else n_keys), 0

    def unknown(self, call: Call[Any], op_id: str) -> None:
        """Remember the update of live bytes of a mutation with unknown outcome; the oldest are forgotten first.

        The call itself is not kept, since that would keep its tensors alive. A put that may have left out stale rows is
        not counted, since nobody learns which rows it wrote.
        """
        if isinstance(call, PutSamples):
            if call.skip_stale:
                return
            sizes = sizes_of(call.fields)
            self._unsure[op_id] = partial(self.live_bytes.put_sizes, call.partition_id, call.sample_ids, sizes)
        elif isinstance(call, ClearSamples):
            self._unsure[op_id] = partial(self.live_bytes.clear, call.partition_id, call.sample_ids, call.lives)
        elif isinstance(call, DropPartition):
            self._unsure[op_id] = partial(self.live_bytes.clear, call.partition_id, None)
        while len(self._unsure) > UNSURE_KEPT:
            del self._unsure[next(iter(self._unsure))]

    def snapshot(self) -> Counted:
        """Return the live bytes and keys and the event counts, as in :class:`~asyncdp.metrics.snapshot.Snapshot`."""
        by = CountsBy()
        for (name, labels), count in list(self._labelled.items()):
            by.setdefault(name, Counter())[" ".join(f"{k}={v}" for k, v in labels)] = count
        return {
            "bytes_outstanding": self.live_bytes.outstanding,
            "peak_bytes_outstanding": self.live_bytes.peak,
            "max_bytes_per_key_seen": self.live_bytes.max_bytes_per_key_seen,
            "last_put_bytes_per_key": self.live_bytes.last_put_bytes_per_key,
            "n_keys_outstanding": self.live_bytes.keys(),
            "events": Counter(self._events),
            "events_by": by,
            "observer_errors": 0 if self.observers is None else self.observers.errors,
        }


def _written(meta: KVBatchMeta) -> dict[str, int | None]:
    """Return the incarnation of each row that a put wrote; None where the backend did not return it."""
    handles = meta.handles or [None] * meta.size
    return {i: None if h is None else h.incarnation for i, h in zip(meta.sample_ids, handles, strict=True)}
