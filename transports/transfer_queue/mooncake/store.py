"""A client's connection to Mooncake: rows into and out of its segments, in threads, since its calls block."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import anyio
import anyio.to_thread
import torch

from asyncdp.errors import (
    CorruptPayload,
    DataPlaneClearError,
    DataPlaneClosed,
    DataPlaneError,
    DataPlaneNotReady,
    DataPlaneReadError,
    DataPlaneUnavailable,
    DataPlaneUnsupported,
    DataPlaneWriteError,
    StaleSlotError,
)
from asyncdp.process.forks import never_destroy, on_fork, skip_exit_handlers

from .line import Line
from .master import check_import
from .objects import pack, unpack
from .outgoing import Lent, lay_out
from .unit import PROTOCOL, transport_settings

if TYPE_CHECKING:
    from ..endpoints import Server

__all__ = ["Store", "shared_store"]

R = TypeVar("R")

#: Objects and bytes of one request: Mooncake opens a connection per object under way (4,096 at once fail).
MOST_OBJECTS, MOST_BYTES = 128, 64 << 20
#: Mooncake's codes: the master does not answer, timeout of its answer, no room, no such object, not written yet, and a
#: transfer that failed.
RPC_FAIL, RPC_TIMEOUT, NO_ROOM, NOT_READY, NOT_FOUND, TRANSFER = -900, -901, -200, -703, -704, -800


#: Open connections by process, controller and settings. Mooncake keeps threads and a buffer for each, and takes a
#: second to close one, so that the clients that a process has of a plane share it.
_STORES: weakref.WeakValueDictionary[tuple[Any, ...], Store] = weakref.WeakValueDictionary()
#: The process that has opened one first. Mooncake's event loop is one for the whole process: a child that used it would
#: register its sockets in the parent's, which ends the parent with a segmentation fault.
_OPENED_IN: list[int] = []


def shared_store(controller: str, master: str, buffer_bytes: int, ip: str, protocol: str) -> Store:
    """Return the connection of this process to a plane's Mooncake, made if there is none; blocks.

    Each caller closes it; the last one disconnects. ``controller`` is the id of the plane's controller, the rest is as
    in :class:`Store`.
    """
    key = (os.getpid(), controller, master, buffer_bytes, ip, protocol)
    found = _STORES.get(key)
    if found is not None and found.enter():
        return found
    made = Store(master, buffer_bytes, ip, protocol)  # two threads at once make two, of which one is shared
    _STORES[key] = made
    return made


class Store:
    """Stores each row as one object in the segment of a unit.

    Args:
        master: ``host:port`` of Mooncake's master.
        buffer_bytes: Size of Mooncake's own buffer in this process.
        ip: Address of this process at which Mooncake listens.
        protocol: By which the plane's segments are reached, ``tcp`` or ``rdma``.

    Raises:
        ValueError: The environment says something else of the network, or something that cannot be.
        ImportError: Mooncake, or a library that it needs, is missing.
        DataPlaneUnavailable: The master does not answer.
        DataPlaneUnsupported: This process was forked from one that used Mooncake.
    """

    def __init__(self, master: str, buffer_bytes: int, ip: str, protocol: str = "tcp") -> None:
        """Connect; blocks (measured: 0.03-0.15 s)."""
        if _OPENED_IN and _OPENED_IN[0] != os.getpid():
            msg = "Mooncake cannot be used in a process that was forked from one that used it: spawn the process"
            raise DataPlaneUnsupported(msg, capability="mooncake")
        _, device = transport_settings(ip, {PROTOCOL: protocol})
        check_import()
        from mooncake.store import MooncakeDistributedStore, ReplicateConfig

        _OPENED_IN[:] = [os.getpid()]
        self._master = master
        self._replicate = ReplicateConfig
        self._store = MooncakeDistributedStore()
        code = self._store.setup(ip, "P2PHANDSHAKE", 0, buffer_bytes, protocol, device, master)
        if code:
            msg = f"Mooncake's master at {master} does not take this client: code {code}"
            raise DataPlaneUnavailable(msg, blames_port=False)
        self._line = Line(master)
        self._lent = Lent()
        self._lock = threading.Lock()
        self._users = 1  # clients, and calls under way: memory that a transfer uses must stay
        on_fork(self)

    def after_fork(self) -> None:
        """Keep a forked child from closing it: the threads that it would wait for are those of the parent."""
        never_destroy(self._store)
        skip_exit_handlers()

    def enter(self) -> bool:
        """Count one more user; return False if it is closed."""
        with self._lock:
            self._users += bool(self._users)
            return bool(self._users)

    async def in_a_thread(self, work: Callable[..., R], *args: Any) -> R:
        """Run a blocking call in a thread, which goes on by itself if the caller is cancelled."""

        def run() -> R:
            if not self.enter():
                raise DataPlaneClosed("the connection to Mooncake is closed")
            try:
                if self._line.is_dead():
                    raise self._no_master()
                return work(*args)
            finally:
                if self._leave():
                    self._disconnect()

        # A limiter of its own: calls that hang, because a server is paused, do not hold up the next ones.
        return await anyio.to_thread.run_sync(run, abandon_on_cancel=True, limiter=anyio.CapacityLimiter(1))

    def _leave(self) -> bool:
        """Count one user less; return whether it was the last."""
        with self._lock:
            self._users -= 1
            return not self._users

    def close(self) -> None:
        """Leave it; the last one to do so disconnects, in a thread, since Mooncake takes a second for it."""
        if self._leave():
            threading.Thread(target=self._disconnect, name="asyncdp-mooncake-close").start()

    def _disconnect(self) -> None:
        self._line.close()
        self._store.close()

    # -- blocking calls

    def put(self, unit: Server, keys: Sequence[int], values: Mapping[str, Sequence[Any]]) -> None:
        """Store rows in the segment of a unit.

        Raises:
            DataPlaneNotReady: The segment is full; none of the rows stays.
            DataPlaneUnavailable: The master, or the unit, does not answer.
        """
        rows = [pack(key, {name: column[at] for name, column in values.items()}) for at, key in enumerate(keys)]
        sizes = [sum(part.nbytes for part in row) for row in rows]
        config = self._replicate()
        config.with_hard_pin = True  # never evicted
        config.preferred_segment = f"{unit.ip}:{unit.ports['segment']}"
        names = [_name(key) for key in keys]
        try:
            for first, last in _batches(sizes):
                codes = self._put_in_place(names[first:last], rows[first:last], config)
                if codes is None:
                    joined = bytearray().join(part for row in rows[first:last] for part in row)
                    codes = self._transfer(
                        lambda *where: self._store.batch_put_from(*where, config=config),
                        names[first:last],
                        torch.frombuffer(joined, dtype=torch.uint8),
                        sizes[first:last],
                    )
                self._check_put(codes, unit)
                self._check_place(names[first:last], unit)
        except DataPlaneError as err:
            if err.host is not None or not isinstance(err, DataPlaneUnavailable):  # else the master does not answer
                self._store.batch_remove(names, force=True)
            raise

    def _put_in_place(self, names: list[str], rows: Sequence[Sequence[memoryview]], config: Any) -> list[int] | None:
        """Store large rows from the memory in which they are; None if they have to be copied together first."""
        laid = lay_out(rows)
        if laid is None or not self._lent.take(laid.regions):
            return None
        registered: list[int] = []
        try:
            for start, size in (*laid.regions, (laid.copied.data_ptr(), laid.copied.nbytes)):
                if self._store.register_buffer(start, size):
                    return None
                registered.append(start)
            codes: list[int] = self._store.batch_put_from_multi_buffers(names, laid.pointers, laid.sizes, config=config)
        finally:
            for start in registered:
                self._store.unregister_buffer(start)
            self._lent.give_back(laid.regions)
        return codes

    def _check_put(self, codes: Sequence[int], unit: Server) -> None:
        worst = min(codes)
        if worst >= 0:
            return
        if worst in {RPC_FAIL, RPC_TIMEOUT}:
            raise self._no_master()
        if worst == TRANSFER:
            raise DataPlaneUnavailable(f"storage unit {unit.id} did not take the rows", host=unit.id)
        if NO_ROOM in codes:
            raise DataPlaneNotReady(f"storage unit {unit.id} is full", host=unit.id, retry_after_s=0.05)
        raise DataPlaneWriteError(f"Mooncake refused the rows: code {worst}", host=unit.id)

    def _check_place(self, names: Sequence[str], unit: Server) -> None:
        """Raise DataPlaneNotReady if an object lies in another segment: Mooncake takes any if the preferred is full."""
        endpoint = f"{unit.ip}:{unit.ports['transfer']}"
        found = self._store.batch_get_replica_desc(list(names))
        for name in names:
            if name not in found:
                raise DataPlaneWriteError("Mooncake does not hold a row that was just written", host=unit.id)
            if _described(found[name]).transport_endpoint != endpoint:
                raise DataPlaneNotReady(f"storage unit {unit.id} is full", host=unit.id, retry_after_s=0.05)

    def get(self, unit: Server, keys: Sequence[int], fields: Sequence[str]) -> dict[str, list[Any]]:
        """Return the values of fields by key.

        Raises:
            StaleSlotError: Mooncake does not hold one of the rows, or not with these fields.
            DataPlaneUnavailable: The master, or the unit, does not answer.
        """
        names = [_name(key) for key in keys]
        found = self._store.batch_get_replica_desc(names)
        if not found:
            self._check_alive(names)
        if any(not found.get(name) for name in names):
            raise _gone(unit)
        sizes = [int(_described(found[name]).size) for name in names]
        values: dict[str, list[Any]] = {field: [] for field in fields}
        for first, last in _batches(sizes):
            raw, at = self._fetch(unit, names[first:last], sizes[first:last]), 0
            for key, size in zip(keys[first:last], sizes[first:last], strict=True):
                try:
                    row = unpack(key, raw[at : at + size], fields)
                except KeyError as err:
                    raise _gone(unit) from err
                except ValueError as err:
                    raise CorruptPayload(str(err), host=unit.id) from err
                for field in fields:
                    values[field].append(row[field])
                at += size
        return values

    def _fetch(self, unit: Server, names: Sequence[str], sizes: Sequence[int]) -> memoryview:
        """Return objects one after another."""
        flat = torch.empty(sum(sizes), dtype=torch.uint8)
        codes = self._transfer(self._store.batch_get_into, names, flat, sizes)
        if any(code in {NOT_FOUND, NOT_READY} for code in codes):
            raise _gone(unit)
        if min(codes) in {RPC_FAIL, RPC_TIMEOUT}:
            raise self._no_master()
        if min(codes) < 0:
            raise DataPlaneUnavailable(f"storage unit {unit.id} did not send rows: code {min(codes)}", host=unit.id)
        # What was removed during the transfer may have been overwritten; names are never used again.
        if any(there != 1 for there in self._store.batch_is_exist(list(names))):
            raise _gone(unit)
        if list(codes) != list(sizes):
            raise CorruptPayload("a row came with another size than it was stored with", host=unit.id)
        whole: Any = flat.numpy()
        return memoryview(whole)

    def clear(self, unit: Server, keys: Sequence[int]) -> None:
        """Remove rows; those that are not there count as removed.

        Raises:
            DataPlaneClearError: Mooncake did not remove all of them.
            DataPlaneUnavailable: The master does not answer.
        """
        codes = [code for at in range(0, len(keys), 4096) for code in self._remove(keys[at : at + 4096])]
        left = [code for code in codes if code not in {0, NOT_FOUND}]
        if any(code in {RPC_FAIL, RPC_TIMEOUT} for code in left):
            raise self._no_master()
        if left:
            msg = f"Mooncake did not remove {len(left)} rows: code {left[0]}"
            raise DataPlaneClearError(msg, host=unit.id, retryable=True)

    def _remove(self, keys: Sequence[int]) -> list[int]:
        codes: list[int] = self._store.batch_remove([_name(key) for key in keys], force=True)
        return codes

    def _transfer(
        self, call: Callable[..., Any], names: Sequence[str], flat: torch.Tensor, sizes: Sequence[int]
    ) -> list[int]:
        """Have Mooncake move objects from or into one buffer, in which they lie one after another."""
        start = flat.data_ptr()
        if self._store.register_buffer(start, flat.nbytes):
            raise DataPlaneReadError(f"Mooncake could not register a buffer of {flat.nbytes} bytes")
        try:
            pointers, at = [], start
            for size in sizes:
                pointers.append(at)
                at += size
            codes: list[int] = call(list(names), pointers, list(sizes))
        finally:
            self._store.unregister_buffer(start)
        return codes

    def _check_alive(self, names: Sequence[str]) -> None:
        if any(code < 0 for code in self._store.batch_is_exist(list(names[:1]))):
            raise self._no_master()

    def _no_master(self) -> DataPlaneUnavailable:
        return DataPlaneUnavailable(f"Mooncake's master at {self._master} does not answer", blames_port=False)


def _gone(unit: Server) -> StaleSlotError:
    return StaleSlotError("Mooncake does not hold these rows any more", host=unit.id)


def _name(key: int) -> str:
    return f"asyncdp/{key}"


def _described(replicas: Sequence[Any]) -> Any:
    return replicas[0].get_memory_descriptor().buffer_descriptor


def _batches(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return ranges of rows that one request moves."""
    out, first, total = [], 0, 0
    for at, size in enumerate(sizes):
        if at > first and (at - first >= MOST_OBJECTS or total + size > MOST_BYTES):
            out.append((first, at))
            first, total = at, 0
        total += size
    if first < len(sizes):
        out.append((first, len(sizes)))
    return out
