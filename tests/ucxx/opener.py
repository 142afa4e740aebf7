"""Opens planes of UCXX for the contract suite: one server and one thread for slot hosts, a plane per test."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar
from unittest import mock

import anyio
import pytest
import sniffio

from asyncdp.testing import contract
from asyncdp.testing.contract.rig import BASE
from asyncdp.testing.pytest.leaks import lasting
from asyncdp.transports.ucxx.client.directory_entry import HostEntry
from asyncdp.transports.ucxx.directory import Directory, DirectorySettings, EmbeddedServer
from asyncdp.transports.ucxx.host.host import Host
from tests.ucxx.hosts import SECRET, settings

if TYPE_CHECKING:
    from asyncdp.transports.ucxx.transport import UCXXTransport

__all__ = ["PLANES", "on_lane", "on_wire"]

TEXT = "a secret for tests"
T = TypeVar("T")
_NUMBER = itertools.count()


class HostThread:
    """A thread with an event loop, on which slot hosts run beside a test that may block its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="slot hosts", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it there, and wait for it here."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _elsewhere(work: Callable[[], Awaitable[Any]]) -> None:
    """Run a coroutine function in another thread, to its end."""
    thread = threading.Thread(target=lambda: anyio.run(work))
    thread.start()
    thread.join()


class Planes:
    """One Valkey server for all planes, started when it is first needed; each has a user and a namespace of its own."""

    def __init__(self) -> None:
        self._server: EmbeddedServer | None = None
        self.hosts: HostThread | None = None

    @property
    def server(self) -> EmbeddedServer:
        """The server."""
        if self._server is None:
            with lasting():
                self._server = EmbeddedServer(fsync="no")
                _elsewhere(self._server.start)
                self.hosts = HostThread()
        return self._server

    def close(self) -> None:
        """End what was started."""
        server, hosts, self._server, self.hosts = self._server, self.hosts, None, None
        if server is not None and hosts is not None:
            hosts.close()
            _elsewhere(server.stop)


PLANES = Planes()


class Plane:
    """A plane that ends as an embedded one does: nobody answers any more."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.hosts: list[Host] = []
        self.directory: Directory | None = None

    async def admit(self, url: str) -> None:
        """Make the plane's user, whose end cuts everybody off."""
        admin = Directory(url)
        await admin._link.command("ACL", "SETUSER", self.name, "on", ">secret", "~*", "&*", "+@all")
        await admin.close()

    async def start(self, count: int, secret: Any, **keys: Any) -> None:
        """Start hosts; on their thread."""
        self.directory = Directory(self.url, settings=DirectorySettings(namespace=self.name))
        for number in range(count):
            chosen = settings(host_id=f"host-{number}", plane=f"t{uuid.uuid4().hex[:8]}", beat_s=0.5, **keys)
            self.hosts.append(Host(chosen, HostEntry(self.directory), secret))
            await self.hosts[-1].start()

    async def leftovers(self) -> dict[str, int]:
        """Slots that are being written or read, by a put that was given up as well; on the thread of the hosts."""
        found: dict[str, int] = {}
        for host in self.hosts:
            host.service.table.sweep(host.clock())
            counts = host.service.table.counts()
            found.update({f"{host.arena.host_id} {name}": n for name, n in counts.items() if n})
        return {name: n for name, n in found.items() if name.endswith((" writing", " reading", " given_up"))}

    async def end(self) -> None:
        """Stop hosts; on their thread. Twice is fine."""
        hosts, self.hosts = self.hosts, []
        for host in hosts:
            await host.stop()
        if self.directory is not None:
            await self.directory.close()


def _opener(lane: str, *, ucx: bool) -> contract.Opener:
    @asynccontextmanager
    async def opened(config: dict[str, Any]) -> AsyncIterator[contract.Plane]:
        # Clients, those that are unpickled too, have the secret from the environment: as long as the plane is open.
        with mock.patch.dict(os.environ, {"ASYNCDP_SECRET": TEXT}):
            async with _opened(config) as plane:
                yield plane

    @asynccontextmanager
    async def _opened(config: dict[str, Any]) -> AsyncIterator[contract.Plane]:
        if sniffio.current_async_library() != "asyncio":
            pytest.skip("UCXX is a transport for asyncio")
        from asyncdp.transports.ucxx.transport import UCXXTransport

        name = f"plane{next(_NUMBER)}"
        server = PLANES.server
        thread = PLANES.hosts
        assert thread is not None
        door = server.folder / f"{name}.sock"  # a way in of its own, so that nobody answers when the plane has ended
        door.symlink_to("valkey.sock")
        plane = Plane(name, f"unix://{name}:secret@{door}")
        thread.run(plane.admit(server.url))
        whole = {**BASE, "impl": "ucxx", "backend": "valkey", "controller_address": plane.url, **config}
        whole["ucxx"] = {"namespace": name, "lane": lane, "devices": "lo", **config.get("ucxx", {})}
        thread.run(
            plane.start(whole["num_storage_units"], SECRET, ucx=ucx, watch_ucx_s=0, inline_bytes=0 if ucx else 32 << 10)
        )
        left: dict[str, int] = {}

        class Owned:
            """The plane, seen from the client that owns it."""

            async def stop(self) -> None:
                """End it; whoever is still connected is cut off."""
                left.update(thread.run(plane.leftovers()))
                thread.run(cut_off())  # in one go: a cancelled close ends the plane too

        async def cut_off() -> None:
            door.unlink(missing_ok=True)
            admin = Directory(server.url)
            await admin._link.command("ACL", "DELUSER", name)
            await admin.close()
            await plane.end()

        transport: Any = UCXXTransport(whole)
        transport._plane = Owned()

        def attach(differing: dict[str, Any]) -> UCXXTransport:
            return UCXXTransport({**transport.attach_config(), **differing}, bootstrap=False)

        try:
            yield contract.Plane(transport, attach, lambda: left or thread.run(plane.leftovers()))
        finally:
            left.update(thread.run(plane.leftovers()))
            thread.run(cut_off())

    return opened


def on_lane() -> contract.Opener:
    """Open planes whose slots are reached through shared memory."""
    return _opener("auto", ucx=False)


def on_wire() -> contract.Opener:
    """Open planes whose slots are reached over the wire, all payload over UCX."""
    return _opener("off", ucx=True)
