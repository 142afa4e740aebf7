"""Determines host, port, partition and samples of each request, with the help of the user call's earlier requests."""

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

#: Maximum number of user calls whose slots and sample ids are kept.
REMEMBERED = 4096


SlotKey = tuple[str, int, int, int]


def _key(ref: SlotRef) -> SlotKey:
    return ref.host.id, ref.host.epoch, ref.slot, ref.generation


@dataclass(slots=True)
class _Seen:
    """Partition, sample ids and slots of one user call, as known from its requests."""

    partition: str
    ids: Sequence[str]
    slots: dict[SlotKey, dict[int, str]]


@dataclass(frozen=True, slots=True)
class Subject:
    """Properties of a request that rules are matched against.

    Attributes:
        by_slot: For a read, the sample ids in each slot.
        kinds: Names of the request's type and of its base classes.
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
        """Whether a rule applies to this request."""
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
    """Return the names of a call's type and of its base classes."""
    return frozenset(each.__name__ for each in kind.__mro__)


class RequestTracker:
    """Determines the samples of slot calls, which name only slots, from the preceding look-up, which names both."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, _Seen] = OrderedDict()

    def describe(self, call: Call[Any], ctx: CallContext) -> Subject:
        """Return the properties of a request, from itself or from earlier requests of the same user call."""
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
        """Record from the answer of a look-up which samples are in which slots."""
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
