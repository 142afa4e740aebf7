"""What happened: every call of every client in one order, and every wire request where somebody sees them."""

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
    """Samples that a fault took away for good: from now on they may be missing, but never wrong.

    Attributes:
        at: Place in the one order of all events.
        partition, ids: Which.
        why: What took them.
        since: ``at`` in seconds.
    """

    at: float
    partition: str
    ids: frozenset[str]
    why: str
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a layer of a client told: ``what`` and its labels."""

    at: float
    client: str
    what: str
    labels: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Budgets:
    """What the stack of one client allows itself; None where there is no limit.

    Attributes:
        ratio, floor_per_s, window_s: Its retry budget.
        per_slot: How often one user call may ask for one slot; as often again after waits for an outage.
        after_wait: How many requests one wait for an outage that ended may be followed by.
        patience_s: How long one user call may wait for outages.
    """

    ratio: float = math.inf
    floor_per_s: float = math.inf
    window_s: float = 10.0
    per_slot: float = math.inf
    after_wait: int = 1
    patience_s: float = math.inf


@dataclass(slots=True)
class History:
    """All that the checks need to know.

    Record by a :class:`~asyncdp.testing.simulation.recorded.Recorded` client, or by hand::

        history = History()
        op = history.begin("alice", "put_samples", "train", ["a"], values={"x": [1]})
        ...
        history.ended(op)                     # or history.ended(op, error=err): the error decides what it was
        assert check(history) == []

    Events are ordered as they were recorded. Histories of several processes are merged by time with :meth:`merged`.

    Attributes:
        operations: All calls, by their beginning.
        lost: What faults took away.
        requests: Wire requests, where they were seen.
        events: What layers told.
        budgets: By client, what its stack allows itself.
        settles: Clients that find out what became of a mutation before their next one on the same samples (the
            Reconcile layer): what they left open is over when that one is.
        lease_s: How long claims last; None: until they are released.
        group_sizes: By partition, the grpo_group_size: groups are claimed whole.
        calm_since: When the last fault was over, in seconds; None: never.
        now: The clock; without one, moments are places in the order.
        derived: What checks have found out already; forgotten when something is recorded.
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
        """Return the next place in the order of all events."""
        self._count += 1
        if self.derived:
            self.derived.clear()
        return self._count

    def time(self) -> float:
        """Seconds, by the clock that was given; else the place in the order."""
        return float(self._count) if self.now is None else self.now()

    def begin(self, client: str, verb: str, partition: str = "", ids: Iterable[str] = (), **known: Any) -> Operation:
        """Record that a call begins; ``known`` are attributes of :class:`Operation`."""
        op = Operation(len(self.operations), client, verb, partition, tuple(ids), start=self.tick(), **known)
        op.began = self.time()
        self.operations.append(op)
        return op

    def ended(self, op: Operation, error: BaseException | None = None, **known: Any) -> Operation:
        """Record that it ended: well, or with an error.

        A timeout, an ambiguous error, a cancel, and anything that is no error of a data plane, leave it unknown.
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
        """Record that a fault took samples away."""
        at = self.tick()
        self.lost.append(Lost(at, partition, frozenset(ids), why, self.time()))

    # -- looking

    def of(self, partition: str, ids: Sequence[str]) -> Iterator[Operation]:
        """Iterate over the calls that concern some of these samples, for a trace."""
        wanted = set(ids)
        for op in self.operations:
            if op.partition == partition and (not wanted.isdisjoint(op.ids) or op.verb == "drop_partition"):
                yield op

    @property
    def completed(self) -> int:
        """Calls that came back, well or not."""
        return sum(not math.isinf(op.end) for op in self.operations)

    def counts(self) -> Counter[tuple[str, str]]:
        """How many calls there were, by verb and outcome."""
        return Counter((op.verb, op.outcome) for op in self.operations)

    def digest(self) -> str:
        """Hash of all that happened: two runs of the same seed have the same."""
        digest = hashlib.blake2b(digest_size=8)
        for op in self.operations:
            told = (
                *(op.client, op.verb, op.ids, op.start, op.end, round(op.began, 9), round(op.ended, 9), op.outcome),
                *(type(op.error).__name__, sorted(op.values.items()), list(op.came)),
            )
            digest.update(repr(told).encode())
        for request in self.requests:
            digest.update(f"{request.at:.9f} {request.client} {request.kind} {request.port} {request.ended}".encode())
        return digest.hexdigest()

    @classmethod
    def merged(cls, histories: Iterable[History]) -> History:
        """Put histories of several processes together, by their clocks, which must agree; moments count as places."""
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
