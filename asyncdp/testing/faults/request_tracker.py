"""What each request is about: host, port, partition, samples; learnt from those that were made before it."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from asyncdp.calls.slots import Locate, Place, ReadSlots, Reserve, SlotRef, WriteSlots

if TYPE_CHECKING:
    from collections.abc import Sequence

    from asyncdp.calls import Call, CallContext

    from .rule import Rule

__all__ = ["RequestTracker", "Subject"]

#: User calls whose slots and ids are remembered, to tell which samples a request is about.
REMEMBERED = 4096


SlotKey = tuple[str, int, int, int]


def _key(ref: SlotRef) -> SlotKey:
    return ref.host.id, ref.host.epoch, ref.slot, ref.generation


@dataclass(slots=True)
class _Seen:
    """What is known of one user call from the requests that were made for it."""

    partition: str
    ids: Sequence[str]
    slots: dict[SlotKey, dict[int, str]]


@dataclass(frozen=True, slots=True)
class Subject:
    """What one request is about, as rules see it.

    Attributes:
        by_slot: The samples of each slot of a read.
        kinds: The names of its type and of those that this derives from.
    """

    call: str
    verb: str
    host: str | None
    port: int | None
    partition: str | None
    ids: tuple[str, ...]
    by_slot: tuple[tuple[str, ...], ...] = ()
    kinds: frozenset[str] = frozenset()

    def fits(self, rule: Rule) -> bool:
        """Whether a rule is about this request."""
        where = rule.where
        return (
            rule.wants(self.kinds, self.verb)
            and where.host in (None, self.host)
            and where.port in (None, self.port)
            and where.partition in (None, self.partition)
            and (where.sample is None or where.sample in self.ids)
        )


@cache
def _kinds(kind: type) -> frozenset[str]:
    """Return the names of a call's type and of all that it derives from."""
    return frozenset(each.__name__ for each in kind.__mro__)


class RequestTracker:
    """Tells of a slot call which samples it is about: it names slots, and the look-up before it named both."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, _Seen] = OrderedDict()

    def describe(self, call: Call[Any], ctx: CallContext) -> Subject:
        """Tell host, partition and samples, from the request or from those made before it for the same user call."""
        host = getattr(call, "host", None)
        partition: str | None = getattr(call, "partition_id", None)
        ids: Sequence[str] = getattr(call, "sample_ids", None) or ()
        by_slot: tuple[tuple[str, ...], ...] = ()
        seen = self._calls.get(ctx.op_id)
        if seen is not None and isinstance(call, (ReadSlots, Reserve, WriteSlots)):
            partition = seen.partition
            if isinstance(call, ReadSlots):
                by_slot = tuple(_samples(ref, seen) for ref in call.refs)
                ids = tuple(dict.fromkeys(i for each in by_slot for i in each))
            elif isinstance(call, Reserve):
                ids = seen.ids[call.first_row : call.first_row + len(call.sizes)]
            else:
                ids = [seen.ids[row] for ref in call.refs for row in ref.rows if row < len(seen.ids)]
        elif isinstance(call, ReadSlots):
            by_slot = ((),) * len(call.refs)
        if isinstance(call, (Locate, Place)):
            self._remember(ctx.op_id, partition or "", ids)
        port = getattr(call, "port", None)
        kind: Any = type(call)
        return Subject(
            kind.__name__,
            ctx.verb,
            None if host is None else host.id,
            port,
            partition,
            tuple(ids),
            by_slot,
            _kinds(kind),
        )

    def _remember(self, op_id: str, partition: str, ids: Sequence[str]) -> None:
        if op_id not in self._calls:
            self._calls[op_id] = _Seen(partition, ids, {})
            if len(self._calls) > REMEMBERED:
                self._calls.popitem(last=False)

    def learn(self, call: Call[Any], result: Any, ctx: CallContext) -> None:
        """Remember which samples lie in which slots."""
        if not isinstance(call, Locate):
            return
        seen = self._calls.get(ctx.op_id)
        if seen is None:
            return
        for ref in result.refs:
            named = {index: call.sample_ids[row] for index, row in zip(ref.index, ref.rows, strict=True)}
            seen.slots.setdefault(_key(ref), {}).update(named)


def _samples(ref: SlotRef, seen: _Seen) -> tuple[str, ...]:
    named = seen.slots.get(_key(ref), {})
    return tuple(named[index] for index in ref.index if index in named)
