"""The history of a run: all calls of all clients in one order, and all wire requests if they are recorded."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from asyncdp.errors import DataPlaneError

from .operation import Operation

if TYPE_CHECKING:
    from .wire_request import WireRequest

__all__ = ["Budgets", "Event", "History", "Lost"]


@dataclass(frozen=True, slots=True)
class Lost:
    """Samples that a fault removed permanently; from then on they may be missing, but must never be wrong.

    Attributes:
        at: Position in the order of all events.
        partition, ids: Partition and ids of the samples.
        why: Description of the fault.
        since: Time of the fault in seconds.
    """

    at: float
    partition: str
    ids: frozenset[str]
    why: str
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """An event that a layer of a client emitted, with its name (``what``) and labels."""

    at: float
    client: str
    what: str
    labels: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Budgets:
    """Limits of retries and waits in the stack of one client; None means no limit.

    Attributes:
        ratio, floor_per_s, window_s: Parameters of its retry budget.
        per_slot: Maximum number of requests of one user call for one slot; the same number again after waits for an
            outage.
        after_wait: Maximum number of requests that may follow one completed wait for an outage.
        patience_s: Maximum time in seconds that one user call may wait for outages.
    """

    ratio: float = math.inf
    floor_per_s: float = math.inf
    window_s: float = 10.0
    per_slot: float = math.inf
    after_wait: int = 1
    patience_s: float = math.inf


@dataclass(slots=True)
class History:
    """Records everything that the checks need.

    It is filled by a :class:`~asyncdp.testing.simulation.recording.recorded.Recorded` client, or by hand::

        history = History()
        op = history.begin("alice", "put_samples", "train", ["a"], values={"x": [1]})
        ...
        history.ended(op)                     # or history.ended(op, error=err): the error determines the outcome
        assert check(history) == []

    Events are ordered as they were recorded. Histories of several processes are merged by time with :meth:`merged`.

    Attributes:
        operations: All calls, ordered by their start.
        lost: Samples that faults removed.
        requests: Wire requests, if they are recorded.
        events: Events that layers emitted.
        budgets: Limits of each client's stack, by client.
        settles: Clients with the Reconcile layer, which resolve a pending mutation before their next one on the same
            samples; when that one has ended, the pending one cannot happen any more.
        lease_s: Duration of claims in seconds; None: claims last until they are released.
        group_sizes: The grpo_group_size by partition; such groups are claimed whole.
        calm_since: Time in seconds at which the last fault ended; None: it never did.
        now: Clock in seconds; None: positions in the order of events serve as times.
        derived: Cached intermediate results of checks; cleared when something is recorded.
    """

    operations: list[Operation] = field(default_factory=list)
    lost: list[Lost] = field(default_factory=list)
    requests: list[WireRequest] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    budgets: dict[str, Budgets] = field(default_factory=dict)
    settles: set[str] = field(default_factory=set)
    lease_s: float | None = None
    group_sizes: dict[str, int] = field(default_factory=dict)
    calm_since: float | None = None
    now: Callable[[], float] | None = None
    derived: dict[str, Any] = field(default_factory=dict)
    _count: int = 0

    # -- recording

    def tick(self) -> int:
        """Return the next position in the order of all events."""
        self._count += 1
        if self.derived:
            self.derived.clear()
        return self._count

    def time(self) -> float:
        """Return the time in seconds by the clock; without a clock, the position in the order."""
        return float(self._count) if self.now is None else self.now()

    def begin(self, client: str, verb: str, partition: str = "", ids: Iterable[str] = (), **known: Any) -> Operation:
        """Record the start of a call; ``known`` are attributes of :class:`Operation`."""
        op = Operation(len(self.operations), client, verb, partition, tuple(ids), start=self.tick(), **known)
        op.began = self.time()
        self.operations.append(op)
        return op

    def ended(self, op: Operation, error: BaseException | None = None, **known: Any) -> Operation:
        """Record the end of a call, with its error if it failed.

        After a timeout, an ambiguous error, a cancel, or an exception that is not an error of asyncdp, the outcome is
        unknown.
        """
        op.end = self.tick()
        op.ended = self.time()
        for name, value in known.items():
            setattr(op, name, value)
        if error is None:
            op.outcome = "ok"
            return op
        op.error = error if isinstance(error, Exception) else None
        op.denied = isinstance(error, DataPlaneError) and not error.ambiguous
        op.outcome = "fail" if op.denied and not isinstance(error, TimeoutError) else "unknown"
        return op

    def lose(self, partition: str, ids: Iterable[str], why: str = "") -> None:
        """Record that a fault removed samples."""
        at = self.tick()
        self.lost.append(Lost(at, partition, frozenset(ids), why, self.time()))

    # -- queries

    def of(self, partition: str, ids: Sequence[str]) -> Iterator[Operation]:
        """Iterate over the calls that involve any of these samples, for a trace."""
        wanted = set(ids)
        for op in self.operations:
            if op.partition == partition and (not wanted.isdisjoint(op.ids) or op.verb == "drop_partition"):
                yield op

    @property
    def completed(self) -> int:
        """Number of calls that returned or raised."""
        return sum(not math.isinf(op.end) for op in self.operations)

    def counts(self) -> Counter[tuple[str, str]]:
        """Return the number of calls by verb and outcome."""
        return Counter((op.verb, op.outcome) for op in self.operations)

    def digest(self) -> str:
        """Return a hash of the whole history, which is equal for two runs of the same seed."""
        digest = hashlib.blake2b(digest_size=8)
        for op in self.operations:
            described = (
                *(op.client, op.verb, op.ids, op.start, op.end, round(op.began, 9), round(op.ended, 9), op.outcome),
                *(type(op.error).__name__, sorted(op.values.items()), list(op.came)),
            )
            digest.update(repr(described).encode())
        for request in self.requests:
            digest.update(f"{request.at:.9f} {request.client} {request.kind} {request.port} {request.ended}".encode())
        return digest.hexdigest()

    @classmethod
    def merged(cls, histories: Iterable[History]) -> History:
        """Merge the histories of several processes by time; their clocks must agree, and times become positions."""
        whole = cls()
        for part in histories:
            for op in part.operations:
                op.start, op.end = op.began, op.ended
            whole.operations += part.operations
            whole.lost += [replace(lost, at=lost.since) for lost in part.lost]
            whole.requests += part.requests
            whole.events += part.events
            whole.budgets.update(part.budgets)
            whole.settles |= part.settles
            whole.group_sizes.update(part.group_sizes)
            if part.calm_since is not None:
                whole.calm_since = max(part.calm_since, whole.calm_since or part.calm_since)
            whole.lease_s = part.lease_s if whole.lease_s is None else whole.lease_s
        whole.operations.sort(key=lambda op: op.start)
        for number, op in enumerate(whole.operations):
            op.number = number
        return whole
