"""The memory plane: the directory and slot hosts within this process. All of it is synchronous."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel

from asyncdp.calls.answers import group_meta, published, refusal
from asyncdp.calls.slots import HostRef, Located, Placement, Publish, Published, SlotRef
from asyncdp.clock import AnyioClock
from asyncdp.config import Config, MemorySettings
from asyncdp.errors import DataPlaneNotReady, DataPlaneUnavailable, DataPlaneWriteError
from asyncdp.meta import DataPlaneGroupMeta, RowHandle
from asyncdp.process.forks import on_fork
from asyncdp.rows.field_spec import FieldSpec
from asyncdp.settings.urls import without_password
from asyncdp.transports.directory.core import KEEP_S
from asyncdp.transports.directory.listing import find, page
from asyncdp.transports.directory.snapshots import Snapshots

from .host import Host, Use, least_loaded

if TYPE_CHECKING:
    from asyncdp.calls import Only
    from asyncdp.transports.directory.directory import Piece
    from asyncdp.transports.directory.rows import Cell

__all__ = ["PLANES", "Plane", "Waker", "start"]

#: Seconds after which a host that is down is considered lost instead of restarting.
HOST_TIMEOUT_S = 5.0
#: Config keys of the plane, as opposed to those of one client.
PLANE_KEYS = ("storage_capacity", "num_storage_units", "group_id_pattern", "strict_schema", "auto_register", "memory")


class Plane(Snapshots):
    """A directory with its slot hosts, and the callbacks of clients that wait for a change.

    Args:
        capacity: Maximum number of samples in the plane.
        hosts: The slot hosts.
        group_pattern: Regular expression that extracts a sample's group from its id.
        strict_schema: Whether puts of undeclared fields are refused.
        auto_register: Whether a put to an unknown partition declares it.
    """

    error = staticmethod(refusal)
    new_spec = FieldSpec

    def __init__(
        self, capacity: int, hosts: Sequence[Host], group_pattern: str, *, strict_schema: bool, auto_register: bool
    ) -> None:
        """Begin empty."""
        super().__init__(capacity, group_pattern, strict_schema=strict_schema, auto_register=auto_register)
        #: Config of the client that started the plane; None if no client did.
        self.config: Any = None
        self.hosts = {host.id: host for host in hosts}
        self.clock = AnyioClock()
        self.closed = False
        self.lock = threading.RLock()
        self._missed: dict[str, float] = {}
        self._wakers: dict[object, Callable[[], None]] = {}
        on_fork(self)

    def after_fork(self) -> None:
        """Make the plane unusable in a forked child, where it is a copy that no other process would see."""
        self.closed = True

    def time(self) -> float:
        """Return the unix time in seconds by the plane's clock."""
        return self.clock.time()

    monotonic = time

    # -- waiting

    def watch(self, key: object, wake: Callable[[], None]) -> None:
        """Call ``wake`` whenever a sample may have become ready; the call may come from any thread."""
        self._wakers[key] = wake

    def unwatch(self, key: object) -> None:
        """Remove the callback that was registered under this key."""
        self._wakers.pop(key, None)

    def changed(self) -> None:
        """Call the callbacks of all waiting clients."""
        for key, wake in list(self._wakers.items()):
            try:
                wake()
            except RuntimeError:  # the event loop of the client is closed
                self.unwatch(key)

    def close(self) -> None:
        """Close the plane; its clients get DataPlaneUnavailable from then on."""
        self.closed = True
        self.changed()

    # -- hosts

    def answers(self, host_id: str) -> bool:
        """Whether a host is up."""
        host = self.hosts.get(host_id)
        if host is None or not host.up:
            return False
        self._missed.pop(host_id, None)
        return True

    def expects(self, host_id: str) -> bool:
        """Whether a host that is down may still restart: it was first found down less than ``HOST_TIMEOUT_S`` ago."""
        now = self.clock.time()
        return host_id in self.hosts and now - self._missed.setdefault(host_id, now) <= HOST_TIMEOUT_S

    def gone(self) -> frozenset[tuple[str, int]]:
        """Return the (host, epoch) pairs whose rows cannot be read."""
        return frozenset(
            (host.id, epoch)
            for host in self.hosts.values()
            for epoch in range(1, host.ref.epoch + (0 if host.up else 1))
        )

    def discard(self, cell: Cell) -> None:
        """Remove a row from its slot."""
        cell.place.host.kill(cell)

    def replaced(self, cell: Cell, names: Sequence[str]) -> None:
        """Mark these fields of a row as replaced in its slot."""
        cell.place.host.replace(cell, names)

    def _prune(self, now: float) -> None:
        super()._prune(now)
        for host in self.hosts.values():
            host.forget(now - 2 * KEEP_S)

    def cell_name(self, cell: Cell) -> str:
        """Return the use of the slot that holds a cell, and its index there."""
        use = cell.place
        return f"{use.host.id}/{use.epoch}/{use.slot.number}/{use.generation}/{cell.index}"

    # -- puts

    def place(
        self, partition_id: str, sample_ids: Sequence[str], fields: Sequence[str], only: Only | None
    ) -> Placement:
        """Choose hosts for a put, the least loaded first; return them with the specs that the partition fixed."""
        specs, _ = self.prepare(partition_id, sample_ids, fields, only)
        left = len(sample_ids)
        shares = []
        hosts = least_loaded(self.hosts.values())
        for host in hosts:
            room = host.room(self.clock.time())
            count = left if room is None else min(left, room)
            if count:
                shares.append((host.ref, count))
                left -= count
            if not left:
                break
        if not hosts:
            msg = "no slot host answers"
            raise DataPlaneUnavailable(msg, partition_id=partition_id, host=next(iter(self.hosts), None))
        if left:
            msg = f"the slot hosts have no room for {left} of {len(sample_ids)} rows"
            raise DataPlaneNotReady(msg, partition_id=partition_id, retry_after_s=0.05)
        used = {host.id for host, _ in shares}
        return Placement(tuple(shares), tuple(h.ref for h in hosts if h.id not in used), specs)

    def publish(self, call: Publish, owner: str) -> tuple[Published, bool]:
        """Publish the slots of a put as the content of its samples; all checks come before the first change.

        The outcome is recorded even if all rows were left out as stale: a repeated request must leave them out again.
        """
        bound = None if call.only is None else (call.only, call.lives, call.skip_stale)

        def lies() -> Iterable[Piece]:
            for ref in call.refs:
                host = self.hosts[ref.host.id]
                host.answer(None)
                slot = host.slot(ref)
                if slot is None or slot.block is None:
                    msg = f"slot {ref.slot} of host {host.id!r} holds no finished write"
                    raise DataPlaneWriteError(msg, partition_id=call.partition_id)
            slots = [self.hosts[ref.host.id].commit(ref) for ref in call.refs]
            return [
                (Use(self.hosts[ref.host.id], ref.host.epoch, slot, ref.generation), ref.fields, ref.index, ref.rows)
                for ref, slot in zip(call.refs, slots, strict=True)
            ]

        what = (call.partition_id, call.sample_ids, owner, call.tags, call.specs)
        return published(self.put(*what, bound, call.nbytes, lies)), True

    # -- queries

    def locate(
        self,
        partition_id: str,
        sample_ids: Sequence[str],
        fields: Sequence[str],
        handles: Sequence[RowHandle | None] | None,
    ) -> Located:
        """Return refs to the slots that hold these samples, and an error for each row that cannot be read."""
        part = self.partition(partition_id)
        meant = None if handles is None else [None if one is None else one.incarnation for one in handles]
        found = find(part, sample_ids, fields, meant)
        refs = tuple(
            SlotRef(_host_ref(use), use.slot.number, use.generation, names, indexes, rows)
            for (use, names), (indexes, rows) in found.spots.items()
        )
        missing = {
            at: refusal(kind, text, partition_id=partition_id, **info)
            for at, (kind, text, info) in found.missing.items()
        }
        lives = [None if life is None else RowHandle(life) for life in found.lives]
        return Located(refs, missing, lives, {name: part.fields[name] for name in fields if name in part.fields})

    def groups(self, partition_id: str) -> list[DataPlaneGroupMeta]:
        """List the groups of a partition, oldest first."""
        listed, _ = page(self.partition(partition_id), 0, sys.maxsize)
        gone = self.gone()
        return sorted((group_meta(partition_id, one, gone) for one in listed), key=lambda meta: meta.created_at)


class Waker:
    """An event that can be set from any thread."""

    __slots__ = ("_event", "_schedule")

    def __init__(self) -> None:
        """Begin unset, for a task of the running event loop to wait for."""
        self._event = anyio.Event()
        loop: Any = anyio.lowlevel.current_token().native_token
        self._schedule: Callable[..., Any] = getattr(loop, "call_soon_threadsafe", None) or loop.run_sync_soon

    def wake(self) -> None:
        """Set the event."""
        self._schedule(self._event.set)

    async def wait(self) -> None:
        """Wait until it is set."""
        await self._event.wait()


def _host_ref(use: Use) -> HostRef:
    ref = use.host.ref
    return ref if ref.epoch == use.epoch else HostRef(ref.id, use.epoch, ref.ports)


#: The planes of this process by address, so that other clients and unpickled ones can attach. This is the one exception
#: to the rule of no module-level state.
PLANES: weakref.WeakValueDictionary[str, Plane] = weakref.WeakValueDictionary()


def start(address: str, config: Config) -> Plane | None:
    """Start a plane at an address and return it; None if there is one of the same config.

    Raises:
        ValueError: There is one of another config.
    """
    there = PLANES.get(address)
    if there is not None and not there.closed:
        _check_same(there, config, address)
        return None
    settings = config.memory or MemorySettings()
    first = 1
    hosts = []
    for number in range(config.num_storage_units):
        ports = tuple(range(first, first + settings.ports_per_host))
        first += settings.ports_per_host
        hosts.append(Host(f"host-{number}", ports, settings.slots_per_host, settings.rows_per_slot))
    plane = PLANES[address] = Plane(
        config.storage_capacity,
        hosts,
        config.group_id_pattern,
        strict_schema=config.strict_schema,
        auto_register=config.auto_register,
    )
    plane.config = config
    return plane


def _check_same(plane: Plane, config: Config, address: str) -> None:
    """Raise ValueError if the plane at this address has another config."""
    for key in PLANE_KEYS:
        there, here = getattr(plane.config, key), getattr(config, key)
        if key == "memory":
            there, here = there or MemorySettings(), here or MemorySettings()
        if there != here:
            msg = f"{key}: the plane at {without_password(address)} has {there!r}, not {here!r}"
            raise ValueError(msg)
