"""Slots that hosts leased to this client ahead of its puts, so that a put need not ask a host for one.

A client that puts rows of one kind again and again (the same fields, as many rows, about the same size) asks with a
Reserve for slots of this kind for its next puts. To use one it begins it in shared memory; from then on it is reserved
as any other slot is. The host takes back what was not begun when it needs the space, when the connection ends, and
after ``LEASE_S``, so nothing has to be given back.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from asyncdp.calls.slots import SlotRef

from ..payload.layout import bound
from ..wire.messages import LEASE_S, LONGEST_PUT_S, MOST_LEASES, lease_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from asyncdp.calls.slots import HostRef

    from .connection import Connection
    from .lane import Lane

__all__ = ["Leased", "Leases"]

#: Puts of one kind in a row, at most ``LEASE_S`` apart, after which slots are leased for further ones.
STEADY: Final = 8
#: Bytes of a put above which what a Reserve takes does not count beside the copy.
MOST_BYTES: Final = 32 << 20
#: Bytes that are leased at a time.
AHEAD_BYTES: Final = 64 << 20

Kind = tuple[tuple[str, ...], int]
Key = tuple[str, int]


class Leased(tuple[SlotRef, ...]):
    """The refs of a put that got a leased slot, so that no port took part."""

    __slots__ = ()
    through_port = False


class _Lease(NamedTuple):
    slot: int
    generation: int
    op_id: str
    connection: Connection
    sent_at: float
    last_at: float


class _Run(NamedTuple):
    """The puts of one kind at a host that came one after the other.

    How many, when the last one came, and for how many seconds that which had most time could publish.
    """

    kind: Kind
    puts: int
    at: float
    ttl_s: float


class Leases:
    """The leased slots of one client, and the puts that use them."""

    def __init__(self) -> None:
        """Start without leases."""
        self._free: dict[tuple[Key, Kind], deque[_Lease]] = {}
        self._runs: dict[Key, _Run] = {}
        #: Of each put the ids by which hosts know its slots, and the slots, by host and first row.
        self._used: dict[str, dict[tuple[Key, int], tuple[str, SlotRef]]] = {}

    def clear(self) -> None:
        """Forget all leases."""
        self._free.clear()
        self._runs.clear()
        self._used.clear()

    def wanted(self, host: HostRef, fields: tuple[str, ...], sizes: Sequence[int], ttl_s: float) -> tuple[int, float]:
        """Count a put; return how many slots to lease for further puts of its kind where it has to ask the host.

        And with which ``ttl_s``: the longest of its run, or puts with longer timeouts could not use what others lease.
        """
        key, kind, now = (host.id, host.epoch), (fields, len(sizes)), time.monotonic()
        last = self._runs.get(key)
        again = last is not None and last.kind == kind and now - last.at <= LEASE_S
        run = _Run(kind, 1, now, ttl_s)
        if last is not None and again:
            run = _Run(kind, last.puts + 1, now, max(ttl_s, last.ttl_s))
        self._runs[key] = run
        nbytes = sum(sizes)
        if run.puts < STEADY or nbytes > MOST_BYTES:
            return 0, ttl_s
        return min(MOST_LEASES, max(1, AHEAD_BYTES // max(1, nbytes))), run.ttl_s

    def add(
        self,
        host: HostRef,
        fields: tuple[str, ...],
        rows: int,
        leases: Iterable[tuple[int, int]],
        *,
        op_id: str,
        connection: Connection,
        sent_at: float,
        ttl_s: float,
    ) -> None:
        """Add what a host leased: (slot, generation) each, in reply to the Reserve of ``op_id`` sent at ``sent_at``."""
        last_at = sent_at + min(ttl_s, LONGEST_PUT_S) + 2 * LEASE_S
        for number, (slot, generation) in enumerate(leases):
            made = _Lease(slot, generation, lease_id(op_id, number), connection, sent_at, last_at)
            self._free.setdefault(((host.id, host.epoch), (fields, rows)), deque()).append(made)

    def take(
        self,
        lane: Lane,
        host: HostRef,
        op_id: str,
        fields: tuple[str, ...],
        sizes: Sequence[int],
        first_row: int,
        ttl_s: float,
    ) -> Leased | None:
        """Begin to use a leased slot for a put; None where there is none. The same put gets the same slot again."""
        key, n = (host.id, host.epoch), len(sizes)
        used = self._used.get(op_id, {}).get((key, first_row))
        if used is not None:
            return Leased((used[1],)) if lane.may_write(used[1]) else None
        free = self._free.get((key, (fields, n)))
        if not free:
            return None
        now, nbytes = time.monotonic(), bound(fields, sizes)
        while free:
            lease = free.popleft()
            late = now - lease.sent_at > LEASE_S or now + min(ttl_s, LONGEST_PUT_S) > lease.last_at
            if late or lease.connection.ended:
                continue
            ref = SlotRef(host, lease.slot, lease.generation, fields, range(n), range(first_row, first_row + n))
            if not lane.fits(ref, len(fields), nbytes):
                free.appendleft(lease)
                return None
            if lane.begin(ref):
                self._used.setdefault(op_id, {})[key, first_row] = lease.op_id, ref
                return Leased((ref,))
        return None

    def ids(self, host: HostRef, op_id: str) -> list[str]:
        """Return the ids by which a host knows what a put has of it, beside the put's own one."""
        return [name for (key, _), (name, _) in self._used.get(op_id, {}).items() if key[0] == host.id]

    def done(self, op_id: str) -> None:
        """Forget a put that is published."""
        self._used.pop(op_id, None)

    def given_back(self, host: HostRef, op_id: str) -> None:
        """Forget what a put, which was aborted, had of a host."""
        used = self._used.get(op_id, {})
        for at in [at for at in used if at[0][0] == host.id]:
            del used[at]
        if not used:
            self._used.pop(op_id, None)
