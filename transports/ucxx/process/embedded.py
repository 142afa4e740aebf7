"""An embedded plane: a Valkey server and slot hosts as children of this process."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
import time
import uuid
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import msgspec

from asyncdp.config import shared_config
from asyncdp.errors import DataPlaneUnavailable
from asyncdp.process.forks import on_fork, replace_by_unconnected
from asyncdp.process.private_files import private_folder, read_private, write_private
from asyncdp.settings.names import convert

from ..directory import Directory, DirectorySettings, EmbeddedServer
from ..host.settings import HostSettings
from ..slots.arena import Arena, arena_name

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence

    from asyncdp.config import UcxxSettings

__all__ = ["EmbeddedPlane", "attach_config", "directory_settings", "host_settings"]

POLL_S = 0.01
RESTART_POLL_S = 0.05


class EmbeddedPlane:
    """A directory and slot hosts that this process owns: they stop when it ends, however it ends.

    With a folder (``settings.folder``), the plane's samples outlive the process: the next plane started in that folder
    has them.

    Args:
        settings: Configuration of the transport.
        hosts: Number of slot hosts.
    """

    def __init__(self, settings: UcxxSettings, hosts: int) -> None:
        """Check the settings; :meth:`start` starts the processes.

        Raises:
            ValueError: A setting of the hosts or the folder is invalid.
        """
        self._options = directory_settings(settings)
        folder = None if settings.folder is None else Path(settings.folder).absolute()
        plane = uuid.uuid4().hex if folder is None else hashlib.sha256(os.fsencode(folder)).hexdigest()
        self._settings = settings
        self._secret = settings.secret or os.environ.get("ASYNCDP_SECRET", "")
        self._hosts = [host_settings(settings, number, plane[:12], keep=folder is not None) for number in range(hosts)]
        try:
            password = None if folder is None else _password(folder)
        except OSError as err:
            msg = f"ucxx.folder: {err}"
            raise ValueError(msg) from err
        self._server = EmbeddedServer(folder, password=password)
        self._logs_to_folder = settings.host_log == "folder"
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        temporary = [] if folder is not None else [arena_name(host.host_id, host.plane) for host in self._hosts]
        self._arenas = temporary
        #: The readiness report of each slot host, by number.
        self.reports: dict[int, dict[str, Any]] = {}
        self._ender = weakref.finalize(self, _end, self._children, os.getpid(), temporary)
        on_fork(self)

    def after_fork(self) -> None:
        """Close the pipes to the hosts in the child: hosts stop when the last holder of a pipe closes it."""
        for child in self._children.values():
            for pipe in (child.stdin, child.stdout):
                if pipe is not None and not pipe.closed:
                    replace_by_unconnected(pipe.fileno())

    @property
    def url(self) -> str:
        """URL of the directory, including its password."""
        return self._server.url

    @property
    def pids(self) -> dict[int, int]:
        """Process ids of the slot hosts that run, by number."""
        return {number: child.pid for number, child in self._children.items() if child.poll() is None}

    @property
    def server(self) -> EmbeddedServer:
        """Server of the directory."""
        return self._server

    def start(self) -> None:
        """Start all processes and block until all of them serve.

        Raises:
            ImportError: An extra is not installed.
            DataPlaneUnavailable: A child process did not start.
        """
        try:
            _in_a_thread(self._serve)
            for number in range(len(self._hosts)):
                self._spawn(number)
            until = time.monotonic() + self._settings.start_timeout_s
            for number in range(len(self._hosts)):
                self._await_ready(number, until)
        except BaseException:
            _end(self._children, os.getpid(), self._arenas)
            _in_a_thread(self._server.stop)
            raise

    async def _serve(self) -> None:
        """Start the directory; without a configured secret, store a random one there for clients and hosts."""
        await self._server.start()
        directory = Directory(self.url, settings=self._options)
        try:
            await directory.tell_supervised(supervised=any(host.supervised for host in self._hosts))
            if not self._secret:
                self._secret = await directory.share_secret(secrets.token_urlsafe(24))
        finally:
            await directory.close()

    def start_host(self, number: int) -> None:
        """Restart a slot host that has ended, and block until it serves; it adopts the arena it had before."""
        if number not in self.pids:
            self._spawn(number)
            self._await_ready(number, time.monotonic() + self._settings.start_timeout_s)

    async def restart_host(self, number: int) -> None:
        """Restart a slot host like :meth:`start_host`, without blocking; on cancellation, kill it, which loses nothing.

        Raises:
            DataPlaneUnavailable: The host did not start.
        """
        self._spawn(number)
        child = self._children[number]
        until = time.monotonic() + self._settings.start_timeout_s
        rest = b""
        try:
            while (came := self._ready_line(number, rest, until, look_s=0.0)) is not None:
                rest = came
                await anyio.sleep(RESTART_POLL_S)
        except BaseException:
            child.kill()
            raise

    def _spawn(self, number: int) -> None:
        _close_pipes(self._children.pop(number, None))
        text = msgspec.json.encode(self._hosts[number]).decode()
        command = [sys.executable, "-m", "asyncdp.transports.ucxx.host.main", "--watch-stdin", "--settings", text]
        command += ["--namespace", self._settings.namespace]
        env = {**os.environ, "ASYNCDP_DIRECTORY": self.url, "ASYNCDP_SECRET": self._secret}
        # In a session of its own, so that Ctrl-C reaches only this process, which then stops the host in order.
        with self._log_of(number) as log:
            self._children[number] = subprocess.Popen(  # noqa: S603 - our own module, arguments of our own
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=env, start_new_session=True
            )

    @contextlib.contextmanager
    def _log_of(self, number: int) -> Iterator[Any]:
        """Yield the file for a host's log; None: the standard error of this process."""
        if not self._logs_to_folder:
            yield None
            return
        with self._log_file(number).open("ab") as log:
            yield log

    def _log_file(self, number: int) -> Path:
        return self._server.folder / f"host-{number}.log"

    def _log_tail(self, number: int) -> str:
        if self._logs_to_folder:
            with contextlib.suppress(OSError):
                lines = self._log_file(number).read_text(errors="replace").strip().splitlines()
                return lines[-1] if lines else "its log is empty"
        return "its log says why"

    def _await_ready(self, number: int, until: float) -> None:
        """Block until a host has printed its readiness line."""
        rest: bytes | None = b""
        while rest is not None:
            rest = self._ready_line(number, rest, until, look_s=max(0.0, until - time.monotonic()))

    def _ready_line(self, number: int, rest: bytes, until: float, look_s: float) -> bytes | None:
        """Read a host's output for at most ``look_s`` seconds and look for the readiness line; skip other lines.

        Returns None once the line was read, else the beginning of the next line that was read so far.
        """
        child = self._children[number]
        assert child.stdout is not None  # noqa: S101 - made with a pipe
        if not select.select([child.stdout], [], [], look_s)[0]:
            if time.monotonic() >= until:
                raise DataPlaneUnavailable(
                    f"slot host {number} did not start within {self._settings.start_timeout_s:g} s"
                    " (ucxx.start_timeout_s; asyncdp serve --start-timeout-s)"
                )
            return rest
        came = os.read(child.stdout.fileno(), 1 << 16)
        if not came:
            raise DataPlaneUnavailable(f"slot host {number} ended with {child.wait()}: {self._log_tail(number)}")
        *lines, rest = (rest + came).split(b"\n")
        for line in lines:
            if line.startswith(b'{"ready": true'):
                self.reports[number] = json.loads(line)
                return None
        return rest

    def fail_port(self, number: int, index: int) -> int:
        """Make a port of a host fail, for tests of clients; return its number."""
        pipe = self._children[number].stdin
        assert pipe is not None  # noqa: S101 - made with a pipe
        pipe.write(b"fail port %d\n" % index)
        pipe.flush()
        return int(self.reports[number]["ports"][index])

    def cut_off_requests(self) -> None:
        """Make stopping hosts cut off running requests, which is what a second signal means to a slot host."""
        for pid in self.pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    async def stop(self) -> None:
        """Stop the hosts, then the directory; kill what has not stopped after its time limit. Idempotent."""
        try:
            for child in self._children.values():
                _close_pipes(child)
            longest = max((host.drain_s for host in self._hosts), default=0.0) + 5.0
            with anyio.move_on_after(longest):
                while self.pids:  # noqa: ASYNC110 - a child's end is no event
                    await anyio.sleep(POLL_S)
        finally:
            _end(self._children, os.getpid(), self._arenas)
            self._ender.detach()
            await self._server.stop()


def host_settings(settings: UcxxSettings, number: int = 0, plane: str = "", *, keep: bool = False) -> HostSettings:
    """Return the settings of a slot host that is started as a child.

    Raises:
        ValueError: A setting is unknown, ill-typed or cannot work; the message begins with its name, such as
            ``ucxx.host.ports``.
    """
    if "host_id" in settings.host:
        raise ValueError("ucxx.host.host_id: slot hosts that are started as children are numbered by their plane")
    keys: dict[str, Any] = {"plane": plane, "keep_arena": keep, "devices": settings.devices}
    return convert({**keys, **settings.host, "host_id": f"host-{number}"}, HostSettings, "ucxx.host")


def directory_settings(settings: UcxxSettings) -> DirectorySettings:
    """Return the settings of the directory, checked together with those of slot hosts.

    Raises:
        ValueError: A setting is unknown, ill-typed or cannot work; the message begins with its name.
    """
    if "namespace" in settings.directory:
        raise ValueError("ucxx.directory.namespace: is given as ucxx.namespace, which slot hosts have too")
    options = convert({"namespace": settings.namespace, **settings.directory}, DirectorySettings, "ucxx.directory")
    host = host_settings(settings)
    if host.beat_s >= options.host_timeout_s:
        raise ValueError(
            f"ucxx.host.beat_s: {host.beat_s:g} s is not shorter than ucxx.directory.host_timeout_s"
            f" ({options.host_timeout_s:g} s): every slot host would count as silent between two heartbeats"
        )
    return options


def attach_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config for attaching processes, from one whose ``controller_address`` is the directory's URL.

    It lacks the slot hosts' secret, which no pickle may contain, and other settings of the plane itself. It also lacks
    ``allow_pickle``: each reading process decides itself whether unpickling may run code in it.
    """
    shared = shared_config(config)
    if "ucxx" in shared:
        own = ("secret", "host", "folder", "host_log", "allow_pickle")
        shared["ucxx"] = {key: value for key, value in shared["ucxx"].items() if key not in own}
    return shared


def _password(folder: Path) -> str:
    """Return the directory's password that the folder stores; created once, so existing clients can reconnect."""
    private_folder(folder)
    path = folder / "password"
    with contextlib.suppress(FileExistsError):
        write_private(path, secrets.token_urlsafe(24), replace=False)
    return read_private(path)


def _close_pipes(child: subprocess.Popen[bytes] | None) -> None:
    """Close the pipes to a child, which tells it to stop."""
    if child is not None:
        for pipe in (child.stdin, child.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()


def _end(children: dict[int, subprocess.Popen[bytes]], parent: int, arenas: Sequence[str]) -> None:
    """Stop the children that still run and wait for them; do nothing in a forked child, which does not own them.

    ``arenas`` are removed, because a killed host could not remove its own.
    """
    if os.getpid() != parent:
        return
    for child in children.values():
        _close_pipes(child)
    for child in children.values():
        try:
            child.wait(2.0)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
    children.clear()
    for arena in arenas:
        Arena.discard(arena)


def _in_a_thread(work: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine function in another thread and block until it ends; works while this thread runs a loop."""
    problem: list[BaseException] = []

    def run() -> None:
        try:
            anyio.run(work)
        except BaseException as err:  # noqa: BLE001 - raised again below
            problem.append(err)

    thread = threading.Thread(target=run, name="asyncdp-start")
    thread.start()
    thread.join()
    if problem:
        raise problem[0]
