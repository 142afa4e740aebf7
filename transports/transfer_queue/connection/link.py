"""A client's connection to a plane as long as its controller runs: requests, and a heartbeat for each server."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio
from zmq.constants import SocketOption, SocketType

from asyncdp.calls.answers import refusal
from asyncdp.errors import DataPlaneClearError, DataPlaneError, DataPlaneUnavailable
from asyncdp.log_line import log_line
from asyncdp.process.forks import never_destroy, on_fork

from ..controller.directory_server import PORT
from ..directory.requests import ARGUMENT, LEAVES_GARBAGE, VERSION
from ..endpoints import Server
from .connecting import connect
from .heartbeat import Heartbeat

if TYPE_CHECKING:
    from asyncdp.config import TransferQueueSettings

    from ..endpoints import Endpoints
    from ..private import Client

__all__ = ["Link"]

#: Requests whose answer may name garbage that the client has to clear in storage units.
_LEAVING = frozenset(LEAVES_GARBAGE)
_SWEEPING = _LEAVING | {"sweep"}


class NoDirectoryError(DataPlaneUnavailable):
    """The controller runs a sampler that is not ours, or has no reserved partition for this plane."""

    def __init__(self, message: str, **more: Any) -> None:
        """Create the error with ``blames_port=False``."""
        super().__init__(message, **{"blames_port": False, **more})


class Link:
    """Connects one client, in one event loop, to a plane until its controller ends.

    Attributes:
        endpoints: Addresses of the servers.
        epoch: Epoch of the directory that answered last.
        directory: Heartbeat of the process that runs the directory: the controller, or a server beside it.
        units: Heartbeats of the storage units by id.
        finished: Tickets of garbage that was cleared, to be reported to the directory with the next request.
    """

    def __init__(self, client: Client, endpoints: Endpoints, settings: TransferQueueSettings) -> None:
        """Start the heartbeats of the servers in the running event loop."""
        self.client = client
        self.endpoints = endpoints
        self.loop = asyncio.get_running_loop()
        self.namespace = settings.namespace
        self.epoch: str | None = None
        self.closed = False
        self.config: dict[str, Any] = {}
        self.finished: list[int] = []
        self.offset_s = 0.0
        self._settings = settings
        on_fork(self)
        self.directory = self._watch_directory()
        self.units = {
            unit.id: self._watch(f"storage unit {unit.id}", unit.address("put_get_socket")) for unit in endpoints.units
        }

    def _watch(self, name: str, address: str) -> Heartbeat:
        interval_s, timeout_s = self._settings.heartbeat_interval_s, self._settings.heartbeat_timeout_s
        return Heartbeat(self.client.context, name, address, interval_s=interval_s, timeout_s=timeout_s)

    def _watch_directory(self) -> Heartbeat:
        beside = self.endpoints.directory
        if beside is not None:
            return self._watch("the directory", beside.address(PORT))
        return self._watch("the controller", self.endpoints.controller.address("request_handle_socket"))

    @classmethod
    async def open(
        cls,
        endpoints: Endpoints,
        settings: TransferQueueSettings,
        infos: Callable[[], Mapping[str, Any]] | None = None,
    ) -> Link:
        """Connect to a plane.

        Args:
            endpoints: Addresses of the servers.
            settings: The transport's settings.
            infos: Asks Ray for TransferQueue's descriptions of its servers; used if they cannot be created locally.

        Raises:
            DataPlaneUnavailable: The controller does not answer.
        """
        client = await connect(endpoints, settings, infos)
        if client.missing:
            lacks = list(client.missing.values())
            log_line("warning", "transfer_queue_lacks", calls=lacks, instead="its public calls")
        return cls(client, endpoints, settings)

    # -- the directory

    @property
    def partition(self) -> str:
        """TransferQueue's name for the reserved partition that stores the directory."""
        return f"__asyncdp__{self.namespace}"

    async def ask(self, op: str, args: Sequence[Any], deadline: float) -> Any:
        """Send a request to the directory and return its answer; for ``LEAVES_GARBAGE`` ones, ``(value, garbage)``.

        Raises:
            DataPlaneError: The directory refused the request, or did not answer.
        """
        finished = list(self.finished) if op in _SWEEPING else []
        payload = pickle.dumps((op, tuple(args), finished), protocol=5)
        raw = await self.directory.guard(lambda: self._send(payload), deadline, host=self.endpoints.directory_id)
        if raw is None:
            raise NoDirectoryError(
                f"the controller at {self.directory.address} serves no asyncdp plane {self.namespace!r}"
            )
        status, epoch, *rest = pickle.loads(raw)  # noqa: S301 - TransferQueue unpickles all that arrives as well
        self.epoch = epoch
        if status == "refused":
            kind, message, info = rest[0]
            raise refusal(kind, message, **info)
        if status == "failed":
            msg = f"the directory could not serve {op!r}: {rest[0]}"
            raise DataPlaneError(msg)
        if finished:  # a concurrent request may have reported some of them
            self.finished = [ticket for ticket in self.finished if ticket not in finished]
        return (rest[0], rest[1]) if op in _LEAVING else rest[0]

    async def _send(self, payload: bytes) -> bytes | None:
        """Send a request to the directory, on the controller or beside it, and return its reply."""
        beside = self.endpoints.directory
        if beside is None:
            return await self.client.request(self.partition, ARGUMENT, payload)
        socket = self.client.context.socket(SocketType.DEALER)  # one per request, so that cancels need no clean-up
        try:
            socket.setsockopt(SocketOption.LINGER, 0)
            if ":" in beside.ip:
                socket.setsockopt(SocketOption.IPV6, 1)
            socket.connect(beside.address(PORT))
            await socket.send(payload)
            answer: bytes = await socket.recv()
            return answer
        finally:
            socket.close(0)

    def move_to(self, beside: Server) -> None:
        """Send all further requests to a directory that runs beside the controller."""
        self.endpoints = replace(self.endpoints, directory=beside)
        self.directory.close()
        self.directory = self._watch_directory()

    async def find_directory(self, deadline: float) -> bool:
        """Find the directory: on the controller, or beside it as the controller tells. Return whether there is one.

        Raises:
            DataPlaneUnavailable: The controller, or a directory beside it that still runs, does not answer.
        """
        try:
            _check_version(await self.ask("hello", (), deadline))
        except NoDirectoryError:
            where = await self.directory.guard(lambda: self.client.find_directory(self.partition), deadline)
            if where is None:
                return False
            self.move_to(Server.from_config(where))
            try:
                facts = await self.ask("hello", (), deadline)
            except DataPlaneUnavailable:
                if not await self.directory.is_gone():
                    raise
                return False
            _check_version(facts)
        return True

    async def hello(self, deadline: float) -> bool:
        """Query the plane's directory for its address, state, config and clock. Return whether the plane is open.

        Raises:
            DataPlaneUnavailable: There is no directory, or one of another version.
        """
        try:
            facts = await self.ask("hello", (), deadline)
        except NoDirectoryError:
            if not await self.find_directory(deadline):
                raise
            facts = await self.ask("hello", (), deadline)
        _check_version(facts)
        if "config" not in facts:
            return False
        self.config = {**facts["config"], "units": facts["units"]}
        self.offset_s = facts["monotonic"] - anyio.current_time()
        return True

    # -- storage units

    def unit(self, unit_id: str) -> Heartbeat:
        """Return the heartbeat of a storage unit; raise DataPlaneUnavailable if this plane does not have it."""
        found = self.units.get(unit_id)
        if found is None:
            msg = f"storage unit {unit_id} is not one of this plane's"
            raise DataPlaneUnavailable(msg, host=unit_id)
        return found

    async def heard(self) -> None:
        """Wait until it is known of each unit whether it answers; this takes time only on a new link."""
        for heartbeat in self.units.values():
            await heartbeat.heard()

    def silent(self) -> frozenset[str]:
        """Return the ids of the units that are known not to answer."""
        return frozenset(unit_id for unit_id, heartbeat in self.units.items() if heartbeat.down)

    async def clear(
        self, garbage: Mapping[str, Sequence[tuple[int, int]]], deadline: float
    ) -> dict[str, DataPlaneError]:
        """Remove ranges of keys from the units; return an error for each unit that may still hold some of them.

        A unit whose process has ended holds nothing and is no error.
        """
        failed: dict[str, DataPlaneError] = {}

        async def one(unit_id: str, ranges: Sequence[tuple[int, int]]) -> None:
            heartbeat = self.units.get(unit_id)
            if heartbeat is None:
                return
            keys = [key for first, count in ranges for key in range(first, first + count)]
            try:
                await heartbeat.guard(lambda: self.client.clear(unit_id, keys), deadline, host=unit_id)
            except DataPlaneError as err:
                failed[unit_id] = err
            except Exception as err:  # noqa: BLE001 - as a value: the other units are to be cleared all the same
                text = f"{type(err).__name__}: {err}"
                failed[unit_id] = DataPlaneClearError(text, host=unit_id, cause=err)
            if unit_id in failed and await heartbeat.is_gone():
                del failed[unit_id]

        if len(garbage) == 1:
            await one(*next(iter(garbage.items())))
        elif garbage:
            async with anyio.create_task_group() as group:
                for unit_id, ranges in garbage.items():
                    group.start_soon(one, unit_id, ranges)
        return failed

    def after_fork(self) -> None:
        """Make the link unusable in a forked child without touching its sockets.

        libzmq's threads do not exist in the child, and every call that uses or closes a socket would wait for them; so
        would closing an event loop that was running at the fork.
        """
        if not self.closed:
            self.closed = True
            for heartbeat in (self.directory, *self.units.values()):
                heartbeat.closed = True
            self.client.after_fork()
            never_destroy(self)

    def close(self) -> None:
        """End all waiting calls, then close all sockets. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for heartbeat in (self.directory, *self.units.values()):
            heartbeat.close()
        self.client.close()


def _check_version(facts: Mapping[str, Any]) -> None:
    if facts["version"] != VERSION:
        msg = (
            f"the controller runs version {facts['version']} of asyncdp's directory, this client speaks {VERSION}: "
            "use one release of asyncdp on both sides, or a controller of its own for each"
        )
        raise DataPlaneUnavailable(msg, blames_port=False, retryable=False)
